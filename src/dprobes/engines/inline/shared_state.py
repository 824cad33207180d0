"""
State that handlers in processes share with the handlers that the tracer interprets: variables, tables, hit counts.

It is the first part of the memory that processes map. The tracer maps the memory, too. By the plan alone it finds all
parts: the same parts, allocated in the same order, have the same offsets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.map_layouts import HEAD_CELLS, PROBE_ENTRY_SIZE, MapName, ProbeField, power_of_two, table_map
from dprobes.engines.engine_interface import TableChange
from dprobes.engines.inline.shared_memory import Region, SharedArray, SharedHash
from dprobes.engines.keyed_table_maps import TableMaps
from dprobes.engines.ptrace.shared_counters import Variables
from dprobes.engines.shared_globals import AtomicCells, add_to_word, raise_word
from dprobes.keyed.table_layout import Change, changes, count_cells, shown_value
from dprobes.native.routines.shared_hash_table import HEAD_SIZE, TableShape
from dprobes.platform.linux.process_calls import ROBUST_LIST_SIZE
from dprobes.platform.linux.procfs import cpu_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.engines.hits.hit_lifecycle import ProbeLimits
    from dprobes.keyed.table_layout import TableContents
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Program

__all__ = ["PROBES_MAX", "SharedHits", "SharedState", "SharedStore", "SharedTables", "StatePlan"]


class _SharedMaps:
    """Factory of arrays and hash tables in a region of memory that is shared with the probed processes."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def array(self, size: int, name: str) -> SharedArray:  # noqa: ARG002 - what is shared has no names
        """Return an array of one element of ``size`` bytes."""
        return SharedArray(self._region, size)

    def hash(
        self,
        key_size: int,
        value_size: int,
        entries: int,
        name: str,  # noqa: ARG002
        *,
        per_cpu: bool,
    ) -> SharedHash:
        """Return a hash table with at most ``entries`` keys; sizes are in bytes, and ``per_cpu`` must be False."""
        assert not per_cpu
        return SharedHash(self._region, TableShape(key_size, value_size, entries))


class SharedTables(TableMaps[SharedArray, SharedHash]):
    """Keyed tables of a program in memory that is shared with the probed processes."""

    keeps_stacks = True

    def __init__(self, tables: Sequence[Table], region: Region) -> None:
        super().__init__(tables, frozenset(range(len(tables))), 1, _SharedMaps(region))
        self.refused: dict[int, int] = {}
        """The largest number of keys with impossible counts of hits in one reading, by the number of the table."""

    def contents(self) -> tuple[TableContents, ...]:
        """Return the contents of the tables without keys with impossible counts, which a process may have written."""
        most = counted_at_most()
        return tuple(self._without(number, each, most) for number, each in enumerate(super().contents()))

    def _without(self, number: int, contents: TableContents, most: int) -> TableContents:
        cells = count_cells(contents.table)
        bad = {row.key for row in contents.rows if any(row.cells[cell] > most for cell in cells)}
        if not bad:
            return contents
        self.refused[number] = max(self.refused.get(number, 0), len(bad))
        return contents._replace(rows=tuple(row for row in contents.rows if row.key not in bad))


def counted_at_most() -> int:
    """Return an upper bound for the number of hits since boot: each takes at least a nanosecond of CPU time."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) * (os.cpu_count() or 1)


def tables_size(tables: Sequence[Table]) -> int:
    """Return the approximate size in bytes of the maps of tables."""
    hashes = (TableShape(table.key_size, 8 * table.value_cells, table.room).size for table in tables if table.keys)
    return sum(hashes) + sum(8 * (table.value_cells + 2) + 2 * HEAD_SIZE for table in tables)


_CELL = 8
_TRIES = 8
"""Maximum number of attempts to insert a value that another thread deletes immediately."""


class SharedStore:
    """
    Table with the given number in the ``maps`` of its program.

    Each change of a cell is an atomic instruction: no change by another thread is lost.
    """

    def __init__(self, table: Table, number: int, maps: SharedTables) -> None:
        self.table = table
        self._number = number
        self._all = maps
        self._map = maps.maps[table_map(number)]
        self._lost = maps.maps[MapName.TABLES_LOST]

    def tally(self, key: bytes, value: int = 0) -> None:
        """Tally a signed number under a key."""
        address = self._made(key)
        if not address:
            return
        for cell, change, number in changes(self.table, value):
            place = address + _CELL * cell
            match change:
                case Change.ADD:
                    add_to_word(place, number)
                case Change.GREATEST:
                    raise_word(place, number)
                case Change.SET:
                    ctypes.c_uint64.from_address(place).value = number

    def add(self, key: bytes, value: int) -> None:
        """Add a signed number to the entry of a key, in a table that keeps the last number."""
        if address := self._made(key):
            add_to_word(address, value)

    def keep(self, key: bytes, value: bytes) -> None:
        """Store a string or a call stack, padded to the table's value size; without room, count the key as lost."""
        if address := self._made(key):
            ctypes.memmove(address, value, _CELL * self.table.value_cells)

    def kept(self, key: bytes) -> bytes:
        """Return the string or call stack stored under a key; zeros if the key does not exist."""
        address, size = self._found(key), _CELL * self.table.value_cells
        return ctypes.string_at(address, size) if address else bytes(size)

    def value(self, key: bytes) -> int:
        """Return the number under a key (``keyed.table_layout.shown_value``); 0 if the key does not exist."""
        address = self._found(key)
        if not address:
            return 0
        count = self.table.value_cells
        return shown_value(self.table, (ctypes.c_uint64 * count).from_address(address)[:])

    def delete(self, key: bytes) -> None:
        """Delete a key if it exists."""
        self._all.change(TableChange(self._number, key, None))

    def clear(self) -> None:
        """Delete all keys, and reset the count of lost ones."""
        self._all.change(TableChange(self._number, None))

    def contents(self) -> TableContents:
        """Return the keys and values that the table has now."""
        return self._all.contents()[self._number]

    def _found(self, key: bytes) -> int:
        """Return the address of the value under a key; 0 if the key does not exist."""
        if isinstance(self._map, SharedHash):
            return self._map.address_of(key)
        return self._map.own_address + _CELL * HEAD_CELLS if self._map.words[0] else 0

    def _made(self, key: bytes) -> int:
        """
        Return the address of a key's value, after inserting a missing key.

        Without room, count a loss and return 0.
        """
        if not isinstance(self._map, SharedHash):
            self._map.words[0] = 1
            return self._found(key)
        for _ in range(_TRIES):
            if address := self._map.address_of(key):
                return address
            try:
                self._map.add(key, bytes(self._map.shape.value_size))
            except OSError:
                break
        assert isinstance(self._lost, SharedArray)
        add_to_word(self._lost.own_address + _CELL * self._number, 1)
        return 0


PROBES_MAX = 1 << 17
"""Maximum number of probepoints of a program whose hits handlers in processes can count."""

_THREADS, _THREADS_SIZE = 1 << 12, 1 << 22
"""Maximum number of threads with variables, and maximum size in bytes of all their variables."""


class StatePlan(NamedTuple):
    """
    Layout of the memory of ``descriptor``, ``size`` bytes; ``cpus`` is a power of two.

    ``variables`` are the numbers of local, global, per-CPU and per-thread variables.
    """

    descriptor: int
    size: int
    cpus: int
    variables: tuple[int, int, int, int]
    tables: tuple[Table, ...]

    def opened(self, descriptor: int) -> SharedState:
        """Map the state from ``descriptor``, the file in this process; the state owns the descriptor."""
        return SharedState(Region(self.size, descriptor), self.cpus, self.variables, self.tables)


class SharedState:
    """State of one program at the beginning of a region."""

    def __init__(
        self, region: Region, cpus: int, variables: tuple[int, int, int, int], tables: Sequence[Table]
    ) -> None:
        self.region = region
        self._plan = cpus, variables, tuple(tables)
        self._cpu_count = variables[2]
        local, of_all, of_cpu, of_thread = variables
        self.mark = SharedArray(region, ROBUST_LIST_SIZE)
        """The array of the ``LifeMark``: the first part, so that processes find it without the layout of the others."""
        self.probes = SharedArray(region, PROBE_ENTRY_SIZE, PROBES_MAX)
        self._arrays = {
            MapName.PROBES: self.probes,
            MapName.LOCALS: SharedArray(region, _CELL, max(local, 1)),
            MapName.GLOBALS: SharedArray(region, _CELL, max(of_all, 1)),
            MapName.CPU_VARIABLES: SharedArray(region, _CELL, cpus * power_of_two(of_cpu)),
        }
        self._threads = SharedHash(region, _threads_shape(of_thread)) if of_thread else None
        self._thread_count = of_thread
        self.keyed = SharedTables(tables, region) if tables else None
        self.local_variables = self._cells(MapName.LOCALS, 0, local)
        self.global_variables = self._cells(MapName.GLOBALS, 0, of_all)

    @classmethod
    def size_of(cls, cpus: int, program: Program) -> int:
        """Return the approximate size in bytes of the state of a program."""
        size = PROBES_MAX * PROBE_ENTRY_SIZE + tables_size(program.tables)
        size += _CELL * (program.vars + program.gvars + cpus * power_of_two(program.cvars))
        return size + (_threads_shape(program.tvars).size if program.tvars else 0)

    @property
    def plan(self) -> StatePlan:
        """The layout for other processes."""
        return StatePlan(self.region.descriptor, self.region.size, *self._plan)

    @property
    def maps(self) -> Mapping[MapName, SharedArray | SharedHash]:
        """The parts by the names of their maps."""
        found: dict[MapName, SharedArray | SharedHash] = dict(self._arrays)
        if self._threads is not None:
            found[MapName.THREAD_VARIABLES] = self._threads
        return found if self.keyed is None else {**found, **self.keyed.maps}

    @cached_property
    def variables(self) -> Variables:
        """The local variables, and the variables of each CPU."""
        cpus, stride = self._plan[0], power_of_two(self._cpu_count)
        parts = [self._cells(MapName.CPU_VARIABLES, cpu * stride, self._cpu_count) for cpu in range(cpus)]
        return Variables(self.local_variables, [parts[cpu & cpus - 1] for cpu in range(cpu_limit())])

    @cached_property
    def tables(self) -> Sequence[SharedStore]:
        """The tables, in the order of the program's header."""
        if self.keyed is None:
            return ()
        keyed, tables = self.keyed, self._plan[2]
        return [SharedStore(table, number, keyed) for number, table in enumerate(tables)]

    def _cells(self, name: MapName, first: int, count: int) -> AtomicCells:
        array, start = self._arrays[name], _CELL * first
        return AtomicCells(array.memory[start : start + _CELL * count], array.own_address + start)

    def count(self, probe: int, field: ProbeField) -> int:
        """Return a count that handlers in processes keep for a probepoint."""
        value: int = self.probes.words[(probe * PROBE_ENTRY_SIZE + field) // _CELL]
        return value

    def thread_variables(self, tid: int) -> AtomicCells | None:
        """Return the variables of a thread, which the first call creates; None if there is no room for them."""
        assert self._threads is not None
        key = tid.to_bytes(_CELL, "little")
        if not self._threads.address_of(key):
            try:
                self._threads.add(key, bytes(self._threads.shape.value_size))
            except OSError:
                return None
        address = self._threads.address_of(key)
        start = address - self.region.own_address
        return AtomicCells(self.region.view(start, _CELL * self._thread_count), address)

    def forget_thread(self, tid: int) -> None:
        """Delete the variables of a thread that has ended."""
        if self._threads is not None:
            with contextlib.suppress(OSError):  # a killed thread has the lock
                self._threads.discard(tid.to_bytes(_CELL, "little"))

    def hits_of(self, probe: int, limits: ProbeLimits) -> SharedHits | None:
        """Return the shared hits of a probepoint; None if handlers in processes cannot count them."""
        return SharedHits(self.probes, probe, limits) if probe < PROBES_MAX else None


def _threads_shape(count: int) -> TableShape:
    """Return the shape of the table with the variables of threads; ``count`` is the number for each thread."""
    size = _CELL * power_of_two(count)
    return TableShape(_CELL, size, max(1, min(_THREADS, _THREADS_SIZE // size)))


class SharedHits:
    """Number of drawn hits of one probepoint, for ``passcount`` and ``maxhits`` (``hits.hit_context.SharedHits``)."""

    def __init__(self, probes: SharedArray, probe: int, limits: ProbeLimits) -> None:
        self._place = probes.own_address + probe * PROBE_ENTRY_SIZE
        self._words = probes.memory[probe * PROBE_ENTRY_SIZE : (probe + 1) * PROBE_ENTRY_SIZE].cast("Q")
        self._passcount = limits.passcount
        self._end = limits.passcount + limits.maxhits if limits.maxhits else None
        self.is_limited = bool(limits.passcount or limits.maxhits)

    @property
    def is_over(self) -> bool:
        """True if no more handlers run: maxhits is reached, or a handler has disabled the probepoint."""
        is_drawn: bool = self._end is not None and self._words[ProbeField.HITS // _CELL] >= self._end
        return is_drawn or bool(self._words[ProbeField.DISABLED // _CELL] & 0xFFFFFFFF)

    def draw(self) -> bool | None:
        """Count a hit; return whether its handler is to run, None if no more hits count."""
        number = add_to_word(self._place + ProbeField.HITS, 1)
        if self._end is not None and number >= self._end:
            self.give_back()
            return None
        return number >= self._passcount

    def give_back(self) -> None:
        """Undo ``draw`` for a hit that does not count."""
        add_to_word(self._place + ProbeField.HITS, -1)

    def disable(self) -> None:
        """Disable the probepoint: none of its handlers run any more."""
        self._words[ProbeField.DISABLED // _CELL] = 1
