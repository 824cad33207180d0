"""What the kernel would do at a place that carries a uprobe, in words, for those who choose one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import PlaceNote
from dprobes.target.instructions import decode_at
from dprobes.target.uprobes import UprobeClass, refusal, uprobe_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.instructions import DecodedInstruction
    from dprobes.target.location import Module

__all__ = ["place_notes"]


def place_notes(module: Module, instructions: Sequence[DecodedInstruction]) -> Iterator[PlaceNote]:
    """Iterate over what is done at instructions, for probes that name a place as a function's start if it is one."""
    return (PlaceNote(text) for text in _strings(module, instructions))


def _strings(module: Module, known: Sequence[DecodedInstruction]) -> Iterator[str]:
    from dprobes.target.cheapsites import cheap_sites

    bits = 8 * module.word_size
    for instruction, moved in zip(known, cheap_sites(module, known), strict=True):
        reason = refusal(instruction, bits, at_entry=module.function_start(instruction.offset) == instruction.address)
        if reason is not None:
            yield f"refused, because {reason}"
        elif moved:
            neighbour = decode_at(module, instruction.offset + moved)
            yield f"placed {moved:#x} further, at '{neighbour.text}', which is emulated; single-stepped with --exact"
        elif uprobe_class(instruction.raw, bits) is UprobeClass.EMULATED:
            yield "emulated"
        else:
            yield "single-stepped, ten times as slow as one that is emulated"
