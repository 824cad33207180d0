"""
Attachments of companions, the probe programs compiled from one source, as one attachment.

Each program has an attachment of its own, whose events a thread passes to a common queue. Records are merged by time.
All programs use the variables and tables of the first one, the principal. Probepoints and definitions are numbered
across all programs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.command_launcher import LaunchedCommand
from dprobes.engines.engine_interface import (
    Begun,
    Counts,
    Finished,
    Pause,
    ProbeRemoval,
    RecordBatch,
    StateEvent,
    Stop,
    VariableReset,
    make_changes,
)
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.record.log_record import time_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.engine_interface import Attachment, Change, Event, Plan, ValueChange
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.rpn_program import Program

__all__ = ["AttachmentGroup"]

_WAITING = 64
"""Maximum number of events in the common queue. A thread waits for room."""

_BEGINNING = 20.0
"""Maximum number of seconds for which an insertion waits for the attachment's ``Begun``."""

_HELD = 150_000_000
"""Age in nanoseconds at which a record is emitted. Until then, another attachment may have an older record."""

_HELD_AT_END = 5_000_000_000
"""
The same at the end of a run, when attachments remove their breakpoints before they emit their last records.
"""

_LOOK = 0.005
"""Seconds between two checks whether the command has ended."""


class _Numbers:
    """Numbering of the probepoints of several attachments, in one list that only grows. A lock protects ``look``."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.probes: list[Probepoint] = []
        self._of: list[list[int]] = [[] for _ in programs]
        self._owners: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._first: list[int] = []
        count = 0
        for program in programs:
            self._first.append(count)
            count += len(program.definitions)

    def definition(self, member: int, number: int) -> int:
        """Return the number, among the definitions of all programs, of definition ``number`` of program ``member``."""
        return self._first[member] + number

    def look(self, attachments: Sequence[Attachment]) -> None:
        """Append the probepoints that ``attachments`` have found since the last call to ``probes``, numbered."""
        with self._lock:
            for member, attachment in enumerate(attachments):
                own = self._of[member]
                for probe in attachment.probes[len(own) :]:
                    own.append(len(self.probes))
                    self._owners.append((member, len(own) - 1))
                    self.probes.append(probe._replace(number=self.definition(member, probe.number)))

    def number(self, member: int, probe: int) -> int:
        """Return the number, among the probepoints of all programs, of probepoint ``probe`` of a member."""
        return self._of[member][probe]

    def owner(self, probe: int) -> tuple[int, int]:
        """Return the index of the attachment that owns a probepoint, and the probepoint's number in that attachment."""
        return self._owners[probe]

    def placed(self, members: Sequence[Sequence[Counts]]) -> tuple[Counts, ...]:
        """
        Return counts in the order of ``probes``. ``members`` has the counts of each attachment.

        Missing counts are 0.
        """
        counts = [Counts() for _ in self.probes]
        for member, own in enumerate(members):
            for probe, each in enumerate(own[: len(self._of[member])]):
                counts[self._of[member][probe]] = each
        return tuple(counts)


class _RecordOrder:
    """Buffer that sorts the records of several attachments by time. A record without a time is due at once."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, bytes]] = []

    def take(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Store records, as pairs of a probepoint's number and bytes, until ``due`` or ``rest`` returns them."""
        self._held += [(time_of(data) or 0, probe, data) for probe, data in records]

    def due_in(self, held: int) -> float | None:
        """Return the seconds until the oldest record is ``held`` nanoseconds old, or None if there is no record."""
        if not self._held:
            return None
        oldest = min(when for when, _, _ in self._held)
        return max(0.0, (oldest + held - time.monotonic_ns()) / 1e9)

    def due(self, held: int) -> list[tuple[int, bytes]]:
        """Remove and return, oldest first, the records that are at least ``held`` nanoseconds old."""
        return self._until(time.monotonic_ns() - held)

    def rest(self) -> list[tuple[int, bytes]]:
        """Remove and return all records, however recent, oldest first."""
        return self._until(None)

    def _until(self, until: int | None) -> list[tuple[int, bytes]]:
        due = [each for each in self._held if until is None or each[0] <= until]
        if due:
            self._held = [each for each in self._held if until is not None and each[0] > until]
        return [(probe, data) for _, probe, data in sorted(due, key=lambda each: each[0])]


class AttachmentGroup:
    """
    Attachment of probe programs that share their variables and tables.

    ``ready`` is called after all programs are inserted, and before the command begins.
    """

    def __init__(self, plans: Sequence[Plan], ready: Callable[[AttachmentGroup], None]) -> None:
        self._plans = plans
        self._job = plans[0].job
        self._programs = tuple(plan.job.program for plan in plans)
        self._numbers = _Numbers(self._programs)
        self._members: list[Attachment] = []
        self._threads: list[threading.Thread] = []
        self._queue: queue.Queue[tuple[int, Event | BaseException | None]] = queue.Queue(_WAITING)
        self._early: list[tuple[int, Event]] = []
        self._open = 0
        """Number of attachments whose thread still passes events."""
        self._stack = contextlib.ExitStack()
        self._command: LaunchedCommand | None = None
        self._globals: GlobalVariables | None = None
        self._is_stopping = False
        self._has_begun = threading.Event()
        """Event that ``ready`` has returned. Until then, the process at an endpoint stays stopped."""
        self._order = _RecordOrder()
        self._ready = ready

    # Start and end

    def begin(self) -> None:
        """Attach all programs, the principal first, and start the command if there is one. After an error, undo all."""
        scope = self._job.scope
        with self._stack as stack:
            if scope.command and scope.endpoint is None:
                command = LaunchedCommand(scope.command, follow=scope.follow, output=scope.output)
                stack.callback(command.close)
                self._command = command
                scope = command.scope()
            self._globals = self._job.globals
            if self._globals is None and (count := max(program.gvars for program in self._programs)):
                self._globals = stack.enter_context(GlobalVariables(count))
            stack.callback(self._leave)
            for number, plan in enumerate(self._plans):
                job = plan.job._replace(
                    scope=scope,
                    globals=self._globals,
                    beside=(*plan.job.beside, *self._members),
                    principal=self._members[0] if self._members else None,
                    companions=self._programs,
                )
                self._members.append(plan.engine.attach(replace(plan, job=job)))
                self._follow(number)
            self._ready(self)
            self._has_begun.set()
            if self._command is not None and not self._is_stopping:
                self._command.go()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Remove all programs and release their resources. A second call does nothing."""
        self._stack.close()

    def _leave(self) -> None:
        """Remove all programs, the principal last."""
        self.stop()
        self._has_begun.set()
        while self._open:
            self._take(self._queue.get())
        for thread in self._threads:
            thread.join()
        with contextlib.ExitStack() as stack:  # the counts of an attachment can be read until it is closed
            for attachment in self._members:
                stack.callback(attachment.close)

    def _follow(self, number: int) -> None:
        """
        Start the thread for an attachment's events, and wait up to 20 s for ``Begun`` or the attachment's end.

        Other events that arrive meanwhile are kept for ``poll``.
        """
        thread = threading.Thread(target=self._hand_on, args=(number,), name=f"companion {number}", daemon=True)
        self._threads.append(thread)
        self._open += 1
        thread.start()
        until = time.monotonic() + _BEGINNING
        while (rest := until - time.monotonic()) > 0:
            try:
                member, event = self._queue.get(timeout=rest)
            except queue.Empty:
                return
            if (taken := self._take((member, event))) is None:
                if member == number:
                    return
            elif isinstance(taken, Begun) and member == number:
                return
            else:
                self._early.append((member, taken))

    def _take(self, item: tuple[int, Event | BaseException | None]) -> Event | None:
        """
        Return the event of an item of the queue, or None at the end of an attachment.

        Raise the error of an attachment. While the run is being stopped, errors are ignored (``Pause``).
        """
        match item:
            case _, None:
                self._open -= 1
                return None
            case _, BaseException() as error if not self._is_stopping:
                raise error
            case _, BaseException():
                return Pause()
            case _, event:
                return event

    def _hand_on(self, number: int) -> None:
        try:
            for event in self._members[number].poll():
                self._queue.put((number, event))
                if isinstance(event, Begun) and self._job.scope.endpoint is not None:
                    self._has_begun.wait()
        except BaseException as error:  # noqa: BLE001 - the thread that calls ``poll`` raises it
            self._queue.put((number, error))
        finally:
            self._queue.put((number, None))

    # Events

    def poll(self) -> Iterator[Event]:
        """Iterate over the events until ``Finished``."""
        finished: dict[int, Finished] = {}
        for member, early in self._early:
            yield from self._given(member, early, finished)
        yield Begun()
        while self._open:
            try:
                item = self._queue.get(timeout=self._order.due_in(self._held))
                if (event := self._take(item)) is not None:
                    yield from self._given(item[0], event, finished)
            except queue.Empty:
                pass
            if records := self._order.due(self._held):
                yield RecordBatch(records)
        if records := self._order.rest():
            yield RecordBatch(records)
        own = (each.exit_status for each in finished.values() if each.exit_status is not None)
        status = next(own, None) if self._command is None else self._status_of_command()
        counts = self._numbers.placed([finished[n].counts if n in finished else () for n in range(len(self._members))])
        yield Finished(counts, status, any(each.cut_short for each in finished.values()))

    @property
    def _held(self) -> int:
        """Age in nanoseconds at which records are emitted at present."""
        command = self._command
        is_ending = self._is_stopping or (command is not None and command.has_begun and command.exit_status is not None)
        return _HELD_AT_END if is_ending else _HELD

    def _numbered(self, member: int, batch: RecordBatch) -> list[tuple[int, bytes]]:
        return [(self._numbers.number(member, probe), data) for probe, data in batch.records]

    def _given(self, member: int, event: Event, finished: dict[int, Finished]) -> Iterator[Event]:
        self._numbers.look(self._members)
        match event:
            case RecordBatch() if len(self._members) == 1:
                yield RecordBatch(self._numbered(member, event))
            case RecordBatch():
                self._order.take(self._numbered(member, event))
            case StateEvent(probes):
                yield event._replace(probes=tuple(self._numbers.number(member, probe) for probe in probes))
            case Finished():
                finished[member] = event
            case Begun():
                pass
            case _:
                yield event

    def _status_of_command(self) -> int | None:
        """Wait until the command ends or the run is stopped; return the wait status, or None before the end."""
        command = self._command
        assert command is not None, "only one that is there is asked"
        while not self._is_stopping and command.has_begun and command.exit_status is None:
            time.sleep(_LOOK)
        return command.wait_status

    def stop(self) -> None:
        """Request the end of the run. ``poll`` continues until ``Finished``."""
        self._is_stopping = True
        for attachment in self._members:
            attachment.change([Stop()])

    def hurry(self) -> bool:
        """
        Discard the records that are still to be emitted after the end, and count them as lost.

        Return False if no member of the group discarded any.
        """
        gained = [attachment.hurry() for attachment in self._members]
        return any(gained)

    def end_command(self) -> int | None:
        """Send SIGTERM to the command and return its wait status. None is as for ``Attachment.end_command``."""
        if self._command is not None:
            return self._command.end()
        return next((status for each in self._members if (status := each.end_command()) is not None), None)

    def wake(self) -> None:
        """Make ``poll`` read the records that have arrived, without waiting for more."""
        for attachment in self._members:
            attachment.wake()

    # Queries and changes

    @property
    def probes(self) -> Sequence[Probepoint]:
        """Probepoints of all programs. Their ``number`` counts the definitions of all programs."""
        self._numbers.look(self._members)
        return self._numbers.probes

    @property
    def is_debugging(self) -> bool:
        """True while a debugger runs for a process that was handed to it."""
        return any(attachment.is_debugging for attachment in self._members)

    @property
    def tracer(self) -> int | None:
        """The process id of the tracer of the processes in scope, or None if there is no tracer."""
        return next((each.tracer for each in self._members if each.tracer is not None), None)

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """The places that match a pattern and have no probepoint."""
        return [
            each._replace(number=self._numbers.definition(member, each.number))
            for member, attachment in enumerate(self._members)
            for each in attachment.left_out
        ]

    @property
    def mapped_files(self) -> dict[str, str]:
        """The files that processes have mapped as code: the path of each file name."""
        found: dict[str, str] = {}
        for attachment in self._members:
            found |= attachment.mapped_files
        return found

    @property
    def members(self) -> Sequence[Attachment]:
        """The attachments of the single programs, the principal's first."""
        return tuple(self._members)

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts so far, in the order of ``probes``."""
        self._numbers.look(self._members)
        return self._numbers.placed([attachment.counts() for attachment in self._members])

    def remove(self, probes: Sequence[int]) -> None:
        """Remove probepoints, which ``poll`` reports as REMOVED; raise IndexError if a number does not exist."""
        count = len(self.probes)
        for probe in probes:
            if not 0 <= probe < count:
                raise IndexError(f"there is no probepoint {probe}: there are {count}")
        for member, attachment in enumerate(self._members):
            own = [number for owner, number in map(self._numbers.owner, probes) if owner == member]
            if own:
                attachment.change([ProbeRemoval(own)])

    def local_variables(self) -> list[int]:
        """Return the local variables, which all programs share."""
        return self._members[0].local_variables()

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables, which all programs share, a list for each CPU."""
        return self._members[0].cpu_variables()

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the keyed tables, which all programs share."""
        return self._members[0].tables()

    def change(self, changes: Sequence[Change]) -> None:
        """Make changes of variables, tables and probepoints in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[ValueChange]) -> None:
        """Change local variables and tables, which all programs share."""
        self._members[0].change(changes)

    @property
    def globals(self) -> GlobalVariables | None:
        """The global variables, None if the programs have none."""
        return self._globals

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables with the indices from ``first`` to ``last``, by default all, to zero."""
        self._members[0].change([VariableReset(first, last)])
