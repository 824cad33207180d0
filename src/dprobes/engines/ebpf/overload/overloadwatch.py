"""The overload guard of a run: it looks at the time that hits take, and carries out what the policy decides."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ProbeLoad
from dprobes.engines.interface import StateEvent
from dprobes.engines.overload import Load, OverloadPolicy
from dprobes.engines.overloadnotices import OverloadNotices
from dprobes.lazydataclass import dataclass
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.interface import Event
    from dprobes.rpn.program import Program

__all__ = ["OverloadWatch"]

_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class _Stock:
    """What the tables held at one moment: hits by probepoint, those of others and nanoseconds in handlers by entry."""

    hits: dict[int, int]
    foreign: list[int]
    time: list[int]


class OverloadWatch:
    """The watch on the hits of one program in the kernel; ``budget`` is the share of a CPU that they may take."""

    def __init__(self, program: Program, installed: Installation, budget: float) -> None:
        load = installed.maps.load
        assert load is not None, "a program with a budget has the maps for it"
        self._installed = installed
        self._load = load
        self._policy = OverloadPolicy(budget)
        self._notices = OverloadNotices(budget, program.major, installed.probes)
        self._thinning: dict[int, int] = {}
        self._looked_at = time.monotonic()
        self._spent = load.spent()
        self._stock: _Stock | None = None

    def look(self) -> Iterator[Event]:
        """Iterate over what is to be said of the time since the last look."""
        now = time.monotonic()
        elapsed = now - self._looked_at
        before, self._looked_at, self._spent = self._spent, now, self._load.spent()
        share = max(after - earlier for after, earlier in zip(self._spent, before, strict=True)) / _SECOND / elapsed
        loads: list[Load] = []
        if self._policy.is_watching:
            stock = self._take_stock()
            if self._stock is not None:
                loads = list(self._loads(self._stock, stock))
            self._stock = stock
        verdict = self._policy.judge(share, loads)
        if not self._policy.is_watching:
            self._stock = None
        elif self._stock is None:
            self._stock = self._take_stock()
        for number, thinning in verdict.thinned.items():
            self._thinning[number] = thinning
            for entry in self._installed.entries_of(number):
                self._load.thin(entry, thinning)
        attachments = self._installed.attachments
        gone = [number for number in verdict.disabled if attachments.take_away(number)]
        rates = {load.number: load.hits / elapsed for load in loads}
        for number in gone:
            detail = self._notices.cause(rates[number], verdict.shares[number])
            yield StateEvent((number,), 0, ProbeState.DISABLED, detail)
        yield from self._notices.of(replace(verdict, disabled=gone), rates)

    def _take_stock(self) -> _Stock:
        load, attachments = self._load, self._installed.attachments
        hits = {number: attachments.hits(number) for number in self._installed.attached}
        return _Stock(hits, load.column(ProbeLoad.FOREIGN), load.column(ProbeLoad.TIME))

    def _loads(self, before: _Stock, after: _Stock) -> Iterator[Load]:
        """Iterate over what probepoints did between two moments, if they did anything, or have a thinned handler."""
        for number, hits_now in after.hits.items():
            entries = self._installed.entries_of(number)
            hits = hits_now - before.hits.get(number, 0)
            hits += sum(after.foreign[entry] - before.foreign[entry] for entry in entries)
            in_handler = sum(after.time[entry] - before.time[entry] for entry in entries)
            in_traps = hits * self._load.cost(number)
            thinning = self._thinning.get(number, 1)
            if hits or in_handler or thinning > 1:
                yield Load(number, hits, in_handler / _SECOND, in_traps / _SECOND, thinning)
