"""
The overload guard of a program whose handlers run in this process.

What hits take is what this process takes of a CPU, as long as it has nothing else to do than to see to hits; programs
share that by their hits. Handlers are measured, and what is left is what their hits cost besides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dprobes.engines.hits.hitload import HitLoad
from dprobes.engines.overload import LOOK_INTERVAL, Load, OverloadPolicy
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dprobes.engines.hits.probes import Probe
    from dprobes.engines.overload import Verdict

__all__ = ["Moment", "ProgramGuard"]


class Moment(NamedTuple):
    """A moment: by the clock, by the processor time of this process, and by the hits of all programs."""

    time: float
    busy: float
    hits: int

    @classmethod
    def now(cls, hits: int) -> Moment:
        """Return the present one."""
        return cls(time.monotonic(), time.process_time(), hits)


class ProgramGuard:
    """The guard of one program; ``budget`` is the share of a CPU that its hits may take."""

    def __init__(self, budget: float, clock: Callable[[int], Moment] = Moment.now) -> None:
        self._clock = clock
        self._policy = OverloadPolicy(budget)
        self._last = clock(0)
        self._hits: dict[int, int] = {}
        self._in_handler: dict[int, float] = {}

    @staticmethod
    def new_load() -> HitLoad:
        """Return what measures the hits of one more probepoint."""
        return HitLoad()

    def due_in(self, now: float) -> float:
        """Return in how many seconds ``look`` is to be called."""
        return self._last.time + LOOK_INTERVAL - now

    def look(self, probes: Mapping[int, Probe[Any]], all_hits: int) -> tuple[Verdict, dict[int, float]]:
        """
        Return what is to be done about probepoints, and their hits a second; thinning is done already.

        ``all_hits`` are those of all programs so far.
        """
        last, self._last = self._last, self._clock(all_hits)
        elapsed = self._last.time - last.time
        loads = list(self._loads(probes.values()))
        hits = sum(load.hits for load in loads)
        others = max(0, self._last.hits - last.hits - hits)
        busy = (self._last.busy - last.busy) * hits / (hits + others) if hits else 0.0
        outside = max(0.0, busy - sum(load.in_handler for load in loads))
        loads = [
            Load(load.number, load.hits, load.in_handler, outside * load.hits / hits if hits else 0.0, load.thinning)
            for load in loads
        ]
        verdict = self._policy.judge(busy / elapsed, loads)
        for number, thinning in verdict.thinned.items():
            if (state := probes[number].load) is not None:
                state.thinning = thinning
        return verdict, {load.number: load.hits / elapsed for load in loads}

    def _loads(self, probes: Iterable[Probe[Any]]) -> Iterable[Load]:
        """Iterate over what probepoints did since the last look, if they did anything, or have a thinned handler."""
        for probe in probes:
            state, number = probe.load, probe.number
            if state is None:
                continue
            hits = probe.counts.hits - self._hits.get(number, 0)
            in_handler = state.in_handler - self._in_handler.get(number, 0.0)
            self._hits[number] = probe.counts.hits
            self._in_handler[number] = state.in_handler
            if (hits or in_handler or state.thinning > 1) and probe.is_active:
                yield Load(number, hits, in_handler, 0.0, state.thinning)
