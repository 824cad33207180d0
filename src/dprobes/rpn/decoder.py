"""
Bytes to instructions: the inverse of ``encode``, for the interpreter, for listings, and for compiled files.

Bytes are hostile until proven otherwise: an unknown opcode or a cut-off operand decodes to a row of None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dprobes.lazydataclass import dataclass
from dprobes.rpn.isa import OperandKind, Row, rows_by_opcode, text_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EncodedInstruction", "decode_all", "decode_one"]

_RELATIVE = (OperandKind.LABEL, OperandKind.PROCEDURE)


@dataclass(frozen=True, slots=True)
class EncodedInstruction:
    """
    Hold one decoded instruction.

    ``operand`` is the number as encoded (two's complement resolved for signed kinds), the absolute target offset for
    jumps, calls and ``sx``, or the name of an extension or a field. ``row`` is None where the bytes are no instruction.
    """

    offset: int
    row: Row | None
    operand: int | str
    end: int


def decode_one(data: bytes, offset: int, word_size: int, byte_order: Literal["little", "big"]) -> EncodedInstruction:
    """Return the instruction at ``offset``; offsets outside ``data`` are no instruction."""
    if not 0 <= offset < len(data):
        return EncodedInstruction(offset, None, 0, offset + 1)
    opcode = data[offset]
    row = rows_by_opcode().get(opcode)
    invalid = EncodedInstruction(offset, None, opcode, offset + 1)
    if row is None:
        return invalid
    kind = row.operand_kind
    start = offset + 1
    if kind is None:
        return EncodedInstruction(offset, row, 0, start)
    if kind.width < 0:
        end = start + 1 + data[start] if start < len(data) else len(data) + 1
        operand = data[start + 1 : end].decode("utf-8", "replace")
        if end > len(data) or (kind is OperandKind.TEXT and text_problem(operand) is not None):
            return invalid
        return EncodedInstruction(offset, row, operand, end)
    end = start + (kind.width or word_size)
    if end > len(data):
        return invalid
    number = int.from_bytes(data[start:end], byte_order, signed=kind.is_signed)
    return EncodedInstruction(offset, row, number + end if kind in _RELATIVE else number, end)


def decode_all(data: bytes, word_size: int, byte_order: Literal["little", "big"]) -> Iterator[EncodedInstruction]:
    """Iterate over the instructions from the first byte on, each starting where the one before ends."""
    offset = 0
    while offset < len(data):
        instruction = decode_one(data, offset, word_size, byte_order)
        yield instruction
        offset = instruction.end
