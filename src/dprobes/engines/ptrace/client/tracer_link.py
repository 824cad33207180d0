"""
The client's link to a tracer: the process, the two pipes, and the guard that is asked before the tracer dies.

The kernel lets the threads of a dead tracer run at once, and they come to breakpoints before anyone outside can know
(measured: 3 to 70 ms). So the client traces the tracer, for one thing: PTRACE_O_TRACEEXIT holds a process that is about
to end, killed by SIGKILL as well, until its own tracer lets it go on; ``do_exit`` does so before it gives anything up.
Meanwhile the code is restored at leisure. Where the tracer cannot be traced, its end shows only afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from dprobes.engines import refusals
from dprobes.engines.ptrace.tracer_messages import End, FrameReader, pack_message
from dprobes.errors import EngineError, reason_of
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Event, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer_messages import Kind, Start

__all__ = ["Inbox", "Outbox", "TracerGuard", "readable", "start_tracer", "watch_for_death"]

_PATIENCE = 10.0
"""Seconds for which a guard is waited for."""

_PIPE_SIZE = 1 << 20
"""What the pipe for records is to hold, in bytes; the most that an ordinary user gets (pipe(7))."""


def start_tracer(start: Start, module: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """
    Start a tracer whose first program ``start`` describes, and which is for ``module``.

    Return it with two descriptors: what it sends is read from the first one, what it is sent goes into the second one.
    Raise ``EngineError`` if it cannot be started.
    """
    their_input, to_tracer = os.pipe2(os.O_CLOEXEC)
    from_tracer, their_output = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(their_output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    shared = [descriptor for descriptor in (start.counters, start.globals, start.restorer[0]) if descriptor >= 0]
    if start.native is not None:
        shared.append(start.native.descriptor)
    try:
        # A session of its own: neither the terminal's signals nor the end of ours reach the tracer by themselves.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", refusals.TRACER, str(their_input), str(their_output), module],
            pass_fds=[their_input, their_output, *shared],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        os.close(to_tracer)
        os.close(from_tracer)
        reason = reason_of(error)
        raise EngineError(
            f"the tracer cannot be started: '{sys.executable}': {reason}",
            hint="this user must be able to execute the Python that runs dprobes",
        ) from error
    finally:
        os.close(their_input)
        os.close(their_output)
    return process, from_tracer, to_tracer


def readable(descriptors: list[int], seconds: float | None) -> list[int]:
    """Wait until one of some descriptors can be read, and return those that can; None is for ever."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


_Frame = tuple["Kind", bytes]

_CHUNK = 1 << 16


class Inbox:
    """The frames that arrive at ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._reader = FrameReader()
        self._kept: list[_Frame] = []

    def read(self) -> tuple[list[_Frame], bool]:
        """Wait for frames; return them, those that were read ahead first, and whether that was the end."""
        data = os.read(self.descriptor, _CHUNK)
        kept, self._kept = self._kept, []
        return kept + list(self._reader.feed(data)), not data

    def read_ahead(self) -> list[_Frame]:
        """Return what has arrived by now, and keep it for ``read``."""
        ahead: list[_Frame] = []
        while readable([self.descriptor], 0) and (data := os.read(self.descriptor, _CHUNK)):
            ahead += self._reader.feed(data)
        self._kept += ahead
        return ahead

    def close(self) -> None:
        """Give the pipe up."""
        os.close(self.descriptor)


class Outbox:
    """The way of whole messages to the tracer through ``descriptor``; that the tracer is gone shows elsewhere."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._ends: deque[End] = deque()
        self._ended: set[int] = set()

    def send(self, message: object) -> None:
        """Send a message; after ``close`` it goes nowhere."""
        with self._lock:
            self._write(message)
        self._send_ends()

    def end(self, program: int) -> None:
        """Ask once for the end of a program; may be called by a signal handler, which may have interrupted ``send``."""
        if program not in self._ended:
            self._ended.add(program)
            self._ends.append(End(program))
        self._send_ends()

    def close(self) -> None:
        """Give the pipe up."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _send_ends(self) -> None:
        # A signal handler cannot wait for whom it has interrupted: that one will come here when it is done.
        while self._ends and self._lock.acquire(blocking=False):
            try:
                while self._ends:
                    self._write(self._ends.popleft())
            finally:
                self._lock.release()

    def _write(self, message: object) -> None:
        frame = memoryview(pack_message(message))
        with contextlib.suppress(BrokenPipeError):
            while frame and self._descriptor >= 0:
                frame = frame[os.write(self._descriptor, frame) :]


_STOPS = (os.CLD_TRAPPED, os.CLD_STOPPED)


class TracerGuard:
    """
    The guard of a tracer that is a child of this process.

    Should it be killed, ``before`` is called while it still holds its threads, and ``after`` when it lets go of them,
    both by a thread of the guard. Once it is made, the tracer is guarded, unless it cannot be traced.
    """

    def __init__(self, process: subprocess.Popen[bytes], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._process = process
        # A request of ptrace(2) must come from the thread that began it. Only the thread knows whom to call: else who
        # made the guard would live on in a cycle of references, with descriptors.
        is_guarded = threading.Event()
        watched = process.pid, before, after, is_guarded.set
        self._thread = threading.Thread(target=watch_for_death, args=watched, name="dprobes-guard", daemon=True)
        self._thread.start()
        is_guarded.wait(_PATIENCE)

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of the tracer and return its exit code; raise ``subprocess.TimeoutExpired``."""
        # Who waits for the process itself would take the stops that are for the guard.
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired(self._process.args, seconds or 0)
        return self._process.wait(seconds)


def watch_for_death(pid: int, before: Callable[[], None], after: Callable[[], None], begun: Callable[[], None]) -> bool:
    """
    Wait for the end of a tracer; should it be killed, call ``before`` while it still holds its threads, then ``after``.

    Call ``begun`` as soon as it will be held at its end, or cannot be traced: then return False.
    """
    try:
        ptrace_calls.seize_for_exit(pid)
    except OSError:
        return False
    finally:
        begun()
    while True:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | ptrace_calls.WALL)
        if found is None or found.si_code not in _STOPS:
            return True
        with contextlib.suppress(OSError):  # killed once more
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | ptrace_calls.WALL)
            kind, number = classify_stop(found.si_status << 8 | 0x7F)
            if kind is StopKind.GROUP_STOP:
                ptrace_calls.listen(pid)
            elif kind is StopKind.SIGNAL:
                ptrace_calls.resume(pid, number)
            elif kind is StopKind.EVENT and number == Event.EXIT and ptrace_calls.event_message(pid):
                try:
                    before()
                finally:
                    with contextlib.suppress(OSError):
                        ptrace_calls.resume(pid)
                after()
            else:
                ptrace_calls.resume(pid)
