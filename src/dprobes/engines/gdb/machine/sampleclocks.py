"""
The samplers of a program on a machine behind a stub: when each of them wants the machine to stop.

One stop is a sample on each processor. It takes milliseconds, so a clock that has become due several times meanwhile is
due once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dprobes.resolve.probepoints import ProbeKind
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.gdb.program import StubProbe
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["SampleClocks"]


class SampleClocks:
    """The clocks of those ``probes`` that are samplers; times are in seconds, of one clock that never goes back."""

    def __init__(self, probes: Sequence[StubProbe], probepoints: Sequence[Probepoint]) -> None:
        self._periods = {
            probe: 1 / each.clock.frequency
            for probe, each in zip(probes, probepoints, strict=True)
            if each.kind is ProbeKind.SAMPLER
        }
        self._due: dict[StubProbe, float] = {}

    def __bool__(self) -> bool:
        """Whether there are samplers."""
        return bool(self._periods)

    def next(self, now: float) -> float:
        """Return when the next one is due, which may be past; infinity if none will ever be."""
        return min((self._due_at(probe, now) for probe in self._active()), default=math.inf)

    def take(self, now: float) -> list[StubProbe]:
        """Return those that are due; they are so again a period later."""
        due = [probe for probe in self._active() if self._due_at(probe, now) <= now]
        for probe in due:
            late = now - self._due[probe]
            self._due[probe] = now + self._periods[probe] - late % self._periods[probe]
        return due

    def _active(self) -> list[StubProbe]:
        return [probe for probe in self._periods if probe.state is ProbeState.ACTIVE]

    def _due_at(self, probe: StubProbe, now: float) -> float:
        """Return when a sampler is due: a period after it was looked at first."""
        return self._due.setdefault(probe, now + self._periods[probe])
