"""What a hit at a place costs: **the** definition of "cheap", for all verbs that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.code.instructions import unprobeable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.location import Module

__all__ = ["PlaceCost", "costs_at"]


class PlaceCost(NamedTuple):
    """
    What a hit costs, in words; it ``is_cheap`` if it is with each engine.

    With the ptrace engine a cheap hit stops the thread once, with the ebpf engine it needs no single step.
    """

    text: str
    is_cheap: bool


def costs_at(module: Module, instructions: Sequence[DecodedInstruction]) -> Iterator[PlaceCost]:
    """Give what a hit costs at each of some instructions of a module."""
    from dprobes.engines.registry import rows

    notes = {row.name: found for row in rows() if (found := list(row.notes_on(module, instructions)))}
    for number, instruction in enumerate(instructions):
        cheap = [name for name, found in notes.items() if found[number].is_cheap]
        if (reason := unprobeable(instruction)) is not None:
            yield PlaceCost(f"none: {reason}", is_cheap=False)
        elif not cheap:
            yield PlaceCost("slow: single-stepped", is_cheap=False)
        elif len(cheap) == len(notes):
            yield PlaceCost("cheap", is_cheap=True)
        else:
            others = [name for name in notes if name not in cheap]
            yield PlaceCost(f"cheap with {' and '.join(cheap)}, slow with {' and '.join(others)}", is_cheap=False)
