"""
RPN for numbers wider than a word: 64 bits in programs with 32-bit words.

Such a number takes two cells, the high word below the low one, as with ``push mem, u64`` and ``push time``. RPN
procedures compute with such numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

from dprobes.dpc.emitters.rpn_writer import INSTRUCTIONS
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.value_properties import integer_of
from dprobes.rpn.keyed_tables import Key, KeyKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.dpc.emitters.rpn_writer import Writer
    from dprobes.dpc.types.c_types import CType

__all__ = ["CellEmitter", "TableEmitter", "WideEmitter", "procedure_lines", "wide_procedure"]


class CellEmitter(Protocol):
    """A writer of code that pushes values as RPN stack cells: one, or two for 64 bits in 32-bit programs."""

    wide: WideEmitter
    tables: TableEmitter

    def exact(self, value: typed_values.Value) -> None:
        """Write code that pushes a value, sign- or zero-extended to the cell according to its type."""

    def low(self, value: typed_values.Value, bits: int) -> None:
        """Write code that pushes a value whose bits above the low ``bits`` may be wrong, because they are not used."""

    def cut(self, type_: CType) -> None:
        """Write code that truncates the top cell to the width of a type, and sign- or zero-extends it to the word."""

    def index(self, variable: typed_values.Variable) -> None:
        """Write code that pushes the number of the RPN variable in which an array element of the program is stored."""

    def displacement(self, slot: int) -> int:
        """Return the displacement in cells, from SBP, of the block variable with number ``slot``."""

    def branch(self, condition: typed_values.Value, label: str, *, when: bool) -> None:
        """
        Write a jump to ``label`` that is taken if the condition is true and ``when`` is True, or both are false.

        The label itself must be written by ``landing``.
        """

    def landing(self, label: str) -> None:
        """Write the label to which ``branch`` jumps, and drop the cell that it leaves."""


class TableEmitter:
    """A writer of code that pushes keys and values of keyed tables in the format of RPN's table instructions."""

    def __init__(self, values: CellEmitter, writer: Writer, word_size: int) -> None:
        self._values = values
        self._w = writer
        self._word_size = word_size

    def cells(self, parts: tuple[typed_values.Argument, ...]) -> int:
        """
        Write code that pushes key fields, or a value to be stored in a table.

        Return the number of cells on the RPN stack.

        ``parts`` are the key fields, or the value alone. The process name and call stacks take no cell: RPN's
        instructions get them themselves.
        """
        cells = 0
        for part in parts:
            match part:
                case typed_values.Text(address) | typed_values.Bytes(address):
                    self._values.exact(address)
                    cells += 1
                case typed_values.Kept(table, keys, count, _, padding):
                    for _ in range(padding):
                        self._w.number(0)
                    self._w.op(f"push table, {table}", count - self.cells(keys))
                    cells += padding + count
                case typed_values.Literal() | typed_values.TextChoice():
                    cells += self._text(part)
                case typed_values.CommName() | typed_values.StackTrace() | typed_values.NetworkAddress():
                    pass
                case typed_values.ItemText():
                    raise AssertionError(part)  # only blocks of the tool have items of loops
                case value:
                    self._values.exact(value)
                    cells += self._values.wide.width(value.type)
        return cells

    def _text(self, text: typed_values.Literal | typed_values.TextChoice) -> int:
        """
        Write code that pushes a string literal, padded with zeros, its first word on top.

        Return the number of cells.
        """
        w, size = self._w, self._word_size
        if isinstance(text, typed_values.Literal):
            content = text.text.encode().ljust(Key(KeyKind.TEXT, text.limit).bytes, b"\0")
            places = range(0, len(content), size)
            for place in reversed(places):
                w.number(int.from_bytes(content[place : place + size], "little"))
            return len(places)
        other, end = w.new_label(), w.new_label()
        self._values.branch(text.condition, other, when=False)
        cells = self._text(text.yes)
        w.op(f"jmp {end}")
        self._values.landing(other)
        w.depth -= cells
        self._text(text.no)
        w.label(end)
        return cells

    def differs(self, test: typed_values.KeptTest) -> None:
        """
        Write code that compares a string in a table with ``test.text``: push 0 if they are equal, else another number.

        For a prefix test, push 0 if the string begins with the text.
        """
        w, size, text = self._w, self._word_size, test.text.encode()
        if not test.is_prefix:
            text += b"\0"  # the kept value ends with zeros
        self.cells((test.kept,))
        words = [text[start : start + size] for start in range(0, len(text), size)]
        for number, word in enumerate(words):
            if number:
                w.op("xchg")
            if len(word) < size:
                w.op(f"pzl {8 * len(word)}")
            w.number(int.from_bytes(word, "little"))
            w.op("xor", -1)
            if number:
                w.op("or", -1)
        if below := test.kept.cells - max(len(words), 1):
            w.op(f"pop tsp, {below}", -1)
            w.drop(below - 1)
        if not words:  # every string begins with the empty one
            w.code("push 0; and")


# RPN procedures for numbers of two cells: 64 bits in programs with 32-bit words.
#
# The high word of a number is below the low one. A procedure addresses its operands upwards from SBP: the low word of
# the right operand is at SBP+0. It leaves the result in the deepest cells of the operands; the caller drops the others.


class WideProcedure(NamedTuple):
    """
    A procedure: the number of cells of its operands and results, its instructions, and its callees.

    ``code`` has the instructions separated by semicolons.
    """

    takes: int
    leaves: int
    code: str
    calls: tuple[str, ...] = ()


def _bitwise(operation: str) -> WideProcedure:
    low = f"push sbp, 0; push sbp, 2; {operation}; pop sbp, 2"
    return WideProcedure(4, 2, f"{low}; push sbp, 1; push sbp, 3; {operation}; pop sbp, 3")


def _negated(high: int, low: int, mask: int) -> str:
    """
    Return code that negates the two-cell number ``high``, ``low`` if all bits of the cell ``mask`` are set.

    If ``mask`` is 0, the number stays. The arguments are displacements of the cells from SBP.
    """
    return (
        f"push sbp, {low}; push sbp, {mask}; xor; push sbp, {mask}; push 1; and; add; copy sbp, {low};"
        f"push 0; eq; push sbp, {mask}; and; push 1; and;"
        f"push sbp, {high}; push sbp, {mask}; xor; add; pop sbp, {high}"
    )


def _shifted_right() -> str:
    # low = low >> n | high << (32 - n) | high >> (n - 32); a count that is, as an unsigned number, 32 or more gives 0
    return (
        "push sbp, 0; push sbp, 1; shr;"
        "push sbp, 0; push 32; sub; push sbp, 2; shl; or;"
        "push 32; push sbp, 0; sub; push sbp, 2; shr; or; pop sbp, 1;"
        "push sbp, 0; push sbp, 2; shr; pop sbp, 2"
    )


_LESS_LOW = "push sbp, 1; push sbp, 3; eq; push sbp, 0; push sbp, 2; ltu; and"

_MULTIPLY = (
    # The halves of the low words ll and rl: SBP-1 = ll & ffff, -2 = ll >> 16, -3 = rl & ffff, -4 = rl >> 16.
    "push sbp, 2; pzl 16; push sbp, 2; shr 16; push sbp, 0; pzl 16; push sbp, 0; shr 16;"
    "push sbp, -2; push sbp, -3; mul; push sbp, -1; push sbp, -4; mul;"  # SBP-5, SBP-6: the products in the middle
    "push sbp, -1; push sbp, -3; mul; shr 16; push sbp, -5; pzl 16; add; push sbp, -6; pzl 16; add; shr 16;"
    "push sbp, -5; shr 16; add; push sbp, -6; shr 16; add; push sbp, -2; push sbp, -4; mul; add;"
    "push sbp, 3; push sbp, 0; mul; add; push sbp, 2; push sbp, 1; mul; add; pop sbp, 3;"
    "push sbp, 2; push sbp, 0; mul; pop sbp, 2; ros 6"
)

_DIVIDE = (
    # The dividend is at SBP+3 and +2, the divisor at +1 and +0. The quotient replaces the dividend, the remainder
    # replaces the divisor. A divisor of 0 raises an exception, as for a word.
    "push 1; push sbp, 0; push sbp, 1; or; div; ros 2;"
    "push 0; push 0; push 64;"  # SBP-1 and -2: the remainder, SBP-3: the remaining bits
    "again:;"
    "push sbp, -1; shr 31;"  # the bit that is shifted out of the remainder
    "push sbp, -1; shl 1; push sbp, -2; shr 31; or; pop sbp, -1;"
    "push sbp, -2; shl 1; push sbp, 3; shr 31; or; pop sbp, -2;"
    "push sbp, 3; shl 1; push sbp, 2; shr 31; or; pop sbp, 3;"
    "push sbp, 2; shl 1; pop sbp, 2;"
    "push sbp, 1; push sbp, -1; eq; push sbp, 0; push sbp, -2; ltu; and; push sbp, 1; push sbp, -1; ltu; or;"
    "push 1; xor; or;"  # 1 if the remainder is not less than the divisor
    "push sbp, 2; push tsp, 1; or; pop sbp, 2;"
    "push 0; sub;"  # all ones in that case
    "push sbp, 0; push tsp, 1; and; push sbp, -2; ltu;"  # the borrow
    "push sbp, 1; push tsp, 2; and; add; push sbp, -1; sub; pop sbp, -1;"
    "push sbp, 0; push tsp, 1; and; push sbp, -2; sub; pop sbp, -2;"
    "ros 1;"
    "loop again;"
    "push sbp, -1; pop sbp, 1; push sbp, -2; pop sbp, 0; ros 3"
)

_SIGNED_DIVIDE = (
    "push sbp, 3; pbr 32; push sbp, 1; pbr 32;"  # SBP-1 and -2: the signs of both
    + _negated(3, 2, -1)
    + ";"
    + _negated(1, 0, -2)
    + ";push sbp, 3; push sbp, 2; push sbp, 1; push sbp, 0; call wide_udivide;"
    "pop sbp, 0; pop sbp, 1; pop sbp, 2; pop sbp, 3;"
    "push sbp, -1; push sbp, -2; xor; pop sbp, -2;" + _negated(3, 2, -2) + ";" + _negated(1, 0, -1) + ";ros 2"
)

_PROCEDURES = {
    "add": WideProcedure(
        4, 2, "push sbp, 0; push sbp, 2; add; dup 1; push sbp, 2; xchg; ltu; push sbp, 1; add; push sbp, 3; add;"
        "pop sbp, 3; pop sbp, 2",
    ),
    "subtract": WideProcedure(
        4, 2, "push sbp, 0; push sbp, 2; ltu; push sbp, 1; add; push sbp, 3; sub; pop sbp, 3;"
        "push sbp, 0; push sbp, 2; sub; pop sbp, 2",
    ),
    "multiply": WideProcedure(4, 2, _MULTIPLY),
    "and": _bitwise("and"),
    "or": _bitwise("or"),
    "xor": _bitwise("xor"),
    "shl": WideProcedure(
        3, 2, "push sbp, 0; push sbp, 2; shl; push sbp, 0; push 32; sub; push sbp, 1; shr; or;"
        "push 32; push sbp, 0; sub; push sbp, 1; shl; or; pop sbp, 2; push sbp, 0; push sbp, 1; shl; pop sbp, 1",
    ),
    "shr": WideProcedure(3, 2, _shifted_right()),
    "sar": WideProcedure(
        3, 2, "push sbp, 2; pbr 32; push sbp, -1; push sbp, 1; xor; pop sbp, 1; push sbp, -1; push sbp, 2; xor;"
        "pop sbp, 2;" + _shifted_right() + ";"
        "push sbp, -1; push sbp, 1; xor; pop sbp, 1; push sbp, -1; push sbp, 2; xor; pop sbp, 2; ros 1",
    ),
    "equal": WideProcedure(
        4, 1, "push sbp, 1; push sbp, 3; xor; push sbp, 0; push sbp, 2; xor; or; push 0; eq; pop sbp, 3"
    ),
    "less": WideProcedure(4, 1, _LESS_LOW + "; push sbp, 1; push sbp, 3; lt; or; pop sbp, 3"),
    "uless": WideProcedure(4, 1, _LESS_LOW + "; push sbp, 1; push sbp, 3; ltu; or; pop sbp, 3"),
    "udivide": WideProcedure(4, 4, _DIVIDE),
    "divide": WideProcedure(4, 4, _SIGNED_DIVIDE, ("udivide",)),
}  # fmt: skip


def wide_procedure(name: str) -> WideProcedure:
    """Return the RPN procedure for an operation on 64-bit numbers by its name; raise ``KeyError`` if there is none."""
    return _PROCEDURES[name]


def procedure_lines(names: Iterable[str]) -> list[str]:
    """Return the RPN source lines of the named procedures, and of those that they call, each once."""
    wanted: dict[str, None] = {}
    for name in names:
        wanted |= dict.fromkeys((name, *_PROCEDURES[name].calls))
    lines = []
    for name in wanted:
        lines += ["", f"proc wide_{name}", "    save tsp", "    restore sbp"]
        for instruction in _PROCEDURES[name].code.split(";"):
            text = instruction.strip()
            if text:
                lines.append(text if text.endswith(":") else f"    {text}")
        lines += ["    ret", "endproc"]
    return lines


WORD_BITS = 32
"""The width of a word in bits in programs with wide numbers."""

_WORD = (1 << WORD_BITS) - 1
_OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "&": "and", "|": "or", "^": "xor", "<<": "shl"}


class WideEmitter:
    """
    A writer of 64-bit values in 32-bit programs, as two cells.

    ``used`` collects the RPN procedures that they call.
    """

    def __init__(self, cells: CellEmitter, writer: Writer, word_size: int, used: dict[str, None]) -> None:
        self._cells = cells
        self._w = writer
        self._word_size = word_size
        self._used = used

    def is_wide(self, type_: CType) -> bool:
        """Return whether values of a type take two cells of the RPN stack: 64 bits in 32-bit programs."""
        integer = integer_of(type_)
        return integer is not None and integer.size > self._word_size

    def width(self, type_: CType) -> int:
        """Return the number of RPN stack cells of a value of this type: 2 for 64 bits in 32-bit programs, else 1."""
        return 2 if self.is_wide(type_) else 1

    def push(self, value: typed_values.Value) -> None:
        """Push a value of two cells, except an assignment, a step, a choice, a sequence or a call."""
        w = self._w
        match value:
            case typed_values.Constant(number):
                w.number(number >> WORD_BITS & _WORD)
                w.number(number & _WORD)
            case typed_values.System(name):
                w.op(f"push {name}", 2)
            case typed_values.Local(slot):
                w.code(f"push sbp, {self._cells.displacement(slot + 1)}; push sbp, {self._cells.displacement(slot)}")
            case typed_values.Variable():
                self._load(value)
            case typed_values.Memory(address):
                self._cells.exact(address)
                w.op("push mem, u64", 1)
            case typed_values.TableValue(table, keys):
                w.op(f"push table, {table}", 2 - self._cells.tables.cells(keys))
            case typed_values.Arithmetic():
                self._arithmetic(value)
            case typed_values.Negation(operand, _, is_complement):
                w.code("push -1; push -1" if is_complement else "push 0; push 0")
                self._cells.exact(operand)
                self.call("xor" if is_complement else "subtract")
            case typed_values.Convert(operand):
                self._widened(operand)
            case _:
                raise AssertionError(value)

    def call(self, name: str) -> None:
        """Write a call of a procedure by its name, and drop the operand cells that are not part of its result."""
        self._used[name] = None
        self._w.op(f"call wide_{name}")
        procedure = wide_procedure(name)
        self._w.drop(procedure.takes - procedure.leaves)

    def drop_high(self) -> None:
        """Write code that drops the high word of the two-cell number on top, so that the low word remains."""
        self._w.code("xchg; ros 1")

    def test(self) -> None:
        """Replace the number on top by one cell that is 0 if the number is 0."""
        self._w.op("or", -1)

    def compare(self, comparison: typed_values.Comparison) -> None:
        """Write code that pushes 1 if a comparison of two 64-bit values holds, else 0."""
        self._cells.exact(comparison.left)
        self._cells.exact(comparison.right)
        self.call("equal" if comparison.operator == "==" else "less" if comparison.is_signed else "uless")

    def search(self, cases: Sequence[tuple[int, str]], default: str) -> list[tuple[str, str]]:
        """
        Search for the number on top among cases. If it is equal to none, drop it and jump to ``default``.

        Return the labels to jump to on a match, each with the label of its case. At such a label, the stack has one
        more cell.
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

    def _widened(self, operand: typed_values.Value) -> None:
        """
        Write code that pushes a number as two cells.

        One of 32 bits is sign- or zero-extended according to its type.
        """
        w, source = self._w, integer_of(operand.type)
        if self.is_wide(operand.type):
            self._cells.exact(operand)
        elif source is not None and source.is_signed:
            self._cells.exact(operand)
            self._widen(is_signed=True)
        else:
            w.number(0)
            self._cells.exact(operand)

    def _arithmetic(self, value: typed_values.Arithmetic) -> None:
        operator, w = value.operator, self._w
        self._cells.exact(value.left)
        if operator in ("<<", ">>"):
            # Counts are from 0 to 63; for other counts the result is undefined in C.
            self._cells.low(value.right, WORD_BITS)
            self.call("shl" if operator == "<<" else "sar" if value.type.is_signed else "shr")
            return
        self._cells.exact(value.right)
        if operator in _OPERATIONS:
            self.call(_OPERATIONS[operator])
            return
        self.call("divide" if value.type.is_signed else "udivide")
        if operator == "%":
            w.code("pop tsp, 2; pop tsp, 2")
        else:
            w.drop(2)

    # Places

    def _load(self, variable: typed_values.Variable) -> None:
        w, name = self._w, INSTRUCTIONS[variable.kind]
        if variable.index is None:
            w.code(f"push {name}, {variable.first + 1}; push {name}, {variable.first}")
            return
        self._cells.index(variable)
        w.code(f"dup 1; push 1; add; push {name}; xchg; push {name}")

    def store(self, target: typed_values.Place, *, is_wanted: bool) -> None:
        """Write code that pops the two-cell number on top into ``target``; with ``is_wanted`` it stays on the stack."""
        w = self._w
        match target:
            case typed_values.Local(slot):
                if is_wanted:
                    self._duplicate()
                w.code(f"pop sbp, {self._cells.displacement(slot)}; pop sbp, {self._cells.displacement(slot + 1)}")
            case typed_values.Variable(kind, first, _, None):
                if is_wanted:
                    self._duplicate()
                w.code(f"pop {INSTRUCTIONS[kind]}, {first}; pop {INSTRUCTIONS[kind]}, {first + 1}")
            case typed_values.Variable(kind):
                self._cells.index(target)
                pop = f"push tsp, 2; pop {INSTRUCTIONS[kind]}"
                w.code(f"dup 1; {pop}; push 1; add; {pop}")
                if not is_wanted:
                    w.drop(2)
            case typed_values.Memory(address):
                self._cells.exact(address)
                w.code("push tsp, 2; push tsp, 2")
                w.op("pop mem, u64", -3)
                if not is_wanted:
                    w.drop(2)
            case typed_values.Register() | typed_values.BitField():
                raise AssertionError(target)  # registers are words; ``store_bits`` stores bit fields
            case _:
                assert_never(target)

    def store_bits(self, unit: typed_values.Memory, bits: int, shift: int) -> None:
        """
        Write code that stores the low ``bits`` bits of the number on top in the 64-bit ``unit`` from bit ``shift`` on.

        The number stays on the stack, and the unit's other bits do not change.
        """
        w, mask = self._w, ((1 << bits) - 1) << shift
        self._cells.exact(unit.address)
        w.op("dup 1", 1)
        w.op("push mem, u64", 1)
        for is_high in (False, True):
            # This word of the unit is on top; the low word of the number is three cells below it, the high one below
            # that.
            wanted = mask >> (WORD_BITS if is_high else 0) & _WORD
            if wanted:
                w.number(_WORD & ~wanted)
                w.op("and", -1)
                self._push_shifted(shift, bits, is_high=is_high)
                w.number(wanted)
                w.code("and; or")
            w.op("xchg")
        w.op("pop mem, u64", -3)

    def _push_shifted(self, shift: int, bits: int, *, is_high: bool) -> None:
        """Push a word of the number that is three cells below the top, shifted left."""
        w = self._w
        if not is_high or shift >= WORD_BITS:
            w.code(f"push tsp, 3; shl {shift % WORD_BITS}")
            return
        if bits > WORD_BITS:
            w.code(f"push tsp, 4; shl {shift}")
        if shift:
            w.code(f"push tsp, {4 if bits > WORD_BITS else 3}; shr {WORD_BITS - shift}")
            if bits > WORD_BITS:
                w.op("or", -1)

    def cut(self, bits: int, *, is_signed: bool) -> None:
        """Write code that truncates the number on top to ``bits`` bits, and sign- or zero-extends it to 64 bits."""
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
        """Sign- or zero-extend the top cell to a number of two cells."""
        w = self._w
        if is_signed:
            w.code(f"dup 1; pbr {WORD_BITS}")
        else:
            w.number(0)
        w.op("xchg")

    def step(self, target: typed_values.Place, amount: int, *, is_postfix: bool, is_wanted: bool) -> None:
        """
        Write code that adds ``amount`` to ``target``, for ``++`` and ``--``. With ``is_wanted``, push the result.

        With ``is_postfix``, the result is the previous value.
        """
        self._cells.exact(target)
        if is_postfix and is_wanted:
            self._duplicate()
        self.push(typed_values.Constant(amount & (_WORD << WORD_BITS | _WORD), target.type))
        self.call("add")
        self.store(target, is_wanted=is_wanted and not is_postfix)

    def _duplicate(self) -> None:
        self._w.code("push tsp, 1; push tsp, 1")
