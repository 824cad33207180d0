"""BPF maps of one run (``map_layouts``), sized for its handlers, and access to the fields of the probe table."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from dprobes.bpf.lower.lowering_request import Placement
from dprobes.bpf.map_layouts import (
    COUNTER_CELL_SIZE,
    COUNTER_SHIFT,
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
from dprobes.engines.ebpf.kernel.bpf_objects import (
    TOO_MANY_FILES,
    ArrayMap,
    Descriptor,
    Descriptors,
    HashMap,
    LruHashMap,
    OuterMap,
    RingBuffer,
)
from dprobes.engines.engine_interface import TableChange, VariableChange
from dprobes.errors import EngineError, reason_of
from dprobes.platform.linux.bpf_calls import MapType, create_map, update_element
from dprobes.platform.linux.perf_calls import open_counter
from dprobes.platform.linux.procfs import online_cpus
from dprobes.rpn.performance_counters import COUNTERS
from dprobes.target.code.uprobe_sites import UprobeClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dprobes.bpf.lower.lowering_request import CounterLayout
    from dprobes.engines.ebpf.attach.site_spec import Site
    from dprobes.engines.ebpf.kernel.bpf_objects import KernelTables
    from dprobes.engines.engine_interface import ValueChange
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
Cost in nanoseconds of a hit's trap, without the handler. The trap encloses the handler, so no handler can measure it.

The figures are from docs/explanation/measurements.md, for a current machine. Traps take longer on slower machines.
"""


def hit_cost(site: Site) -> int:
    """Return the cost of a hit at a site in nanoseconds, without its handler."""
    if site.executed == DEBUG_REGISTER:
        return _DEBUG_EXCEPTION
    if (cost := _COSTS.get(site.placement)) is not None:
        return cost
    return _STEPPED if site.executed == UprobeClass.STEPPED.value else _EMULATED


class LoadMaps:
    """Maps of the overload guard, with times and counters that handlers update; the context manager closes them."""

    def __init__(self, probes: int, cpus: int) -> None:
        """Create the maps for ``probes`` entries of the probe table and ``cpus`` CPUs, which is a power of two."""
        with contextlib.ExitStack() as stack:
            self._cpus = stack.enter_context(ArrayMap(CPU_LOAD_SIZE * cpus, name="dprobes_cpus"))
            self._probes = stack.enter_context(ArrayMap(PROBE_LOAD_SIZE * power_of_two(probes), name="dprobes_loads"))
            # Map the arrays now: mapping takes a descriptor as well, and later reads must not fail for want of one.
            _ = self._cpus.words, self._probes.words, self._probes.halves
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def descriptors(self) -> Mapping[MapName, int]:
        """File descriptors of the maps, keyed by the names that handlers use."""
        return {MapName.CPU_LOAD: self._cpus.fd, MapName.PROBE_LOAD: self._probes.fd}

    def spent(self) -> list[int]:
        """Return the nanoseconds that hits have taken on each CPU, traps and handlers together."""
        words, stride = self._cpus.words, CPU_LOAD_SIZE // 8
        both = words[CpuLoad.TRAPS // 8 :: stride], words[CpuLoad.HANDLERS // 8 :: stride]
        return [traps + handlers for traps, handlers in zip(*both, strict=True)]

    def column(self, what: ProbeLoad) -> list[int]:
        """Return the field ``what`` of every entry of the map, 64 bits each, in the order of the entries."""
        return list(self._probes.words[what // 8 :: PROBE_LOAD_SIZE // 8])

    def skipped(self, entry: int) -> int:
        """Return the number of hits, of an entry of the probe table, whose handler the overload guard has excluded."""
        count: int = self._probes.words[(entry * PROBE_LOAD_SIZE + ProbeLoad.SKIPPED) // 8]
        return count

    def cost(self, entry: int) -> int:
        """Return the cost of a hit in nanoseconds, without its handler, for an entry of the probe table."""
        cost: int = self._probes.halves[(entry * PROBE_LOAD_SIZE + ProbeLoad.COST) // 4]
        return cost

    def set_costs(self, sites: Iterable[tuple[Iterable[int], Site]]) -> None:
        """
        Write the costs of hits without handlers.

        ``sites`` has pairs of the entries of probepoints and their site.
        """
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
        """Make the handlers of an entry of the probe table run at only one of ``thinning`` successive hits."""
        self._probes.halves[(entry * PROBE_LOAD_SIZE + ProbeLoad.THINNING) // 4] = thinning


_STATES_MIN = 8
_STATES_FOR_CPU = 4
_TOO_MUCH = "a smaller --ring-size needs less, and so do a smaller 'logmax' and fewer variables"
_LOCKED = "kernels before 5.11 count them as locked memory: raise its limit (ulimit -l unlimited)"
_HINTS = {errno.EPERM: _LOCKED, errno.EMFILE: TOO_MANY_FILES}
_SCOPE_SIZE = 1 << 16
"""Maximum number of processes in a scope at a time."""
_NOTES = 1 << 12
"""Maximum number of threads with a note of a hit (NOTES). Beyond it, the oldest notes are evicted."""


_ENTRIES, _SPACES = 1 << 14, 1 << 13
"""Maximum numbers of calls (ENTRIES) and of processes (SPACES) with entry data. Beyond them, the oldest are evicted."""
_THREADS, _THREADS_MIN, _THREADS_SIZE = 1 << 13, 1 << 10, 8 << 20
"""Maximum and minimum number of threads with variables. In between, the size in bytes of all variables is the limit."""
_COUNTED = 1 << 13
"""Maximum number of pairs of a thread and a counter that it has read. Beyond it, handlers cannot read counters."""
_ENDING = 1 << 16
"""Maximum number of threads between their exit and the release of their thread id."""


def state_count() -> int:
    """Return the number of handlers that can run at the same time: a few for each CPU, because handlers may sleep."""
    # A handler takes one of the states of its CPU (``bpf.lower.hits.hit_prologue``).
    return max(_STATES_MIN, power_of_two(_STATES_FOR_CPU * (max(online_cpus()) + 1)))


class CounterEvents(Descriptor):
    """
    Perf events of a program's counters on each online CPU, in a map for handlers.

    The map has one row of CPUs for each of ``counters.cells``. Rows of counters that are no events are empty.
    """

    def __init__(self, counters: CounterLayout) -> None:
        size = len(counters.cells) << COUNTER_SHIFT
        super().__init__(create_map(MapType.PERF_EVENT_ARRAY, 4, 4, size, name="dprobes_pmc"))
        self._events = Descriptors()
        try:
            for row, number in enumerate(counters.cells):
                if not counters.has_event(number):
                    continue
                counter = COUNTERS[number]
                for cpu in online_cpus():
                    event = self._events.add(open_counter(counter.kind, counter.config, cpu=cpu))
                    place = row << COUNTER_SHIFT | cpu
                    update_element(self.fd, place.to_bytes(4, "little"), event.to_bytes(4, "little"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the map and the perf events in it."""
        super().close()
        self._events.close()


class Sizes(NamedTuple):
    """Sizes of the maps: ``state`` and ``ring`` in bytes, the other fields in entries."""

    probes: int
    state: int
    ring: int
    states: int
    cpus: int
    locals: int = 0
    globals: int = 0
    cpu_variables: int = 0
    thread_variables: int = 0
    counters: CounterLayout | None = None
    """The sources of performance counters, or None if the program reads none."""
    for_tree: bool = False
    """True if the scope is a process tree; SCOPE contains the ids of its processes."""
    for_events: bool = False
    """True if handlers of perf events use the maps."""
    replaceable: bool = False
    """True if another program may replace this one."""
    replaces: bool = False
    """True if this program replaces another one."""
    notes: bool = False
    """True if handlers note hits (NOTES), because their tickets are returned if the instruction faults."""
    loads: bool = False
    """True if the run has an overload guard."""
    entry: int = 0
    """Size in bytes of the data kept from the entry of a call, or 0 if none is kept."""
    stops: bool = False
    """True if handlers stop processes for core dumps."""


class ProbeCounters(NamedTuple):
    """Counters of one probepoint in the probe table (``map_layouts.ProbeField``)."""

    hits: int
    records: int
    lost: int
    missed: int
    skipped: int = 0


class SharedMaps:
    """
    Maps of one run, and their context manager.

    ``descriptors`` has the file descriptors by the names that handlers use. ``tables`` has the keyed tables, ``load``
    the overload guard's maps, and ``stops`` the list of stopped processes; each is None if the run needs none.
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
        Create the maps. With a ``principal``, use its maps of variables and tables, which must stay open.

        ``shared_globals`` is the descriptor of global variables that several programs share, or None. ``tables`` has
        the program's keyed tables; ``shared_tables`` has the numbers of those in which all CPUs share a value
        (``Request.shared_tables``). Raise ``EngineError`` if the kernel refuses a map.
        """
        self.descriptors: dict[MapName, int] = {}
        self.tables: KernelTables | None = None
        self.load: LoadMaps | None = None
        self.stops: ArrayMap | None = None
        self._crossed: ArrayMap | None = None
        self._successor: OuterMap | None = None
        self._counts = sizes.locals, sizes.cpu_variables
        self._cpus = max(online_cpus()) + 1
        self.counter_layout = sizes.counters
        """The sources of performance counters, or None if the program reads none."""
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
        """Register a map under the name by which handlers refer to it, take ownership of it, and return it."""
        self.descriptors[name] = made.fd
        self._stack.enter_context(made)
        return made

    def _make_common(self, sizes: Sizes) -> None:
        """Create the maps that every program needs, with the numbers of entries in ``sizes``."""
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
        """Create the maps of variables and tables, which the companions of a principal share."""
        before = set(self.descriptors)
        self._locals: ArrayMap = self._add(MapName.LOCALS, ArrayMap(8 * power_of_two(sizes.locals), name="dprobes_lv"))
        per_cpu = 8 * power_of_two(sizes.cpu_variables) * sizes.cpus
        self._cpu: ArrayMap = self._add(MapName.CPU_VARIABLES, ArrayMap(per_cpu, name="dprobes_cv"))
        # Map the arrays now: mapping takes a descriptor as well, and later reads must not fail for want of one.
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
        """Use the maps of variables and tables of ``owner``, the principal, which closes them."""
        self._locals, self._cpu, self.tables = owner._locals, owner._cpu, owner.tables
        self._of_variables = owner._of_variables
        self.descriptors |= {name: owner.descriptors[name] for name in self._of_variables}

    def _make_wanted(self, sizes: Sizes) -> None:
        """Create the maps for optional features of a program, as far as their members of ``sizes`` are not 0."""
        if sizes.entry:
            self._add(MapName.ENTRIES, LruHashMap(32, sizes.entry, _ENTRIES, "dprobes_entries"))
            self._add(MapName.SPACES, LruHashMap(4, 8, _SPACES, "dprobes_spaces"))
        if sizes.stops:
            from dprobes.bpf.core_stop_layout import STOPS_SIZE

            self.stops = self._add(MapName.STOPS, ArrayMap(STOPS_SIZE, name="dprobes_stops"))
        if sizes.counters is not None and sizes.counters.cells:
            self._add(MapName.COUNTERS, HashMap(8, COUNTER_CELL_SIZE, _COUNTED, "dprobes_counters", preallocated=True))
            self._add(MapName.COUNTER_EVENTS, CounterEvents(sizes.counters))
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
        """Close the maps. The kernel keeps those that loaded BPF programs use."""
        self._stack.close()

    @property
    def status(self) -> memoryview:
        """64-bit words of the STATUS map."""
        return self._status.words

    @property
    def alive(self) -> int:
        """Number of processes in scope."""
        count: int = self.status[Status.ALIVE // 8]
        return count

    def set_alive(self, count: int) -> None:
        """Set the number of processes in scope. No BPF program may update it at the same time."""
        self.status[Status.ALIVE // 8] = count

    @property
    def is_replaceable(self) -> bool:
        """True if another program can replace this one (``set_successor``)."""
        return self._successor is not None

    def set_successor(self, successor: SharedMaps) -> None:
        """Give handlers access to the successor's map CROSSED, of threads whose hits belong to it already."""
        assert self._successor is not None
        assert successor._crossed is not None
        self._successor.put(successor._crossed.fd)

    @property
    def switch_over(self) -> SwitchOver:
        """State of the switch-over, by which handlers decide whether hits belong to this program."""
        return SwitchOver(self.status[Status.SWITCH_OVER // 8])

    def set_switch_over(self, state: SwitchOver) -> None:
        """Set the state of the switch-over to a replacing program, for all handlers at once."""
        self.status[Status.SWITCH_OVER // 8] = state

    def set_place(self, entry: int, link: int, offset: int) -> None:
        """Write the link address and the file offset of a probepoint to its entry of the probe table."""
        words, first = self._probes.words, entry * PROBE_ENTRY_SIZE
        words[(first + ProbeField.LINK) // 8] = link
        words[(first + ProbeField.OFFSET) // 8] = offset

    def disable(self, probe: int) -> None:
        """Disable an entry of the probe table, so that its handlers no longer run."""
        self._probes.halves[(probe * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 4] = 1

    def is_disabled(self, entry: int) -> bool:
        """Return whether an entry is disabled, by ``disable`` or by the handler itself."""
        return bool(self._probes.halves[(entry * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 4])

    def hand_over(self, old: int, new: int) -> tuple[int, int]:
        """
        Disable the entry ``old`` of the probe table, and copy its former state and number of hits to ``new``.

        Return the numbers of hits that ``old`` and ``new`` had before.
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
        """Return the current counters in an entry of the probe table."""
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
        """Return the disabled entries of the probe table."""
        column = self._probes.halves[ProbeField.DISABLED // 4 :: PROBE_ENTRY_SIZE // 4]
        return {entry for entry, value in enumerate(column) if value}

    def local_variables(self) -> list[int]:
        """Return the values of the local variables, 64 bits each, by index."""
        count, _ = self._counts
        return list(self._locals.words[:count]) if count else []

    def cpu_variables(self) -> list[list[int]]:
        """Return the values of the CPU variables, a list for each CPU up to the highest one that has been online."""
        _, count = self._counts
        if not count:
            return [[] for _ in range(self._cpus)]
        words, stride = self._cpu.words, power_of_two(count)
        self._cpus = max(self._cpus, max(online_cpus()) + 1)
        cpus = min(len(words) // stride, self._cpus)
        return [list(words[cpu * stride : cpu * stride + count]) for cpu in range(cpus)]

    def reset_variables(self, some: slice) -> None:
        """Set the local and CPU variables at the indices of a slice to zero."""
        for each, count in zip((self._locals, self._cpu), self._counts, strict=True):
            if count:
                words = each.words
                for start in range(0, len(words), power_of_two(count)):
                    for index in range(*some.indices(count)):
                        words[start + index] = 0

    def change(self, changes: Sequence[ValueChange]) -> None:
        """Set local variables, and change keyed tables, as each change specifies."""
        for change in changes:
            match change:
                case VariableChange(index, value):
                    self._locals.words[index] = value
                case TableChange():
                    assert self.tables is not None
                    self.tables.change(change)

    @property
    def unfollowed(self) -> int:
        """Number of processes that are not probed because the map SCOPE was full."""
        count: int = self.status[Status.UNFOLLOWED // 8]
        return count

    @property
    def unseen(self) -> int:
        """Number of fault signals that were lost because the ring was full."""
        count: int = self.status[Status.UNSEEN // 8]
        return count

    def unhandled(self) -> dict[int, int]:
        """Return bit masks of the uncaught exceptions that ended handlers, keyed by entry of the probe table."""
        column = self._probes.words[ProbeField.UNHANDLED // 8 :: PROBE_ENTRY_SIZE // 8]
        # There may be thousands of probepoints and hardly ever an unhandled exception; "any" is the fast check.
        return {number: bits for number, bits in enumerate(column) if bits} if any(column) else {}
