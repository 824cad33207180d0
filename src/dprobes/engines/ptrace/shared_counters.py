"""
Counts and variables of a run, in memory that the tracer writes and the client reads.

The memory is a memfd that the client creates. The client can read it without a request to the tracer, which is busy
with hits, and after the tracer's end. The file has 64-bit cells::

    resets requested | resets made | changes made | local variables | CPU variables of CPU 0 | of CPU 1 | ...
    the number of the last reset of each local variable | of each CPU variable
    the program's keyed tables (``keyed.table_entries``)
    from the next page on: a Tally for each probepoint
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, cast

from dprobes.engines.engine_interface import Counts, apply_changes
from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.platform.linux.process_calls import growing_memory_file
from dprobes.platform.linux.procfs import cpu_limit

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from dprobes.engines.engine_interface import ValueChange
    from dprobes.engines.hits.hit_context import SharedHits
    from dprobes.engines.hits.hit_lifecycle import ProbeLimits
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.keyed.table_layout import TableContents
    from dprobes.rpn.keyed_tables import Table

__all__ = ["NativeState", "NativeStatePlan", "SharedCounters", "Tally", "Variables"]

_CELL = 8
_ASKED, _MADE, _CHANGED, _FIRST_VARIABLE = 0, 1, 2, 3
"""Indices of cells."""

_ROWS = 512
"""Number of tallies in a chunk, which is mapped as a whole; its size is a multiple of a page."""


_PLACEMENTS = {placement: 1 << bit for bit, placement in enumerate(Placement)}


class Tally(ctypes.Structure):
    """Counts of one probepoint; ``placements`` is a set of ``Placement`` as bits."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "hits",
            "records",
            "lost",
            "passed",
            "missed",
            "skipped",
            "faulted",
            "neighbours",
            "placements",
        )
    )
    hits: int
    records: int
    lost: int
    passed: int
    missed: int
    skipped: int
    faulted: int
    neighbours: int
    placements: int

    def note(self, placement: Placement) -> None:
        """Record how the probed instruction was executed, such as in an out-of-line slot."""
        self.placements |= _PLACEMENTS[placement]

    def counts(self) -> Counts:
        """Return the current counts."""
        placements = self.placements
        executed = tuple(sorted(place.value for place, bit in _PLACEMENTS.items() if placements & bit))
        return Counts(
            hits=self.hits,
            records=self.records,
            lost=self.lost,
            passed=self.passed,
            missed=self.missed,
            skipped=self.skipped,
            faulted=self.faulted,
            neighbours=self.neighbours,
            executed=executed,
        )


class Variables(NamedTuple):
    """Variables of a program; ``by_cpu`` is indexed by the number of the CPU."""

    local: MutableSequence[int]
    by_cpu: Sequence[MutableSequence[int]]


class SharedCounters:
    """
    Shared memory of a program's counts and variables, in the file ``descriptor``, which is closed with the object.

    ``local_count`` and ``cpu_count`` are the numbers of local and CPU variables. All methods are thread-safe.
    """

    def __init__(self, descriptor: int, local_count: int, cpu_count: int, tables: Sequence[Table] = ()) -> None:
        self.descriptor = descriptor
        self._tables = tables
        weakref.finalize(self, os.close, descriptor)
        self._lock = threading.Lock()
        self._chunks: list[ctypes.Array[Tally]] = []
        cpus = cpu_limit()
        end = _FIRST_VARIABLE + local_count + cpus * cpu_count
        self._first_table = count = end + local_count + cpu_count
        if tables:
            from dprobes.keyed.table_entries import cells_of

            count += sum(map(cells_of, tables))
        self._tallies = -(-count * _CELL // mmap.PAGESIZE) * mmap.PAGESIZE
        self._cells = self._map(0, self._tallies)
        variables = self._cells[_FIRST_VARIABLE:end]
        starts = [local_count + cpu * cpu_count for cpu in range(cpus)]
        by_cpu = [variables[start : start + cpu_count] for start in starts]
        self.variables = Variables(
            cast("MutableSequence[int]", variables[:local_count]), cast("list[MutableSequence[int]]", by_cpu)
        )
        self._local_resets = self._cells[end : end + local_count]
        self._cpu_resets = self._cells[end + local_count : self._first_table]
        self.resets = self._cells[_ASKED : _MADE + 1]
        """The number of resets of variables that were requested, and the number that were made."""
        self._principal: SharedCounters | None = None
        self._stores: list[KeyedStore] | None = None
        self._is_native = False
        self._native_tables: Sequence[KeyedStore | None] = ()

    def borrow(self, principal: SharedCounters) -> None:
        """Use the variables, and the requests to reset them, of ``principal``, the first of the companion programs."""
        self._principal, self.variables, self.resets = principal, principal.variables, principal.resets

    def use_native(self, variables: Variables, tables: Sequence[KeyedStore | None]) -> None:
        """
        Use ``variables`` and ``tables`` that both the tracer and handlers in the probed processes write.

        ``tables`` has the order of the program's tables. An item that is None is a table that only the tracer writes,
        and that stays in this memory.
        """
        self.variables, self._native_tables, self._is_native = variables, tables, True

    @classmethod
    def new(cls, local_count: int, cpu_count: int, tables: Sequence[Table] = ()) -> Self:
        """Create the memory; ``descriptor`` may be passed to other processes."""
        return cls(growing_memory_file("dprobes_counters"), local_count, cpu_count, tables)

    def table_memory(self) -> list[memoryview]:
        """Return the memory of each keyed table, a view of its cells."""
        from dprobes.keyed.table_entries import cells_of

        found, start = [], self._first_table
        for table in self._tables:
            found.append(self._cells[start : start + cells_of(table)])
            start += cells_of(table)
        return found

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the keyed tables."""
        if self._principal is not None:
            return self._principal.tables()
        if not self._tables:
            return ()
        from dprobes.keyed.table_entries import TableReader

        readers = [TableReader(*each) for each in zip(self._tables, self.table_memory(), strict=True)]
        return tuple((native or own).contents() for native, own in zip(self._shared_tables, readers, strict=True))

    def stores(self) -> list[KeyedStore]:
        """Return the keyed tables, through which the tracer's handlers update them."""
        from dprobes.keyed.table_entries import TableStore

        memory = zip(self._tables, self.table_memory(), strict=True)
        own = [TableStore.taken_over(table, cells) for table, cells in memory]
        return [native or store for native, store in zip(self._shared_tables, own, strict=True)]

    @property
    def _shared_tables(self) -> Sequence[KeyedStore | None]:
        return self._native_tables or [None] * len(self._tables)

    def tally(self, probe: int) -> Tally:
        """Return the counts of a probepoint. Their chunk of memory is mapped when it is first used."""
        chunk, row = divmod(probe, _ROWS)
        if chunk >= len(self._chunks):
            with self._lock:
                while chunk >= len(self._chunks):
                    self._chunks.append(self._next_chunk())
        return self._chunks[chunk][row]

    def counts(self, probes: int) -> tuple[Counts, ...]:
        """Return the counts of the first ``probes`` probepoints."""
        return tuple(self.tally(probe).counts() for probe in range(probes))

    # The client requests a reset, and the tracer carries it out before the next handler runs. A handler that runs at
    # the moment of the request therefore cannot write an old value back.

    def ask_for_reset(self, first: int = 0, last: int | None = None) -> None:
        """Reset the variables ``first`` to ``last`` (included; None for the last one). Readers see 0 from now on."""
        if self._principal is not None:
            self._principal.ask_for_reset(first, last)
            return
        some = slice(first, None if last is None else last + 1)
        if self._is_native:  # handlers in processes do not check for resets
            for values in (self.variables.local, *self.variables.by_cpu):
                for index in range(*some.indices(len(values))):
                    values[index] = 0
            return
        with self._lock:
            number = self._cells[_ASKED] + 1
            for resets in (self._local_resets, self._cpu_resets):
                for index in range(*some.indices(len(resets))):
                    resets[index] = number
            self._cells[_ASKED] = number

    def reset_if_asked(self) -> None:
        """Set variables to zero if a reset was requested; call this only between two runs of handlers."""
        if self._principal is not None:
            self._principal.reset_if_asked()
            return
        asked, made = self.resets
        if asked != made:
            for values in (self.variables.local, *self.variables.by_cpu):
                for index, number in enumerate(self._resets_of(values)):
                    if number > made:
                        values[index] = 0
            self._cells[_MADE] = asked

    def take_over(self, changes: Sequence[ValueChange]) -> None:
        """Change variables and tables. Call this only after the tracer has stopped writing them."""
        if self._stores is None:
            self._stores = self.stores()
        apply_changes(changes, self.variables.local, self._stores)

    @property
    def changes_made(self) -> int:
        """Number of requests to change variables and tables that have been carried out."""
        made: int = self._cells[_CHANGED]
        return made

    def note_changes(self, count: int) -> None:
        """Record how many requests to change variables and tables have been carried out."""
        self._cells[_CHANGED] = count

    def local_variables(self) -> list[int]:
        """Return the local variables. A variable whose reset is pending is zero."""
        if self._principal is not None:
            return self._principal.local_variables()
        return self._shown(self.variables.local)

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables of each CPU. A variable whose reset is pending is zero."""
        if self._principal is not None:
            return self._principal.cpu_variables()
        return [self._shown(values) for values in self.variables.by_cpu]

    def _shown(self, values: MutableSequence[int]) -> list[int]:
        if self._is_native:
            return list(values)
        resets = self._resets_of(values)
        while True:
            made = self._cells[_MADE]
            # Read the values before the resets: a variable that is reset meanwhile is not shown with its old value.
            shown = list(zip(list(values), resets, strict=True))
            if self._cells[_MADE] == made:
                return [0 if number > made else value for value, number in shown]

    def _resets_of(self, values: MutableSequence[int]) -> memoryview:
        return self._local_resets if values is self.variables.local else self._cpu_resets

    # Memory

    def _next_chunk(self) -> ctypes.Array[Tally]:
        size = _ROWS * ctypes.sizeof(Tally)
        view = self._map(self._tallies + len(self._chunks) * size, size)
        return (Tally * _ROWS).from_buffer(view)

    def _map(self, offset: int, size: int) -> memoryview:
        # Either process may be the first to extend the file; this never shortens it.
        os.posix_fallocate(self.descriptor, offset, size)
        return memoryview(mmap.mmap(self.descriptor, size, offset=offset)).cast("Q")


class NativeState(Protocol):
    """
    Variables, tables and hit counts of one program that handlers in processes share with the tracer.

    The client's side is ``engines.ptrace.client.program_run``. The first message about a program contains a plan, by
    which the tracer maps the memory.
    """

    @property
    def variables(self) -> Variables:
        """Local variables, and per-CPU variables by CPU."""

    @property
    def global_variables(self) -> MutableSequence[int]:
        """Global variables, or none if other programs share them."""

    @property
    def tables(self) -> Sequence[KeyedStore | None]:
        """Keyed tables, with None for a table that only the tracer writes."""

    def thread_variables(self, tid: int) -> MutableSequence[int] | None:
        """Return the variables of a thread, allocated on first use, or None if there is no room for them."""

    def forget_thread(self, tid: int) -> None:
        """Free the variables of a thread that has ended."""

    def hits_of(self, probe: int, limits: ProbeLimits) -> SharedHits | None:
        """Return the shared hit counts of a probepoint, or None if no handler in a process counts its hits."""


class NativeStatePlan(Protocol):
    """Description of a ``NativeState`` that is not mapped yet. ``descriptor`` belongs to a file in the client."""

    @property
    def descriptor(self) -> int:
        """File descriptor in the client."""

    def opened(self, descriptor: int) -> NativeState:
        """Return the state; it owns ``descriptor``, which is the file in this process."""
