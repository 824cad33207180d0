"""
Hits of probepoints: which of them run a handler, what that comes to, and the records and counts that are left of it.

The hit counter of a probepoint starts at -passcount; the handler runs while it is not negative, and the probepoint is
disabled when it reaches maxhits (recovered reference 2.2).

Handlers of several programs run in the order of their insertion, from one saved state: each sees the registers as they
were at the hit. Their changes are put together afterwards: of two that change the same register, the later one counts.
Memory is no part of the saved state, because it belongs to all threads: what a handler writes there is done at once.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from dprobes.arch import architecture
from dprobes.engines.overload_guard import LOOK_INTERVAL, Load, OverloadPolicy
from dprobes.record.log_record import PROCESS_NAME_MAX, Item, header_struct
from dprobes.resolve.probe_state import ProbeState
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
"""The operands of ``exit`` that mean something in user programs."""

HANDING_OVER = frozenset({DEBUGGER, CORE_DUMP})
"""Those after which the probepoint is removed."""

_INACTIVE = (ProbeState.DISABLED, ProbeState.REMOVED)


class Handlers:
    """A program's handlers for modules of one architecture; ``warn`` takes a message and a hint for the user."""

    def __init__(self, image: CodeImage, name: str, warn: Callable[[str, str | None], None]) -> None:
        self._warn = warn
        self._ended: set[tuple[int, int]] = set()
        self._translator = Translator(image, architecture(name))
        self._starts = image.handlers
        self._functions: dict[int, Callable[[Point, Context], Any]] = {}

    def run(self, definition: int, point: Point, context: Context) -> Outcome:
        """Run the handler of a probe definition."""
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
    """A program whose handlers run at hits; ``handlers`` are those for modules with words of 4 and 8 bytes."""

    number: int
    rank: int
    records: RecordBuilder
    handlers: dict[int, Handlers]

    @property
    def reach(self) -> Reach:
        """The processes that it is about."""

    @property
    def counters(self) -> SharedCounters:
        """The memory of its variables."""


class HitLoad:
    """What the handler of one probepoint has taken so far, and at which hits it runs."""

    __slots__ = ("_turn", "in_handler", "thinning")

    def __init__(self) -> None:
        self.in_handler = 0.0
        """Seconds."""
        self.thinning = 1
        self._turn = 0

    def skips(self) -> bool:
        """Return whether this hit is to run no handler; to be asked once for each."""
        if self.thinning <= 1:
            return False
        turn, self._turn = self._turn, self._turn + 1
        return turn % self.thinning != 0


@dataclass(slots=True, eq=False)
class Probe(Generic[ProgramT]):
    """
    A probepoint of a program, in all processes; ``definition`` is the number of its definition.

    ``file`` is the device and inode of the file that it is in. ``shared`` are its hits where handlers in the probed
    processes have some as well.
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
    """What hits take, where that is measured."""
    shared: SharedHits | None = None

    def __post_init__(self) -> None:
        self.counter = -self.limits.passcount

    def draw(self) -> bool | None:
        """Return whether the handler runs at a hit, which is not counted yet; None if that is no hit any more."""
        if self.shared is None:
            return self.counter >= 0
        if self.shared.is_limited:
            return self.shared.draw()
        return None if self.shared.is_over else True

    def give_back(self) -> None:
        """Let a hit that was drawn be none, because its instruction is not carried out."""
        if self.shared is not None and self.shared.is_limited:
            self.shared.give_back()

    @property
    def is_active(self) -> bool:
        """Whether hits count."""
        return self.state not in _INACTIVE

    @property
    def counts_late(self) -> bool:
        """Whether a hit counts whose handler ran before: it may have been drawn before the last one was counted."""
        return self.is_active or (self.shared is not None and self.shared.is_limited)

    def concerns(self, process: int) -> bool:
        """Return whether hits of a process count."""
        return process in self.program.reach.pids and self.state not in _INACTIVE

    def count_hit(self, outcome: Outcome | None, *, is_skipped: bool = False) -> bool:
        """
        Count a hit whose instruction completed; ``outcome`` is None if its handler did not run.

        Return whether the probepoint has become inactive by this.
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
        """Count a hit at which no handler can run."""
        if self.state not in _INACTIVE:
            self.counts.hits += 1
            self.counts.missed += 1

    @property
    def _is_last(self) -> bool:
        return self.counter >= self.limits.maxhits if self.shared is None else self.shared.is_over


Header = tuple[int, list[int], bytes]
"""The flag word of a record, its items up to the process name, and the bytes of the rest."""


class Handled(Generic[ProgramT]):
    """
    What the handler of one probepoint came to at a hit; ``outcome`` is None if it did not run.

    It did not run because of passcount, or with ``is_skipped`` because of the overload guard.
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
    """Return whether a handler wants anything but that the thread goes on as without the probe: see what follows."""
    # A loop: a generator costs as much as the rest of the bookkeeping of a hit.
    for each in handled:
        outcome = each.outcome
        if outcome is not None and (outcome.ending is Ending.SKIP or outcome.exit_code in HANDING_OVER):
            return True
    return False


def hands_over(handled: Iterable[Handled[ProgramT]]) -> bool:
    """Return whether a handler wants the process to be handed to the debugger, or its core."""
    return any(each.outcome is not None and each.outcome.exit_code in HANDING_OVER for each in handled)


def is_last(handled: Iterable[Handled[ProgramT]]) -> bool:
    """Return whether a probepoint may be inactive when these hits are counted."""
    return any(
        each.probe.limits.maxhits
        or (
            each.outcome is not None
            and (each.outcome.ending is Ending.REMOVE or each.outcome.exit_code in HANDING_OVER)
        )
        for each in handled
    )


def skipping(handled: Iterable[Handled[ProgramT]]) -> Handled[ProgramT] | None:
    """Return the last one that wants the function to be skipped: its value is what counts; None if none does."""
    found = None
    for each in handled:
        if each.outcome is not None and each.outcome.ending is Ending.SKIP:
            found = each
    return found


class HandlerRunner:
    """The running of handlers on the thread that ``context`` speaks of."""

    def __init__(self, context: HitContext) -> None:
        self._context = context

    def run(
        self, owners: Sequence[tuple[Probe[ProgramT], Point]], known: Iterable[Handled[ProgramT]] = ()
    ) -> tuple[Handled[ProgramT], ...]:
        """
        Run the handlers of those probepoints whom a hit concerns; those that are ``known`` ran before.

        What they change in registers is there when all have run, and in ``written`` of the context.
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
        """Run a handler; return None if this is no hit any more, by what has happened in a probed process."""
        is_run = probe.counter >= 0 if probe.shared is None else probe.draw()  # a call fewer, mostly
        if not is_run:
            return None if is_run is None else Handled(probe)  # passcount
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
    A builder of records that carry ``items``, in a target's byte order.

    An item costs time at each hit, so only what is asked for is looked up.
    """

    def __init__(self, items: int, byte_order: ByteOrder = "little") -> None:
        self._order: ByteOrder = byte_order
        # Plain numbers and truth values: operations on enum members are an order slower, and this runs at each hit.
        self._flags = int(items | Item.MAJOR | Item.MINOR)
        self._wide_flags = self._flags | int(Item.WIDE)
        self._cpu, self._pid, self._uid, self._time, self._name, self._tid = (
            bool(items & item) for item in (Item.CPU, Item.PID, Item.UID, Item.TIME, Item.PROCESS_NAME, Item.TID)
        )
        self._cs, self._ip, self._ss, self._sp = (bool(items & item) for item in (Item.CS, Item.IP, Item.SS, Item.SP))
        self._pointers = self._cs or self._ip or self._ss or self._sp

    def header(self, context: HitContext, word_size: int, *, keep_ip: bool = False) -> Header:
        """
        Return flags, items and tail of a record for the state before the probed instruction.

        The first two items, major and minor, are zeros to be filled in by ``record``. ``keep_ip`` adds the instruction
        pointer to what was asked for.
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
        """Return the record of a handler's log buffer."""
        flags, values, tail = header
        if outcome.is_cut:
            flags |= int(Item.CUT)
        values[0], values[1] = outcome.major, outcome.minor
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.log

    def stack_trace(self, header: Header, outcome: Outcome) -> bytes:
        """Return the record of a handler's stack trace; its major and minor codes stay 0."""
        flags, values, tail = header
        flags |= int(Item.STACK_TRACE)
        values[0] = values[1] = 0
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.trace


Records = list[tuple["Probe[Any]", bytes]]


class RecordSender(Protocol):
    """The way of records to the session."""

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        """Send the record of a program's probepoint; return False if there is no room for it."""


class QueuedRecords:
    """
    The records of one hit in the order of hits.

    ``records`` is None until it is known what they are. Those of a hit that was skipped are no longer ``is_queued``.
    """

    __slots__ = ("is_queued", "records")

    def __init__(self, records: Records | None = None) -> None:
        self.records = records
        self.is_queued = True


class Emitter:
    """A counter of hits, which sends their records, and counts these as emitted or lost."""

    def __init__(self, sender: RecordSender) -> None:
        self._sender = sender
        self._queue: deque[QueuedRecords] = deque()

    def count(
        self, handled: Iterable[Handled[ProgramT]], queued: QueuedRecords | None = None, *, has_faulted: bool = False
    ) -> list[Probe[ProgramT]]:
        """
        Count the hits of an instruction that completed, or ``has_faulted``, and emit their records.

        Return the probepoints that have become inactive by this.
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
        """Queue the records of a hit of which it is not known yet whether it completes, and return their place."""
        queued = QueuedRecords()
        self._queue.append(queued)
        return queued

    def emit(self, records: Records, queued: QueuedRecords | None = None) -> None:
        """Emit the records of a hit, where they are ``queued`` or else last; they wait until all before are known."""
        if queued is not None and queued.is_queued:
            queued.records = records
        elif self._queue:
            self._queue.append(QueuedRecords(records))
        else:
            self._send(records)
            return
        self._send_known()

    def skip(self, queued: QueuedRecords) -> None:
        """Let no record wait for those of a hit any longer."""
        if queued.is_queued:
            queued.is_queued = False
            self._queue.remove(queued)
            self._send_known()

    def finish(self) -> None:
        """Send all records that are known."""
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
    """A moment: by the clock, by the processor time of this process, and by the hits of all programs."""

    time: float
    busy: float
    hits: int

    @classmethod
    def now(cls, hits: int) -> Moment:
        """Return the present one."""
        return cls(time.monotonic(), time.process_time(), hits)


class ProgramGuard:
    """The guard of one program; ``budget`` is the share of a CPU that its hits may take."""

    def __init__(self, budget: float, clock: Callable[[int], Moment] = Moment.now) -> None:
        self._clock = clock
        self._policy = OverloadPolicy(budget)
        self._last = clock(0)
        self._hits: dict[int, int] = {}
        self._in_handler: dict[int, float] = {}

    @staticmethod
    def new_load() -> HitLoad:
        """Return what measures the hits of one more probepoint."""
        return HitLoad()

    def due_in(self, now: float) -> float:
        """Return in how many seconds ``look`` is to be called."""
        return self._last.time + LOOK_INTERVAL - now

    def look(self, probes: Mapping[int, Probe[Any]], all_hits: int) -> tuple[Verdict, dict[int, float]]:
        """
        Return what is to be done about probepoints, and their hits a second; thinning is done already.

        ``all_hits`` are those of all programs so far.
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
        """Iterate over what probepoints did since the last look, if they did anything, or have a thinned handler."""
        for probe in probes:
            state, number = probe.load, probe.number
            if state is None:
                continue
            hits = probe.counts.hits - self._hits.get(number, 0)
            in_handler = state.in_handler - self._in_handler.get(number, 0.0)
            self._hits[number] = probe.counts.hits
            self._in_handler[number] = state.in_handler
            if (hits or in_handler or state.thinning > 1) and probe.is_active:
                yield Load(number, hits, in_handler, 0.0, state.thinning)
