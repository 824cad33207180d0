"""Code that is not the one that a program was built for: what a MISMATCH says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import Span
    from dprobes.target.functionexits import Exits
    from dprobes.target.location import Module

__all__ = ["exits_difference", "warn_of_mismatch"]


def exits_difference(module: Module, exits: Exits) -> str:
    """Return how the first differing exit of a function differs from what is expected there, empty if none does."""
    for leaving in exits.exits:
        if (difference := module.difference_at(leaving.offset)) is not None:
            return f"at offset {leaving.offset:#x}, where it is left: {difference}"
    return ""


def warn_of_mismatch(diagnostics: Diagnostics, span: Span | None, difference: str) -> None:
    """Say that other code is in the module than the program was built for."""
    diagnostics.warning(
        span,
        f"MISMATCH: {difference}; not inserted",
        hint="build the program for this version of the module, or give --dont-verify-opcodes",
    )
