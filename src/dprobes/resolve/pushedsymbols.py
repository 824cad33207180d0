"""The symbols whose addresses handlers push."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.rpn.operands import like_statement
from dprobes.rpn.program import Expression

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.spaces import SymbolSpace
    from dprobes.rpn.program import Program

__all__ = ["pushed_symbols"]


def pushed_symbols(program: Program, space: SymbolSpace, diagnostics: Diagnostics) -> tuple[tuple[str, int], ...]:
    """Return the addresses of the symbols that handlers push; add an error for each that the space has not."""
    symbols: dict[str, int] = {}
    for code in program.bodies():
        for instruction in code.instructions:
            match instruction.operand:
                case Expression(_, str(name)) if name not in symbols:
                    try:
                        symbols[name] = space.address_of(name)
                    except TargetError as error:
                        hint = error.hint or like_statement(instruction.row.operator, name)
                        diagnostics.error(instruction.operand_place, error.message, hint=hint)
    return tuple(symbols.items())
