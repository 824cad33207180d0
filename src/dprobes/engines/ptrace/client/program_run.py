"""Client's state of one program in a tracer: its events and counts, and the events for the tracer's reports."""

from __future__ import annotations

import os
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.engines.engine_interface import Counts, Event, Finished, Notice, RecordBatch, StateEvent
from dprobes.engines.ptrace.tracer_messages import Done, Dumped, Ended, ProbeStatus, Warned
from dprobes.record.log_record import time_of
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.engines.command_launcher import Debuggers
    from dprobes.engines.overload_guard import OverloadNotices
    from dprobes.engines.ptrace.client.site_answers import Answers
    from dprobes.engines.ptrace.shared_counters import NativeState, NativeStatePlan, SharedCounters
    from dprobes.engines.ptrace.tracer_messages import (
        MemoryReleased,
        MemoryShared,
        Overloaded,
        PatchSites,
        ReleaseMemory,
        ShareMemory,
        SitesPatched,
    )
    from dprobes.platform.linux.procfs import ThreadIdentity
    from dprobes.target.process_images import ProcessImages

__all__ = ["NativeSide", "ProgramRun", "QueueEntry", "death_notices", "event_of", "merged", "obstacle_text"]

if TYPE_CHECKING:
    Batch = Sequence[tuple[int, bytes]]
    Request = ShareMemory | PatchSites


class NativeSide(Protocol):
    """
    The client's side of one program's handlers in probed processes.

    All methods except ``take`` and ``add_counts`` are called in the order of events. A breakpoint is placed first, but
    not always written (``engines.ptrace.tracer.breakpoint_placement``). Then the process maps memory for handlers, and
    jumps replace breakpoints where that is possible.
    """

    @property
    def state(self) -> NativeState | None:
        """State shared with handlers that the tracer interprets; None if no handlers run in processes."""

    @property
    def plan(self) -> NativeStatePlan | None:
        """Description of the state, to be sent to the tracer; None without a state."""

    def join(self, rank: int, neighbours: Callable[[], Iterable[object]]) -> None:
        """Set the program's rank in the order of insertion; ``neighbours`` returns other programs' native sides."""

    def native_probes(self, probes: Iterable[int], answers: Answers) -> frozenset[int]:
        """Return the members of ``probes`` for which jumps will be requested when they are placed."""

    def placed(
        self, program: int, pid: int, probes: Sequence[int], answers: Answers
    ) -> ShareMemory | PatchSites | None:
        """Record breakpoints placed in a process; return the next request to the tracer, or None."""

    def shared(self, message: MemoryShared, answers: Answers) -> PatchSites | None:
        """Record memory that a process has mapped; return the next request to the tracer, or None."""

    def patched(self, program: int, message: SitesPatched) -> ShareMemory | None:
        """Record the tracer's result of writing jumps; return a request if jumps must be planned again, else None."""

    def copied(self, pid: int, parent: int) -> None:
        """Record that a process has a copy of its parent's memory, including jumps."""

    def left(self, pid: int) -> None:
        """Record that a process has ended or executes another program, and drop its data."""

    @property
    def is_due(self) -> bool:
        """True if a request to the tracer is due."""

    def due(self, answers: Answers) -> ShareMemory | PatchSites | None:
        """Return the request to the tracer that is due, or None if there is none."""

    def told(self, identity: ThreadIdentity) -> None:
        """Record the name and user id of a thread, for the records of handlers in processes."""

    @property
    def has_breakpoints(self) -> bool:
        """True if a probepoint has breakpoints instead of jumps, in at least one process."""

    @property
    def settled(self) -> int | None:
        """Monotonic time in nanoseconds before which all records were taken, or None if all existing ones were."""

    @property
    def is_busy(self) -> bool:
        """True if records arrive so fast that more are available already."""

    def to_be_released(self, program: int) -> ReleaseMemory | None:
        """
        Return a request if handlers seem to have left locks or ring entries without reaching their end.

        Else None.
        """

    def released(self, message: MemoryReleased) -> None:
        """Record the tracer's reply to the request that ``to_be_released`` returned."""

    def take(self, *, is_over: bool, patience: int = 0) -> tuple[list[Batch], list[tuple[int, ProbeState]]]:
        """
        Return the records that have arrived, with their probepoints, and the probepoints that have ended.

        ``is_over`` is True if no more records can arrive. Records of the last ``patience`` nanoseconds may be kept for
        the next call.
        """

    def add_counts(self, counts: Sequence[Counts]) -> None:
        """Add the counts of handlers in processes to ``counts``, in place."""

    def notices(self) -> Iterator[Notice]:
        """Iterate over notices for the user at the end."""

    def disable(self) -> None:
        """Disable all handlers in processes, because the tracer, which handles their faults, has ended."""

    def remove(self, pids: Iterable[int]) -> int:
        """Restore the files' bytes where memory of these processes has jumps; return the number of jumps."""

    def close(self) -> None:
        """Release resources that are only needed during the run; a second call does nothing."""


_BACKLOG = 64 << 20
"""Maximum size in bytes of the records that wait to be consumed."""

_TRACER_DELAY = 100_000_000
"""Nanoseconds after a hit until its record from the tracer has certainly arrived, even on a busy machine."""

_MIXED = 1.0
"""Seconds after a record from the tracer during which another one is expected."""

_TOGETHER = 1024
"""Maximum number of records in a batch."""

QueueEntry = Event | Done | Ended | Exception
"""An event to be returned, or an exception to be raised."""


class _Record(NamedTuple):
    """A record and its probepoint, to be returned in a batch."""

    probe: int
    data: bytes


def _time(record: tuple[int, bytes]) -> int:
    """Return the time in a record, CLOCK_MONOTONIC in nanoseconds, or 0 if the record has none."""
    return time_of(record[1]) or 0


def merged(batches: Iterable[Batch], others: Sequence[tuple[int, bytes]]) -> Iterator[Batch]:
    """
    Iterate over ``batches`` and ``others``, merged by time.

    Both must be in order of time; the batches stay packed.
    """
    taken = 0
    for batch in batches:
        first = 0
        while taken < len(others):
            place = bisect_left(batch, _time(others[taken]), lo=first, key=_time)
            if place == len(batch):
                break
            if place > first:
                yield batch[first:place]
            end = bisect_right(others, _time(batch[place]), lo=taken, key=_time)
            yield others[taken:end]
            taken, first = end, place
        yield batch[first:] if first else batch
    if taken < len(others):
        yield others[taken:]


class ProgramRun:
    """The client's state of one program; a follower thread consumes its items, and ``wake`` wakes the thread."""

    def __init__(
        self,
        answers: Answers,
        counters: SharedCounters,
        debuggers: Debuggers,
        overload: OverloadNotices | None = None,
        images: ProcessImages | None = None,
    ) -> None:
        self.answers = answers
        self.images = images
        self._overload = overload
        self.counters = counters
        self.debuggers = debuggers
        self.native: NativeSide | None = None
        """Handlers that run in the probed processes; None if there are none."""
        self.number = 0
        self.rank = 0
        """Rank in the order of insertion; a replacement has the rank of the replaced program."""
        self.items: deque[QueueEntry | _Record] = deque()
        self.is_stopping = False
        """True if the end of the run was requested."""
        self.is_over = False
        """True if no more items will be queued."""
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.bell)
        self._arrived: deque[_Record] = deque()
        """Records of the tracer that the follower has not read. The thread that reads messages appends to them."""
        self._held: list[_Record] = []
        """Records of the tracer that wait for older ones of handlers in processes."""
        self._mixed_until = 0.0
        """Monotonic time in seconds until which records of handlers in processes wait for records of the tracer."""
        self._backlog = 0
        self._backlog_max = _BACKLOG
        self._received: dict[int, int] = {}
        self._dropped: dict[int, int] = {}

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts so far."""
        counts = self.counters.counts(len(self.answers.probes))
        for probe, dropped in list(self._dropped.items()):
            counts[probe].records -= dropped
            counts[probe].lost += dropped
        if self.native is not None:
            self.native.add_counts(counts)
        return counts

    def take_native(self, heard: int | None) -> list[tuple[int, ProbeState]]:
        """
        Queue the records of handlers in processes, merged by time with the held records of the tracer.

        All messages that the tracer sent before the monotonic time ``heard``, in nanoseconds, have been read. If it is
        None, no more records can arrive. Return the probepoints that have ended, with their new states.
        """
        if self.native is None:
            return []
        is_mixed = self.native.has_breakpoints or time.monotonic() < self._mixed_until
        patience = 0 if heard is None or not is_mixed else time.monotonic_ns() - heard + _TRACER_DELAY
        batches, ended = self.native.take(is_over=heard is None, patience=patience)
        self.items += map(RecordBatch, merged(batches, self._due(None if heard is None else self.native.settled)))
        return ended

    def _due(self, until: int | None) -> list[_Record]:
        """Remove and return, by time, the held records before ``until`` (monotonic, in nanoseconds; None for all)."""
        while self._arrived:
            self._held.append(self._arrived.popleft())
        self._held.sort(key=_time)
        count = len(self._held) if until is None else bisect_left(self._held, until, key=_time)
        due, self._held = self._held[:count], self._held[count:]
        self._backlog -= sum(len(record.data) for record in due)
        return due

    def release(self) -> None:
        """Queue the held records; no older ones will arrive."""
        self.items += map(RecordBatch, merged([], self._due(None)))

    def counts_of_received(self) -> tuple[Counts, ...]:
        """Return counts with the number of received records: after the tracer was killed, no others are reliable."""
        numbers = [self._received.get(probe, 0) for probe in range(len(self.answers.probes))]
        return tuple(Counts(hits=number, records=number) for number in numbers)

    def take_record(self, probe: int, record: bytes) -> None:
        """Queue a record, or count it as lost if ``_BACKLOG`` bytes are queued."""
        if self._backlog + len(record) > self._backlog_max:
            self._dropped[probe] = self._dropped.get(probe, 0) + 1
            return
        self._received[probe] = self._received.get(probe, 0) + 1
        self._backlog += len(record)
        if self.native is not None and time_of(record) is not None:
            self._arrived.append(_Record(probe, record))
            self._mixed_until = time.monotonic() + _MIXED
        else:
            self.items.append(_Record(probe, record))

    def take_overload(self, message: Overloaded) -> None:
        """Queue the notices of an overload, and of the measures that were taken."""
        assert self._overload is not None, "a program with a budget has words for it"
        verdict, rates = message.verdict, message.rates
        for number in verdict.disabled:
            detail = self._overload.cause(number, rates, verdict.shares)
            self.items.append(StateEvent((number,), 0, ProbeState.DISABLED, detail))
        self.items += self._overload.of(verdict, rates)

    def next_item(self) -> QueueEntry:
        """Remove and return the next item; records are returned in batches, which are written faster."""
        item = self.items.popleft()
        if not isinstance(item, _Record):
            return item
        records = [item]
        while self.items and len(records) < _TOGETHER and isinstance(following := self.items[0], _Record):
            records.append(following)
            self.items.popleft()
        self._backlog -= sum(len(record.data) for record in records)
        return RecordBatch(records)

    def take_all(self) -> list[QueueEntry]:
        """Remove and return all queued records and events."""
        items = []
        while self.items:
            items.append(self.next_item())
        return items

    def wake(self) -> None:
        """Wake the thread that takes the queued items, by the eventfd ``bell``."""
        os.eventfd_write(self.bell, 1)

    def end(self, item: QueueEntry) -> None:
        """Queue the last item of the run, its result or its error."""
        self.items.append(item)
        self.is_over = True

    def replaced(self) -> None:
        """End the run because another program has replaced this one."""
        self.end(Finished(self.counts()))


def _state_event(message: ProbeStatus) -> StateEvent:
    """Return the event that reports a new state of probepoints."""
    state = message.state
    detail = ""
    if state is ProbeState.CONFLICT:
        where = f"offset {message.offset:#x} of '{message.path}'"
        detail = f"a breakpoint of another tool is at {where}"
        if message.reason:
            detail = f"{where} cannot be written ({message.reason})"
    elif state is ProbeState.MISMATCH:
        detail = f"memory at offset {message.offset:#x} of '{message.path}' holds {message.found.hex(' ')}"
    elif message.reason:
        detail = message.reason
    return StateEvent(message.probes, message.pid, state, detail)


def obstacle_text(obstacle: ProbeStatus) -> str:
    """Return the reason why a program cannot replace another one, as a line for the user."""
    event = _state_event(obstacle)
    return event.state.line(event.detail, f"in process {event.pid}", "the old program continues")


def event_of(message: ProbeStatus | Dumped | Warned) -> Event:
    """Return the event for a tracer's report about a program."""
    match message:
        case ProbeStatus():
            return _state_event(message)
        case Dumped():
            return _dump_notice(message)
        case Warned(text, hint, _, details, is_warning):
            return Notice(text, hint, is_warning, details)


def _dump_notice(dumped: Dumped) -> Notice:
    """Return the notice that a core file was written, or why it was not."""
    from dprobes.engines.engine_interface import no_core_notice, written_notice

    if dumped.problem:
        return no_core_notice(dumped.pid, dumped.name, dumped.path, dumped.problem)
    return written_notice(dumped.pid, dumped.name, dumped.path, dumped.size)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def death_notices(status: int, restored: int, cleared: int, left: int) -> list[Notice]:
    """
    Return the notices about the cleanup after the tracer has ended.

    ``status`` is its exit status, or the negative number of a signal. ``restored`` is a number of breakpoints, which
    includes those of the engine itself: one in the dynamic linker, also for a program with watchpoints only.
    ``cleared`` and ``left`` are the numbers of threads whose debug registers were cleared, and could not be.
    """
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    notices = [
        Notice(
            f"the tracer {how}; {_counted(restored, 'breakpoint')} (the engine's own included) "
            f"{'was' if restored == 1 else 'were'} removed from outside",
            "a thread that reached one before that has received a SIGTRAP",
        )
    ]
    if cleared:
        notices.append(Notice(f"the debug registers of {_counted(cleared, 'thread')} were cleared from outside"))
    if left:
        do = "it does" if left == 1 else "they do"
        notices.append(
            Notice(
                f"the debug registers of {_counted(left, 'thread')} could not be cleared: {do} not stop",
                "an access that was watched will end the program with a SIGTRAP",
            )
        )
    return notices
