"""
What handlers in processes and those that the tracer interprets have in common: variables, tables, numbers of hits.

It is the first part of the memory that processes map. The tracer, which maps it as well, finds everything by the plan:
whoever makes the same parts in the same order has them at the same places.
"""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.bpf.layout import PROBE_ENTRY_SIZE, MapName, ProbeField, power_of_two
from dprobes.engines.atomiccells import AtomicCells, add_to_word
from dprobes.engines.inline.memory.arrays import SharedArray
from dprobes.engines.inline.memory.hashes import SharedHash
from dprobes.engines.inline.memory.region import Region
from dprobes.engines.inline.memory.tables import SharedTables, tables_size
from dprobes.engines.inline.memory.tablestores import SharedStore
from dprobes.engines.linux.cpus import cpu_limit
from dprobes.engines.linux.robustlist import SIZE
from dprobes.engines.ptrace.sharedcounters import Variables
from dprobes.lazydataclass import dataclass
from dprobes.native.routines.hashtable import TableShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.engines.hits.probelimits import ProbeLimits
    from dprobes.rpn.program import Program
    from dprobes.rpn.tables import Table

__all__ = ["PROBES_MAX", "SharedHits", "SharedState", "StatePlan"]

PROBES_MAX = 1 << 14
"""How many probepoints of a program handlers in processes can count."""

_THREADS, _THREADS_SIZE = 1 << 12, 1 << 22
"""How many threads can have variables, and in how many bytes at most."""

_CELL = 8


@dataclass(frozen=True, slots=True)
class StatePlan:
    """
    Say what is in the memory behind ``descriptor``, ``size`` bytes; ``cpus`` is a power of two.

    ``variables`` are the numbers of local, global, per-CPU and per-thread variables.
    """

    descriptor: int
    size: int
    cpus: int
    variables: tuple[int, int, int, int]
    tables: tuple[Table, ...]

    def opened(self, descriptor: int) -> SharedState:
        """Return the state; ``descriptor`` is the file in this process, which belongs to the state from now on."""
        return SharedState(Region(self.size, descriptor), self.cpus, self.variables, self.tables)


class SharedState:
    """The state of one program at the beginning of a region."""

    def __init__(
        self, region: Region, cpus: int, variables: tuple[int, int, int, int], tables: Sequence[Table]
    ) -> None:
        self.region = region
        self._plan = cpus, variables, tuple(tables)
        self._cpu_count = variables[2]
        local, of_all, of_cpu, of_thread = variables
        self.mark = SharedArray(region, SIZE)
        """That of a ``LifeMark``, the first part of all: so others find it who know nothing of the rest."""
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
        """Return about how many bytes the state of a program takes."""
        size = PROBES_MAX * PROBE_ENTRY_SIZE + tables_size(program.tables)
        size += _CELL * (program.vars + program.gvars + cpus * power_of_two(program.cvars))
        return size + (_threads_shape(program.tvars).size if program.tvars else 0)

    @property
    def plan(self) -> StatePlan:
        """What others have to know to find it."""
        return StatePlan(self.region.descriptor, self.region.size, *self._plan)

    @property
    def maps(self) -> Mapping[MapName, SharedArray | SharedHash]:
        """The parts by what handlers call them."""
        found: dict[MapName, SharedArray | SharedHash] = dict(self._arrays)
        if self._threads is not None:
            found[MapName.THREAD_VARIABLES] = self._threads
        return found if self.keyed is None else {**found, **self.keyed.maps}

    @cached_property
    def variables(self) -> Variables:
        """The local variables, and those of each CPU, as handlers of a CPU find them."""
        cpus, stride = self._plan[0], power_of_two(self._cpu_count)
        parts = [self._cells(MapName.CPU_VARIABLES, cpu * stride, self._cpu_count) for cpu in range(cpus)]
        return Variables(self.local_variables, [parts[cpu & cpus - 1] for cpu in range(cpu_limit())])

    @cached_property
    def tables(self) -> Sequence[SharedStore]:
        """The tables."""
        if self.keyed is None:
            return ()
        keyed, tables = self.keyed, self._plan[2]
        return [SharedStore(table, number, keyed) for number, table in enumerate(tables)]

    def _cells(self, name: MapName, first: int, count: int) -> AtomicCells:
        array, start = self._arrays[name], _CELL * first
        return AtomicCells(array.memory[start : start + _CELL * count], array.own_address + start)

    def count(self, probe: int, field: ProbeField) -> int:
        """Return what handlers in processes have counted of a probepoint."""
        value: int = self.probes.words[(probe * PROBE_ENTRY_SIZE + field) // _CELL]
        return value

    def thread_variables(self, tid: int) -> AtomicCells | None:
        """Return the variables of a thread, which has some from now on; None if there is no room for them."""
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
        """Take away the variables of a thread that is no more."""
        if self._threads is not None:
            with contextlib.suppress(OSError):  # somebody was killed who has the lock
                self._threads.discard(tid.to_bytes(_CELL, "little"))

    def hits_of(self, probe: int, limits: ProbeLimits) -> SharedHits | None:
        """Return what handlers everywhere know of the hits of a probepoint; None if those in processes have none."""
        return SharedHits(self.probes, probe, limits) if probe < PROBES_MAX else None


def _threads_shape(count: int) -> TableShape:
    """Return the shape of the table with the variables of threads, which have so many each."""
    size = _CELL * power_of_two(count)
    return TableShape(_CELL, size, max(1, min(_THREADS, _THREADS_SIZE // size)))


class SharedHits:
    """The hits of one probepoint: how many are drawn for ``passcount`` and ``maxhits``, and whether that is all."""

    def __init__(self, probes: SharedArray, probe: int, limits: ProbeLimits) -> None:
        self._place = probes.own_address + probe * PROBE_ENTRY_SIZE
        self._words = probes.memory[probe * PROBE_ENTRY_SIZE : (probe + 1) * PROBE_ENTRY_SIZE].cast("Q")
        self._passcount = limits.passcount
        self._end = limits.passcount + limits.maxhits if limits.maxhits else None
        self.is_limited = bool(limits.passcount or limits.maxhits)

    @property
    def is_over(self) -> bool:
        """Whether no handler is to run any more: all hits are drawn, or a handler said so."""
        is_drawn: bool = self._end is not None and self._words[ProbeField.HITS // _CELL] >= self._end
        return is_drawn or bool(self._words[ProbeField.DISABLED // _CELL] & 0xFFFFFFFF)

    def draw(self) -> bool | None:
        """Draw a hit: return whether its handler runs, None if it is no hit any more."""
        number = add_to_word(self._place + ProbeField.HITS, 1)
        if self._end is not None and number >= self._end:
            self.give_back()
            return None
        return number >= self._passcount

    def give_back(self) -> None:
        """Let a hit that was drawn be none after all."""
        add_to_word(self._place + ProbeField.HITS, -1)

    def disable(self) -> None:
        """Let no handler run any more."""
        self._words[ProbeField.DISABLED // _CELL] = 1
