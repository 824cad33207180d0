"""
List of the processes that ``exit 3`` has stopped, and a guard process that resumes them.

The guard resumes them if dprobes is killed before their core dumps are written. Handlers write the list, which the
engine, the writer of a core dump, and the guard share (``bpf.core_stop_layout``). Each of these three records in the
list that it has resumed a process. If it is killed between the resumption and the record, the process is resumed twice;
it is never left stopped. A process that another tool has stopped meanwhile remains stopped.

The guard is started before the first handler is attached, in its own session, so that signals of a terminal do not
reach it. It waits for the end of a pipe, or of the process that has started it; then no link is left. While a core dump
is being written, its writer must resume the process. The guard's command is ``python -m
dprobes.engines.ebpf.read.stop_guard STOPS PIPE PROCESS``, with three descriptors.
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
"""Maximum number of seconds to wait until the threads of a process have stopped."""
_LOOK = 0.001
_NANOSECONDS = 1_000_000_000


class Stop(NamedTuple):
    """
    Entry of the list: its index ``place``, the stopped process ``pid``, and the time of the stop.

    ``keeper`` is the id of the process that will resume it, or 0 if there is none yet. ``time`` is CLOCK_MONOTONIC in
    nanoseconds.
    """

    place: int
    pid: int
    keeper: int
    time: int

    @property
    def age(self) -> float:
        """Seconds since the stop."""
        return (time.monotonic_ns() - self.time) / _NANOSECONDS


class CoreStops:
    """
    List of stopped processes, mapped from the descriptor of its BPF map, which remains open.

    It is a context manager.
    """

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
        """Unmap the list of stopped processes."""
        self._words.release()
        self._halves.release()
        self._memory.close()

    def end(self) -> None:
        """Prevent handlers from stopping further processes. After the return, no handler adds an entry."""
        self._words[CLOSED // 8] = 1
        time.sleep(_LOOK)  # enough for the store to be visible before the list is read next

    def waiting(self) -> list[Stop]:
        """Return the stopped processes that have not been resumed."""
        return [stop for stop in self._noted() if stop.keeper != ENDED and not _is_another(stop)]

    def has(self, pid: int) -> bool:
        """Return True if a process has an entry, resumed or not. If it has none, a full list prevented its stop."""
        return any(stop.pid == pid for stop in self._noted())

    def unheard(self, seconds: float) -> list[int]:
        """Return the processes without a keeper that were stopped more than ``seconds`` ago."""
        return [stop.pid for stop in self.waiting() if not stop.keeper and stop.age > seconds]

    def entrust(self, pid: int, keeper: int) -> None:
        """Make ``keeper``, the writer of the core dump, responsible for resuming ``pid``."""
        for stop in self._of(pid):
            self._set_keeper(stop, keeper)

    def let_go_on(self, pid: int, *, was_stopped: bool | None = None) -> None:
        """
        Resume a process that a handler has stopped. Do nothing if it has no entry, or was resumed before.

        ``was_stopped`` is True if the process was seen stopped; if it is None, check this now. If the process was
        stopped and has one entry, a pending SIGSTOP is from another tool. Then the process remains stopped until that
        tool resumes it.
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
        """Record in the list that a process has been resumed."""
        self._set_keeper(stop, ENDED)

    def _of(self, pid: int) -> list[Stop]:
        return [stop for stop in self.waiting() if stop.pid == pid]

    def _noted(self) -> Iterator[Stop]:
        """Iterate over the entries, except those whose process id is not written yet."""
        for place in range(min(self._words[COUNT // 8], STOPS_MAX)):
            first = FIRST + place * STOP_SIZE
            pid = self._halves[(first + PROCESS) // 4]
            if pid:
                keeper = self._halves[(first + KEEPER) // 4]
                yield Stop(place, pid, keeper, self._words[(first + TIME) // 8])

    def _set_keeper(self, stop: Stop, keeper: int) -> None:
        self._halves[(FIRST + stop.place * STOP_SIZE + KEEPER) // 4] = keeper


def is_stop_pending(pid: int) -> bool:
    """Return whether a SIGSTOP is pending for a process, or its first thread."""
    return any(int(process_field(pid, name) or "0", 16) & _STOP_BIT for name in ("ShdPnd", "SigPnd"))


def await_stop(pid: int) -> bool:
    """
    Wait until all threads have stopped. Return False if one still runs after a second, or the process has ended.

    A thread in uninterruptible sleep may take longer.
    """
    until = time.monotonic() + _STOPPING_TIME
    while (states := {thread_state(tid) for tid in threads_of(pid)} - {"X", "Z"}) - {"T"}:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK)
    return bool(states)


def _is_another(stop: Stop) -> bool:
    """Return whether the process has ended, also if its id was reused after the stop."""
    started = start_time(stop.pid)  # in ticks since the boot, suspended times included
    suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    ticks = os.sysconf("SC_CLK_TCK")
    return not started or started > (stop.time + suspended) * ticks // _NANOSECONDS + 1


_MODULE = "dprobes.engines.ebpf.read.stop_guard"
_WRITER = b"dprobes.engines.ebpf.read.core_dumper"

_GUARD_LOOK = 0.005
_PATIENCE = 1.0
"""Maximum number of seconds between a handler's entry in the list and the stop of the process."""


class StopGuard:
    """Guard process, seen from the process for whose end it waits. ``descriptor`` is the descriptor of the list."""

    def __init__(self, descriptor: int) -> None:
        """Start the guard; raise OSError if that fails."""
        self._descriptor = descriptor
        self._start()

    def _start(self) -> None:
        import subprocess

        theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        try:
            # The pipe alone is not sufficient: a child that this process forks has a copy of it.
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
        """Process id of the guard."""
        return self._process.pid

    def look(self) -> bool:
        """Restart the guard if it has ended; return whether it had."""
        has_ended = self._process.poll() is not None
        if has_ended:
            os.close(self._ours)
            self._start()
        return has_ended

    def close(self) -> None:
        """Make the guard resume the remaining processes, and wait for its end. No handler may run any more."""
        os.close(self._ours)
        self._process.wait()


def release(stops: CoreStops) -> None:
    """Resume all processes in the list, including those that running handlers still add."""
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
    """Return whether a process has stopped, or SIGSTOP is pending."""
    return thread_state(stop.pid) in ("T", "t") or is_stop_pending(stop.pid)


def _take_over(stops: CoreStops, stop: Stop) -> None:
    """Resume a process in the list if the process that writes its core file has ended without resuming it."""
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
    """Run the guard; the arguments are the descriptors of the list, the pipe, and the parent process (a pidfd)."""
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
