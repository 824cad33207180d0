"""
The client's side of a tracer: its start, the replies to its requests, and its messages for each program.

A tracer may have several programs, and runs until the last one ends. So there is one conversation for each tracer, and
a ``ProgramRun`` for each program. One of the threads in ``await_messages`` reads from the tracer, and handles all
messages; the others sleep until they are woken up. A thread that leaves ``await_messages`` lets another one read.

The client also has the crash restorer: when the tracer is killed, it restores the original bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING, assert_never

from dprobes.engines import refusals
from dprobes.engines.command_launcher import LOOK, Command
from dprobes.engines.engine_interface import Begun, Finished
from dprobes.engines.ptrace.client.crash_restorer import CrashRestorer
from dprobes.engines.ptrace.client.program_run import death_notices, event_of, obstacle_text
from dprobes.engines.ptrace.client.tracer_link import Inbox, Outbox, TracerGuard, readable, start_tracer
from dprobes.engines.ptrace.tracer_messages import (
    Attach,
    Attached,
    Done,
    Dumped,
    Ended,
    Failed,
    Forked,
    InPlace,
    Insert,
    Kind,
    Left,
    Mapped,
    MemoryReleased,
    MemoryShared,
    ModuleMapped,
    NotInserted,
    Overloaded,
    ProbeStatus,
    Refused,
    Removed,
    Replace,
    Replaced,
    SitesPatched,
    Warned,
    load_message,
    unpack_record,
)
from dprobes.errors import EngineError, SourceError, TargetError
from dprobes.platform.linux.process_calls import allow_tracer
from dprobes.platform.linux.procfs import ThreadIdentity
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.process_maps import command_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.engine_interface import Scope
    from dprobes.engines.ptrace.breakpoint_sites import Sites
    from dprobes.engines.ptrace.client.program_run import NativeSide, ProgramRun, QueueEntry, Request
    from dprobes.engines.ptrace.client.restorer_process import RestorerProcess
    from dprobes.engines.ptrace.tracer_messages import Start
    from dprobes.engines.shared_globals import GlobalVariables

__all__ = ["Conversation", "NotFollowedError"]

_PATIENCE = 10
"""Maximum number of seconds to wait for the end of a tracer."""

_PATIENCE_AT_DEATH = 0.5
"""Maximum number of seconds for which a dying tracer is held until its last messages are read."""

_LOOK_AT_RINGS = 0.01
"""Seconds between checks for records of handlers in processes, which no message announces."""

_LONG = 1.0
"""Maximum number of seconds between two checks of a run: another follower may have consumed the notification."""

_ENDED = "the program that is to be replaced has ended"

_Known = dict[tuple[int, int, str], "Sites"]


class NotFollowedError(EngineError):
    """Error that a tracer accepts no program for a process: it is about to end, or has detached the process."""


class Conversation:
    """
    Exchange of messages with a tracer, which is started for the program of ``run``.

    ``start`` describes the program; ``module`` is the name of its module. ``variables`` has the global variables if
    they are shared with other programs. The constructor raises ``EngineError`` if the tracer cannot be started.
    """

    def __init__(self, run: ProgramRun, start: Start, module: str, variables: GlobalVariables | None) -> None:
        self.globals = variables
        self._runs: dict[int, ProgramRun] = {run.number: run}
        """Programs for which messages may still arrive, by number."""
        self._members = {run}
        """Programs whose sessions have not left the conversation yet."""
        self._programs = 1
        self._candidate: ProgramRun | None = None
        """Program that is about to be inserted. ``_replaces`` is the program that it replaces."""
        self._replaces: ProgramRun | None = None
        self._refusal: EngineError | None = None
        self._asked: dict[tuple[int, int, str], ModuleMapped] = {}
        self._command: Command | None = None
        self._restorer = CrashRestorer()
        self._restored = 0
        self._cleared = (0, 0)
        self._known_processes: set[int] = set()
        self._is_over = False
        self._inserting = threading.Lock()
        """Lock of the thread that inserts a program: one at a time."""
        self._lock = threading.Lock()
        """Lock of a thread that handles messages, or accesses the programs."""
        self._reading = threading.Lock()
        """Lock of the thread that reads from the tracer."""
        self._waiting: set[ProgramRun] = set()
        self._join(run)
        self._restorer_process = _restorer_process() if run.native is not None else None
        if self._restorer_process is not None:
            start = dataclasses.replace(start, restorer=self._restorer_process.address)
        try:
            self._tracer, from_tracer, to_tracer = start_tracer(start, module)
        finally:
            if self._restorer_process is not None:
                self._restorer_process.begun()
        self._inbox = Inbox(from_tracer)
        self._guard: TracerGuard | None = None
        self._guarding = threading.Lock()
        """Lock of a thread that creates a guard, or decides to wait for the tracer without one."""
        self._is_awaited = False
        """True if no guard may be created any more."""
        self._with_memory: set[int] = set()
        """Processes that have had memory for handlers."""
        self._heard = time.monotonic_ns()
        self._is_listening = False
        """True while a thread waits for a message, and handles none."""
        self.outbox = Outbox(to_tracer)
        self.outbox.send(start)

    @property
    def tracer(self) -> int:
        """Process id of the tracer."""
        return self._tracer.pid

    def attach(self, scope: Scope) -> None:
        """Attach the tracer to a process, or start a command and attach it to that."""
        if scope.pid is None:
            # The Yama module extends this permission to descendants: the tracer, and a debugger after ``exit 1``.
            self._command = Command(scope.command, allow_tracer, scope.output)
        # Not earlier: a process that is forked must have only one thread.
        if self._restorer_process is None:
            self._begin_guard()
        else:
            self._restorer_process.watch(self._begin_guard)
            self._restorer_process.await_watch()
        is_launching = self._command is not None or scope.program is not None
        pid = scope.pid if self._command is None else self._command.pid
        self.outbox.send(Attach(pid or 0, launching=is_launching))

    def _begin_guard(self) -> None:
        """Watch for the tracer's death in the client, because there is no restorer process, or it was killed."""
        with self._guarding:
            if not self._is_awaited:
                self._guard = TracerGuard(self._tracer, self._restore, self._clear)

    def wait_for_command(self) -> int | None:
        """Wait for the end of the command and return its wait status, or None if no command was executed."""
        return None if self._command is None or not self._command.has_gone else self._command.wait()

    def end_command(self) -> int | None:
        """Send SIGTERM to the command and return its wait status, or None without one. It must no longer be traced."""
        return None if self._command is None else self._command.end()

    def leave(self, run: ProgramRun) -> None:
        """Record that a session has ended its program; after the last one, close the connection to the tracer."""
        with self._lock:
            if run.native is not None:
                run.native.close()  # under the lock, so that no message for it is being handled
            if run not in self._members:
                return
            self._members.discard(run)
            if self._members:
                return
        self.close()

    def close(self) -> None:
        """Close the pipes, which makes the tracer exit, and wait for its end."""
        self._members.clear()
        self.outbox.close()
        self.await_end()
        if self._restorer_process is not None:
            self._restorer_process.close()
            if self._restorer_process.was_killed:
                self._remove_left()
        self._inbox.close()
        if self._command is not None:
            self._command.close()

    def await_end(self) -> None:
        """Wait for the end of the tracer, at most ``_PATIENCE`` seconds, unless it still serves programs."""
        if not self._is_over and self._members:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait_for_tracer(_PATIENCE)

    def _remove_left(self) -> None:
        """Remove the remains of the run from processes, because the restorer was killed."""
        from dprobes.engines.ptrace.client.left_removal import remove_left

        for pid in self._with_memory:
            with contextlib.suppress(OSError, EngineError, TargetError):
                remove_left(pid)

    def _wait_for_tracer(self, seconds: float | None = None) -> int:
        with self._guarding:
            self._is_awaited = True
        return self._tracer.wait(seconds) if self._guard is None else self._guard.wait(seconds)

    # Insertion and replacement of programs

    def insert(self, run: ProgramRun, start: Start, pid: int) -> None:
        """
        Insert another program into a traced process, and into the processes that this process has started.

        Raise ``EngineError`` if that is not possible. The error is a ``NotFollowedError`` if this tracer no longer
        traces the process, so that another tracer can.
        """
        known: _Known = {}
        with self._inserting:
            # Do this without the lock, because it may take some time. Errors are reported when the tracer asks.
            with contextlib.suppress(SourceError, TargetError):
                _prepare(run, dict(self._asked), known)
            with self._lock:
                if not self._members or self._is_over:
                    raise NotFollowedError("the process is not traced")
                self._enter(run, None)
                self.outbox.send(Insert(dataclasses.replace(start, number=run.number), pid, known))
            self._await_answer(run)

    def replace(self, former: ProgramRun, run: ProgramRun, start: Start) -> None:
        """
        Replace the program ``former``, which ends, by another one.

        Raise ``EngineError``, ``SourceError`` or ``TargetError`` if that is not possible; then ``former`` continues.
        """
        known: _Known = {}
        with self._inserting:
            _prepare(run, dict(self._asked), known)
            with self._lock:
                if former.is_over:
                    raise EngineError(_ENDED)
                _prepare(run, self._asked, known)
                probes = run.answers.probes
                if probes and all(probe.state.is_obstacle for probe in probes):
                    from dprobes.engines.refusals import nothing_to_insert

                    raise nothing_to_insert(probes)
                self._enter(run, former)
                self.outbox.send(Replace(dataclasses.replace(start, number=run.number), former.number, known))
            self._await_answer(run)

    def _enter(self, run: ProgramRun, former: ProgramRun | None) -> None:
        run.number, self._programs = self._programs, self._programs + 1
        self._join(run, former)
        self._candidate, self._replaces, self._refusal = run, former, None
        self._runs[run.number] = run
        self._members.add(run)

    def _join(self, run: ProgramRun, former: ProgramRun | None = None) -> None:
        """
        Set a program's rank, its place in the order of insertion, and connect its handlers with those of others.

        A program that replaces ``former`` has the rank of that.
        """
        run.rank = run.number if former is None else former.rank
        if (native := run.native) is not None:
            native.join(run.rank, lambda: [r.native for r in self._runs.values() if r.native not in (None, native)])

    def _await_answer(self, run: ProgramRun) -> None:
        """Wait until a program is inserted; raise ``EngineError`` if it is not."""
        try:
            while self._candidate is run:
                self.await_messages(run)
        except BaseException:
            self.outbox.end(run.number)
            self.leave(run)
            raise
        if self._refusal is not None:
            self.leave(run)
            raise self._refusal

    def _on_replaced(self) -> None:
        former = self._replaces
        assert former is not None
        # Keep the debuggers of the former program, with which their processes were started.
        run = self._settle_candidate(None)
        run.debuggers = former.debuggers
        del self._runs[former.number]
        self._members.discard(former)
        former.replaced()
        former.wake()

    def _on_refusal(self, refusal: EngineError) -> None:
        del self._runs[self._settle_candidate(refusal).number]

    def _settle_candidate(self, refusal: EngineError | None) -> ProgramRun:
        run = self._candidate
        assert run is not None
        self._refusal = refusal
        self._candidate = None
        run.wake()
        return run

    # Messages from the tracer

    @property
    def heard(self) -> int:
        """Monotonic time in nanoseconds; all messages that the tracer sent earlier have been handled."""
        now = time.monotonic_ns()
        # Another thread may wait for a message for as long as there is none.
        return now if self._is_listening and not readable([self._inbox.descriptor], 0) else self._heard

    def await_messages(self, run: ProgramRun) -> None:
        """Wait until something may have arrived for ``run``, and handle all messages that have."""
        seconds = None if run.debuggers.is_idle else LOOK
        if run.native is not None:
            seconds = 0 if run.native.is_busy else _LOOK_AT_RINGS
        # Register before trying to read: a thread that stops reading wakes up one that is registered.
        self._waiting.add(run)
        try:
            if self._reading.acquire(blocking=False):
                try:
                    self._is_listening = True
                    ready = readable([self._inbox.descriptor, run.bell], seconds)
                    now, self._is_listening = time.monotonic_ns(), False
                    if self._inbox.descriptor in ready:
                        with self._lock:
                            self._read(run)
                    if not self._inbox.has_more:
                        self._heard = now
                finally:
                    self._is_listening = False
                    self._reading.release()
            else:
                readable([run.bell], _LONG if seconds is None else seconds)
        finally:
            self._waiting.discard(run)
            self._let_another_read()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(run.bell)
        if run.native is not None and not run.is_over:
            if run.native.is_due:
                with self._lock:  # others use its data in their plans
                    request = run.native.due(run.answers)
                if request is not None:
                    self.outbox.send(request)
            if (release := run.native.to_be_released(run.number)) is not None:
                self.outbox.send(release)
        if seconds is not None and not run.is_over:
            # Skip a process that was handed to the debugger just now: earlier items are consumed first.
            run.items += run.debuggers.look()

    def _let_another_read(self) -> None:
        if not self._reading.locked():
            for other in tuple(self._waiting)[:1]:
                other.wake()

    def _read(self, reader: ProgramRun) -> None:
        if self._is_over:
            return
        frames, ended = self._inbox.read()
        concerned: set[ProgramRun] = set()
        for kind, payload in frames:
            if kind is Kind.RECORD:
                number, probe, record = unpack_record(payload)
                if (run := self._runs.get(number)) is not None:
                    run.take_record(probe, record)
                    concerned.add(run)
                continue
            concerned |= set(self._runs.values())
            try:
                self._on_message(load_message(payload))
            except Exception as error:  # noqa: BLE001 - ``poll`` raises it
                reader.items.append(error)
        if ended and not self._is_over:
            concerned |= set(self._runs.values())
            self._on_death()
        for run in concerned:
            if run is not reader:
                run.wake()

    def _on_message(self, message: object) -> None:
        match message:
            case ModuleMapped():
                self._answer(message)
            case ProbeStatus() | Dumped() | Warned():
                self._give(event_of(message), message.program)
                if isinstance(message, ProbeStatus):
                    self._on_placed(message)
            case Overloaded() | Left() | MemoryReleased():
                self._on_program(message)
            case Replaced() | InPlace() | NotInserted():
                self._on_candidate(message)
            case Attached():
                if self._command is not None:
                    self._command.go()
                for first in self._runs.values():
                    if first is not self._candidate:
                        first.items.append(Begun())
            case Ended() | Refused() | Failed() | Done():
                self._on_ending(message)
            case Mapped() | Forked() | ThreadIdentity() | MemoryShared() | SitesPatched() | Removed(_, ()):
                self._on_process(message)
            case _:
                self._restorer.note(message)

    def _on_process(self, message: Mapped | Forked | ThreadIdentity | MemoryShared | SitesPatched | Removed) -> None:
        """Forward a report about a process to all programs that have handlers in processes."""
        match message:
            case Mapped():
                self._remember(message)
            case Forked(pid, parent):
                self._remember(message)
                if parent in self._with_memory:
                    self._with_memory.add(pid)
                for native in self._natives():
                    native.copied(pid, parent)
            case ThreadIdentity():
                for native in self._natives():
                    native.told(message)
            case MemoryShared() | SitesPatched():
                self._with_memory.add(message.pid)
                self._on_native(message)
            case Removed(pid):
                self._restorer.note(message)
                for native in self._natives():
                    native.left(pid)
            case _:
                assert_never(message)

    def _on_program(self, message: Overloaded | Left | MemoryReleased) -> None:
        """Forward a report about one program to its run."""
        if (run := self._runs.get(message.program)) is None:
            return
        match message:
            case Overloaded():
                run.take_overload(message)
            case Left(_, process):
                run.items += run.debuggers.add(process)
            case MemoryReleased():
                if run.native is not None:
                    run.native.released(message)
            case _:
                assert_never(message)

    def _on_candidate(self, message: Replaced | InPlace | NotInserted) -> None:
        """Handle the result of an insertion or replacement."""
        match message:
            case Replaced():
                self._on_replaced()
            case InPlace(number):
                if self._candidate is not None and self._candidate.number == number:
                    self._settle_candidate(None)
                self._give(Begun(), number)
            case NotInserted(_, "", None):
                self._on_refusal(NotFollowedError("the process is not traced"))
            case NotInserted(_, text, obstacle):
                self._on_refusal(EngineError(text if obstacle is None else obstacle_text(obstacle)))
            case _:
                assert_never(message)

    def _on_ending(self, message: Ended | Refused | Failed | Done) -> None:
        """Handle the tracer's report that one program, or all programs, have ended or could not be inserted."""
        match message:
            case Ended(number):
                if (ended := self._runs.pop(number, None)) is not None:
                    ended.end(message)
            case Refused(text):
                self._on_end(lambda _: EngineError(text))
            case Failed(pid, reason, number, shares_with):
                error = refusals.attach_error(pid, reason, number, shares_with)
                self._on_end(lambda _: error)
            case Done():
                self._on_end(lambda _: message)
            case _:
                assert_never(message)

    def _natives(self) -> list[NativeSide]:
        """Return the native sides of all programs that have one."""
        return [run.native for run in self._runs.values() if run.native is not None]

    def _on_placed(self, message: ProbeStatus) -> None:
        """Request jumps to handlers in place of the breakpoints whose placement a message reports."""
        run = self._runs.get(message.program)
        if run is None or run.native is None or message.state is not ProbeState.ACTIVE:
            return
        request = run.native.placed(message.program, message.pid, message.probes, run.answers)
        if request is not None:
            self.outbox.send(request)

    def _on_native(self, message: MemoryShared | SitesPatched) -> None:
        for number in message.programs if isinstance(message, SitesPatched) else (message.program,):
            run = self._runs.get(number)
            if run is None or run.native is None:
                continue
            request: Request | None
            if isinstance(message, SitesPatched):
                request = run.native.patched(number, message)
            else:
                request = run.native.shared(message, run.answers)
            if request is not None:
                self.outbox.send(request)

    def _remember(self, message: Mapped | Forked) -> None:
        """Record reported mappings and forks in the process images of all runs that have some."""
        for images in dict.fromkeys(run.images for run in self._runs.values() if run.images is not None):
            match message:
                case Mapped(pid, 0, mappings):
                    for mapping in mappings:
                        images.mapped(pid, time.monotonic_ns(), mapping)
                case Mapped(pid, since, mappings):
                    images.began(pid, since, mappings, command_name(pid))
                case Forked(pid, parent, when):
                    images.forked(pid, parent, when)

    def _give(self, item: QueueEntry, program: int | None) -> None:
        """Queue an item for a program's run, or with None for all runs."""
        for number, run in self._runs.items():
            if program is None or number == program:
                run.items.append(item)

    def _answer(self, mapped: ModuleMapped) -> None:
        self._asked[mapped.device, mapped.inode, mapped.path] = mapped
        run = self._runs[mapped.program]
        sites, notices = run.answers.sites(mapped)
        self.outbox.send(_with_native(sites, run)._replace(number=mapped.number))
        run.items += notices

    def _on_end(self, item_for: Callable[[ProgramRun], QueueEntry]) -> None:
        self._is_over = True
        if self._candidate is not None:
            no_other = self._replaces is None
            self._on_refusal(NotFollowedError("the process is not traced") if no_other else EngineError(_ENDED))
        for run in self._runs.values():
            run.end(item_for(run))

    def _restore(self) -> None:
        """Restore the original bytes; do not wait for the lock if its owner waits for the tracer, which is dying."""
        for native in self._natives():
            native.disable()
        self._known_processes |= self._restorer.processes
        if self._lock.acquire(timeout=_PATIENCE_AT_DEATH):
            try:
                self._restorer.note_all(self._inbox.read_ahead())
            finally:
                self._lock.release()
        self._restored += self._restorer.restore(tracer=self._tracer.pid)

    def _clear(self) -> None:
        self._cleared = self._restorer.clear()
        self._remove_jumps(self._known_processes)

    def _remove_jumps(self, processes: set[int]) -> None:
        for native in self._natives():
            native.disable()
            self._restored += native.remove(processes)

    def _on_death(self) -> None:
        """Report the tracer's death, and clean up if the guard could not."""
        if self._restorer_process is not None:
            done = self._restorer_process.result()
            self._restored, self._cleared = done.places, (done.cleared, done.left)
        processes = self._restorer.processes
        self._restored += self._restorer.restore()
        if self._restorer_process is not None:
            self._remove_jumps(processes)  # in case that process was killed as well
        status = self._wait_for_tracer()
        cleared, left = (sum(pair) for pair in zip(self._cleared, self._restorer.clear(), strict=True))
        self._restorer.unmap()
        notices = death_notices(status, self._restored, cleared, left)
        for run in self._runs.values():
            run.items += notices
        self._on_end(lambda run: Finished(run.counts_of_received(), cut_short=True))


def _restorer_process() -> RestorerProcess | None:
    """Start the restorer; return None if that fails."""
    from dprobes.engines.ptrace.client.restorer_process import RestorerProcess

    with contextlib.suppress(OSError):
        return RestorerProcess()
    return None


def _prepare(run: ProgramRun, asked: dict[tuple[int, int, str], ModuleMapped], known: _Known) -> None:
    """
    Prepare a new program's sites in the files about which the tracer has already asked for other programs.

    Add them to ``known``. Files that cannot be found any more are skipped, because the tracer will request them again.
    Raise ``TargetError`` or ``SourceError`` if the program cannot be inserted into a file.
    """
    for key in asked.keys() - known.keys():
        prepared = run.answers.prepare(asked[key])
        if prepared is not None:
            sites, notices = prepared
            known[key] = _with_native(sites, run)
            run.items += notices


def _with_native(sites: Sites, run: ProgramRun) -> Sites:
    """Return ``sites`` with the set of probepoints for which jumps will be requested."""
    if run.native is None:
        return sites
    probes = {site.probe for site in sites.sites if site.probe >= 0}
    return sites._replace(native=run.native.native_probes(probes, run.answers))
