"""Reader for the results of handlers in processes: their records, which arrive through rings, and their counts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.lower.lowering_request import Tables
from dprobes.bpf.map_layouts import PROBE_ENTRY_SIZE, STATUS_SIZE, MapName, ProbeField, power_of_two
from dprobes.engines.engine_interface import Notice
from dprobes.engines.inline.entry_reader import SharedRings
from dprobes.engines.inline.shared_memory import Region, SharedArray, SharedHash
from dprobes.engines.inline.shared_state import PROBES_MAX, SharedState
from dprobes.engines.keyed_table_maps import zeros_size
from dprobes.engines.shared_globals import mapped_size
from dprobes.native.generated_code import MapPlace
from dprobes.native.process_page import CLOCK_READING, CLOCK_READINGS, CLOCK_SIZE, CLOCK_VERSION, HAS_ENDED
from dprobes.native.routines.handler_ring import RingShape
from dprobes.native.x86.x86_assembler import Gpr, Operation, Shift, X86Assembler
from dprobes.platform.linux.call_proxy import map_code
from dprobes.platform.linux.process_calls import note_end_of_thread
from dprobes.rpn.program_needs import takes_user_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from dprobes.engines.engine_interface import Counts
    from dprobes.engines.inline.entry_index import EntryBuffer
    from dprobes.engines.inline.entry_reader import RingReader
    from dprobes.engines.ptrace.client.program_run import Batch
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.native.routines.shared_hash_table import TableShape
    from dprobes.platform.linux.procfs import ThreadIdentity
    from dprobes.resolve.probepoints import ProbeState
    from dprobes.rpn.rpn_program import Program

__all__ = [
    "STATE_MAX",
    "Borrowed",
    "Clock",
    "Damage",
    "HandlerHits",
    "HandlerMaps",
    "LifeMark",
    "MemoryWatch",
    "damage_notice",
    "new_state",
    "refusal_notice",
]

_FIRST_LOOK = 0.02
"""Seconds over which the rate of the time stamp counter is measured first."""
_TRIES = 5


@cache
def _counter() -> Callable[[], int]:
    asm = X86Assembler()
    asm.rdtsc()
    asm.shift(Shift.SHL, Gpr.RDX, 32)
    asm.calculate(Operation.OR, Gpr.RAX, Gpr.RDX)
    asm.ret()
    function: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_uint64)(map_code(asm.assemble()))
    return function


def _look() -> tuple[int, int]:
    """Read the time stamp counter and CLOCK_MONOTONIC at nearly the same moment; return ticks and nanoseconds."""
    read = _counter()
    best: tuple[int, int, int] | None = None
    for _ in range(_TRIES):
        before, now, after = read(), time.monotonic_ns(), read()
        found = (after - before, (before + after) // 2, now)
        best = min(best or found, found)
    assert best is not None
    return best[1], best[2]


class Clock:
    """
    The clock page of a region: the scale of the time stamp counter for handlers (``native.process_page``).

    ``correct`` is called at intervals; it reads counter and time, and corrects the rate.
    """

    def __init__(self, region: Region) -> None:
        self._page = SharedArray(region, CLOCK_SIZE)
        self._version = 0
        self._first = _look()
        time.sleep(_FIRST_LOOK)
        self.correct()

    @property
    def address(self) -> int:
        """The address of the page in the probed process."""
        return self._page.place.address

    def correct(self) -> None:
        """Write the current reading of counter, time and rate to the page."""
        counter, now = _look()
        rate = ((now - self._first[1]) << 32) // max(1, counter - self._first[0])
        self._version += 1  # the number in the memory cannot be trusted: processes may have written over it
        place = CLOCK_READINGS + CLOCK_READING.size * (self._version & 1)
        CLOCK_READING.pack_into(self._page.memory, place, counter, now, rate)
        self._page.words[CLOCK_VERSION] = self._version

    def close(self) -> None:
        """Release the memory view of the clock page."""
        self._page.close()


class LifeMark:
    """
    The life mark in ``array``, a robust futex that a thread of this process owns; raise ``OSError`` if unsupported.

    The kernel sets FUTEX_OWNER_DIED when this process exits or is killed (``platform.linux.process_calls``).
    """

    def __init__(self, array: SharedArray) -> None:
        self._array = array
        self._address = array.own_address
        self._ready, self._over = threading.Event(), threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._live, name="dprobes-life", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            self._over.set()
            self._thread.join()
            raise self._problem

    @property
    def address(self) -> int:
        """The address of the mark in the probed process."""
        return self._array.place.address

    @property
    def word(self) -> int:
        """The current value of the mark."""
        word: int = self._array.halves[0]
        return word

    def _live(self) -> None:
        try:
            note_end_of_thread(self._array.memory, self._address)
        except OSError as error:
            self._problem = error
        self._ready.set()
        self._over.wait()

    def close(self) -> None:
        """End the life mark: handlers do nothing from now on."""
        self._over.set()
        self._thread.join()
        self._array.halves[0] = HAS_ENDED
        self._array.close()


_OWN = (MapName.PROBES,)
"""The maps that a program never borrows."""


class Borrowed(NamedTuple):
    """
    State of the ``principal``, and global ``variables`` that all programs share; None: the program has its own.

    They are in separate files, which the process maps in addition to the program's file.
    """

    principal: SharedState | None = None
    variables: GlobalVariables | None = None

    @property
    def files(self) -> tuple[tuple[int, int], ...]:
        """The files that a process must map: (descriptor, size) each."""
        return () if self.principal is None else ((self.principal.region.descriptor, self.principal.region.size),)

    @property
    def globals_size(self) -> int:
        """Size in bytes of the global variables, which a process must map after the files; 0: none."""
        return 0 if self.variables is None else mapped_size(self.variables.count)

    @property
    def parts(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """The files and the size of the global variables."""
        return self.files, self.globals_size

    def places(self, addresses: Sequence[int]) -> Mapping[MapName, MapPlace]:
        """Return the places of the maps in a process that has mapped the files at these addresses."""
        left = list(addresses)
        found: dict[MapName, MapPlace] = {}
        if self.principal is not None:
            self.principal.region.place = left.pop(0)
            found |= {name: part.place for name, part in self.principal.maps.items() if name not in _OWN}
        if self.variables is not None:
            found[MapName.GLOBALS] = MapPlace(left.pop(0))
        return found


STATE_MAX = 1 << 19
"""Maximum size of the state of a handler in bytes."""

_STATES = 256
"""Maximum number of threads in handlers at the same time; unused states need no physical memory."""
_RINGS_SIZE, _RING_SIZE_MIN = 8 << 20, 1 << 20
"""Size in bytes of all rings together, and minimum size of each; unused pages need no physical memory."""
_STACK_RINGS_SIZE = 64 << 20
"""Size in bytes of all rings for entries with copies of stacks: several thousand bytes each, and slow to unwind."""
_SPARE = 1 << 20


def _rings(cpus: int, program: Program) -> RingShape:
    size = _STACK_RINGS_SIZE if takes_user_stacks(program) else _RINGS_SIZE
    return RingShape(cpus, max(size // cpus, _RING_SIZE_MIN))


def new_state(program: Program) -> SharedState:
    """Return the state of a new program, in memory with room for the rest of its maps."""
    sizes = HandlerMaps.sizes()
    rings = _rings(sizes.cpus, program)
    size = sizes.states * (STATE_MAX + 8) + rings.rings * rings.stride + _SPARE
    region = Region(size + SharedState.size_of(sizes.cpus, program))
    variables = program.vars, program.gvars, program.cvars, program.tvars
    return SharedState(region, sizes.cpus, variables, program.tables)


class HandlerMaps:
    """
    The maps of one program: those of its ``state``, and those that only handlers in processes and the reader need.

    The memory has other addresses in a probed process than in this one; ``places`` returns the addresses there.
    """

    def __init__(self, state: SharedState, program: Program) -> None:
        self._state = state
        sizes, region = self.sizes(), state.region
        states, rings = sizes.states, _rings(sizes.cpus, program)
        self.region = region
        self.clock = Clock(region)
        self.rings = SharedRings(region, rings)
        self._arrays = {
            MapName.CLAIMS: SharedArray(region, 8, states),
            MapName.STATUS: SharedArray(region, STATUS_SIZE),
            MapName.SCRATCH: SharedArray(region, STATE_MAX, states),
            MapName.ZEROS: SharedArray(region, max(zeros_size(program.tables), 8 * power_of_two(program.tvars))),
        }
        self.life_mark = LifeMark(state.mark)  # last: it starts a thread, which an error above would leave running

    @staticmethod
    def sizes() -> Tables:
        """Return the numbers of entries of the maps, by which handlers are compiled."""
        cpus = power_of_two(os.cpu_count() or 1)
        return Tables(states=_STATES, cpus=cpus, probes=PROBES_MAX)

    def places(self, address: int, borrowed: Borrowed, others: Sequence[int] = ()) -> Mapping[MapName, MapPlace]:
        """
        Return the places of the maps in a process that has mapped the memory at ``address``.

        ``others`` are the addresses of the files and variables that are ``borrowed``.
        """
        self.region.place = address
        places = {name: array.place for name, array in self._arrays.items()} | {MapName.RING: self.rings.place}
        places |= {name: part.place for name, part in self._state.maps.items()}
        return {**places, **borrowed.places(others)}

    @property
    def shapes(self) -> Mapping[MapName, TableShape]:
        """The shapes of the hash tables."""
        return {name: part.shape for name, part in self._state.maps.items() if isinstance(part, SharedHash)}

    @property
    def held_words(self) -> Iterator[int]:
        """Iterate over the offsets in the region of state claims and table locks that handlers hold (not 0)."""
        hashes = (part.locks for part in self._state.maps.values() if isinstance(part, SharedHash))
        memory = self.region.mapping
        for places in (self._arrays[MapName.CLAIMS].elements, *hashes):
            yield from (place for place in places if memory[place])

    def disable(self, probe: int) -> None:
        """Disable a probepoint: its handlers do not run any more."""
        self._state.probes.words[(probe * PROBE_ENTRY_SIZE + ProbeField.DISABLED) // 8] = 1

    def close(self) -> None:
        """Disable all handlers, and release these maps; the state remains readable."""
        with contextlib.ExitStack() as stack:
            for array in self._arrays.values():
                stack.callback(array.close)
            stack.callback(self.clock.close)
            stack.callback(self.rings.close)
            stack.callback(self.life_mark.close)  # closed before all others


_LOOK = 0.1
"""Seconds between checks."""
_PATIENCE, _PATIENCE_MAX = 0.5, 30.0
"""Seconds after which an unchanged entry or lock is suspected: the first value, and the maximum after false alarms."""


_WORD = -1


class MemoryWatch:
    """
    Watch for abandoned ring entries and locks in the memory of handlers.

    A signal handler of the probed program may interrupt a handler, and leave it by siglongjmp(3). The client cannot
    distinguish that from a preempted thread. So it records entries and locks that remain unchanged, and requests that
    the tracer sees each thread outside of handlers. Those that are then still unchanged have been abandoned.
    """

    def __init__(self, maps: HandlerMaps) -> None:
        self._maps = maps
        self._looked = 0.0
        self._since: dict[tuple[int, int], float] = {}
        """Monotonic time since which a ring's first entry (ring, position) or a word (_WORD, offset) is unchanged."""
        self._ends: list[int] | None = None
        """The ends of the rings at the time of the request to the tracer; None without an outstanding request."""
        self._patience = _PATIENCE

    def are_suspected(self, now: float) -> bool:
        """Return True if a request to the tracer is due at the monotonic time ``now``; call ``note_asking`` then."""
        if now < self._looked + _LOOK or self._ends is not None:
            return False
        self._looked = now
        rings = enumerate(ring.stalled_at for ring in self._maps.rings.rings)
        present = [(number, position) for number, position in rings if position is not None]
        present += [(_WORD, place) for place in self._maps.held_words]
        self._since = {thing: self._since.get(thing, now) for thing in present}
        return any(now >= since + self._patience for since in self._since.values())

    def note_asking(self) -> tuple[tuple[int, int], ...]:
        """Record a request: store the ends of the rings, and return the words to be released, (offset, size) each."""
        self._ends = [ring.end for ring in self._maps.rings.rings]
        until = self._looked - self._patience
        return tuple((place, 8) for (kind, place), since in self._since.items() if kind == _WORD and since <= until)

    def note_answer(self, *, is_done: bool) -> None:
        """Record the tracer's reply; ``is_done`` is True if it has seen each thread outside of handlers."""
        ends, self._ends = self._ends, None
        self._since.clear()
        if not is_done:
            self._patience = min(2 * self._patience, _PATIENCE_MAX)
            return
        self._patience = _PATIENCE
        for ring, end in zip(self._maps.rings.rings, ends or (), strict=True):
            ring.leave(end)

    @property
    def entries(self) -> int:
        """The number of entries of rings that were skipped as abandoned."""
        return sum(ring.skipped for ring in self._maps.rings.rings)


_CORRECTION = 0.25
"""Seconds after which the clock of handlers is corrected again."""


class Damage(NamedTuple):
    """
    Numbers of impossible values in memory that probed processes have overwritten.

    ``entries`` is the number of skipped entries, ``rings`` how often the contents of a ring were discarded. ``counts``
    is the number of probepoints, and ``keys`` that of keys of tables, whose counts are impossible.
    """

    entries: int = 0
    rings: int = 0
    counts: int = 0
    keys: int = 0


class HandlerHits:
    """Reader of the records of one program's handlers in the memory of ``maps``; the counts outlive that memory."""

    def __init__(self, maps: HandlerMaps, reader: RingReader, state: SharedState) -> None:
        self._maps: HandlerMaps | None = maps
        self._reader = reader
        self._state = state
        self._left = MemoryWatch(maps)
        self._unfinished = 0
        """The number of entries that threads did not finish because they were killed."""
        self._left_entries = 0
        """Number of entries abandoned because a signal handler has left the handler."""
        self._emitted: Sequence[int] = ()
        """The number of records of each probepoint, after the reader was closed."""
        self._corrected = 0.0
        self._began = time.monotonic_ns()
        self._unknown: set[int] = set()
        """The probepoints whose counts in the memory are impossible."""
        self._damage = Damage()
        """The findings before the reader ended."""
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> int:
        """The number of records that threads did not finish."""
        return self._unfinished + self._left_entries

    @property
    def damage(self) -> Damage:
        """The findings in shared memory that no handler can have written."""
        maps = self._maps
        keys = 0 if self._state.keyed is None else sum(self._state.keyed.refused.values())
        if maps is None:
            return self._damage._replace(counts=len(self._unknown), keys=keys)
        return Damage(self._reader.refused, self._reader.damaged + maps.rings.damaged, len(self._unknown), keys)

    def limit(self, probes: int, ending: Collection[int]) -> None:
        """Set the number of probepoints, and the numbers ``ending`` of those whose handlers may end them."""
        with self._lock:
            if self._maps is not None:
                self._reader.limit(probes, ending)

    @property
    def is_busy(self) -> bool:
        """True if so many entries have arrived that the next reading must follow at once."""
        return self._reader.is_busy

    @property
    def settled(self) -> int | None:
        """The time in nanoseconds before which all records have been returned; None if all records have."""
        return None if self._maps is None else self._reader.settled

    def begin_program(self, pid: int) -> None:
        """Record that a process has called execve and has mapped memory for handlers: its threads have new names."""
        if self._reader.names is not None:
            self._reader.names.begin_program(pid)

    def told(self, identity: ThreadIdentity) -> None:
        """Record the name and user id of a thread, which the tracer reported."""
        with self._lock:
            if self._reader.names is not None:
                self._reader.names.told(identity)

    def take(self, *, is_over: bool, patience: int = 0) -> tuple[list[Batch], list[tuple[int, ProbeState]]]:
        """
        Return the records that have arrived, each with its probepoint, and the probepoints that have ended.

        ``is_over`` is True if no more records can arrive. Otherwise records of the last ``patience`` nanoseconds may be
        kept, unless there are very many.
        """
        with self._lock:
            if self._maps is None:
                return [], []
            now = time.monotonic()
            if now > self._corrected + _CORRECTION:
                self._corrected = now
                self._maps.clock.correct()
            horizon = self._reader.horizon
            began = time.monotonic_ns() - (max(horizon, patience) if horizon else 0)
            batches = self._reader.read(self._maps.rings.move, began)
            if is_over:
                batches += self._reader.read(self._move_rest, None)
            ended, self._reader.ended = self._reader.ended, []
            self._left_entries = self._left.entries
        return batches, ended

    def _move_rest(self, buffer: EntryBuffer, _: object) -> set[int]:
        assert self._maps is not None
        self._unfinished += self._maps.rings.move_rest(buffer)
        return set()

    def to_be_released(self) -> tuple[tuple[int, int], ...] | None:
        """Return the words for ``ReleaseMemory`` if handlers seem to have abandoned entries or locks; else None."""
        if self._maps is None or not self._left.are_suspected(time.monotonic()):
            return None
        return self._left.note_asking()

    def released(self, *, is_done: bool) -> None:
        """Record the tracer's reply to ``ReleaseMemory``."""
        with self._lock:
            if self._maps is not None:
                self._left.note_answer(is_done=is_done)

    def add_counts(
        self, counts: Sequence[Counts], jumps: Mapping[int, set[str]], limits: Mapping[int, tuple[int, int]]
    ) -> None:
        """
        Add the counts of handlers in processes, for probepoints with ``jumps``, to ``counts``, in place.

        For probepoints in ``limits`` (passcount, maxhits), the shared count includes the hits that the tracer has
        drawn.
        """
        with self._lock:
            emitted = self._emitted if self._maps is None else self._reader.counts
            records = {number: emitted[number] for number in list(jumps)}
        most = (time.monotonic_ns() - self._began) * (os.cpu_count() or 1)  # an upper bound: a hit takes at least 1 ns
        fields = ProbeField.HITS, ProbeField.LOST, ProbeField.MISSED
        for number, each in enumerate(counts[:PROBES_MAX]):
            if number not in records:
                continue
            found = [self._state.count(number, field) for field in fields]
            if max(found) > most:
                self._unknown.add(number)
                found = [0 for _ in fields]
            (hits, lost, missed), (passcount, maxhits) = found, limits[number]
            if passcount or maxhits:
                drawn = min(hits, passcount + maxhits) if maxhits else hits
                each.hits, each.passed = drawn + each.missed, min(hits, passcount)
            else:
                each.hits += hits
            each.records += records[number]
            each.lost += lost
            each.missed += missed
            each.executed = (*each.executed, *(f"inline ({method})" for method in sorted(jumps[number])))

    def close(self) -> None:
        """Release the memory; the counts can still be read."""
        with self._lock:
            damage = self.damage
            maps, self._maps = self._maps, None
            if maps is not None:
                self._damage = damage
                self._emitted = tuple(self._reader.counts)
        with contextlib.ExitStack() as stack:
            if maps is not None:
                stack.callback(maps.close)
                stack.callback(self._reader.close)


_REASONS = 4
"""Maximum number of reasons in a notice."""


def refusal_notice(reasons: Sequence[str]) -> Notice:
    """Return the notice of probepoints that have breakpoints instead of jumps, with a reason for each."""
    count, kinds = len(reasons), Counter(reasons)
    listed = [f"{reason}{f' ({number})' if count > 1 else ''}" for reason, number in kinds.most_common(_REASONS)]
    if len(kinds) > _REASONS:
        listed.append("...")
    what = "a probepoint used a breakpoint instead of a jump"
    if count > 1:
        what = f"{count} probepoints used breakpoints instead of jumps"
    return Notice(f"{what}: {'; '.join(listed)}", is_warning=False)


def damage_notice(damage: Damage) -> Notice:
    """Return the warning that probed processes have damaged the memory of their handlers, with the numbers."""
    parts = (
        (damage.entries, "record that no handler makes was dropped", "records that no handler makes were dropped"),
        (damage.rings, "time all records of a CPU were given up", "times all records of a CPU were given up"),
        (damage.counts, "probepoint has no count of hits", "probepoints have no counts of hits"),
        (damage.keys, "key of a table without a count was left out", "keys of tables without counts were left out"),
    )
    found = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)
    return Notice(
        f"a probed process has written over the memory of its handlers: {found}",
        hint="the other values may be wrong as well; '--engine ptrace' shares no memory with the process",
    )
