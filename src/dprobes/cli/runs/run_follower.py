"""The part of a run after the insertion: output of its records, messages, Ctrl-C, and the summary."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from dprobes.cli import console
from dprobes.cli.scope_and_engine import note_uprobe_holders
from dprobes.engines.engine_interface import (
    OBJECTS_BETWEEN_COLLECTIONS,
    Begun,
    Finished,
    Notice,
    Pause,
    RecordBatch,
    StateEvent,
    Stop,
)
from dprobes.escapes import escaped
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.keyed_tables import FAULTS
from dprobes.rpn.program_needs import patched_definitions
from dprobes.target.module_lookup import advice_on_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from dprobes.cli.console import Progress
    from dprobes.cli.output.run_outputs import Outputs
    from dprobes.cli.output.run_summary import SummaryOptions
    from dprobes.cli.runs.early_interrupt import EarlyInterrupt
    from dprobes.engines.engine_interface import Attachment, Counts, Event, Scope
    from dprobes.rpn.rpn_program import Program

__all__ = ["Run"]

_IMPATIENCE = 1.0
"""Seconds within which a second Ctrl-C overrides the handling of the first one."""


_BEGINNING = 5.0
"""Seconds for which a run with a command waits for its first probepoint before its duration begins."""

_HELD_MAX = 1 << 17
"""Upper bound of the number of records that outputs buffer."""


class _Time:
    """
    The maximum duration of a run in seconds, None for no limit, counted from the insertion of its probepoints.

    A command is probed as it maps files, after its start. The duration therefore begins with the first inserted
    probepoint, if that exists within ``_BEGINNING`` seconds.
    """

    def __init__(self, duration: float | None, attachment: Attachment, *, is_command: bool) -> None:
        self._duration = duration
        self._attachment = attachment
        self._awaits_first = is_command
        self._until: float | None = None
        self._starts: float | None = None
        """The latest time at which the duration begins."""
        self._is_ended = False
        self.is_over = False
        self._changed = threading.Condition()

    def begin(self, *, has_probepoints: bool) -> None:
        """
        Start the measurement of ``--duration``, once all possible probepoints are inserted.

        Without probepoints (``has_probepoints``), a launched command has some time to load a module that is probed.
        """
        self._awaits_first = self._awaits_first and not has_probepoints
        self._set(_BEGINNING if self._awaits_first else 0.0)

    def first(self) -> None:
        """Start the measurement of ``--duration`` if it waited for the first probepoint."""
        if self._awaits_first and self._starts is not None:
            self._awaits_first = False
            self._set(0.0)

    def _set(self, delay: float) -> None:
        with self._changed:
            now = time.monotonic()
            self._starts = now + delay
            self._until = None if self._duration is None else now + max(self._duration, delay)
            self._changed.notify_all()

    def await_beginning(self) -> None:
        """Wait until the duration begins, or the run is over."""
        with self._changed:
            while not self._is_ended:
                remaining = None if self._starts is None else self._starts - time.monotonic()
                if remaining is not None and remaining <= 0:
                    break
                self._changed.wait(remaining)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Return a context manager that ends the attachment when the duration is over, unless the block ends first."""
        thread = threading.Thread(target=self._count, daemon=True)
        if self._duration is not None:
            thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._is_ended = True
                self._changed.notify_all()
            if self._duration is not None:
                thread.join()

    def _count(self) -> None:
        with self._changed:
            while not self._is_ended:
                remaining = None if self._until is None else self._until - time.monotonic()
                if remaining is not None and remaining <= 0:
                    self.is_over = True
                    break
                self._changed.wait(remaining)
        if self.is_over:
            self._attachment.change([Stop()])


class Run:
    """
    Attachment of a program that is followed to its end, or for ``duration`` seconds.

    ``outputs`` write the records. ``progress`` shows slow operations before the first and after the last record.
    ``summary`` has the options of the table at the end. With ``exit_status``, the run has the exit status of the
    command. Hits that ``filters`` refuse produce no records; the end of the run reports this.
    """

    def __init__(
        self,
        program: Program,
        attachment: Attachment,
        outputs: Outputs,
        scope: Scope,
        progress: Progress,
        summary: SummaryOptions,
        *,
        exit_status: bool,
        filters: Sequence[str] = (),
        duration: float | None = None,
    ) -> None:
        self._program = program
        self._summary = summary
        self._filters = filters
        self._progress = progress
        self._attachment = attachment
        self._outputs = outputs
        self._scope = scope
        self._argv = scope.command
        self._time = _Time(duration, attachment, is_command=bool(scope.command))
        self._gone: set[int] = set()
        """The probepoints that have been removed or disabled."""
        self._may_end_itself = not scope.command and not any(
            instruction.row.syntax == "exit <code>" for code in program.bodies() for instruction in code.instructions
        )
        """True if the run ends with its last probepoint, because no other work such as a core dump is in progress."""
        self._announces = not scope.command and scope.endpoint is None
        self._has_begun = False
        self._has_met_obstacle = False
        self._active: set[int] = set()
        """The probepoints that are or were active in a process."""
        self._exit_status = exit_status
        self._awaited = ""
        """The condition that probepoints wait for, as a clause."""
        self._inserted = False
        self._last_signal = float("-inf")
        self._asked_to_stop = False
        self._named_holders = False
        self._is_early = False
        self._reader_is_gone = False
        self._unflushed: deque[Sequence[tuple[int, bytes]]] = deque()
        """The last written records, some of which may not have arrived yet."""
        self._unflushed_count = 0
        self._lost: Counter[int] = Counter()
        """Number of records by probepoint that could not be written."""
        self._has_failed = False
        self._ended_by: int | None = None

    def follow(self, early: EarlyInterrupt) -> Finished | None:
        """
        Write records and messages until the run ends; return its last event, None if the engine reported none.

        ``early`` has recorded a Ctrl-C before this call.
        """
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup(1) sets it
            ending.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._on_signal) for number in ending}
        self._is_early = early.came
        if early.came:
            self._on_signal(signal.SIGINT, None)
        finished = None
        gc.freeze()
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
        gc.enable()
        try:
            with self._time.counting():
                for event in self._attachment.poll():
                    try:
                        finished = self._on_event(event) or finished
                    except BrokenPipeError:
                        self._stop_writing()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return finished

    @property
    def is_over_in_time(self) -> bool:
        """True if the run ended because its duration (``--duration``) is over."""
        return self._time.is_over

    def await_beginning(self) -> None:
        """
        Wait until all processes in scope are probed, a command's first probepoint is inserted, or the run has ended.

        For the first probepoint, wait at most ``_BEGINNING`` seconds.
        """
        self._time.await_beginning()

    def end_command(self, finished: Finished | None) -> Finished | None:
        """
        Send SIGTERM to a launched command that still runs, and return ``finished`` with its exit status.

        None as ``finished``, an interrupted run, is returned unchanged.
        """
        if finished is None or finished.exit_status is not None or not self._argv:
            return finished
        status = self._attachment.end_command()
        if status is None and self._scope.endpoint is None:
            console.warning("the command continues: it did not end on SIGTERM")
        return finished._replace(exit_status=status)

    def _on_event(self, event: Event) -> Finished | None:
        match event:
            case RecordBatch(records):
                self._write(records)
            case Pause():
                if not self._reader_is_gone:
                    self._flush()
            case StateEvent():
                self._on_state(event)
            case Begun():
                self._progress.end()
                self._has_begun = True
                self._time.begin(has_probepoints=self._inserted)
                self._announce()
                self._end_without_probepoints()
            case Notice(message, hint, is_warning, details):
                (console.warning if is_warning else console.note)(message, hint, details)
            case Finished():
                self._progress.end()
                self._asked_to_stop = True
                if not self._reader_is_gone:
                    self._flush()
                    if self._outputs.is_waiting:
                        console.note("records wait until standard output is read; Ctrl-C discards them")
                    self._flush(is_last=True)
                return event._replace(counts=self._without_lost(event.counts)) if self._lost else event
            case _:
                assert_never(event)
        return None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._attachment.is_debugging:
            return
        now = time.monotonic()
        recent = now - self._last_signal < _IMPATIENCE
        self._last_signal = now
        if number != signal.SIGINT:
            self._ended_by = number
        if self._asked_to_stop and self._outputs.give_up():
            return
        if self._attachment.hurry():
            return
        if number == signal.SIGINT and self._argv and not recent:
            # The terminal sends Ctrl-C to the command as well, which handles it. Two in quick succession end the run.
            return
        if self._asked_to_stop and recent:
            console.warning("ended before everything was written; the probepoints are removed as soon as possible")
            os._exit(128 + number)
        self._asked_to_stop = recent or number != signal.SIGINT or not self._argv
        self._is_early |= not (self._has_begun or self._has_met_obstacle)
        self._progress.begin("removing the probepoints")
        self._attachment.change([Stop()])

    def _write(self, records: Sequence[tuple[int, bytes]]) -> None:
        if self._reader_is_gone:
            return
        self._unflushed.append(records)
        self._unflushed_count += len(records)
        while self._unflushed_count - len(self._unflushed[0]) > _HELD_MAX:
            self._unflushed_count -= len(self._unflushed.popleft())
        self._note(self._outputs.write(self._attachment.probes, records))

    def _flush(self, *, is_last: bool = False) -> None:
        self._note(self._outputs.flush(is_last=is_last))
        if not self._outputs.is_holding:
            self._unflushed.clear()
            self._unflushed_count = 0

    def _note(self, lost: int) -> None:
        """Count the last ``lost`` records as not written; the first time, end the run."""
        for records in reversed(self._unflushed):
            if lost <= 0:
                break
            self._lost.update(probe for probe, _ in records[-lost:])
            lost -= len(records)
        if self._outputs.problem is not None and not self._has_failed:
            self._has_failed = True
            console.error(f"{self._outputs.problem}; the probepoints are removed")
            self._attachment.change([Stop()])

    def _without_lost(self, counts: Sequence[Counts]) -> tuple[Counts, ...]:
        """Return the counts, with records that were not written counted as lost."""
        return tuple(
            replace(each, records=each.records - self._lost[probe], lost=each.lost + self._lost[probe])
            for probe, each in enumerate(counts)
        )

    def _stop_writing(self) -> None:
        """Remove the probepoints and print the results, because the output has no reader any more, as in ``| head``."""
        self._reader_is_gone = True
        self._outputs.abandon()
        self._attachment.change([Stop()])

    def _on_state(self, event: StateEvent) -> None:
        if event.state is ProbeState.ACTIVE:
            self._inserted = True
            self._time.first()
            self._active.update(event.probes)
            self._announce()
        if event.state in (ProbeState.DISABLED, ProbeState.REMOVED):
            self._gone.update(event.probes)
            self._end_without_probepoints()
        if event.state is ProbeState.COMPILED:
            self._awaited = event.detail
        if event.state.is_obstacle:
            self._has_met_obstacle = True
            where, outcome = (f"in process {event.pid}", "not inserted there") if event.pid else ("", "not inserted")
            console.warning(event.state.line(event.detail, where, outcome))
        if event.state is ProbeState.CONFLICT and not self._named_holders:
            self._named_holders = True
            note_uprobe_holders()

    def _end_without_probepoints(self) -> None:
        """End the run if no hit is possible any more: every definition had probepoints, and all are gone."""
        probes = self._attachment.probes
        is_last = self._may_end_itself and self._has_begun and not self._asked_to_stop and not self._time.is_over
        never = {index for index, probe in enumerate(probes) if probe.never_returns}
        if not is_last or not probes or len(self._gone | never) < len(probes):
            return
        if {probe.number for probe in probes} == set(range(len(self._program.definitions))):
            self._asked_to_stop = True
            if self._gone:
                console.note("all probepoints have been removed or disabled: the run ends")
            self._attachment.change([Stop()])

    def _announce(self) -> None:
        """Print once that recording has begun, as soon as everything in scope is probed."""
        if self._announces and self._has_begun and self._active and not self._asked_to_stop:
            self._announces = False
            are = "s are" if len(self._active) > 1 else " is"
            is_patched = bool(patched_definitions(self._program))
            what, state = ("function", "patched") if is_patched else ("probepoint", "active")
            console.note(f"{len(self._active)} {what}{are} {state}; Ctrl-C ends the run")

    def conclude(self, finished: Finished | None) -> int:
        """Print the summary and reasons for missing hits, and return the exit status; 1 if ``finished`` is None."""
        if finished is None:
            return 1
        if not self._program.definitions or patched_definitions(self._program):  # they have no hits
            return self._status(finished)
        self._summarize(finished)
        if finished.cut_short:
            console.error("the run was cut short: the summary may be incomplete")
            return 1
        if not self._inserted:
            self._explain_absence()
        elif not any(count.hits for count in finished.counts):
            self._explain_silence(has_faulted=any(count.faulted for count in finished.counts))
        return self._status(finished)

    def _summarize(self, finished: Finished) -> None:
        """Print the summary: the counts of each probepoint, the faults, and the filters."""
        from dprobes.cli.output.run_summary import fault_lines, summary

        console.write(summary(self._program, self._attachment, finished.counts, self._summary, console.width()))
        if any(table.name == FAULTS for table in self._program.tables) and (
            text := "\n".join(fault_lines(self._program, self._attachment.tables()))
        ):
            console.write(text)
        if self._filters and any(count.hits for count in finished.counts):
            console.write(_filtered_line(self._filters))

    def _explain_silence(self, *, has_faulted: bool) -> None:
        """Print why inserted probepoints had no hits; with ``has_faulted`` the probed instructions faulted at each."""
        if has_faulted:
            console.note("the probepoints were inserted, but the probed instruction faulted at every hit")
            return
        from dprobes.cli.output.run_summary import advice_on_unreached

        self._progress.begin("searching for the functions that were called instead")
        hint = advice_on_unreached(self._attachment.probes, self._scope, self._attachment.mapped_files)
        self._progress.end()
        console.note("the probepoints were inserted, but never reached", hint)

    def _explain_absence(self) -> None:
        """Print why no probepoint was inserted."""
        probes = self._attachment.probes
        if self._is_early:
            console.note("the run was ended before a probepoint was inserted")
        elif self._awaited:
            console.note(f"the probepoints have never been active: {self._awaited}")
        elif not probes:
            name = self._program.name
            message = f"no probepoint was inserted: no process mapped '{name}' as code"
            console.error(message, advice_on_name(name, self._attachment.mapped_files))
        # The reasons for those that were found were printed before.
        elif all(probe.never_returns for probe in probes):
            functions = list(dict.fromkeys(f"'{escaped(probe.function)}'" for probe in probes))
            returns = "never returns" if len(functions) == 1 else "never return"
            console.error(f"no probepoint was inserted: {', '.join(functions)} {returns}")
        elif self._time.is_over and not self._has_met_obstacle:
            console.error("no probepoint was inserted before --duration ended")
        else:
            console.error("no probepoint was inserted")

    def _status(self, finished: Finished) -> int:
        """
        Return the exit status of dprobes.

        It is 1 after a failure. With ``--exit-status``, it is that of the command, or 128 plus the number of the signal
        that killed it. If a signal ended the run, it is 128 plus the signal's number. Otherwise it is 0, or 1 if no
        probepoint has become active.
        """
        if self._has_failed:
            return 1
        if self._exit_status and finished.exit_status is not None:
            code = os.waitstatus_to_exitcode(finished.exit_status)
            return code if code >= 0 else 128 - code
        if self._ended_by is not None:
            return 128 + self._ended_by
        return 0 if self._inserted or self._is_early or self._awaited or not self._program.definitions else 1


def _filtered_line(filters: Sequence[str]) -> str:
    """Return the message about hits that are counted and have no record."""
    shown = " and ".join(f"'{escaped(each)}'" for each in filters)
    return f"all hits are counted, and make a record where {shown} holds"
