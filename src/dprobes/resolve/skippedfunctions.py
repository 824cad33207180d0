"""Functions that a handler lets return at once: whether one begins where the probepoint is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.rpn.needs import skipping_instruction

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["check_skip"]


def check_skip(
    program: Program, definition: ProbeDefinition, where: str, diagnostics: Diagnostics, *, begins: bool
) -> None:
    """Add an error if a handler skips the function at a place where none ``begins``."""
    if begins:
        return
    if (skip := skipping_instruction(program, definition)) is not None:
        diagnostics.error(
            skip.span,
            f"'skip' returns from the function that begins at the probepoint, and none begins at {where}",
            hint="only there the return address is on top of the stack: write 'offset =' with the function's name",
        )
