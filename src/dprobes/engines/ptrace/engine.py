"""
The client side of the conversation: start the tracer, send it what it asks for, and hand out what it sends.

What files hold is known to ``answers``. The client is the tracer's bystander as well: when the tracer dies, it puts the
original bytes back at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from dprobes.engines.base import (
    Capability,
    Counts,
    Event,
    Finished,
    Notice,
    Pause,
    ProbeState,
    RecordEvent,
    StateEvent,
)
from dprobes.engines.ptrace import refusals
from dprobes.engines.ptrace.answers import Answers
from dprobes.engines.ptrace.bystander import Bystander
from dprobes.engines.ptrace.debugger import LOOK, Debuggers
from dprobes.engines.ptrace.launch import Command
from dprobes.engines.ptrace.wire import (
    Attach,
    Attached,
    Done,
    Dumped,
    Failed,
    FrameReader,
    HandedOver,
    Kind,
    ModuleMapped,
    Placed,
    ProbeLimits,
    ProbeStatus,
    Refused,
    Removed,
    Start,
    Stop,
    Warned,
    Watched,
    load_message,
    pack_message,
    unpack_record,
)
from dprobes.errors import EngineError, InternalError
from dprobes.extensions.registry import called_extensions
from dprobes.rpn.program import Glob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dprobes.engines.base import Job
    from dprobes.engines.resolve import LeftOutProbe, Probepoint

__all__ = ["PtraceEngine", "PtraceSession"]

_PIPE_SIZE = 1 << 20
"""What the pipe for records is to hold, in bytes; the most that an ordinary user gets (pipe(7))."""


class PtraceEngine:
    """Probe a process tree through ptrace(2)."""

    name = "ptrace"
    capabilities: frozenset[Capability] = frozenset(
        {
            Capability.WRITE_REGISTER,
            Capability.WRITE_MEMORY,
            Capability.FLOATING_POINT,
            Capability.CPUID,
            Capability.SEGMENTED,
            Capability.EXTENSION,
            Capability.HAND_OVER,
            Capability.CORE_DUMP,
            Capability.GLOB,
            Capability.WATCHPOINT,
            Capability.RETURN,
        }
    )

    def __init__(
        self,
        *,
        allow_write: bool = False,
        symbols: Path | None = None,
        debugger: Sequence[str] | None = None,
        core_directory: str = ".",
    ) -> None:
        self._allow_write = allow_write
        self._symbols = symbols
        self._debugger = debugger
        self._core_directory = core_directory

    def run(self, job: Job) -> PtraceSession:
        """Return the session; entering it starts the tracer and the command, or attaches to the process."""
        return PtraceSession(
            job,
            allow_write=self._allow_write,
            symbols=self._symbols,
            debugger=self._debugger,
            core_directory=self._core_directory,
        )


class PtraceSession:
    """Hold one run; use it as a context manager and iterate over ``events``."""

    def __init__(
        self,
        job: Job,
        *,
        allow_write: bool,
        symbols: Path | None,
        debugger: Sequence[str] | None = None,
        core_directory: str = ".",
    ) -> None:
        self._job = job
        self._core_directory = core_directory
        self._answers = Answers(job.program, allow_write=allow_write, symbols=symbols, resolved=job.resolved)
        self._reader = FrameReader()
        self._bystander = Bystander()
        # A command needs its input itself, unless it is the terminal, which people share.
        self._debuggers = Debuggers(debugger, keep_input=not job.command or os.isatty(0))
        self._command: Command | None = None
        self._finished = False
        self._stopping = False
        self._sending = False
        self._received: dict[int, int] = {}

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The probepoints that were found so far; events give their indices."""
        return self._answers.probes

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger runs for a process that was handed over."""
        return self._debuggers.is_running

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""
        return self._answers.left_out

    def __enter__(self) -> Self:
        their_input, self._to_tracer = os.pipe2(os.O_CLOEXEC)
        self._from_tracer, their_output = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(their_output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        try:
            # A session of its own: neither the terminal's signals nor the end of ours reach the tracer by themselves.
            self._tracer = subprocess.Popen(
                [sys.executable, "-P", "-m", "dprobes.engines.ptrace.tracer", str(their_input), str(their_output)],
                pass_fds=[their_input, their_output],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._to_tracer)
            os.close(self._from_tracer)
            reason = (error.strerror or str(error)).lower()
            raise EngineError(
                f"the tracer cannot be started: '{sys.executable}': {reason}",
                hint="this user must be able to execute the Python that runs dprobes",
            ) from error
        finally:
            os.close(their_input)
            os.close(their_output)
        self._send(self._start_message())
        if self._job.pid is not None:
            self._send(Attach(self._job.pid, launching=False))
        else:
            try:
                self._command = Command(self._job.command)
            except BaseException:
                self._close_tracer()
                raise
            self._send(Attach(self._command.pid, launching=True))
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        with contextlib.suppress(EngineError):
            for _ in self.events():
                pass
        self._close_tracer()
        if self._command is not None:
            self._command.close()

    def stop(self) -> None:
        """Ask the tracer to take everything away and detach; may be called by a signal handler."""
        if not self._stopping:
            self._stopping = True
            if not self._sending:  # else it is sent after what is being sent now
                self._send(Stop())

    def events(self) -> Iterator[Event]:
        """Iterate over what happens until ``Finished``; raise ``EngineError`` if the target cannot be taken over."""
        data = b""  # an earlier iteration may have left something behind
        while not self._finished:
            for kind, payload in self._reader.feed(data):
                if kind is Kind.RECORD:
                    probe, record = unpack_record(payload)
                    self._received[probe] = self._received.get(probe, 0) + 1
                    yield RecordEvent(probe, record)
                else:
                    yield from self._on_message(load_message(payload))
            if self._finished:
                return
            yield Pause()
            while not self._debuggers.is_idle:
                yield from self._debuggers.look()
                if select.select([self._from_tracer], [], [], LOOK)[0]:
                    break
            data = os.read(self._from_tracer, 1 << 16)
            if not data:
                yield from self._tracer_died()

    def _start_message(self) -> Start:
        program = self._job.program
        definitions = tuple(
            ProbeLimits(d.passcount, d.maxhits, program.keeps_log_on_fault(d), isinstance(d.location, Glob))
            for d in program.definitions
        )
        return Start(
            definitions,
            int(self._job.items),
            (program.vars, program.gvars, program.cvars),
            called_extensions(program),
            self._core_directory,
            follow=self._job.follow,
            everywhere=self._answers.everywhere(),
        )

    def _send(self, message: object) -> None:
        """Send a message; that the tracer is gone shows at the end of what it sends."""
        self._sending = True
        frame = memoryview(pack_message(message))
        stopping = self._stopping
        with contextlib.suppress(BrokenPipeError):
            while frame:
                frame = frame[os.write(self._to_tracer, frame) :]
        self._sending = False
        if self._stopping and not stopping:
            self._send(Stop())

    def _on_message(self, message: object) -> Iterator[Event]:
        match message:
            case ModuleMapped():
                sites, notices = self._answers.sites(message)
                self._send(dataclasses.replace(sites, number=message.number))
                yield from notices
            case Attached():
                if self._command is not None:
                    self._command.go()
            case Refused(text):
                self._finished = True
                raise EngineError(text)
            case Failed(pid, reason, number):
                self._finished = True
                raise refusals.attach_error(pid, reason, number)
            case ProbeStatus():
                yield self._state_event(message)
            case Placed(pid, breakpoints):
                self._bystander.placed(pid, breakpoints)
            case Removed(pid, addresses):
                self._bystander.removed(pid, addresses)
            case HandedOver():
                yield from self._debuggers.add(message)
            case Dumped():
                yield _dump_notice(message)
            case Watched(pid, watches):
                self._bystander.watched(pid, watches)
            case Warned(text, hint):
                yield Notice(text, hint)
            case Done():
                yield from self._on_done(message)

    def _on_done(self, done: Done) -> Iterator[Event]:
        self._finished = True
        status = None
        if not done.complete and not done.problem and not self._stopping:
            yield Notice("the tracer was told to end (SIGTERM); the probepoints are taken away")
        while not self._debuggers.is_idle:
            yield Pause()
            yield from self._debuggers.look()
            time.sleep(LOOK)
        if done.complete and self._command is not None:
            status = self._command.wait()
        yield Finished(tuple(done.counts.get(n, Counts()) for n in range(len(self.probes))), status)
        if done.problem:
            raise InternalError(f"the tracer failed; the probepoints are taken away\n{done.problem.rstrip()}")

    def _state_event(self, message: ProbeStatus) -> StateEvent:
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

    def _tracer_died(self) -> Iterator[Event]:
        """Put the original bytes back, and say what happened."""
        self._finished = True
        restored = self._bystander.restore()
        disarmed, armed = self._bystander.disarm()
        code = self._tracer.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        yield Notice(
            f"the tracer {how}; {restored} breakpoints were taken away from outside",
            "a thread that ran into one before that has got a SIGTRAP",
        )
        if disarmed:
            yield Notice(f"the debug registers of {disarmed} threads were cleared from outside")
        if armed:
            yield Notice(
                f"the debug registers of {armed} threads could not be cleared: those threads do not stop",
                "an access that was watched will end the program with a SIGTRAP",
            )
        received = (self._received.get(n, 0) for n in range(len(self.probes)))
        yield Finished(tuple(Counts(hits=n, records=n) for n in received), cut_short=True)

    def _close_tracer(self) -> None:
        os.close(self._to_tracer)
        os.close(self._from_tracer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._tracer.wait(10)


def _dump_notice(dumped: Dumped) -> Notice:
    process = f"process {dumped.pid} ({dumped.name})"
    if dumped.problem:
        return Notice(f"no core of {process} in '{dumped.path}': {dumped.problem.rstrip()}; the process goes on")
    return Notice(f"the core of {process} is in '{dumped.path}' ({dumped.size} bytes)", is_warning=False)
