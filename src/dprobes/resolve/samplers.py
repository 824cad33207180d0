"""The sampler probes of a program: they have a rate, and no place in the module's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.program import Sampler

if TYPE_CHECKING:
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["ANYWHERE", "ResolvedSampler", "resolve_samplers", "samples_everything"]

ANYWHERE = "*"
"""The module's name in programs whose samplers run the handler wherever they interrupt."""


@dataclass(frozen=True, slots=True)
class ResolvedSampler:
    """
    Name one sampler of a program; it has ``frequency`` samples a second on each CPU.

    ``number`` is that of the definition. ``path`` is that of the file whose code is sampled, or ANYWHERE.
    """

    number: int
    definition: ProbeDefinition
    path: str
    frequency: int
    state: ProbeState = ProbeState.COMPILED

    @property
    def where(self) -> str:
        """What takes the place of a place for people."""
        return f"{self.frequency}hz"

    @property
    def function(self) -> str:
        """The function that a pattern found: never one."""
        return ""


def samples_everything(program: Program) -> bool:
    """Return whether a program is not about any module, but about whatever runs."""
    return program.name == ANYWHERE


def resolve_samplers(program: Program, path: str) -> tuple[ResolvedSampler, ...]:
    """Return the samplers of a program for the file at ``path``."""
    return tuple(
        ResolvedSampler(number, definition, path, definition.location.frequency)
        for number, definition in enumerate(program.definitions)
        if isinstance(definition.location, Sampler)
    )
