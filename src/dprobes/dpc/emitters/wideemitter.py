"""
Numbers that are wider than a word as RPN: 64 bits in programs with words of 32.

Such a number takes two cells, the high word below the low one, as ``push mem, u64`` and ``push time`` have it. What is
computed with them is in procedures (``wideprocedures``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.dpc.emitters.writer import INSTRUCTIONS
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import integer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.emitters.tableemitter import TableEmitter
    from dprobes.dpc.emitters.writer import Writer
    from dprobes.dpc.types.ctype import CType

__all__ = ["WORD_BITS", "WideEmitter"]

WORD_BITS = 32
"""The bits of a word where there are wide numbers."""

_WORD = (1 << WORD_BITS) - 1
_OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "&": "and", "|": "or", "^": "xor", "<<": "shl"}


class Cells(Protocol):
    """Write what leaves values in cells."""

    def exact(self, value: typed.Value) -> None:
        """Push a value, of one cell or two."""

    def low(self, value: typed.Value, bits: int) -> None:
        """Push a cell of which only so many low bits count."""

    @property
    def tables(self) -> TableEmitter:
        """What writes keys of tables."""

    def displacement(self, slot: int) -> int:
        """Return where a variable of a block is, counted from SBP."""

    def index(self, variable: typed.Variable) -> None:
        """Push the number of the cell of an element of an array."""


class WideEmitter:
    """Write wide values; ``used`` collects the procedures that are needed."""

    def __init__(self, cells: Cells, writer: Writer, word_size: int, used: dict[str, None]) -> None:
        self._cells = cells
        self._w = writer
        self._word_size = word_size
        self._used = used

    def is_wide(self, type_: CType) -> bool:
        """Return whether values of a type take two cells."""
        integer = integer_of(type_)
        return integer is not None and integer.size > self._word_size

    def width(self, type_: CType) -> int:
        """Return how many cells a value of a type takes."""
        return 2 if self.is_wide(type_) else 1

    def push(self, value: typed.Value) -> None:
        """Push a value of two cells, of those that are not made of other values by control alone."""
        w = self._w
        match value:
            case typed.Constant(number):
                w.number(number >> WORD_BITS & _WORD)
                w.number(number & _WORD)
            case typed.System(name):
                w.op(f"push {name}", 2)
            case typed.Local(slot):
                w.op(f"push sbp, {self._cells.displacement(slot + 1)}", 1)
                w.op(f"push sbp, {self._cells.displacement(slot)}", 1)
            case typed.Variable():
                self._load(value)
            case typed.Memory(address):
                self._cells.exact(address)
                w.op("push mem, u64", 1)
            case typed.TableValue(table, keys):
                w.op(f"push table, {table}", 2 - self._cells.tables.cells(keys))
            case typed.Arithmetic():
                self._arithmetic(value)
            case typed.Negation(operand, _, is_complement):
                if is_complement:
                    w.op("push -1", 1)
                    w.op("push -1", 1)
                    self._cells.exact(operand)
                    self.call("xor")
                else:
                    w.number(0)
                    w.number(0)
                    self._cells.exact(operand)
                    self.call("subtract")
            case typed.Convert(operand):
                self._widened(operand)
            case _:
                raise AssertionError(value)

    def call(self, name: str) -> None:
        """Call a procedure, and drop what it takes more than it leaves."""
        from dprobes.dpc.emitters.wideprocedures import wide_procedure

        self._used[name] = None
        self._w.op(f"call wide_{name}")
        procedure = wide_procedure(name)
        self._w.drop(procedure.takes - procedure.leaves)

    def drop_high(self) -> None:
        """Keep the low word of the number on top."""
        self._w.op("xchg")
        self._w.op("ros 1", -1)

    def test(self) -> None:
        """Let a cell take the place of the number on top: 0 if that is 0."""
        self._w.op("or", -1)

    def compare(self, comparison: typed.Comparison) -> None:
        """Push whether a comparison holds."""
        self._cells.exact(comparison.left)
        self._cells.exact(comparison.right)
        self.call("equal" if comparison.operator == "==" else "less" if comparison.is_signed else "uless")

    def search(self, cases: Sequence[tuple[int, str]], default: str) -> list[tuple[str, str]]:
        """
        Search the number on top among cases, and go to ``default``, without it, if it is none of them.

        Return labels that are reached with a cell more, and where each of them leads.
        """
        w, found = self._w, []
        for number, label in cases:
            stub = w.new_label()
            found.append((stub, label))
            self._duplicate()
            w.number(number >> WORD_BITS & _WORD)
            w.number(number & _WORD)
            self.call("equal")
            w.op(f"jnz {stub}")
            w.drop()
        w.op("ros 2")
        w.op(f"jmp {default}")
        return found

    def _widened(self, operand: typed.Value) -> None:
        """Push a number of one cell as one of two."""
        w, source = self._w, integer_of(operand.type)
        if self.is_wide(operand.type):
            self._cells.exact(operand)
        elif source is not None and source.is_signed:
            self._cells.exact(operand)
            self._widen(is_signed=True)
        else:
            w.number(0)
            self._cells.exact(operand)

    def _arithmetic(self, value: typed.Arithmetic) -> None:
        operator, w = value.operator, self._w
        self._cells.exact(value.left)
        if operator in ("<<", ">>"):
            # Counts are from 0 to 63, or C says nothing of the result.
            self._cells.low(value.right, WORD_BITS)
            self.call("shl" if operator == "<<" else "sar" if value.type.is_signed else "shr")
            return
        self._cells.exact(value.right)
        if operator in _OPERATIONS:
            self.call(_OPERATIONS[operator])
            return
        self.call("divide" if value.type.is_signed else "udivide")
        if operator == "%":
            w.op("pop tsp, 2", -1)
            w.op("pop tsp, 2", -1)
        else:
            w.drop(2)

    # Places

    def _load(self, variable: typed.Variable) -> None:
        w, name = self._w, INSTRUCTIONS[variable.kind]
        if variable.index is None:
            w.op(f"push {name}, {variable.first + 1}", 1)
            w.op(f"push {name}, {variable.first}", 1)
            return
        self._cells.index(variable)
        w.op("dup 1", 1)
        w.number(1)
        w.op("add", -1)
        w.op(f"push {name}")
        w.op("xchg")
        w.op(f"push {name}")

    def store(self, target: typed.Place, *, is_wanted: bool) -> None:
        """Pop two cells into a place; with ``is_wanted`` they stay on the stack."""
        w = self._w
        match target:
            case typed.Local(slot):
                if is_wanted:
                    self._duplicate()
                w.op(f"pop sbp, {self._cells.displacement(slot)}", -1)
                w.op(f"pop sbp, {self._cells.displacement(slot + 1)}", -1)
            case typed.Variable(kind, first, _, None):
                if is_wanted:
                    self._duplicate()
                w.op(f"pop {INSTRUCTIONS[kind]}, {first}", -1)
                w.op(f"pop {INSTRUCTIONS[kind]}, {first + 1}", -1)
            case typed.Variable(kind):
                self._cells.index(target)
                w.op("dup 1", 1)
                w.op("push tsp, 2", 1)
                w.op(f"pop {INSTRUCTIONS[kind]}", -2)
                w.number(1)
                w.op("add", -1)
                w.op("push tsp, 2", 1)
                w.op(f"pop {INSTRUCTIONS[kind]}", -2)
                if not is_wanted:
                    w.drop(2)
            case typed.Memory(address):
                self._cells.exact(address)
                w.op("push tsp, 2", 1)
                w.op("push tsp, 2", 1)
                w.op("pop mem, u64", -3)
                if not is_wanted:
                    w.drop(2)
            case _:
                raise AssertionError(target)

    def store_bits(self, unit: typed.Memory, bits: int, shift: int) -> None:
        """Put the low bits of the number on top, which stays, among the others of a unit of 64 bits in memory."""
        w, mask = self._w, ((1 << bits) - 1) << shift
        self._cells.exact(unit.address)
        w.op("dup 1", 1)
        w.op("push mem, u64", 1)
        for is_high in (False, True):
            # Of the unit this word is on top; three cells below it is the low word of the number, below that the high.
            wanted = mask >> (WORD_BITS if is_high else 0) & _WORD
            if wanted:
                w.number(_WORD & ~wanted)
                w.op("and", -1)
                self._push_shifted(shift, bits, is_high=is_high)
                w.number(wanted)
                w.op("and", -1)
                w.op("or", -1)
            w.op("xchg")
        w.op("pop mem, u64", -3)

    def _push_shifted(self, shift: int, bits: int, *, is_high: bool) -> None:
        """Push a word of the number that is three cells below the top, shifted to the left."""
        w = self._w
        if not is_high or shift >= WORD_BITS:
            w.op("push tsp, 3", 1)
            w.op(f"shl {shift % WORD_BITS}")
            return
        if bits > WORD_BITS:
            w.op("push tsp, 4", 1)
            w.op(f"shl {shift}")
        if shift:
            w.op(f"push tsp, {4 if bits > WORD_BITS else 3}", 1)
            w.op(f"shr {WORD_BITS - shift}")
            if bits > WORD_BITS:
                w.op("or", -1)

    def cut(self, bits: int, *, is_signed: bool) -> None:
        """Let the number on top have so many bits."""
        w, instruction = self._w, "pbl" if is_signed else "pzl"
        if bits > WORD_BITS:
            w.op("xchg")
            w.op(f"{instruction} {bits - WORD_BITS}")
            w.op("xchg")
            return
        self.drop_high()
        w.op(f"{instruction} {bits}")
        self._widen(is_signed=is_signed)

    def _widen(self, *, is_signed: bool) -> None:
        """Let the number on top take two cells."""
        w = self._w
        if is_signed:
            w.op("dup 1", 1)
            w.op(f"pbr {WORD_BITS}")
        else:
            w.number(0)
        w.op("xchg")

    def step(self, target: typed.Place, amount: int, *, is_postfix: bool, is_wanted: bool) -> None:
        """Add to a place."""
        self._cells.exact(target)
        if is_postfix and is_wanted:
            self._duplicate()
        self.push(typed.Constant(amount & (_WORD << WORD_BITS | _WORD), target.type))
        self.call("add")
        self.store(target, is_wanted=is_wanted and not is_postfix)

    def _duplicate(self) -> None:
        self._w.op("push tsp, 1", 1)
        self._w.op("push tsp, 1", 1)
