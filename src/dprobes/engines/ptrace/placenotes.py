"""What a hit at an instruction costs with the ptrace engine, for people who choose a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import PlaceNote
from dprobes.engines.x86.cost import execution_of
from dprobes.target.code.instructions import is_x86

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.location import Module

__all__ = ["place_notes"]


def place_notes(module: Module, instructions: Sequence[DecodedInstruction]) -> Iterator[PlaceNote]:
    """Iterate over how instructions of a module are executed; nothing is said of other processors than x86."""
    if not is_x86(module):
        return
    for instruction in instructions:
        execution = execution_of(instruction.raw, module.word_size)
        advice = ": a hit stops the thread once."
        if not execution.is_cheap:
            advice = "; a hit at an instruction marked '+' near it costs less."
        yield PlaceNote(f"executed {execution.value}", advice, execution.is_cheap)
