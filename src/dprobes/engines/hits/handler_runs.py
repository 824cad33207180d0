"""
Running the handlers of a hit: those of several programs in the order of their insertion, from one saved state.

Each handler sees the registers as they were at the hit, whatever others do with them. Their changes are put together
behind them: of two that change the same register, the later one counts. Memory is no part of the saved state, because
it belongs to all threads: what a handler writes there is done at once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from dprobes.engines.hits.hit_probes import HANDING_OVER, HandledProgram, Probe
from dprobes.vm import Ending

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.engines.hits.hit_context import Changes, Header, HitContext
    from dprobes.vm import Outcome, Point

__all__ = ["Emitter", "Handled", "HandlerRunner", "QueuedRecords", "diverts", "hands_over", "is_last", "skipping"]

ProgramT = TypeVar("ProgramT", bound=HandledProgram)


class Handled(NamedTuple, Generic[ProgramT]):
    """
    What the handler of one probepoint came to at a hit; ``outcome`` is None if it did not run.

    It did not run because of passcount, or with ``is_skipped`` because of the overload guard.
    """

    probe: Probe[ProgramT]
    outcome: Outcome | None = None
    header: Header | None = None
    changes: Changes | None = None
    is_skipped: bool = False


def diverts(handled: Iterable[Handled[ProgramT]]) -> bool:
    """Return whether a handler wants anything but that the thread goes on as without the probe: see what follows."""
    # A loop: a generator costs as much as the rest of the bookkeeping of a hit.
    for _, outcome, *_ in handled:
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
    """Run handlers on the thread that ``context`` speaks of."""

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
        program.counters.reset_if_asked()
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


# Emitting records in the order of the hits.
#
# The record of a pending hit, whose instruction is executed without a stop behind it, is emitted some time after its
# handler ran. Records of other threads' hits, which came later, wait for it, so that what handlers counted shows in the
# order in which they did.


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
    """Count hits, send their records, and count these as emitted or lost."""

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
        for probe, outcome, header, _, is_skipped in handled:
            if has_faulted and not probe.limits.keep_on_fault:
                if outcome is not None and outcome.ending is not Ending.ABORT:
                    probe.counts.faulted += 1
                probe.give_back()
                continue
            if probe.count_hit(outcome, is_skipped=is_skipped):
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
