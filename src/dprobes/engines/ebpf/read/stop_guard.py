"""
The processes that ``exit 3`` has stopped, and who lets those go on should dprobes be killed before their core is there.

The engine, the process that writes a core, and a guard share the list that handlers keep (``bpf.core_stop_layout``).
Who lets a process go on says so in the list right afterwards: one that is killed in between may let it go on twice, but
never not at all. What somebody else has stopped meanwhile stays stopped.

The guard is there before the first handler is attached, in a session of its own: what a terminal kills leaves it alone.
It waits for the end of a pipe, or of the process that has started it, which is when no link is left. A process whose
core is being written is left to the writer, as long as that lives. It runs as ``python -m
dprobes.engines.ebpf.read.stop_guard STOPS PIPE PROCESS``, three descriptors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from dprobes.bpf.core_stop_layout import (
    CLOSED,
    COUNT,
    ENDED,
    FIRST,
    KEEPER,
    PROCESS,
    STOP_SIZE,
    STOPS_MAX,
    STOPS_SIZE,
    TIME,
)
from dprobes.platform.linux import process_calls
from dprobes.platform.linux.procfs import process_field, spare_process, start_time, thread_state, threads_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CoreStops", "Stop", "StopGuard", "await_stop", "is_stop_pending", "main", "release"]

_STOP_BIT = 1 << signal.SIGSTOP - 1
_STOPPING_TIME = 1.0
"""Seconds that the threads of a process may take to reach their stop."""
_LOOK = 0.001
_NANOSECONDS = 1_000_000_000


class Stop(NamedTuple):
    """A process that is to go on: its place in the list, its id, who keeps it (0: nobody yet), when it was stopped."""

    place: int
    pid: int
    keeper: int
    time: int

    @property
    def age(self) -> float:
        """Seconds since the stop."""
        return (time.monotonic_ns() - self.time) / _NANOSECONDS


class CoreStops:
    """The list, behind the descriptor of its map, which remains the caller's; leaving the context manager ends it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, -(-STOPS_SIZE // mmap.PAGESIZE) * mmap.PAGESIZE)
        with memoryview(self._memory) as whole, whole[:STOPS_SIZE] as used:
            self._words, self._halves = used.cast("Q"), used.cast("I")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Look at the list no more."""
        self._words.release()
        self._halves.release()
        self._memory.close()

    def end(self) -> None:
        """Have nobody stopped any more, besides those that are in the list when this returns."""
        self._words[CLOSED // 8] = 1
        time.sleep(_LOOK)  # enough for the store to come before the next look at the list

    def waiting(self) -> list[Stop]:
        """Return the processes that have not gone on."""
        return [stop for stop in self._noted() if stop.keeper != ENDED and not _is_another(stop)]

    def has(self, pid: int) -> bool:
        """Return whether a process is in the list, even if it has gone on; otherwise it was not stopped."""
        return any(stop.pid == pid for stop in self._noted())

    def unheard(self, seconds: float) -> list[int]:
        """Return the processes that nobody keeps that long after their stop."""
        return [stop.pid for stop in self.waiting() if not stop.keeper and stop.age > seconds]

    def entrust(self, pid: int, keeper: int) -> None:
        """Leave a process to the one that writes its core."""
        for stop in self._of(pid):
            self._set_keeper(stop, keeper)

    def let_go_on(self, pid: int, *, was_stopped: bool | None = None) -> None:
        """
        End our stop of a process; nothing happens if it has ended.

        ``was_stopped`` says whether the process has been seen in its stop (None: look now). A SIGSTOP that waits then
        is somebody else's, if ours is the only one: then the process stays stopped, until they let it go on.
        """
        mine = self._of(pid)
        if not mine:
            return
        if was_stopped is None:
            was_stopped = thread_state(pid) == "T"
        if not (was_stopped and len(mine) == 1 and is_stop_pending(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for stop in mine:
            self._set_keeper(stop, ENDED)

    def forget(self, stop: Stop) -> None:
        """Take a process for one that goes on."""
        self._set_keeper(stop, ENDED)

    def _of(self, pid: int) -> list[Stop]:
        return [stop for stop in self.waiting() if stop.pid == pid]

    def _noted(self) -> Iterator[Stop]:
        """Iterate over the list; a stop whose process is not written yet is not in it."""
        for place in range(min(self._words[COUNT // 8], STOPS_MAX)):
            first = FIRST + place * STOP_SIZE
            pid = self._halves[(first + PROCESS) // 4]
            if pid:
                keeper = self._halves[(first + KEEPER) // 4]
                yield Stop(place, pid, keeper, self._words[(first + TIME) // 8])

    def _set_keeper(self, stop: Stop, keeper: int) -> None:
        self._halves[(FIRST + stop.place * STOP_SIZE + KEEPER) // 4] = keeper


def is_stop_pending(pid: int) -> bool:
    """Return whether a SIGSTOP waits for a process, or its first thread."""
    return any(int(process_field(pid, name) or "0", 16) & _STOP_BIT for name in ("ShdPnd", "SigPnd"))


def await_stop(pid: int) -> bool:
    """Wait until no thread runs any more; return whether that came. One that sleeps in the kernel may take longer."""
    until = time.monotonic() + _STOPPING_TIME
    while (states := {thread_state(tid) for tid in threads_of(pid)} - {"X", "Z"}) - {"T"}:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK)
    return bool(states)


def _is_another(stop: Stop) -> bool:
    """Return whether the process is gone, or its id has become that of one that was started after the stop."""
    started = start_time(stop.pid)  # in ticks since the boot, suspended times included
    suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    ticks = os.sysconf("SC_CLK_TCK")
    return not started or started > (stop.time + suspended) * ticks // _NANOSECONDS + 1


_MODULE = "dprobes.engines.ebpf.read.stop_guard"
_WRITER = b"dprobes.engines.ebpf.read.core_dumper"

_GUARD_LOOK = 0.005
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
        time.sleep(_GUARD_LOOK)


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
