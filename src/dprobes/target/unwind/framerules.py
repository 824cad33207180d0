"""
What call frame instructions say: at each instruction, where the caller's registers are.

A *row* holds from an address on: the rule for the canonical frame address, which is the caller's stack pointer, and one
for each register that has moved. Rules: DWARF 5, 6.4.2; the GNU operations in GCC's ``dwarf2.def``.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.unwind.framebytes import FrameBytes
    from dprobes.target.unwind.frameentries import FrameDescription

__all__ = ["FrameAddress", "RegisterRule", "Row", "RuleKind", "rows_of"]

_ADVANCE, _OFFSET, _RESTORE = 1, 2, 3
"""Operations with an operand in their lower six bits."""

_OPERANDS = {
    0x00: "", 0x01: "a", 0x02: "1", 0x03: "2", 0x04: "4", 0x05: "uu", 0x06: "u", 0x07: "u", 0x08: "u", 0x09: "uu",
    0x0A: "", 0x0B: "", 0x0C: "uu", 0x0D: "u", 0x0E: "u", 0x0F: "b", 0x10: "ub", 0x11: "us", 0x12: "us", 0x13: "s",
    0x14: "uu", 0x15: "us", 0x16: "ub", 0x2D: "", 0x2E: "u", 0x2F: "uu",
}  # fmt: skip
"""The operands of the others: a an address, a size in bytes, u and s LEB128 without and with a sign, b a block."""

_ROWS_MAX, _RULES_MAX, _DEPTH_MAX = 1 << 13, 64, 64
"""Rows of one function, registers with a rule in one of them, and rows that are remembered at once."""


class RuleKind(enum.Enum):
    """Say where the caller's value of a register is."""

    UNDEFINED = enum.auto()
    """Lost; of the return address: nothing called."""
    SAME = enum.auto()
    """In the register still."""
    AT = enum.auto()
    """In memory, at the frame address plus the number."""
    OFFSET = enum.auto()
    """The frame address plus the number."""
    REGISTER = enum.auto()
    """In the register with the number."""
    AT_EXPRESSION = enum.auto()
    """In memory, where the expression says."""
    EXPRESSION = enum.auto()
    """The value of the expression."""


class RegisterRule(NamedTuple):
    """Say where the caller's value of one register is; ``expression`` is of the kinds that have one."""

    kind: RuleKind
    number: int = 0
    expression: bytes = b""


class FrameAddress(NamedTuple):
    """Say that the frame address is a register, by DWARF's number, plus an offset; register None: an expression."""

    register: int | None
    offset: int
    expression: bytes = b""


class Row(NamedTuple):
    """Say what holds from an address on."""

    start: int
    frame: FrameAddress
    rules: Mapping[int, RegisterRule]


_UNDEFINED = RegisterRule(RuleKind.UNDEFINED)
_SAME = RegisterRule(RuleKind.SAME)
_NOWHERE = FrameAddress(None, 0)


def rows_of(description: FrameDescription, word_size: int) -> list[Row]:
    """Return the rows of a function in order; raise ValueError or IndexError for what cannot be understood."""
    machine = _Machine(description, word_size)
    machine.run(description.common.instructions.rest())
    machine.keep_initial()
    machine.run(description.instructions.rest())
    return machine.finished()


class _Machine:
    """Carry out call frame instructions."""

    def __init__(self, description: FrameDescription, word_size: int) -> None:
        self._common = description.common
        self._word_size = word_size
        self._position = description.start
        self._frame = _NOWHERE
        self._rules: dict[int, RegisterRule] = {}
        self._initial: dict[int, RegisterRule] = {}
        self._kept: list[tuple[FrameAddress, dict[int, RegisterRule]]] = []
        self._found: list[Row] = []

    def keep_initial(self) -> None:
        """Remember what the common entry says, which ``restore`` brings back."""
        self._initial = dict(self._rules)

    def run(self, data: FrameBytes) -> None:
        """Carry out instructions."""
        while not data.is_at_end:
            operation = data.number(1)
            kind, low = operation >> 6, operation & 0x3F
            match kind:
                case 1:
                    self._advance(low * self._common.code_alignment)
                case 2:
                    self._rules[low] = RegisterRule(RuleKind.AT, data.unsigned() * self._common.data_alignment)
                case 3:
                    self._restore(low)
                case _:
                    self._extended(operation, data)

    def _extended(self, operation: int, data: FrameBytes) -> None:
        if operation not in _OPERANDS:
            raise ValueError(f"operation {operation:#x}")
        common, block = self._common, b""
        values = []
        for form in _OPERANDS[operation]:
            if form == "b":
                block = data.take(data.unsigned())
            else:
                values.append(self._operand(data, form))
        match operation, values:
            case 0x01, [address]:
                self._advance(address - self._position)
            case ((0x02 | 0x03 | 0x04), [distance]):
                self._advance(distance * common.code_alignment)
            case ((0x05 | 0x11), [register, offset]):
                self._rules[register] = RegisterRule(RuleKind.AT, offset * common.data_alignment)
            case 0x2F, [register, offset]:
                self._rules[register] = RegisterRule(RuleKind.AT, -offset * common.data_alignment)
            case ((0x14 | 0x15), [register, offset]):
                self._rules[register] = RegisterRule(RuleKind.OFFSET, offset * common.data_alignment)
            case 0x06, [register]:
                self._restore(register)
            case 0x07, [register]:
                self._rules[register] = _UNDEFINED
            case 0x08, [register]:
                self._rules[register] = _SAME
            case 0x09, [register, other]:
                self._rules[register] = RegisterRule(RuleKind.REGISTER, other)
            case 0x10, [register]:
                self._rules[register] = RegisterRule(RuleKind.AT_EXPRESSION, 0, block)
            case 0x16, [register]:
                self._rules[register] = RegisterRule(RuleKind.EXPRESSION, 0, block)
            case 0x0A, _:
                if len(self._kept) >= _DEPTH_MAX:
                    raise ValueError("too many rows to remember")
                self._kept.append((self._frame, dict(self._rules)))
            case 0x0B, _:
                self._frame, self._rules = self._kept.pop()
            case 0x0C, [register, offset]:
                self._frame = FrameAddress(register, offset)
            case 0x12, [register, offset]:
                self._frame = FrameAddress(register, offset * common.data_alignment)
            case 0x0D, [register]:
                self._frame = FrameAddress(register, self._frame.offset)
            case 0x0E, [offset]:
                self._frame = FrameAddress(self._frame.register, offset)
            case 0x13, [offset]:
                self._frame = FrameAddress(self._frame.register, offset * common.data_alignment)
            case 0x0F, _:
                self._frame = FrameAddress(None, 0, block)

    def _operand(self, data: FrameBytes, form: str) -> int:
        match form:
            case "a":
                return data.pointer(self._common.encoding, self._word_size)
            case "u":
                return data.unsigned()
            case "s":
                return data.signed()
            case _:
                return data.number(int(form))

    def _restore(self, register: int) -> None:
        self._rules.pop(register, None)
        if (rule := self._initial.get(register)) is not None:
            self._rules[register] = rule

    def finished(self) -> list[Row]:
        """Return all rows."""
        return [*self._found, Row(self._position, self._frame, self._rules)]

    def _advance(self, distance: int) -> None:
        if len(self._found) >= _ROWS_MAX or len(self._rules) > _RULES_MAX:
            raise ValueError("too many rows")
        self._found.append(Row(self._position, self._frame, dict(self._rules)))
        self._position += distance
