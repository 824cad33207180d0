"""Assignments as RPN: to variables of blocks and of the program, to registers, memory, and bits of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.dpc.emitters.writer import INSTRUCTIONS
from dprobes.dpc.typedtree.folder import integer_of
from dprobes.dpc.typedtree.typed import BitField, Local, Memory, Register, Variable
from dprobes.dpc.types.ctype import size_of

if TYPE_CHECKING:
    from dprobes.dpc.emitters.wideemitter import WideEmitter
    from dprobes.dpc.emitters.writer import Writer
    from dprobes.dpc.typedtree.typed import Place, Value
    from dprobes.dpc.types.ctype import CType

__all__ = ["CellEmitter", "PlaceEmitter"]


class CellEmitter(Protocol):
    """Write what leaves a value in a cell, or in two."""

    wide: WideEmitter

    def exact(self, value: Value) -> None:
        """Push a value, as its type holds it."""

    def low(self, value: Value, bits: int) -> None:
        """Push a value of which only so many low bits count."""

    def cut(self, type_: CType) -> None:
        """Let the top cell hold a number of a type."""

    def index(self, variable: Variable) -> None:
        """Push the index of an element of an array."""

    def displacement(self, slot: int) -> int:
        """Return where a variable of a block is, counted from SBP."""


class PlaceEmitter:
    """Write what changes places; ``values`` writes the values."""

    def __init__(self, values: CellEmitter, writer: Writer, word_size: int) -> None:
        self._values = values
        self._w = writer
        self._bits = 8 * word_size
        self._word_size = word_size

    def assign(self, target: Place, value: Value, *, is_wanted: bool) -> None:
        """Assign a value, and push it if it is wanted."""
        match target:
            case Variable(index=None) if not is_wanted and not self._values.wide.is_wide(target.type):
                self._values.low(value, self._integer_bits(target.type))
            case _:
                self._values.exact(value)
        self.store(target, is_wanted=is_wanted)

    def _integer_bits(self, type_: CType) -> int:
        integer = integer_of(type_)
        return self._bits if integer is None or integer.is_bool else integer.bits

    def store(self, target: Place, *, is_wanted: bool) -> None:
        """Pop the top cell into a place; with ``is_wanted`` it stays on the stack."""
        w = self._w
        keep = 0 if is_wanted else -1
        if isinstance(target, BitField):
            self._store_field(target, is_wanted=is_wanted)
            return
        if self._values.wide.is_wide(target.type):
            self._values.wide.store(target, is_wanted=is_wanted)
            return
        match target:
            case Local(slot):
                w.op(f"{'copy' if is_wanted else 'pop'} sbp, {self._values.displacement(slot)}", keep)
            case Register(name):
                if is_wanted:
                    w.op("dup 1", 1)
                w.op(f"pop r, {name}", -1)
            case Variable(kind, first, _, None):
                w.op(f"{'move' if is_wanted else 'pop'} {INSTRUCTIONS[kind]}, {first}", keep)
            case Variable(kind):
                if is_wanted:
                    w.op("dup 1", 1)
                self._values.index(target)
                w.op("xchg")
                w.op(f"pop {INSTRUCTIONS[kind]}", -2)
            case Memory(address, type_):
                self._values.exact(address)
                w.op("push tsp, 1", 1)
                w.op(f"pop mem, u{8 * (size_of(type_) or self._word_size)}", -2)
                if not is_wanted:
                    w.drop()

    def _store_field(self, target: BitField, *, is_wanted: bool) -> None:
        """Store the number on top in a bit field, and let it be what that holds then, or drop it."""
        wide = self._values.wide
        if wide.is_wide(target.unit.type):
            wide.store_bits(target.unit, target.bits, target.shift)
        else:
            self._store_bits(target.unit, target.bits, target.shift)
        integer = integer_of(target.type)
        is_signed = integer is not None and integer.is_signed
        if not is_wanted:
            self._w.drop(wide.width(target.type))
        elif wide.is_wide(target.type):
            wide.cut(target.bits, is_signed=is_signed)
        else:
            self._w.op(f"{'pbl' if is_signed else 'pzl'} {target.bits}")

    def _store_bits(self, unit: Memory, bits: int, shift: int) -> None:
        """Put the low bits of the number on top, which stays, among the others of a unit of a word in memory."""
        w, size = self._w, 8 * (size_of(unit.type) or self._word_size)
        mask = (1 << bits) - 1
        self._values.exact(unit.address)
        w.op("dup 1", 1)
        w.op(f"push mem, u{size}")
        w.number(((1 << size) - 1) & ~(mask << shift))
        w.op("and", -1)
        w.op("push tsp, 2", 1)
        w.number(mask)
        w.op("and", -1)
        if shift:
            w.op(f"shl {shift}")
        w.op("or", -1)
        w.op(f"pop mem, u{size}", -2)

    def step(self, target: Place, amount: int, *, is_postfix: bool, is_wanted: bool) -> None:
        """Add to a place."""
        w = self._w
        if self._values.wide.is_wide(target.type):
            self._values.wide.step(target, amount, is_postfix=is_postfix, is_wanted=is_wanted)
            return
        if isinstance(target, Variable) and amount in (1, -1) and not is_wanted:
            operation = "inc" if amount == 1 else "dec"
            if target.index is None:
                w.op(f"{operation} {INSTRUCTIONS[target.kind]}, {target.first}")
            else:
                self._values.index(target)
                w.op(f"{operation} {INSTRUCTIONS[target.kind]}", -1)
            return
        self._values.exact(target)
        if is_postfix and is_wanted:
            w.op("dup 1", 1)
        w.number(amount)
        w.op("add", -1)
        self._values.cut(target.type)
        self.store(target, is_wanted=is_wanted and not is_postfix)
