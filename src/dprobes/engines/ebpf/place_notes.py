"""Notes on how the kernel executes an instruction under a uprobe, for users who choose an instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import PlaceNote
from dprobes.target.code.machine_code import decode_at, is_x86
from dprobes.target.code.uprobe_sites import UprobeClass, refusal, uprobe_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module

__all__ = ["place_notes"]


def place_notes(module: Module, instructions: Sequence[DecodedInstruction]) -> Iterator[PlaceNote]:
    """
    Iterate over notes on instructions.

    The note on a function's first instruction is for a probepoint at the function.
    """
    from dprobes.target.code.uprobe_sites import cheap_sites

    if not is_x86(module):
        return
    bits = 8 * module.word_size
    for instruction, moved in zip(instructions, cheap_sites(module, instructions), strict=True):
        reason = refusal(instruction, bits, at_entry=module.function_start(instruction.offset) == instruction.address)
        if reason is not None:
            yield PlaceNote(f"refused, because {reason}")
        elif moved:
            neighbour = decode_at(module, instruction.offset + moved)
            where = f"placed {moved:#x} further, at '{neighbour.text}', which is emulated; single-stepped with --exact"
            yield PlaceNote(where, is_cheap=True)
        elif uprobe_class(instruction.raw, bits) is UprobeClass.EMULATED:
            yield PlaceNote("emulated", is_cheap=True)
        else:
            yield PlaceNote("single-stepped, ten times as slow as one that is emulated")
