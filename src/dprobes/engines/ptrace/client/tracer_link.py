"""
Client's link to a tracer: the process, the two pipes, and the guard that restores code before the tracer dies.

The kernel resumes the threads of a dead tracer at once, and they reach breakpoints before another process can detect
the tracer's death (measured: 3 to 70 ms). So the client traces the tracer, only for PTRACE_O_TRACEEXIT. This option
stops a process at its exit, even after SIGKILL, until its tracer resumes it. The stop in ``do_exit`` precedes the
release of the tracer's own tracees. The code is restored during that stop. If the tracer cannot be traced, its end is
detected only afterwards.
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
"""Maximum number of seconds to wait until the guard traces the tracer."""

_PIPE_SIZE = 1 << 20
"""Size in bytes of the pipe for records; the maximum for an ordinary user (pipe(7))."""


def start_tracer(start: Start, module: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """
    Start a tracer whose first program ``start`` describes.

    ``module`` is the name of the program's module, which ps(1) shows. Return the process, the descriptor from which its
    messages are read, and the descriptor to which messages for it are written. Raise ``EngineError`` if it cannot be
    started.
    """
    their_input, to_tracer = os.pipe2(os.O_CLOEXEC)
    from_tracer, their_output = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(their_output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    shared = [descriptor for descriptor in (start.counters, start.globals, start.restorer[0]) if descriptor >= 0]
    if start.native is not None:
        shared.append(start.native.descriptor)
    try:
        # A separate session: neither the terminal's signals nor the end of the client's session reach the tracer.
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
    """
    Wait until a descriptor is readable, and return those that are.

    After ``seconds``, return an empty list; if ``seconds`` is None, wait without limit.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


_Frame = tuple["Kind", bytes]

_CHUNK = 1 << 16


class Inbox:
    """Client's end of the pipe ``descriptor``, through which the tracer sends frames."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._reader = FrameReader()
        self._kept: list[_Frame] = []
        self.has_more = False
        """True if the last call of ``read`` may have left data in the pipe."""

    def read(self) -> tuple[list[_Frame], bool]:
        """Wait for data; return the complete frames, those read ahead first, and whether the stream has ended."""
        data = os.read(self.descriptor, _CHUNK)
        self.has_more = len(data) == _CHUNK
        kept, self._kept = self._kept, []
        return kept + list(self._reader.feed(data)), not data

    def read_ahead(self) -> list[_Frame]:
        """Return the frames that have arrived by now, and keep them for ``read``."""
        ahead: list[_Frame] = []
        while readable([self.descriptor], 0) and (data := os.read(self.descriptor, _CHUNK)):
            ahead += self._reader.feed(data)
        self._kept += ahead
        return ahead

    def close(self) -> None:
        """Close the descriptor of the pipe from the tracer."""
        os.close(self.descriptor)


class Outbox:
    """Pipe ``descriptor`` to the tracer, for whole messages; writes after the tracer's end are ignored."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._ends: deque[End] = deque()
        self._ended: set[int] = set()

    def send(self, message: object) -> None:
        """Send a message. After ``close``, it is discarded."""
        with self._lock:
            self._write(message)
        self._send_ends()

    def end(self, program: int) -> None:
        """Request the end of a program, once. A signal handler may call this, even if it has interrupted ``send``."""
        if program not in self._ended:
            self._ended.add(program)
            self._ends.append(End(program))
        self._send_ends()

    def close(self) -> None:
        """Close the client's end of the pipe to the tracer; a second call has no effect."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _send_ends(self) -> None:
        # A signal handler cannot wait for the code that it has interrupted: that will call this when it is done.
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
    Guard of a tracer that is a child of this process.

    If the tracer is killed, the guard's thread calls ``before`` while the kernel holds the tracer at its exit, and
    ``after`` when the tracer's threads are released. When the constructor returns, the tracer is guarded, unless it
    cannot be traced.
    """

    def __init__(self, process: subprocess.Popen[bytes], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._process = process
        # Requests of ptrace(2) must come from the thread that began tracing. Only that thread refers to the callbacks:
        # otherwise their owner would stay alive in a cycle of references, with its descriptors.
        is_guarded = threading.Event()
        watched = process.pid, before, after, is_guarded.set
        self._thread = threading.Thread(target=watch_for_death, args=watched, name="dprobes-guard", daemon=True)
        self._thread.start()
        is_guarded.wait(_PATIENCE)

    def wait(self, seconds: float | None = None) -> int:
        """
        Wait for the end of the tracer and return its exit code.

        Raise ``subprocess.TimeoutExpired`` after ``seconds``.
        """
        # Waiting for the process itself would take the stops that are for the guard.
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired(self._process.args, seconds or 0)
        return self._process.wait(seconds)


def watch_for_death(pid: int, before: Callable[[], None], after: Callable[[], None], begun: Callable[[], None]) -> bool:
    """
    Wait for the end of a tracer, and return True.

    If the tracer is killed or exits with an error, call ``before`` while it is held at its exit, and ``after`` when it
    was resumed. Call ``begun`` as soon as the tracer is traced. If it cannot be traced, also call ``begun``, and return
    False at once.
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
        with contextlib.suppress(OSError):  # killed again
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
