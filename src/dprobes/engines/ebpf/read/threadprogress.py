"""
Whether a thread has got beyond the instruction before which its handler ran, seen from outside.

A signal follows a fault at once, but the thread may have to give way to others between the handler and the instruction,
on a busy machine for long. Thread ids are of the initial PID namespace.
"""

from __future__ import annotations

from dprobes.engines.linux.procfs import system_call_of

__all__ = ["BEYOND", "progress"]

BEYOND = -1
"""What ``progress`` returns when the thread is beyond the instruction, or nothing can be learnt of it."""

_LONG_ENOUGH = 1_000_000
"""
Nanoseconds of running in which an instruction is executed for certain. Out of line that takes ten microseconds, but in
a virtual machine time goes by while the CPU does nothing.
"""


def progress(tid: int, mark: int | None = None) -> int:
    """
    Return ``BEYOND``, or a mark to be handed in when the same thread is looked at again.

    The first look must come later than the handler.
    """
    number = system_call_of(tid)
    if number is not None and number >= 0:
        return BEYOND
    run = _run_time(tid)
    if run is None:
        return BEYOND
    # One that sleeps outside of system calls may sleep in the page fault of that very instruction.
    if mark is None or number is not None:
        return run
    return BEYOND if run - mark >= _LONG_ENOUGH else mark


def _run_time(tid: int) -> int | None:
    """Return for how many nanoseconds a thread has run, up to when it last stopped or the clock ticked."""
    # Documentation/scheduler/sched-stats.rst: time on a CPU, time spent waiting for one, number of times it got one.
    try:
        with open(f"/proc/{tid}/schedstat", "rb") as file:
            run, waited, times = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return run if run or waited or times else None
