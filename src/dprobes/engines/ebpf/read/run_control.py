"""
Access of other threads to a run while one thread iterates over its events: counts, variables and requests.

Requests are only recorded; the iterating thread carries them out. All methods may be called before the run begins, and
after it has ended. Then they return the last values.
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
    from dprobes.engines.engine_interface import ValueChange
    from dprobes.keyed.table_layout import TableContents

__all__ = ["ProbeCounts", "Readings", "Requests"]


class ProbeCounts:
    """
    Counts of an installation's probepoints. Any thread may call the methods.

    The counts are computed from the probe table, the kernel's counts of missed hits, and the counts of records. For
    each probepoint, ``faults`` has the number of hits whose instruction faulted, ``dropped`` the number of their
    records, and ``given_up`` the number of records that were discarded at the end.
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
    Requests of other threads to a run, and the wake-up of the thread that carries them out.

    ``descriptor`` is readable if there is a request. It is -1 before ``open`` and after ``close``. The methods are
    reentrant, so a signal handler may call them.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._removals: deque[int] = deque()
        self._lock = threading.RLock()

    def open(self) -> None:
        """Create the eventfd ``descriptor``, by which a request wakes the reader."""
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Wake up the thread that carries out requests."""
        # Once the descriptor is closed, its number may belong to another one.
        with self._lock:
            if self.descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self.descriptor, 1)

    def remove(self, probes: Sequence[int]) -> None:
        """Request the removal of the probepoints with these numbers from the thread that reads events."""
        self._removals += probes
        self.wake()

    def take_removals(self) -> list[int]:
        """Return the probepoints to be removed, and clear the list."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return [self._removals.popleft() for _ in range(len(self._removals))]

    def close(self) -> None:
        """Close the descriptor. Later requests wake no thread."""
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class Readings:
    """
    Counts and variables of a program in the kernel. After ``close``, they have their last values.

    ``count`` returns the counts of all probepoints, and any thread may call it. Without an installation, all are empty.
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
        """Return the contents of the keyed tables."""
        with self._lock:
            self._read_tables()
            return self._tables

    def reset_variables(self, first: int, last: int | None) -> None:
        """
        Set the local and CPU variables ``first`` to ``last`` (included) to zero.

        If ``last`` is None, set all from ``first`` on.
        """
        some = slice(first, None if last is None else last + 1)
        with self._lock:
            if self._installed is not None:
                self._installed.maps.reset_variables(some)
                return
            for variables in (self._locals, *self._cpu_variables):
                variables[some] = [0] * len(variables[some])

    def change(self, changes: Sequence[ValueChange]) -> None:
        """
        Set local variables, and change keyed tables, as each change specifies.

        After the end of the run only the deletion of a whole table has an effect.
        """
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
        """Store the present values. Later calls do not access the maps."""
        with self._lock:
            self._read_counts()
            self._read_variables()
            self._read_tables()
            self._installed = None
