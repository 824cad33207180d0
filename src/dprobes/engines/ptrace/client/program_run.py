"""What the client knows of one program in a tracer, and the events and words for what the tracer reports."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.engines.engine_interface import Counts, Event, Finished, Notice, RecordBatch, StateEvent
from dprobes.engines.ptrace.tracer_messages import Done, Dumped, Ended, ProbeStatus, Warned
from dprobes.resolve.probe_state import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.engines.debugger_start import Debuggers
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

__all__ = ["Item", "NativeSide", "ProgramRun", "death_notices", "event_of", "obstacle_text"]

if TYPE_CHECKING:
    Batch = Sequence[tuple[int, bytes]]
    Request = ShareMemory | PatchSites


class NativeSide(Protocol):
    """
    The handlers of one program; all but ``take`` and ``counts`` are called in the order in which things happen.

    A breakpoint is placed first, though not always written (``engines.ptrace.tracer.breakpoint_placement``). When it
    is, the process maps memory for handlers, and jumps take the place of those breakpoints for which there are any.
    """

    @property
    def state(self) -> NativeState | None:
        """What they have in common with handlers that the tracer interprets; None if there are no such handlers."""

    @property
    def plan(self) -> NativeStatePlan | None:
        """The same, to be sent to the tracer."""

    def join(self, rank: int, neighbours: Callable[[], Iterable[object]]) -> None:
        """Take notice of the place in the order of programs, and of who gives those beside this one."""

    def native_probes(self, probes: Iterable[int], answers: Answers) -> frozenset[int]:
        """Return those of some probepoints for which jumps will be asked for when they are placed."""

    def placed(
        self, program: int, pid: int, probes: Sequence[int], answers: Answers
    ) -> ShareMemory | PatchSites | None:
        """Take notice of breakpoints in a process; return what to ask of the tracer."""

    def shared(self, message: MemoryShared, answers: Answers) -> PatchSites | None:
        """Take notice of memory that a process has mapped; return what to ask next."""

    def patched(self, program: int, message: SitesPatched) -> ShareMemory | None:
        """Take notice of jumps; return what to ask of the tracer if it was asked in vain."""

    def copied(self, pid: int, parent: int) -> None:
        """Take notice that a process has a copy of its parent's memory, jumps and all."""

    def left(self, pid: int) -> None:
        """Take notice that a process has ended, or executes another program: nothing of it is needed any more."""

    @property
    def is_due(self) -> bool:
        """Whether something is to be asked of the tracer because it is time to."""

    def due(self, answers: Answers) -> ShareMemory | PatchSites | None:
        """Return what is to be asked of the tracer because it is time to."""

    def told(self, identity: ThreadIdentity) -> None:
        """Take notice of what a thread is called, and whose it is."""

    @property
    def is_busy(self) -> bool:
        """Whether so much has come that there is more already."""

    def to_be_released(self, program: int) -> ReleaseMemory | None:
        """Return what to ask of the tracer if handlers seem to have left something that others wait for."""

    def released(self, message: MemoryReleased) -> None:
        """Take notice of the answer."""

    def take(self, *, is_over: bool) -> tuple[list[Batch], list[tuple[int, ProbeState]]]:
        """
        Return the records that have come, each with its probepoint, and the probepoints that have had their last hit.

        With ``is_over`` nothing comes any more.
        """

    def add_counts(self, counts: Sequence[Counts]) -> None:
        """Add what happened without the tracer."""

    def notices(self) -> Iterator[Notice]:
        """Iterate over what a user should hear at the end."""

    def disable(self) -> None:
        """Let no handler run any more, as the tracer is gone that sees to their faults."""

    def remove(self, pids: Iterable[int]) -> int:
        """Put the bytes of files back wherever a jump is in the memory of processes; return how many there were."""

    def close(self) -> None:
        """Give up what is not looked at after the end; may be called more than once."""


_BACKLOG = 64 << 20
"""Bytes of records that may wait to be given out, where somebody else reads them from the tracer."""

_TOGETHER = 1024
"""Records that are given out at once at most."""

Item = Event | Done | Ended | Exception
"""What is to be given out, or raised."""


class _Record(NamedTuple):
    """A record and its probepoint, to be given out in a batch."""

    probe: int
    data: bytes


class ProgramRun:
    """One program; ``items`` are to be given out by who follows it, whom ``wake`` wakes up."""

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
        """The handlers that run in the probed processes."""
        self.number = 0
        self.rank = 0
        """Its place in the order of insertion: that of the program which it has replaced."""
        self.items: deque[Item | _Record] = deque()
        self.is_stopping = False
        """Whether its end was asked for."""
        self.is_over = False
        """Whether no more items will come."""
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.bell)
        self._backlog = 0
        self._backlog_max = _BACKLOG
        self._received: dict[int, int] = {}
        self._dropped: dict[int, int] = {}

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far."""
        counts = self.counters.counts(len(self.answers.probes))
        for probe, dropped in list(self._dropped.items()):
            counts[probe].records -= dropped
            counts[probe].lost += dropped
        if self.native is not None:
            self.native.add_counts(counts)
        return counts

    def take_native(self, *, is_over: bool = False) -> list[tuple[int, ProbeState]]:
        """Keep the records of handlers in processes to be given out; return the probepoints that are over."""
        if self.native is None:
            return []
        batches, ended = self.native.take(is_over=is_over)
        self.items += map(RecordBatch, batches)
        return ended

    def counts_of_received(self) -> tuple[Counts, ...]:
        """Return what is known for certain when the tracer was killed."""
        numbers = [self._received.get(probe, 0) for probe in range(len(self.answers.probes))]
        return tuple(Counts(hits=number, records=number) for number in numbers)

    def take_record(self, probe: int, record: bytes) -> None:
        """Keep a record to be given out, or count it as lost if nobody takes them."""
        if self._backlog + len(record) > self._backlog_max:
            self._dropped[probe] = self._dropped.get(probe, 0) + 1
            return
        self._received[probe] = self._received.get(probe, 0) + 1
        self._backlog += len(record)
        self.items.append(_Record(probe, record))

    def take_overload(self, message: Overloaded) -> None:
        """Announce that hits took too much of a CPU, and what was done about it."""
        assert self._overload is not None, "a program with a budget has words for it"
        verdict, rates = message.verdict, message.rates
        for number in verdict.disabled:
            detail = self._overload.cause(rates[number], verdict.shares[number])
            self.items.append(StateEvent((number,), 0, ProbeState.DISABLED, detail))
        self.items += self._overload.of(verdict, rates)

    def next_item(self) -> Item:
        """Take the next one of the items; records come many at once, which are written faster."""
        item = self.items.popleft()
        if not isinstance(item, _Record):
            return item
        records = [item]
        while self.items and len(records) < _TOGETHER and isinstance(following := self.items[0], _Record):
            records.append(following)
            self.items.popleft()
        self._backlog -= sum(len(record.data) for record in records)
        return RecordBatch(records)

    def take_all(self) -> list[Item]:
        """Take all items that there are."""
        items = []
        while self.items:
            items.append(self.next_item())
        return items

    def wake(self) -> None:
        """Wake up who waits."""
        os.eventfd_write(self.bell, 1)

    def end(self, item: Item) -> None:
        """Give out one more item, the last one."""
        self.items.append(item)
        self.is_over = True

    def replaced(self) -> None:
        """Come to the end because another program has taken the place of this one."""
        self.end(Finished(self.counts()))


def _state_event(message: ProbeStatus) -> StateEvent:
    """Return the event for the state of probepoints."""
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
    """Return why a program cannot take the place of another one."""
    event = _state_event(obstacle)
    return event.state.line(event.detail, f"in process {event.pid}", "the old program continues")


def event_of(message: ProbeStatus | Dumped | Warned) -> Event:
    """Return the event for what a tracer reports of a program."""
    match message:
        case ProbeStatus():
            return _state_event(message)
        case Dumped():
            return _dump_notice(message)
        case Warned(text, hint, _, details):
            return Notice(text, hint, details=details)


def _dump_notice(dumped: Dumped) -> Notice:
    """Return the notice of what became of a core file."""
    from dprobes.engines.engine_interface import no_core_notice, written_notice

    if dumped.problem:
        return no_core_notice(dumped.pid, dumped.name, dumped.path, dumped.problem)
    return written_notice(dumped.pid, dumped.name, dumped.path, dumped.size)


def death_notices(status: int, restored: int, cleared: int, left: int) -> list[Notice]:
    """Return the notices of what was done when the tracer ended by itself with a status; see ``CrashRestorer``."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    notices = [
        Notice(
            f"the tracer {how}; {restored} breakpoints were removed from outside",
            "a thread that ran into one before that has got a SIGTRAP",
        )
    ]
    if cleared:
        notices.append(Notice(f"the debug registers of {cleared} threads were cleared from outside"))
    if left:
        notices.append(
            Notice(
                f"the debug registers of {left} threads could not be cleared: those threads do not stop",
                "an access that was watched will end the program with a SIGTRAP",
            )
        )
    return notices
