"""
The processes that ``exit 3`` has stopped, from the list that handlers keep (``bpf.core_stop_layout``).

The engine, the process that writes a core, and the guard of stopped processes (``stop_guard``) share it. Who lets a
process go on says so in the list right afterwards: one that is killed in between may let it go on twice, but never not
at all. What somebody else has stopped meanwhile stays stopped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
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
from dprobes.platform.linux.procfs import process_field, start_time, thread_state, threads_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CoreStops", "Stop", "await_stop", "is_stop_pending"]

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
