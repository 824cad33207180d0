"""
The client's side of a tracer: start it, answer what it asks, and sort what it sends by the program that it is about.

A tracer outlives its program if another one takes the place of that. So there is one conversation for a tracer, and a
``ProgramRun`` for each program. Any thread may ``wait``, and then sees to all that has arrived; what it finds for
others wakes them up.

The client is the tracer's bystander as well: when the tracer dies, it puts the original bytes back at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import select
import subprocess
import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from dprobes.engines import refusals
from dprobes.engines.base import Begun, Counts, Event, Finished, HandedOver, Notice, ProbeState, RecordEvent, StateEvent
from dprobes.engines.debugger import LOOK
from dprobes.engines.launch import Command
from dprobes.engines.ptrace.bystander import Bystander
from dprobes.engines.ptrace.outbox import Outbox
from dprobes.engines.ptrace.syscalls import allow_tracer
from dprobes.engines.ptrace.wire import (
    Attach,
    Attached,
    Done,
    Dumped,
    Failed,
    FrameReader,
    InPlace,
    Kind,
    ModuleMapped,
    NotReplaced,
    Placed,
    ProbeStatus,
    Refused,
    Removed,
    Replace,
    Replaced,
    Warned,
    Watched,
    load_message,
    unpack_record,
)
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.base import Scope
    from dprobes.engines.debugger import Debuggers
    from dprobes.engines.ptrace.answers import Answers
    from dprobes.engines.ptrace.ledger import Ledger
    from dprobes.engines.ptrace.wire import Sites, Start

__all__ = ["Conversation", "ProgramRun"]

_PIPE_SIZE = 1 << 20
"""What the pipe for records is to hold, in bytes; the most that an ordinary user gets (pipe(7))."""

_ENDED = "the program that is to be replaced has ended"


class ProgramRun:
    """Hold what the client knows of one program in a tracer; ``items`` are to be given out, or raised."""

    def __init__(self, answers: Answers, ledger: Ledger) -> None:
        self.answers = answers
        self.ledger = ledger
        self.number = 0
        self.items: deque[Event | Done | Exception] = deque()
        self.received: dict[int, int] = {}
        """How many records have arrived of each probepoint."""
        self.is_over = False
        """Whether no more items will come."""
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.bell)

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far."""
        return self.ledger.counts(len(self.answers.probes))

    def wake(self) -> None:
        """Wake up who waits."""
        os.eventfd_write(self.bell, 1)

    def end(self, item: Event | Done | Exception) -> None:
        """Give out one more item, the last one."""
        self.items.append(item)
        self.is_over = True


class Conversation:
    """
    Start a tracer for the program of ``run`` and exchange messages with it.

    ``start`` describes the program, which is for ``module``. Raise ``EngineError`` if the tracer cannot be started.
    """

    def __init__(self, run: ProgramRun, start: Start, debuggers: Debuggers, module: str) -> None:
        self.current = run
        """The program that the tracer has."""
        self.debuggers = debuggers
        self._candidate: ProgramRun | None = None
        """The one that is about to take its place."""
        self._refusal: EngineError | None = None
        self._programs = 1
        self._asked: dict[tuple[int, int, str], ModuleMapped] = {}
        self._command: Command | None = None
        self._bystander = Bystander()
        self._reader = FrameReader()
        self._lock = threading.Lock()
        """Taken by who reads from the tracer and sees to what has arrived."""
        their_input, to_tracer = os.pipe2(os.O_CLOEXEC)
        self._from_tracer, their_output = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(their_output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        shared = [descriptor for descriptor in (start.ledger, start.globals) if descriptor >= 0]
        try:
            # A session of its own: neither the terminal's signals nor the end of ours reach the tracer by themselves.
            self._tracer = subprocess.Popen(
                [sys.executable, "-P", "-m", refusals.TRACER, str(their_input), str(their_output), module],
                pass_fds=[their_input, their_output, *shared],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(to_tracer)
            os.close(self._from_tracer)
            reason = (error.strerror or str(error)).lower()
            raise EngineError(
                f"the tracer cannot be started: '{sys.executable}': {reason}",
                hint="this user must be able to execute the Python that runs dprobes",
            ) from error
        finally:
            os.close(their_input)
            os.close(their_output)
        self.outbox = Outbox(to_tracer)
        self.outbox.send(start)

    def attach(self, scope: Scope) -> None:
        """Let the tracer take over a process, or a command that is started for that."""
        if scope.pid is not None:
            self.outbox.send(Attach(scope.pid, launching=False))
            return
        # The Yama module extends this to our descendants: the tracer, and a debugger after ``exit 1``.
        self._command = Command(scope.command, allow_tracer)
        self.outbox.send(Attach(self._command.pid, launching=True))

    def wait_for_command(self) -> int | None:
        """Wait for the end of the command and return its wait status, None if there is none."""
        return None if self._command is None else self._command.wait()

    def close(self) -> None:
        """Give the pipes up, with whose end the tracer ends, and wait for that."""
        self.outbox.close()
        os.close(self._from_tracer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._tracer.wait(10)
        if self._command is not None:
            self._command.close()

    # Another program

    def replace(self, former: ProgramRun, run: ProgramRun, start: Start) -> None:
        """
        Put a program in the place of ``former``, which comes to its end.

        Raise ``EngineError`` or ``SourceError`` if that is not possible; then the former one goes on.
        """
        known: dict[tuple[int, int, str], Sites] = {}
        _prepare(run, dict(self._asked), known)  # it may take its time: nobody is to wait for that
        with self._lock:
            if self._candidate is not None:
                raise EngineError("another program is just taking the place of the one that is to be replaced")
            if self.current is not former or former.is_over:
                raise EngineError(_ENDED)
            _prepare(run, self._asked, known)
            run.number, self._programs = self._programs, self._programs + 1
            self._candidate, self._refusal = run, None
            self.outbox.send(Replace(dataclasses.replace(start, number=run.number), known))
        while self._candidate is run:
            self.wait(run)
        if self.current is not run:
            assert self._refusal is not None
            raise self._refusal

    def _on_replaced(self) -> None:
        former, run = self.current, self._candidate
        assert run is not None
        # In this order: whoever follows the former one takes the tracer for his as long as that is the current one.
        self.current, self._candidate = run, None
        former.end(Finished(former.counts()))
        former.wake()
        run.wake()

    def _on_refusal(self, refusal: EngineError) -> None:
        run, self._candidate = self._candidate, None
        self._refusal = refusal
        if run is not None:
            run.wake()

    # What arrives

    def wait(self, run: ProgramRun) -> None:
        """Wait until something may have arrived for ``run``, and see to all that has."""
        if run.bell in _readable([self._from_tracer, run.bell], None if self.debuggers.is_idle else LOOK):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(run.bell)
            return
        with self._lock:
            if run is self.current and not self.debuggers.is_idle:
                run.items += self.debuggers.look()
            # Another thread may have been faster.
            if not self.current.is_over and _readable([self._from_tracer], 0):
                self._read()
                for other in (self.current, self._candidate):
                    if other is not None and other is not run:
                        other.wake()

    def _read(self) -> None:
        data = os.read(self._from_tracer, 1 << 16)
        if not data:
            self._on_death()
        for kind, payload in self._reader.feed(data):
            run = self.current
            if kind is Kind.RECORD:
                probe, record = unpack_record(payload)
                run.received[probe] = run.received.get(probe, 0) + 1
                run.items.append(RecordEvent(probe, record))
                continue
            try:
                self._on_message(run, load_message(payload))
            except Exception as error:  # noqa: BLE001 - whoever gives out the items shall raise it
                run.items.append(error)

    def _on_message(self, run: ProgramRun, message: object) -> None:
        match message:
            case ModuleMapped():
                self._answer(message)
            case Attached():
                if self._command is not None:
                    self._command.go()
                run.items.append(Begun())
            case Refused(text):
                self._on_end(EngineError(text))
            case Failed(pid, reason, number):
                self._on_end(refusals.attach_error(pid, reason, number))
            case ProbeStatus():
                run.items.append(_state_event(message))
            case Placed(pid, breakpoints):
                self._bystander.placed(pid, breakpoints)
            case Removed(pid, addresses):
                self._bystander.removed(pid, addresses)
            case Watched(pid, watches):
                self._bystander.watched(pid, watches)
            case HandedOver():
                run.items += self.debuggers.add(message)
            case Dumped():
                run.items.append(_dump_notice(message))
            case Warned(text, hint):
                run.items.append(Notice(text, hint))
            case Replaced():
                self._on_replaced()
            case InPlace():
                run.items.append(Begun())
            case NotReplaced(text, obstacle):
                self._on_refusal(EngineError(text if obstacle is None else _refusal_text(obstacle)))
            case Done():
                self._on_end(message)

    def _answer(self, mapped: ModuleMapped) -> None:
        self._asked[mapped.device, mapped.inode, mapped.path] = mapped
        run = self.current if mapped.program == self.current.number else self._candidate
        assert run is not None
        sites, notices = run.answers.sites(mapped)
        self.outbox.send(dataclasses.replace(sites, number=mapped.number))
        run.items += notices

    def _on_end(self, item: Event | Done | Exception) -> None:
        self.current.end(item)
        self._on_refusal(EngineError(_ENDED))

    def _on_death(self) -> None:
        """Put the original bytes back, and say what happened."""
        run = self.current
        restored = self._bystander.restore()
        disarmed, armed = self._bystander.disarm()
        code = self._tracer.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        run.items.append(
            Notice(
                f"the tracer {how}; {restored} breakpoints were taken away from outside",
                "a thread that ran into one before that has got a SIGTRAP",
            )
        )
        if disarmed:
            run.items.append(Notice(f"the debug registers of {disarmed} threads were cleared from outside"))
        if armed:
            run.items.append(
                Notice(
                    f"the debug registers of {armed} threads could not be cleared: those threads do not stop",
                    "an access that was watched will end the program with a SIGTRAP",
                )
            )
        received = (run.received.get(n, 0) for n in range(len(run.answers.probes)))
        self._on_end(Finished(tuple(Counts(hits=n, records=n) for n in received), cut_short=True))


def _readable(descriptors: list[int], seconds: float | None) -> list[int]:
    """Wait until one of some descriptors can be read, and return those that can; None is for ever."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def _prepare(
    run: ProgramRun, asked: dict[tuple[int, int, str], ModuleMapped], known: dict[tuple[int, int, str], Sites]
) -> None:
    """Answer for a program what was asked about another one; what cannot be found any more is asked again."""
    for key in asked.keys() - known.keys():
        prepared = run.answers.prepare(asked[key])
        if prepared is not None:
            known[key], notices = prepared
            run.items += notices


def _state_event(message: ProbeStatus) -> StateEvent:
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


def _refusal_text(obstacle: ProbeStatus) -> str:
    event = _state_event(obstacle)
    return f"{event.state.value} in process {event.pid}: {event.detail}; the program before goes on"


def _dump_notice(dumped: Dumped) -> Notice:
    process = f"process {dumped.pid} ({dumped.name})"
    if dumped.problem:
        return Notice(f"no core of {process} in '{dumped.path}': {dumped.problem.rstrip()}; the process goes on")
    return Notice(f"the core of {process} is in '{dumped.path}' ({dumped.size} bytes)", is_warning=False)
