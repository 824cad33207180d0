"""
What other threads may do with a run while one iterates over its events: look at it, and ask for changes.

Whatever is asked for is only noted here, and done by the thread that iterates. Everything may be called before the run
begins and after it has ended: what can be looked at is then as it was at the end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Counts

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.engine_interface import Change
    from dprobes.keyed.table_layout import TableContents

__all__ = ["ProbeCounts", "Readings", "Requests"]


class ProbeCounts:
    """
    The counts of an installation; any thread may ask.

    They are put together from the probe table, the kernel's counts, and what became of records. Of thousands of
    probepoints most are not hit: those cost next to nothing here. By probepoint, ``faults`` are hits that did not
    complete their instruction, ``dropped`` their records, which were not given out, and ``given_up`` those that nobody
    waited for at the end.
    """

    def __init__(
        self, installed: Installation, faults: Counter[int], dropped: Counter[int], given_up: Counter[int]
    ) -> None:
        self._installed = installed
        self._faults = faults
        self._dropped = dropped
        self._given_up = given_up

    def all(self) -> tuple[Counts, ...]:
        """Return the counts of all probepoints, in the order of their numbers."""
        installed = self._installed
        missed = installed.kernel.missed()
        hit = {entry % installed.bank_size for entry in installed.maps.hit_entries()}
        hit.update(missed, list(self._faults), list(self._dropped), list(self._given_up))
        nothing: dict[tuple[str, ...], Counts] = {}
        found = []
        for number in range(len(installed.probes)):
            executed = self._executed(number)
            if number in hit:
                found.append(self._of(number, missed[number], executed))
            else:
                found.append(nothing.setdefault(executed, Counts(executed=executed)))
        return tuple(found)

    def _executed(self, number: int) -> tuple[str, ...]:
        sites = self._installed.numbers.sites.get(number, ())
        executed = self._installed.kernel.executed
        return (executed(sites[0]),) if len(sites) == 1 else tuple(sorted({executed(site) for site in sites}))

    def _of(self, number: int, missed_by_kernel: int, executed: tuple[str, ...]) -> Counts:
        installed = self._installed
        definition = installed.probes[number].definition
        entries = [installed.maps.counters(entry) for entry in installed.entries_of(number)]
        faults, given_up = self._faults[number], self._given_up[number]
        hits = installed.attachments.hits(number)
        if definition.maxhits:
            hits = min(hits, installed.numbers.limit(number))
        if number not in installed.giving_back:
            hits -= faults
        return Counts(
            hits=hits + missed_by_kernel,
            records=sum(entry.records for entry in entries) - self._dropped[number] - given_up,
            lost=sum(entry.lost for entry in entries) + given_up,
            passed=min(hits, definition.passcount),
            missed=sum(entry.missed for entry in entries) + missed_by_kernel,
            skipped=sum(entry.skipped for entry in entries),
            faulted=faults,
            executed=executed,
        )


class Requests:
    """
    What others ask of a run; the thread that sees to it is woken up.

    ``descriptor`` can be read when something was asked for; it is -1 while the run does not go on. A signal handler may
    interrupt these methods and call them itself.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._removals: deque[int] = deque()
        self._lock = threading.RLock()

    def open(self) -> None:
        """Begin to wake up who waits for ``descriptor``."""
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Wake up the thread that sees to requests."""
        # The number may be that of somebody else's descriptor as soon as it is closed.
        with self._lock:
            if self.descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self.descriptor, 1)

    def remove(self, probes: Sequence[int]) -> None:
        """Ask for probepoints to be removed."""
        self._removals += probes
        self.wake()

    def take_removals(self) -> list[int]:
        """Return the probepoints that are to be removed, and forget them."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return [self._removals.popleft() for _ in range(len(self._removals))]

    def close(self) -> None:
        """Wake up nobody any more."""
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class Readings:
    """
    The counts and variables of a program in the kernel, and what they were at the end once ``close`` was called.

    ``count`` returns the counts of all probepoints, and is called by any thread. Without an installation there is
    nothing to read.
    """

    def __init__(
        self, installed: Installation | None = None, count: Callable[[], tuple[Counts, ...]] = lambda: ()
    ) -> None:
        self._installed = installed
        self._count = count
        self._lock = threading.Lock()
        self._counts: tuple[Counts, ...] = ()
        self._locals: list[int] = []
        self._cpu_variables: list[list[int]] = []
        self._tables: tuple[TableContents, ...] = ()

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts of all probepoints."""
        with self._lock:
            self._read_counts()
            return self._counts

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        with self._lock:
            self._read_variables()
            return list(self._locals)

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables, a list for each CPU."""
        with self._lock:
            self._read_variables()
            return [list(variables) for variables in self._cpu_variables]

    def tables(self) -> tuple[TableContents, ...]:
        """Return what the keyed tables hold."""
        with self._lock:
            self._read_tables()
            return self._tables

    def reset_variables(self, first: int, last: int | None) -> None:
        """Set the local and CPU variables with the indices from ``first`` to ``last`` to zero."""
        some = slice(first, None if last is None else last + 1)
        with self._lock:
            if self._installed is not None:
                self._installed.maps.reset_variables(some)
                return
            for variables in (self._locals, *self._cpu_variables):
                variables[some] = [0] * len(variables[some])

    def change(self, changes: Sequence[Change]) -> None:
        """Change local variables and tables."""
        with self._lock:
            if self._installed is not None:
                self._installed.maps.change(changes)
                return
            from dprobes.engines.engine_interface import TableChange
            from dprobes.keyed.table_layout import TableContents

            cleared = {each.table for each in changes if isinstance(each, TableChange) and each.key is None}
            self._tables = tuple(
                TableContents(each.table) if number in cleared else each for number, each in enumerate(self._tables)
            )

    def _read_counts(self) -> None:
        if self._installed is not None:
            self._counts = self._count()

    def _read_variables(self) -> None:
        if self._installed is not None:
            maps = self._installed.maps
            self._locals, self._cpu_variables = maps.local_variables(), maps.cpu_variables()

    def _read_tables(self) -> None:
        if self._installed is not None and (maps := self._installed.maps.tables) is not None:
            self._tables = maps.contents()

    def close(self) -> None:
        """Keep what there is; the maps are not looked at any more when this returns."""
        with self._lock:
            self._read_counts()
            self._read_variables()
            self._read_tables()
            self._installed = None
