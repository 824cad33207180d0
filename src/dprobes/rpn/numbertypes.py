"""
Types of numbers behind a pushed value: ``push r, retval:s32``, ``push mem, s16``.

They are spellings: the value is pushed as without a type, and an instruction behind it, ``pbl`` or ``pzl``, extends its
low bits to the word. A program that is printed has these two instructions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.rpn.isa import OperandKind
from dprobes.rpn.lexer import TokenKind, WordToken
from dprobes.rpn.operands import StatementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.isa import Row

__all__ = ["NUMBER_TYPES", "NumberType", "check_typed", "split_type"]


@dataclass(frozen=True, slots=True)
class NumberType:
    """The width of a number, and whether it has a sign: ``s32``."""

    bits: int
    is_signed: bool

    def __str__(self) -> str:
        return f"{'s' if self.is_signed else 'u'}{self.bits}"

    @property
    def extension(self) -> str:
        """The syntax of the instruction that extends the low bits of a cell; its operand is their number."""
        return "pbl <bits>" if self.is_signed else "pzl <bits>"


NUMBER_TYPES = {
    str(each): each for each in (NumberType(bits, sign) for sign in (False, True) for bits in (8, 16, 32, 64))
}
"""The types by their names."""

_TYPED = (OperandKind.REGISTER, OperandKind.FIELD, OperandKind.ARGUMENT)
"""Operands behind which a type may stand."""


def split_type(tokens: Sequence[WordToken]) -> tuple[Sequence[WordToken], NumberType | None]:
    """Return an instruction without the type of what it pushes, and that; raise ``StatementError`` for none."""
    if tokens[0].word != "push" or len(tokens) < 3:
        return tokens, None
    *before, sign, last = tokens
    if sign.is_punctuation(":"):
        known = NUMBER_TYPES.get(last.word) if last.kind is TokenKind.NAME else None
        if known is None:
            types = ", ".join(NUMBER_TYPES)
            message = f"expected the type of a number, found '{last.text[:40]}'"
            raise StatementError(message, [last], f"types are {types}")
        return before, known
    if tokens[1].word in ("mem", "phys") and last.word in NUMBER_TYPES and last.word.startswith("s"):
        return [*before, sign, WordToken(last.kind, f"u{last.word[1:]}", last.start, last.end)], NUMBER_TYPES[last.word]
    return tokens, None


def check_typed(row: Row, tokens: Sequence[WordToken]) -> None:
    """Raise ``StatementError`` if what an instruction pushes cannot have a type."""
    if row.operand_kind not in _TYPED and not row.syntax.startswith(("push mem", "push phys")):
        hint = "registers, fields and 'push mem' have types"
        raise StatementError(f"'{row.syntax}' takes no type", tokens[-2:], hint)
