"""Watch on the probe table and the overload guard's maps: events of a run other than records."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.map_layouts import ProbeLoad
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.engines.overload_guard import Load, OverloadNotices, OverloadPolicy
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.instruction_set import ExceptionCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.engine_interface import Event
    from dprobes.rpn.rpn_program import Program

__all__ = ["OverloadWatch", "TableWatch"]

_SECOND = 1e9


class _Stock(NamedTuple):
    """
    Contents of the maps of the overload guard at one moment.

    ``hits`` are per probepoint; ``foreign`` hits and the ``time`` in handlers, in nanoseconds, are per entry.
    """

    hits: dict[int, int]
    foreign: list[int]
    time: list[int]


class OverloadWatch:
    """Overload guard of one program in the kernel. ``budget`` is the share of a CPU that its hits may take."""

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
        """Judge the load since the last call, apply the verdict, and iterate over the events."""
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
            detail = self._notices.cause(number, rates, verdict.shares)
            yield StateEvent((number,), 0, ProbeState.DISABLED, detail)
        yield from self._notices.of(replace(verdict, disabled=gone), rates)

    def _take_stock(self) -> _Stock:
        load, attachments = self._load, self._installed.attachments
        hits = {number: attachments.hits(number) for number in self._installed.attached}
        return _Stock(hits, load.column(ProbeLoad.FOREIGN), load.column(ProbeLoad.TIME))

    def _loads(self, before: _Stock, after: _Stock) -> Iterator[Load]:
        """Iterate over the loads, from ``before`` to ``after``, of probepoints with hits or a thinned handler."""
        for number, hits_now in after.hits.items():
            entries = self._installed.entries_of(number)
            hits = hits_now - before.hits.get(number, 0)
            hits += sum(after.foreign[entry] - before.foreign[entry] for entry in entries)
            in_handler = sum(after.time[entry] - before.time[entry] for entry in entries)
            in_traps = hits * self._load.cost(number)
            thinning = self._thinning.get(number, 1)
            if hits or in_handler or thinning > 1:
                yield Load(number, hits, in_handler / _SECOND, in_traps / _SECOND, thinning)


class TableWatch:
    """Watch on the maps of a program in the kernel for losses and uncaught exceptions. Each event is reported once."""

    def __init__(self, program: Program, installed: Installation) -> None:
        self._program = program
        self._installed = installed
        self._unhandled: set[tuple[int, int]] = set()
        self._expired: set[int] = set()
        self.interval = 1.0
        """Seconds between two calls of ``look``."""
        self._overload: OverloadWatch | None = None
        if installed.budget is not None:
            from dprobes.engines.overload_guard import LOOK_INTERVAL

            self.interval = LOOK_INTERVAL
            self._overload = OverloadWatch(program, installed, installed.budget)

    def look(self, *, is_quiet: bool) -> Iterator[Event]:
        """
        Iterate over new events. Call this at intervals of ``interval`` seconds.

        With ``is_quiet``, the ring is empty and no record is held back.
        """
        if self._overload is not None:
            yield from self._overload.look()
        yield from self._unhandled_exceptions()
        if is_quiet:
            yield from self._ended_unheard()

    def finish(self) -> Iterator[Event]:
        """Iterate over the events at the end of the run."""
        yield from self._unhandled_exceptions()
        yield from self._not_known()

    def _unhandled_exceptions(self) -> Iterator[Event]:
        """Yield a notice, once for each definition, about the exceptions that end its handlers."""
        program = self._program
        if program.autostacktrace:
            return
        for number, bits in self._installed.unhandled():
            definition = self._installed.probes[number].number
            for code in ExceptionCode:
                if bits & code and (definition, code) not in self._unhandled:
                    self._unhandled.add((definition, code))
                    yield Notice(
                        f"the handler of {program.major},{program.definitions[definition].minor} was ended by "
                        f"{code.name}, which nothing catches",
                        "catch it with 'sx', or see where it is raised with 'autostacktrace = yes'",
                    )

    def _ended_unheard(self) -> Iterator[Event]:
        """Remove probepoints whose end handlers could not report, because the ring was full."""
        # An entry may still be on its way: it is lost only if it has not arrived within a second.
        expired = self._installed.attachments.expired()
        for probe in expired & self._expired:
            self._installed.attachments.take_away(probe)
            yield StateEvent((probe,), 0, ProbeState.DISABLED)
            definition = self._installed.probes[probe].definition
            if any(i.row.syntax == "exit <code>" for i in definition.handler.instructions):
                yield Notice(
                    f"{self._program.major},{definition.minor} was removed, but the ring had no room for "
                    "the reason; if its handler stopped a process, that is still stopped",
                    "find it with 'ps -e -o pid,stat,comm', state T; continue it with 'kill -CONT PID'",
                )
        self._expired = expired

    def _not_known(self) -> Iterator[Event]:
        """Yield notices about processes and faults that were not reported, because a map or the ring was full."""
        maps = self._installed.maps
        if maps.unfollowed:
            yield Notice(
                f"{maps.unfollowed} processes of the tree were not probed: too many were alive at once",
                "probe all processes instead (without -c and -p), or those of a cgroup",
            )
        if maps.unseen:
            yield Notice(
                f"the ring had no room for {maps.unseen} faults: up to that many records may be of "
                "instructions that did not complete",
                "make the ring larger with --ring-size",
            )
