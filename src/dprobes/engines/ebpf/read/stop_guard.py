"""
A process that lets those go on that ``exit 3`` has stopped, should dprobes be killed before their cores are written.

It is there before the first handler is attached, in a session of its own: what a terminal kills leaves it alone. It
waits for the end of a pipe, or of the process that has started it, which is when no link is left. A process whose core
is being written is left to the writer, as long as that lives.

It runs as ``python -m dprobes.engines.ebpf.read.stop_guard STOPS PIPE PROCESS``, three descriptors.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from dprobes.engines.ebpf.read.core_stops import CoreStops, Stop, is_stop_pending
from dprobes.platform.linux import process_calls
from dprobes.platform.linux.procfs import spare_process, thread_state

__all__ = ["StopGuard", "main", "release"]

_MODULE = "dprobes.engines.ebpf.read.stop_guard"
_WRITER = b"dprobes.engines.ebpf.read.core_dumper"

_LOOK = 0.005
_PATIENCE = 1.0
"""Seconds that a handler may take from the note to the stop."""


class StopGuard:
    """The process, from the side of the one that it guards against; ``descriptor`` is that of the list."""

    def __init__(self, descriptor: int) -> None:
        """Start it; OSError if that cannot be."""
        self._descriptor = descriptor
        self._start()

    def _start(self) -> None:
        import subprocess

        theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        try:
            # The pipe alone would not do: a fork of this process has a copy of it.
            process = os.pidfd_open(os.getpid())
            try:
                passed = self._descriptor, theirs, process
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, *map(str, passed)],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            finally:
                os.close(process)
        except OSError:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def look(self) -> bool:
        """Start it anew if it has ended; return whether it had."""
        has_ended = self._process.poll() is not None
        if has_ended:
            os.close(self._ours)
            self._start()
        return has_ended

    def close(self) -> None:
        """Have it release what is left in the list, when no handler runs any more, and wait for its end."""
        os.close(self._ours)
        self._process.wait()


def release(stops: CoreStops) -> None:
    """Let all go on that are in the list, or come to be in it by handlers that still run."""
    stops.end()
    until = time.monotonic() + _PATIENCE
    while waiting := stops.waiting():
        for stop in waiting:
            if stop.keeper:
                _take_over(stops, stop)
            elif _is_stopping(stop) or time.monotonic() > until:
                stops.let_go_on(stop.pid)
        time.sleep(_LOOK)


def _is_stopping(stop: Stop) -> bool:
    """Return whether the stop has come, or is on its way."""
    return thread_state(stop.pid) in ("T", "t") or is_stop_pending(stop.pid)


def _take_over(stops: CoreStops, stop: Stop) -> None:
    """Let a process go on if the one that was to write its core has ended before it could do that."""
    if _is_writer(stop.keeper):
        return
    if _is_stopping(stop):
        stops.let_go_on(stop.pid)
    else:
        stops.forget(stop)


def _is_writer(pid: int) -> bool:
    if thread_state(pid) in ("Z", "X"):
        return False
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _WRITER in file.read()
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """Run the process; the arguments are the descriptors of the list, the pipe, and the process that has started it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    process_calls.set_process_name("dprobes-guard")
    spare_process()
    descriptor, pipe, process = map(int, arguments)
    with CoreStops(descriptor) as stops:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(process, select.POLLIN)
        poll.poll()
        release(stops)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
