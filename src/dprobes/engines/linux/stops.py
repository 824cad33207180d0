"""What waitpid(2) says of a traced thread that has stopped: constants are from ``include/uapi/linux/ptrace.h``."""

from __future__ import annotations

import enum
import functools
import os
import signal

__all__ = ["NEW_TASK_EVENTS", "Event", "StopKind", "classify_stop"]

_SYSCALL_STOP_SIGNAL = signal.SIGTRAP | 0x80
"""What PTRACE_O_TRACESYSGOOD makes of SIGTRAP where a thread enters or leaves a system call."""


class Event(enum.IntEnum):
    """Number the ptrace events (PTRACE_EVENT_*)."""

    FORK = 1
    VFORK = 2
    CLONE = 3
    EXEC = 4
    VFORK_DONE = 5
    EXIT = 6
    STOP = 128


NEW_TASK_EVENTS = (Event.FORK, Event.VFORK, Event.CLONE)


class StopKind(enum.Enum):
    """Classify what ``waitpid`` reports about a traced thread."""

    EXITED = "exited"
    SIGNAL = "about to receive a signal"
    EVENT = "ptrace event"
    GROUP_STOP = "stopped together with its process"
    SYSCALL = "entering or leaving a system call"


@functools.lru_cache(maxsize=256)
def classify_stop(status: int) -> tuple[StopKind, int]:
    """Return the kind of a wait status, with the signal, event, or (for EXITED) the status itself."""
    if not os.WIFSTOPPED(status):
        return StopKind.EXITED, status
    number = os.WSTOPSIG(status)
    event = status >> 16
    if event == Event.STOP:
        # ptrace(2), "Group-stop": with PTRACE_SEIZE the stop signal tells a group stop from an interrupt.
        return (StopKind.EVENT, Event.STOP) if number == signal.SIGTRAP else (StopKind.GROUP_STOP, number)
    if event:
        return StopKind.EVENT, event
    if number == _SYSCALL_STOP_SIGNAL:
        return StopKind.SYSCALL, number
    return StopKind.SIGNAL, number
