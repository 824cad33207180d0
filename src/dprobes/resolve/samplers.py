"""The samplers of a program: they have a frequency, and no place in the module's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.resolve.probepoints import ProbeKind, Probepoint, SampleClock
from dprobes.rpn.program import Sampler

if TYPE_CHECKING:
    from dprobes.rpn.program import Program

__all__ = ["resolve_samplers"]


def resolve_samplers(program: Program, path: str) -> tuple[Probepoint, ...]:
    """Return the samplers of a program for the code of the file at ``path``, or for all code if that is ANYWHERE."""
    return tuple(
        Probepoint(
            ProbeKind.SAMPLER,
            number,
            definition,
            path,
            f"{definition.location.frequency}hz",
            SampleClock(definition.location.frequency),
        )
        for number, definition in enumerate(program.definitions)
        if isinstance(definition.location, Sampler)
    )
