"""
Restorer: a process that restores code after the tracer was killed, even if the client was killed, too.

The tracer reports breakpoints and jumps to the restorer before it writes them. The restorer holds the dying tracer at
its exit until the bytes of breakpoints are restored (``tracer_link``). Jumps are removed when the tracer has released
its threads. The restorer exits after the tracer. It has its own session, so that signals of a terminal do not reach it.

Its command is ``python -m dprobes.engines.ptrace.client.restorer_process PIPE REPORT``, with two descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.client.left_removal import Restored, RestorerList
from dprobes.engines.ptrace.client.tracer_link import readable, watch_for_death
from dprobes.engines.ptrace.restorer_messages import TracerBegun
from dprobes.engines.ptrace.tracer_messages import FrameReader, load_message
from dprobes.engines.refusals import RESTORER
from dprobes.platform.linux import process_calls
from dprobes.platform.linux.procfs import spare_process

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RestorerProcess", "main"]

_PATIENCE = 10.0
"""Maximum number of seconds to wait for the restorer's report."""
_PATIENCE_AT_FIRST = 30.0
"""Maximum number of seconds to wait until the restorer can hold the tracer at its exit."""

_CHUNK = 1 << 16

_WATCHES = b"w"
"""First byte of the report: the restorer holds the tracer at its exit, unless the tracer cannot be traced."""
_REPORT = struct.Struct("=III")
"""Rest of the report, written at the end: the numbers of ``Restored``."""


class RestorerProcess:
    """
    Client's handle of the restorer, a process that restores code if the client and the tracer were killed.

    Call ``begun`` after the tracer was started with the ``address``, and ``await_watch`` before the tracer writes code.
    """

    def __init__(self) -> None:
        """Start the restorer; raise OSError if that fails."""
        theirs, self._pipe = os.pipe2(os.O_CLOEXEC)
        self._report, their_report = os.pipe2(os.O_CLOEXEC)
        self._watch: threading.Thread | None = None
        self._watches = b""
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    RESTORER,
                    str(theirs),
                    str(their_report),
                ],
                pass_fds=[theirs, their_report],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            os.close(self._pipe)
            os.close(self._report)
            raise
        finally:
            os.close(theirs)
            os.close(their_report)

    @property
    def address(self) -> tuple[int, int]:
        """Descriptor of the pipe to the restorer, and the restorer's process id."""
        return self._pipe, self._process.pid

    def begun(self) -> None:
        """Close the client's copy of the pipe's write end, which the tracer has inherited."""
        os.close(self._pipe)

    def await_watch(self) -> None:
        """Wait, for up to ``_PATIENCE_AT_FIRST`` seconds, until the restorer can hold the tracer at its exit."""
        if readable([self._report], _PATIENCE_AT_FIRST):
            self._watches = os.read(self._report, len(_WATCHES))

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` in another thread when the restorer ends, normally after the tracer."""
        self._watch = threading.Thread(
            target=_call_after, args=(self._process.pid, gone), name="dprobes-watch", daemon=True
        )
        self._watch.start()

    @property
    def was_killed(self) -> bool:
        """True if the restorer was killed or has failed."""
        return self._process.poll() not in (None, 0)

    def result(self) -> Restored:
        """Wait for the restorer's report, and return its numbers; all are 0 if it does not arrive in time."""
        data = self._watches
        while readable([self._report], _PATIENCE) and (part := os.read(self._report, _CHUNK)):
            data += part
        report = data[len(_WATCHES) :]
        return Restored(*_REPORT.unpack(report)) if len(report) == _REPORT.size else Restored()

    def close(self) -> None:
        """Wait for the restorer's end; the tracer must have ended."""
        os.close(self._report)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
            if self._watch is not None:
                self._watch.join(_PATIENCE)


class _Reader:
    """Reader of the tracer's messages, used by one thread, and at the end by another one."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._frames = FrameReader()
        self._lock = threading.Lock()
        self._is_over = False
        self.known = RestorerList()
        self.tracer = 0

    def follow(self) -> None:
        """Record all messages until the end of the stream."""
        while not self._is_over:
            readable([self._pipe], None)
            self.drain()

    def drain(self) -> None:
        """Read the tracer's messages that have arrived, and add the reported changes to the list for restoration."""
        with self._lock:
            while not self._is_over and readable([self._pipe], 0):
                data = os.read(self._pipe, _CHUNK)
                self._is_over = not data
                for _, payload in self._frames.feed(data):
                    message = load_message(payload)
                    if isinstance(message, TracerBegun):
                        self.tracer = message.pid
                    self.known.note(message)

    def await_tracer(self) -> bool:
        """Wait until the tracer has sent its process id; return False if the stream ends first."""
        while not self.tracer and not self._is_over:
            readable([self._pipe], None)
            self.drain()
        return bool(self.tracer)


def main(arguments: list[str]) -> int:
    """Run the process; the arguments are the descriptors to read messages from, and to write the report to."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    process_calls.set_process_name("dprobes-restore")
    spare_process()
    reader, report = _Reader(int(arguments[0])), int(arguments[1])
    if not reader.await_tracer():
        return 0
    known = reader.known
    threading.Thread(target=reader.follow, daemon=True).start()

    def before() -> None:
        reader.drain()
        known.restore_breakpoints(reader.tracer)

    def begun() -> None:
        with contextlib.suppress(OSError):
            os.write(report, _WATCHES)

    if not watch_for_death(reader.tracer, before, known.remove_the_rest, begun):
        _await_end(reader.tracer)
        reader.drain()
        known.restore_breakpoints()
        known.remove_the_rest()
    reader.drain()
    known.unmap()
    with contextlib.suppress(OSError):
        os.write(report, _REPORT.pack(*known.restored))
    return 0


def _call_after(pid: int, gone: Callable[[], None]) -> None:
    _await_end(pid)
    gone()


def _await_end(pid: int) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
