"""The maps of one run (``map_layouts``), made with the sizes that its handlers need, and the probe table's fields."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from dprobes.bpf.lower.lowering_request import Placement
from dprobes.bpf.map_layouts import (
    CPU_LOAD_SIZE,
    CROSSED_SIZE,
    NOTE_SIZE,
    PROBE_ENTRY_SIZE,
    PROBE_LOAD_SIZE,
    SAMPLE_SIZE,
    SCOPE_VALUE,
    STATUS_SIZE,
    CpuLoad,
    MapName,
    ProbeField,
    ProbeLoad,
    Status,
    SwitchOver,
    power_of_two,
)
from dprobes.engines.ebpf.attach.site_spec import DEBUG_REGISTER
from dprobes.engines.ebpf.kernel.bpf_objects import TOO_MANY_FILES, ArrayMap, Descriptor, HashMap, LruHashMap, OuterMap
from dprobes.engines.ebpf.kernel.ring_reader import RingBuffer
from dprobes.engines.engine_interface import TableChange, VariableChange
from dprobes.errors import EngineError, reason_of
from dprobes.platform.linux.cpus import online_cpus
from dprobes.target.code.uprobe_sites import UprobeClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dprobes.engines.ebpf.attach.site_spec import Site
    from dprobes.engines.ebpf.kernel.bpf_objects import KernelTables
    from dprobes.engines.engine_interface import Change
    from dprobes.rpn.keyed_tables import Table

MapT = TypeVar("MapT", bound=Descriptor)

__all__ = ["LoadMaps", "ProbeCounters", "SharedMaps", "Sizes", "state_count"]

_STEPPED = 12_000
_EMULATED = 500
_DEBUG_EXCEPTION = 10_000

_COSTS = {
    Placement.URETPROBE: 1_200,
    Placement.EVENT: 2_000,
    Placement.KPROBE: 800,
    Placement.KRETPROBE: 1_200,
    Placement.ENTRY: 200,
    Placement.ENTRY_RETURN: 400,
    Placement.FENTRY: 100,
    Placement.FEXIT: 100,
    Placement.MODIFY_RETURN: 100,
    Placement.TRACEPOINT: 100,
}
"""
Nanoseconds that a hit costs besides its handler, which cannot see that: the trap is over before it, or comes after it.

The figures are those of docs/engines.md, and for the kernel of a machine of today; on slower ones hits cost more.
"""


def hit_cost(site: Site) -> int:
    """Return the nanoseconds that a hit at a site takes besides its handler."""
    if site.executed == DEBUG_REGISTER:
        return _DEBUG_EXCEPTION
    if (cost := _COSTS.get(site.placement)) is not None:
        return cost
    return _STEPPED if site.executed == UprobeClass.STEPPED.value else _EMULATED


class LoadMaps:
    """The maps of the overload guard: times and counts that hits leave; leaving the context manager closes them."""

    def __init__(self, probes: int, cpus: int) -> None:
        """Make them for so many entries of the probe table and so many CPUs, a power of two."""
        with contextlib.ExitStack() as stack:
            self._cpus = stack.enter_context(ArrayMap(CPU_LOAD_SIZE * cpus, name="dprobes_cpus"))
            self._probes = stack.enter_context(ArrayMap(PROBE_LOAD_SIZE * power_of_two(probes), name="dprobes_loads"))
            # Mapping one takes a descriptor as well; what can be read at all can be read to the end.
            _ = self._cpus.words, self._probes.words, self._probes.halves
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def descriptors(self) -> Mapping[MapName, int]:
        """The descriptors by what handlers call the maps."""
        return {MapName.CPU_LOAD: self._cpus.fd, MapName.PROBE_LOAD: self._probes.fd}

    def spent(self) -> list[int]:
        """Return the nanoseconds that hits have taken of each CPU."""
        words, stride = self._cpus.words, CPU_LOAD_SIZE // 8
        both = words[CpuLoad.TRAPS // 8 :: stride], words[CpuLoad.HANDLERS // 8 :: stride]
        return [traps + handlers for traps, handlers in zip(*both, strict=True)]

    def column(self, what: ProbeLoad) -> list[int]:
        """Return a 64-bit field of all entries."""
        return list(self._probes.words[what // 8 :: PROBE_LOAD_SIZE // 8])

    def skipped(self, entry: int) -> int:
        """Return how many hits of an entry ran no handler."""
        count: int = self._probes.words[(entry * PROBE_LOAD_SIZE + ProbeLoad.SKIPPED) // 8]
        return count

    def cost(self, entry: int) -> int:
        """Return what a hit of an entry costs besides its handler, in nanoseconds."""
        cost: int = self._probes.halves[(entry * PROBE_LOAD_SIZE + ProbeLoad.COST) // 4]
        return cost

    def set_costs(self, sites: Iterable[tuple[Iterable[int], Site]]) -> None:
        """Enter what a hit costs besides its handler; ``sites`` come with the entries of their probepoints."""
        halves = self._probes.halves
        at_entry: dict[int, int] = {}
        for entries, site in sites:
            cost = hit_cost(site)
            for entry in entries:
                place = (entry * PROBE_LOAD_SIZE + ProbeLoad.COST) // 4
                if site.is_entry:
                    at_entry[place] = cost
                else:
                    halves[place] = max(halves[place], cost)
        for place, cost in at_entry.items():
            halves[place] += cost

    def thin(self, entry: int, thinning: int) -> None:
        """Let one hit of so many run the handler."""
        self._probes.halves[(entry * PROBE_LOAD_SIZE + ProbeLoad.THINNING) // 4] = thinning


_STATES_MIN = 8
_STATES_FOR_CPU = 4
_TOO_MUCH = "a smaller --ring-size needs less, and so do a smaller 'logmax' and fewer variables"
_LOCKED = "kernels before 5.11 count them as locked memory: raise its limit (ulimit -l unlimited)"
_HINTS = {errno.EPERM: _LOCKED, errno.EMFILE: TOO_MANY_FILES}
_SCOPE_SIZE = 1 << 16
"""How many processes a scope can hold at a time."""
_NOTES = 1 << 12
"""How many threads can be between a hit and the end of its instruction; if more are, the oldest ones are forgotten."""


_ENTRIES, _SPACES = 1 << 14, 1 << 13
"""Of how many calls the entry is kept, and of how many processes; if there are more, the oldest ones are forgotten."""
_THREADS, _THREADS_MIN, _THREADS_SIZE = 1 << 13, 1 << 10, 8 << 20
"""How many threads can have variables at a time: at most and at least, and in how many bytes between these."""
_ENDING = 1 << 16
"""How many threads can be between their end and that of their number."""


def state_count() -> int:
    """Return how many handlers can run at once: a few on each CPU, because handlers may sleep and be preempted."""
    # A handler takes one of those of its CPU (``bpf.lower.hits.hit_prologue``).
    return max(_STATES_MIN, power_of_two(_STATES_FOR_CPU * (max(online_cpus()) + 1)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the maps: ``state`` and ``ring`` in bytes, variables by their number."""

    probes: int
    state: int
    ring: int
    states: int
    cpus: int
    locals: int = 0
    globals: int = 0
    cpu_variables: int = 0
    thread_variables: int = 0
    for_tree: bool = False
    """Whether the processes in scope are a tree, of which SCOPE holds the ids."""
    for_events: bool = False
    """Whether handlers of perf events use the maps."""
    replaceable: bool = False
    """Whether another program may take the place of this one."""
    replaces: bool = False
    """Whether this program takes the place of another one."""
    notes: bool = False
    """Whether hits do not count whose instruction faults, where there is a limit."""
    loads: bool = False
    """Whether there is an overload guard."""
    entry: int = 0
    """The size of what is kept of the entry of a call, 0 if nothing is."""
    stops: bool = False
    """Whether handlers stop processes for a core."""


@dataclass(frozen=True, slots=True)
class ProbeCounters:
    """What the probe table counts of one probepoint (``map_layouts.ProbeField``)."""

    hits: int
    records: int
    lost: int
    missed: int
    skipped: int = 0


class SharedMaps:
    """
    The maps; leaving the context manager closes them.

    ``descriptors`` are theirs by what handlers call them. ``tables`` are the keyed ones, ``load`` those of the overload
    guard and ``stops`` the list of stopped processes, None where there are none.
    """

    def __init__(
        self,
        sizes: Sizes,
        shared_globals: int | None = None,
        tables: Sequence[Table] = (),
        shared_tables: AbstractSet[int] = frozenset(),
        principal: SharedMaps | None = None,
    ) -> None:
        """
        Make the maps; those of variables and tables are the ``principal``'s if there is one, which lives longer.

        ``shared_globals`` is the descriptor of the global variables, where others have them, too. ``tables`` are the
        program's keyed tables, of which all CPUs share some (``Request.shared_tables``).
        """
        self.descriptors: dict[MapName, int] = {}
        self.tables: KernelTables | None = None
        self.load: LoadMaps | None = None
        self.stops: ArrayMap | None = None
        self._crossed: ArrayMap | None = None
        self._successor: OuterMap | None = None
        self._counts = sizes.locals, sizes.cpu_variables
        self._cpus = max(online_cpus()) + 1
        with contextlib.ExitStack() as stack:
            self._stack = stack
            try:
                self._make_common(sizes)
                if principal is None:
                    self._make_variables(sizes, tables, shared_tables)
                else:
                    self._share_variables(principal)
                if shared_globals is not None:
                    self.descriptors[MapName.GLOBALS] = shared_globals
                self._make_wanted(sizes)
            except OSError as error:
                raise EngineError(
                    f"the kernel has no memory for the maps of this program: {reason_of(error)}",
                    hint=_HINTS.get(error.errno or 0, _TOO_MUCH),
                ) from error
            self._stack = stack.pop_all()

    def _add(self, name: MapName, made: MapT) -> MapT:
        """Own a map, which handlers call by a name."""
        self.descriptors[name] = made.fd
        self._stack.enter_context(made)
        return made

    def _make_common(self, sizes: Sizes) -> None:
        """Make the maps that every program has."""
        self.ring = self._add(MapName.RING, RingBuffer(sizes.ring, "dprobes_ring"))
        scope_size = _SCOPE_SIZE if sizes.for_tree else 1
        scope = HashMap(4, SCOPE_VALUE.size, scope_size, "dprobes_scope", preallocated=sizes.for_events)
        self.scope = self._add(MapName.SCOPE, scope)
        self._add(MapName.SCRATCH, ArrayMap(sizes.state, sizes.states, "dprobes_scratch"))
        self._add(MapName.CLAIMS, ArrayMap(8 * sizes.states, name="dprobes_claims"))
        probes = ArrayMap(PROBE_ENTRY_SIZE * power_of_two(sizes.probes), name="dprobes_probes")
        self._probes = self._add(MapName.PROBES, probes)
        self._status = self._add(MapName.STATUS, ArrayMap(STATUS_SIZE, name="dprobes_status"))
        self._add(MapName.GLOBALS, ArrayMap(8 * power_of_two(sizes.globals), name="dprobes_gv"))
        samples = SAMPLE_SIZE * sizes.cpus if sizes.for_events else SAMPLE_SIZE
        self._add(MapName.SAMPLES, ArrayMap(samples, name="dprobes_samples"))

    def _make_variables(self, sizes: Sizes, tables: Sequence[Table], shared_tables: AbstractSet[int]) -> None:
        """Make the maps of variables and tables, which others may use as well."""
        before = set(self.descriptors)
        self._locals: ArrayMap = self._add(MapName.LOCALS, ArrayMap(8 * power_of_two(sizes.locals), name="dprobes_lv"))
        per_cpu = 8 * power_of_two(sizes.cpu_variables) * sizes.cpus
        self._cpu: ArrayMap = self._add(MapName.CPU_VARIABLES, ArrayMap(per_cpu, name="dprobes_cv"))
        # Mapping one takes a descriptor as well; what can be read at all can be read to the end.
        for each, count in ((self._locals, sizes.locals), (self._cpu, sizes.cpu_variables)):
            if count:
                _ = each.words
        zeros = 0
        if tables:
            from dprobes.engines.ebpf.kernel.bpf_objects import KernelTables
            from dprobes.engines.keyed_table_maps import zeros_size

            zeros = zeros_size(tables)
            self.tables = self._stack.enter_context(KernelTables(tables, shared_tables, sizes.cpus))
            self.descriptors |= self.tables.descriptors
        if sizes.thread_variables:
            size = 8 * power_of_two(sizes.thread_variables)
            room = max(_THREADS_MIN, min(_THREADS, _THREADS_SIZE // size))
            self._add(MapName.THREAD_VARIABLES, HashMap(8, size, room, "dprobes_tv", preallocated=True))
            zeros = max(zeros, size)
            self._add(MapName.ENDING, HashMap(8, 8, _ENDING, "dprobes_ending"))
        if zeros:
            self._add(MapName.ZEROS, ArrayMap(zeros, name="dprobes_zeros"))
        self._of_variables: AbstractSet[MapName] = self.descriptors.keys() - before

    def _share_variables(self, owner: SharedMaps) -> None:
        """Have the variables and tables of another program."""
        self._locals, self._cpu, self.tables = owner._locals, owner._cpu, owner.tables
        self._of_variables = owner._of_variables
        self.descriptors |= {name: owner.descriptors[name] for name in self._of_variables}

    def _make_wanted(self, sizes: Sizes) -> None:
        """Make the maps that some programs have."""
        if sizes.entry:
            self._add(MapName.ENTRIES, LruHashMap(32, sizes.entry, _ENTRIES, "dprobes_entries"))
            self._add(MapName.SPACES, LruHashMap(4, 8, _SPACES, "dprobes_spaces"))
        if sizes.stops:
            from dprobes.bpf.core_stop_layout import STOPS_SIZE

            self.stops = self._add(MapName.STOPS, ArrayMap(STOPS_SIZE, name="dprobes_stops"))
        if sizes.notes:
            self._add(MapName.NOTES, LruHashMap(4, NOTE_SIZE, _NOTES, "dprobes_notes"))
        if sizes.loads:
            self.load = self._stack.enter_context(LoadMaps(sizes.probes, sizes.cpus))
            self.descriptors |= self.load.descriptors
        if sizes.replaces:
            self._crossed = self._add(MapName.CROSSED, ArrayMap(CROSSED_SIZE, name="dprobes_crossed"))
        if sizes.replaceable:
            with ArrayMap(CROSSED_SIZE) as example:
                self._successor = self._add(MapName.SUCCESSOR, OuterMap(example.fd, "dprobes_next"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the maps; those that programs use live on."""
        self._stack.close()

    @property
    def status(self) -> memoryview:
        """The 64-bit words of STATUS."""
        return self._status.words

    @property
    def alive(self) -> int:
        """How many processes are in scope."""
        count: int = self.status[Status.ALIVE // 8]
        return count

    def set_alive(self, count: int) -> None:
        """Set how many processes are in scope; only while nobody else counts."""
        self.status[Status.ALIVE // 8] = count

    @property
    def is_replaceable(self) -> bool:
        """Whether ``set_successor`` can be called."""
        return self._successor is not None

    def set_successor(self, successor: SharedMaps) -> None:
        """Let handlers know the threads that have crossed over to another program."""
        assert self._successor is not None
        assert successor._crossed is not None
        self._successor.put(successor._crossed.fd)

    @property
    def switch_over(self) -> SwitchOver:
        """Which hits are this program's."""
        return SwitchOver(self.status[Status.SWITCH_OVER // 8])

    def set_switch_over(self, state: SwitchOver) -> None:
        """Tell all handlers at once which hits are this program's."""
        self.status[Status.SWITCH_OVER // 8] = state

    def set_place(self, entry: int, link: int, offset: int) -> None:
        """Fill in an entry of the probe table: the link address and the file offset of the written place."""
        words, first = self._probes.words, entry * PROBE_ENTRY_SIZE
        words[(first + ProbeField.LINK) // 8] = link
        words[(first + ProbeField.OFFSET) // 8] = offset

    def disable(self, probe: int) -> None:
        """Let no handler of a probepoint run any more."""
        self._probes.halves[(probe * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 4] = 1

    def is_disabled(self, entry: int) -> bool:
        """Return whether no handler of an entry runs any more, be it by ``disable`` or by the handler itself."""
        return bool(self._probes.halves[(entry * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 4])

    def hand_over(self, old: int, new: int) -> tuple[int, int]:
        """
        Let ``new`` count on from the hits of ``old``, and run handlers in its place if that did.

        Return the hits that ``old`` and ``new`` had before.
        """
        words, halves = self._probes.words, self._probes.halves
        first, second = old * PROBE_ENTRY_SIZE, new * PROBE_ENTRY_SIZE
        was_disabled = halves[(first + ProbeField.DISABLED) // 4]
        halves[(first + ProbeField.DISABLED) // 4] = 1
        before = words[(first + ProbeField.HITS) // 8], words[(second + ProbeField.HITS) // 8]
        words[(second + ProbeField.HITS) // 8] = before[0]
        halves[(second + ProbeField.DISABLED) // 4] = was_disabled
        return before

    def counters(self, probe: int) -> ProbeCounters:
        """Return what was counted of a probepoint so far."""
        words, first = self._probes.words, probe * PROBE_ENTRY_SIZE // 8
        fields = (ProbeField.HITS, ProbeField.RECORDS, ProbeField.LOST, ProbeField.MISSED)
        skipped = 0 if self.load is None else self.load.skipped(probe)
        hits, records, lost, missed = (words[first + field // 8] for field in fields)
        return ProbeCounters(hits, records, lost, missed, skipped)

    def hit_entries(self) -> set[int]:
        """Return the entries of the probe table that have been hit."""
        column = self._probes.words[ProbeField.HITS // 8 :: PROBE_ENTRY_SIZE // 8]
        return {entry for entry, hits in enumerate(column) if hits}

    def disabled(self) -> set[int]:
        """Return the entries of the probe table of which no handler runs any more."""
        column = self._probes.halves[ProbeField.DISABLED // 4 :: PROBE_ENTRY_SIZE // 4]
        return {entry for entry, value in enumerate(column) if value}

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        count, _ = self._counts
        return list(self._locals.words[:count]) if count else []

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables, a list for each CPU up to the last one that has been online."""
        _, count = self._counts
        if not count:
            return [[] for _ in range(self._cpus)]
        words, stride = self._cpu.words, power_of_two(count)
        self._cpus = max(self._cpus, max(online_cpus()) + 1)
        cpus = min(len(words) // stride, self._cpus)
        return [list(words[cpu * stride : cpu * stride + count]) for cpu in range(cpus)]

    def reset_variables(self, some: slice) -> None:
        """Set the local and CPU variables with these indices to zero."""
        for each, count in zip((self._locals, self._cpu), self._counts, strict=True):
            if count:
                words = each.words
                for start in range(0, len(words), power_of_two(count)):
                    for index in range(*some.indices(count)):
                        words[start + index] = 0

    def change(self, changes: Sequence[Change]) -> None:
        """Change local variables and tables."""
        for change in changes:
            match change:
                case VariableChange(index, value):
                    self._locals.words[index] = value
                case TableChange():
                    assert self.tables is not None
                    self.tables.change(change)

    @property
    def unfollowed(self) -> int:
        """How many processes are not in scope because it had no room for them."""
        count: int = self.status[Status.UNFOLLOWED // 8]
        return count

    @property
    def unseen(self) -> int:
        """How many signals for faults are not known of because the ring had no room."""
        count: int = self.status[Status.UNSEEN // 8]
        return count

    def unhandled(self) -> dict[int, int]:
        """Return the bits of the exceptions that ended handlers, and that nothing caught, by probepoint."""
        column = self._probes.words[ProbeField.UNHANDLED // 8 :: PROBE_ENTRY_SIZE // 8]
        # There may be thousands of probepoints, and hardly ever one of these: "any" is quick.
        return {number: bits for number, bits in enumerate(column) if bits} if any(column) else {}
