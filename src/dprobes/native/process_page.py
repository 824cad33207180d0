"""
The pages from which routines get data about the process and the clock without a system call.

::

    process page   0 u32 pid         0 at first in a forked child, where the kernel clears the page (MADV_WIPEONFORK);
                                     the tracer fills it before the child runs
                   4 u32 is nested   not 0: the process is in another PID namespace than the tool, so its threads have
                                     other ids there
                   64 a table of its threads, if it is nested

    a thread       0 u32 local id    the id in the process's PID namespace; 0: the place is free
                   4 u32 id          the id in the tool's PID namespace

A thread with the local id N is in one of ``THREAD_WINDOW`` places of the table, from place N % ``THREAD_SLOTS`` on. The
tracer adds a thread before it runs, and removes a thread that has ended. So a thread finds its own id without a lock.

::

    clock page     0 u64 version     bit 0 is the number of the valid reading
                   8 the reading with the number 0
                  32 the reading with the number 1

    reading        0 u64 counter     the time stamp counter
                   8 u64 time        CLOCK_MONOTONIC, in nanoseconds, at that value of the counter
                  16 u64 rate        nanoseconds for each count, times 2**32

A writer of the clock page writes the other reading first, and then the version. So the page remains valid if the writer
is killed in between.
"""

from __future__ import annotations

import struct

from dprobes.target.process_maps import PAGE_SIZE

__all__ = [
    "CLOCK_COUNTER",
    "CLOCK_RATE",
    "CLOCK_READING",
    "CLOCK_READINGS",
    "CLOCK_SIZE",
    "CLOCK_TIME",
    "CLOCK_VERSION",
    "HAS_ENDED",
    "PROCESS_IS_NESTED",
    "PROCESS_PID",
    "PROCESS_SIZE",
    "PROCESS_THREADS",
    "THREAD",
    "THREAD_SLOTS",
    "THREAD_WINDOW",
    "thread_window",
]

# The life mark by which handlers know whether the tool lives: a word of 32 bits in the memory that it shares with them.
#
# ::
#
#     u32   thread id of the tool; bit 30: it has ended, set by the kernel (FUTEX_OWNER_DIED, futex(2))


HAS_ENDED = 1 << 30


PROCESS_PID, PROCESS_IS_NESTED, PROCESS_THREADS = 0, 4, 64
THREAD = struct.Struct("=II")
THREAD_SLOTS, THREAD_WINDOW = 4096, 64
PROCESS_SIZE = -(-(PROCESS_THREADS + (THREAD_SLOTS + THREAD_WINDOW - 1) * THREAD.size) // PAGE_SIZE) * PAGE_SIZE
"""Size in bytes of a process page with its table; only pages with entries need physical memory."""
CLOCK_VERSION, CLOCK_READINGS = 0, 8
CLOCK_COUNTER, CLOCK_TIME, CLOCK_RATE = 0, 8, 16
CLOCK_READING = struct.Struct("=QQQ")
CLOCK_SIZE = CLOCK_READINGS + 2 * CLOCK_READING.size


def thread_window(local: int) -> range:
    """Return the offsets in a process page of all places where the thread with the id ``local`` may be."""
    start = PROCESS_THREADS + local % THREAD_SLOTS * THREAD.size
    return range(start, start + THREAD_WINDOW * THREAD.size, THREAD.size)
