"""
Hits of probepoints: the choice of hits that run a handler, the handlers' results, records and counts.

The hit counter of a probepoint starts at -passcount; the handler runs while the counter is not negative. The probepoint
is disabled when the counter reaches maxhits (recovered reference 2.2).

Handlers of several programs run in the order of their insertion. Each sees the registers as they were at the hit. Then
their changes are merged: if several handlers change the same register, the last one has precedence. Writes to memory
take effect at once, because all threads share the memory.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from dprobes.arch import architecture
from dprobes.engines.overload_guard import LOOK_INTERVAL, Load, OverloadPolicy
from dprobes.record.log_record import PROCESS_NAME_MAX, Item, header_struct
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.vm import Ending
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dprobes.arch import ByteOrder
    from dprobes.engines.hits.hit_context import Changes, HitContext, Reach, SharedCounters, SharedHits, Tally
    from dprobes.engines.hits.hit_lifecycle import ProbeLimits
    from dprobes.engines.overload_guard import Verdict
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.vm import Context, Outcome, Point

__all__ = [
    "CORE_DUMP",
    "DEBUGGER",
    "HANDING_OVER",
    "Emitter",
    "Handled",
    "HandledProgram",
    "HandlerRunner",
    "Handlers",
    "HitLoad",
    "Moment",
    "Probe",
    "ProgramGuard",
    "QueuedRecords",
    "RecordBuilder",
    "diverts",
    "hands_over",
    "is_last",
    "skipping",
]

ProgramT = TypeVar("ProgramT", bound="HandledProgram")

DEBUGGER, CORE_DUMP = 1, 3
"""Operands of ``exit`` with an effect on a probed process: it is handed to the debugger, or its core is written."""

HANDING_OVER = frozenset({DEBUGGER, CORE_DUMP})
"""Operands of ``exit`` after which the probepoint is removed."""

_INACTIVE = (ProbeState.DISABLED, ProbeState.REMOVED)


class Handlers:
    """
    Handlers of a probe program, as functions of this process, for modules of the architecture ``name``.

    ``warn`` is called with a message and a hint, or None, for the user.
    """

    def __init__(self, image: CodeImage, name: str, warn: Callable[[str, str | None], None]) -> None:
        self._warn = warn
        self._ended: set[tuple[int, int]] = set()
        self._translator = Translator(image, architecture(name))
        self._starts = image.handlers
        self._functions: dict[int, Callable[[Point, Context], Any]] = {}

    def run(self, definition: int, point: Point, context: Context) -> Outcome:
        """Run the handler of a probe definition. Warn once of each exception that ends it unhandled."""
        function = self._functions.get(definition)
        if function is None:
            function = self._functions[definition] = self._translator.handler(self._starts[definition])
        outcome: Outcome = function(point, context)
        if outcome.unhandled and (definition, outcome.unhandled) not in self._ended:
            self._ended.add((definition, outcome.unhandled))
            if not point.autostacktrace:
                self._warn(
                    f"the handler of {point.major},{point.minor} was ended by {ExceptionCode(outcome.unhandled).name}, "
                    "which nothing catches",
                    "catch it with 'sx', or see where it is raised with 'autostacktrace = yes'",
                )
        return outcome


class HandledProgram(Protocol):
    """Probe program whose handlers run at hits. ``handlers`` has those for a module's word size, 4 or 8 bytes."""

    number: int
    rank: int
    records: RecordBuilder
    handlers: dict[int, Handlers]

    @property
    def reach(self) -> Reach:
        """The processes that the program probes."""

    @property
    def counters(self) -> SharedCounters:
        """Memory of the program's variables."""


class HitLoad:
    """Load of one probepoint: the time in its handler, which runs at each ``thinning``-th hit."""

    __slots__ = ("_turn", "in_handler", "thinning")

    def __init__(self) -> None:
        self.in_handler = 0.0
        """Time in the handler so far, in seconds."""
        self.thinning = 1
        self._turn = 0

    def skips(self) -> bool:
        """Return True if thinning excludes the handler of this hit. Call this exactly once for each hit."""
        if self.thinning <= 1:
            return False
        turn, self._turn = self._turn, self._turn + 1
        return turn % self.thinning != 0


@dataclass(slots=True, eq=False)
class Probe(Generic[ProgramT]):
    """
    Probepoint of a program, in all processes. ``definition`` is the number of its definition.

    ``file`` is the device and inode number of the file that contains it. ``shared`` is not None if handlers in the
    probed processes count hits of the probepoint, too.
    """

    program: ProgramT
    number: int
    definition: int
    limits: ProbeLimits
    file: tuple[int, int]
    counts: Tally
    counter: int = 0
    state: ProbeState = ProbeState.COMPILED
    load: HitLoad | None = None
    """Load of its hits, or None if it is not measured."""
    shared: SharedHits | None = None

    def __post_init__(self) -> None:
        self.counter = -self.limits.passcount

    @property
    def occurrences(self) -> int:
        """Number of times that it has stopped a thread: its hits, and a watchpoint's neighbours."""
        return self.counts.hits + self.counts.neighbours

    def draw(self) -> bool | None:
        """Return whether the handler runs at a hit that is not counted yet, or None if the probepoint is inactive."""
        if self.shared is None:
            return self.counter >= 0
        if self.shared.is_limited:
            return self.shared.draw()
        return None if self.shared.is_over else True

    def give_back(self) -> None:
        """Undo ``draw`` for a hit whose instruction was not executed."""
        if self.shared is not None and self.shared.is_limited:
            self.shared.give_back()

    @property
    def is_active(self) -> bool:
        """True if hits of the probepoint run its handler, because it is neither disabled nor removed."""
        return self.state not in _INACTIVE

    @property
    def counts_late(self) -> bool:
        """True if a hit whose handler has run still counts, because ``draw`` may precede the count of the last hit."""
        return self.is_active or (self.shared is not None and self.shared.is_limited)

    def concerns(self, process: int) -> bool:
        """Return whether hits of the process with this id count."""
        return process in self.program.reach.pids and self.state not in _INACTIVE

    def count_hit(self, outcome: Outcome | None, *, is_skipped: bool = False) -> bool:
        """
        Count a hit whose instruction completed. ``outcome`` is None if its handler did not run.

        ``is_skipped`` is True if the overload guard excluded the handler. Return True if this hit made the probepoint
        inactive.
        """
        self.counts.hits += 1
        if is_skipped:
            self.counts.skipped += 1
        else:
            self.counts.passed += outcome is None
        self.counter += 1
        if outcome is not None and (outcome.ending is Ending.REMOVE or outcome.exit_code in HANDING_OVER):
            state = ProbeState.REMOVED
        elif self.limits.maxhits and self._is_last:
            state = ProbeState.DISABLED
        else:
            return False
        if self.shared is not None:
            self.shared.disable()
        former, self.state = self.state, state
        return former not in _INACTIVE

    def miss(self) -> None:
        """Count a hit as missed: its handler could not run. An inactive probepoint is unchanged."""
        if self.state not in _INACTIVE:
            self.counts.hits += 1
            self.counts.missed += 1

    @property
    def _is_last(self) -> bool:
        return self.counter >= self.limits.maxhits if self.shared is None else self.shared.is_over


Header = tuple[int, list[int], bytes]
"""Flag word of a record, its numeric items before the process name, and the bytes of process name and thread id."""


class Handled(Generic[ProgramT]):
    """
    Result of the handler of one probepoint at a hit.

    ``outcome`` is None if the handler did not run, because of passcount, or with ``is_skipped`` because of the overload
    guard. ``header`` is None if the handler writes no record.
    """

    __slots__ = ("changes", "header", "is_skipped", "outcome", "probe")

    def __init__(
        self,
        probe: Probe[ProgramT],
        outcome: Outcome | None = None,
        header: Header | None = None,
        changes: Changes | None = None,
        *,
        is_skipped: bool = False,
    ) -> None:
        self.probe = probe
        self.outcome = outcome
        self.header = header
        self.changes = changes
        self.is_skipped = is_skipped


def diverts(handled: Iterable[Handled[ProgramT]]) -> bool:
    """Return whether a handler skips the function, hands the process to the debugger, or requests its core."""
    # Use a loop: a generator costs as much as the rest of the bookkeeping of a hit.
    for each in handled:
        outcome = each.outcome
        if outcome is not None and (outcome.ending is Ending.SKIP or outcome.exit_code in HANDING_OVER):
            return True
    return False


def hands_over(handled: Iterable[Handled[ProgramT]]) -> bool:
    """Return whether a handler requests to hand the process to the debugger, or to write its core."""
    return any(each.outcome is not None and each.outcome.exit_code in HANDING_OVER for each in handled)


def is_last(handled: Iterable[Handled[ProgramT]]) -> bool:
    """Return whether counting these hits may make a probepoint inactive: by maxhits, ``remove`` or ``exit``."""
    return any(
        each.probe.limits.maxhits
        or (
            each.outcome is not None
            and (each.outcome.ending is Ending.REMOVE or each.outcome.exit_code in HANDING_OVER)
        )
        for each in handled
    )


def skipping(handled: Iterable[Handled[ProgramT]]) -> Handled[ProgramT] | None:
    """Return the last result that skips the function, or None. Its value becomes the function's return value."""
    found = None
    for each in handled:
        if each.outcome is not None and each.outcome.ending is Ending.SKIP:
            found = each
    return found


class HandlerRunner:
    """Runner of handlers on the thread that ``context`` represents."""

    def __init__(self, context: HitContext) -> None:
        self._context = context

    def run(
        self, owners: Sequence[tuple[Probe[ProgramT], Point]], known: Iterable[Handled[ProgramT]] = ()
    ) -> tuple[Handled[ProgramT], ...]:
        """
        Run the handlers of the probepoints in ``owners`` whose programs probe the process, and return the results.

        ``known`` has results of handlers that have run before for the same hit; they are reused. The changes of
        registers are applied after all handlers, and are in ``written`` of the context.
        """
        context = self._context
        if len(owners) == 1 and not known:  # nearly always
            probe, point = owners[0]
            only = self._run(probe, point) if probe.concerns(context.process) else None
            return () if only is None else (only,)
        before = {handled.probe: handled for handled in known}
        context.set_aside()
        results = []
        for probe, point in owners:
            if probe.concerns(context.process):
                handled = before.get(probe)
                if handled is None:
                    handled = self._run(probe, point)
                    context.set_aside()
                if handled is not None:
                    results.append(handled)
        for handled in results:
            if handled.changes:
                context.apply(handled.changes)
        return tuple(results)

    def _run(self, probe: Probe[ProgramT], point: Point) -> Handled[ProgramT] | None:
        """Run a handler; return None if the probepoint is inactive because of hits in a probed process."""
        is_run = probe.counter >= 0 if probe.shared is None else probe.draw()  # saves a call in most cases
        if not is_run:
            return None if is_run is None else Handled(probe)  # not run because of passcount
        load = probe.load
        if load is not None and load.skips():
            return Handled(probe, is_skipped=True)
        program, context = probe.program, self._context
        word_size = context.word_size
        counters = program.counters
        if counters.resets[0] != counters.resets[1]:
            counters.reset_if_asked()
        if context.program is not program:
            context.use(program)
        context.probe = probe
        handlers = program.handlers[word_size]
        if load is None:
            outcome = handlers.run(probe.definition, point, context)
        else:
            began = time.perf_counter()
            outcome = handlers.run(probe.definition, point, context)
            load.in_handler += time.perf_counter() - began
        if outcome.ending is Ending.ABORT:
            return Handled(probe, outcome, None, context.written)
        header = program.records.header(context, word_size, keep_ip=probe.limits.keep_ip)
        return Handled(probe, outcome, header, context.written)


_IP = int(Item.IP)


class RecordBuilder:
    """
    Builder of records with the header items ``items``, in a target's byte order.

    Only the requested items are read from the context, because each costs time at each hit.
    """

    def __init__(self, items: int, byte_order: ByteOrder = "little") -> None:
        self._order: ByteOrder = byte_order
        # Use plain integers and booleans: operations on enum members are ten times slower, and this runs at each hit.
        self._flags = int(items | Item.MAJOR | Item.MINOR)
        self._wide_flags = self._flags | int(Item.WIDE)
        self._cpu, self._pid, self._uid, self._time, self._name, self._tid = (
            bool(items & item) for item in (Item.CPU, Item.PID, Item.UID, Item.TIME, Item.PROCESS_NAME, Item.TID)
        )
        self._cs, self._ip, self._ss, self._sp = (bool(items & item) for item in (Item.CS, Item.IP, Item.SS, Item.SP))
        self._pointers = self._cs or self._ip or self._ss or self._sp

    def header(self, context: HitContext, word_size: int, *, keep_ip: bool = False) -> Header:
        """
        Return the header of a record from the present state of the thread, before the probed instruction.

        The first two items, major and minor, are zeros; ``record`` sets them. ``keep_ip`` adds the instruction pointer
        to the items.
        """
        values = [0, 0]
        if self._cpu:
            values.append(context.cpu())
        if self._pid:
            values.append(context.pid())
        if self._uid:
            values.append(context.uid())
        if self._pointers or keep_ip:
            cs, ip, ss, sp = context.pointers()
            if self._cs:
                values.append(cs)
            if self._ip or keep_ip:
                values.append(ip)
            if self._ss:
                values.append(ss)
            if self._sp:
                values.append(sp)
        if self._time:
            values.append(context.time())
        tail = context.process_name()[:PROCESS_NAME_MAX] + b"\0" if self._name else b""
        if self._tid:
            tail += context.tid().to_bytes(4, self._order)
        flags = self._wide_flags if word_size == 8 else self._flags
        return flags | _IP if keep_ip else flags, values, tail

    def record(self, header: Header, outcome: Outcome) -> bytes:
        """Return the bytes of a record: the header, with the outcome's major and minor codes, then the log buffer."""
        flags, values, tail = header
        if outcome.is_cut:
            flags |= int(Item.CUT)
        values[0], values[1] = outcome.major, outcome.minor
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.log

    def stack_trace(self, header: Header, outcome: Outcome) -> bytes:
        """Return the record with a handler's stack-trace buffer. Its major and minor codes are 0."""
        flags, values, tail = header
        flags |= int(Item.STACK_TRACE)
        values[0] = values[1] = 0
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.trace


Records = list[tuple["Probe[Any]", bytes]]


class RecordSender(Protocol):
    """Channel by which a record reaches the session that writes it."""

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        """Send a record of a program's probepoint, both given by number. If there is no room for it, return False."""


class QueuedRecords:
    """
    Records of one hit, as an element of the emitter's queue, which has the order of the hits.

    ``records`` is None until the records are known. ``is_queued`` becomes False when the hit is removed from the queue.
    """

    __slots__ = ("is_queued", "records")

    def __init__(self, records: Records | None = None) -> None:
        self.records = records
        self.is_queued = True


class Emitter:
    """Counter of hits and sender of their records. It counts each record as emitted or lost."""

    def __init__(self, sender: RecordSender) -> None:
        self._sender = sender
        self._queue: deque[QueuedRecords] = deque()

    def count(
        self, handled: Iterable[Handled[ProgramT]], queued: QueuedRecords | None = None, *, has_faulted: bool = False
    ) -> list[Probe[ProgramT]]:
        """
        Count the hits of an instruction, and emit their records at the place ``queued``, or last if that is None.

        ``has_faulted`` is true if the instruction faulted: only probepoints with ``keep_on_fault`` count the hit then.
        Return the probepoints that this made inactive.
        """
        records: Records = []
        gone = []
        for each in handled:
            probe, outcome, header = each.probe, each.outcome, each.header
            if has_faulted and not probe.limits.keep_on_fault:
                if outcome is not None and outcome.ending is not Ending.ABORT:
                    probe.counts.faulted += 1
                probe.give_back()
                continue
            if probe.count_hit(outcome, is_skipped=each.is_skipped):
                gone.append(probe)
            if outcome is not None and header is not None:
                builder = probe.program.records
                records.append((probe, builder.record(header, outcome)))
                if outcome.trace:
                    records.append((probe, builder.stack_trace(header, outcome)))
        self.emit(records, queued)
        return gone

    def queue(self) -> QueuedRecords:
        """Reserve a place in the queue for a hit whose outcome is not known yet, and return the place."""
        queued = QueuedRecords()
        self._queue.append(queued)
        return queued

    def emit(self, records: Records, queued: QueuedRecords | None = None) -> None:
        """
        Emit the records of a hit, at the place ``queued``, or last if that is None.

        The records are sent when the records of all hits before them are known.
        """
        if queued is not None and queued.is_queued:
            queued.records = records
        elif self._queue:
            self._queue.append(QueuedRecords(records))
        else:
            self._send(records)
            return
        self._send_known()

    def skip(self, queued: QueuedRecords) -> None:
        """Remove a hit from the queue, so that later records do not wait for its records."""
        if queued.is_queued:
            queued.is_queued = False
            self._queue.remove(queued)
            self._send_known()

    def finish(self) -> None:
        """Send all known records. Remove hits whose records are not known from the queue."""
        for queued in list(self._queue):
            if queued.records is None:
                self.skip(queued)

    def _send_known(self) -> None:
        while self._queue and (known := self._queue[0].records) is not None:
            self._queue.popleft()
            self._send(known)

    def _send(self, records: Records) -> None:
        for probe, record in records:
            if self._sender.send_record(probe.program.number, probe.number, record):
                probe.counts.records += 1
            else:
                probe.counts.lost += 1


class Moment(NamedTuple):
    """Monotonic time and CPU time of this process, in seconds, and the number of hits of all programs so far."""

    time: float
    busy: float
    hits: int

    @classmethod
    def now(cls, hits: int) -> Moment:
        """Return the current times of this process, with ``hits``, the number of hits so far."""
        return cls(time.monotonic(), time.process_time(), hits)


class ProgramGuard:
    """Overload guard of one program. ``budget`` is the share of a CPU that its hits may take."""

    def __init__(self, budget: float, clock: Callable[[int], Moment] = Moment.now) -> None:
        self._clock = clock
        self._policy = OverloadPolicy(budget)
        self._last = clock(0)
        self._hits: dict[int, int] = {}
        self._in_handler: dict[int, float] = {}

    @staticmethod
    def new_load() -> HitLoad:
        """Return a measurement of the time that hits of one probepoint take, from zero."""
        return HitLoad()

    def due_in(self, now: float) -> float:
        """
        Return the seconds from the monotonic time ``now`` until the next ``look``.

        The number is negative if overdue.
        """
        return self._last.time + LOOK_INTERVAL - now

    def look(self, probes: Mapping[int, Probe[Any]], all_hits: int) -> tuple[Verdict, dict[int, float]]:
        """
        Measure the load since the last call, apply thinning, and return the verdict and the probepoints' hits a second.

        ``all_hits`` is the number of hits of all programs so far. The caller disables probepoints.
        Neighbours of watchpoints count as hits.
        """
        last, self._last = self._last, self._clock(all_hits)
        elapsed = self._last.time - last.time
        loads = list(self._loads(probes.values()))
        hits = sum(load.hits for load in loads)
        others = max(0, self._last.hits - last.hits - hits)
        busy = (self._last.busy - last.busy) * hits / (hits + others) if hits else 0.0
        outside = max(0.0, busy - sum(load.in_handler for load in loads))
        loads = [
            Load(load.number, load.hits, load.in_handler, outside * load.hits / hits if hits else 0.0, load.thinning)
            for load in loads
        ]
        verdict = self._policy.judge(busy / elapsed, loads)
        for number, thinning in verdict.thinned.items():
            if (state := probes[number].load) is not None:
                state.thinning = thinning
        return verdict, {load.number: load.hits / elapsed for load in loads}

    def _loads(self, probes: Iterable[Probe[Any]]) -> Iterable[Load]:
        """Iterate over the loads of active probepoints since the last call, except idle ones without thinning."""
        for probe in probes:
            state, number = probe.load, probe.number
            if state is None:
                continue
            hits = probe.occurrences - self._hits.get(number, 0)
            in_handler = state.in_handler - self._in_handler.get(number, 0.0)
            self._hits[number] = probe.occurrences
            self._in_handler[number] = state.in_handler
            if (hits or in_handler or state.thinning > 1) and probe.is_active:
                yield Load(number, hits, in_handler, 0.0, state.thinning)
