"""
What routines know of the process and the clock without a system call.

::

    process page   0 u32 pid         0 in a process that has just been forked: the page is wiped then (MADV_WIPEONFORK),
                                     and the tracer writes it before that process runs

    clock page     0 u64 version     its lowest bit says which reading is valid
                   8 a reading, when that is 0
                  32 a reading, when that is 1

    reading        0 u64 counter     the time stamp counter
                   8 u64 time        CLOCK_MONOTONIC, in nanoseconds, when the counter stood there
                  16 u64 rate        nanoseconds for each count, times 2**32

Whoever changes the clock writes the other reading first, and then the version: should it be killed meanwhile, the page
is as good as before.
"""

from __future__ import annotations

import struct

__all__ = [
    "CLOCK_COUNTER",
    "CLOCK_RATE",
    "CLOCK_READING",
    "CLOCK_READINGS",
    "CLOCK_SIZE",
    "CLOCK_TIME",
    "CLOCK_VERSION",
    "PROCESS_PID",
]

PROCESS_PID = 0
CLOCK_VERSION, CLOCK_READINGS = 0, 8
CLOCK_COUNTER, CLOCK_TIME, CLOCK_RATE = 0, 8, 16
CLOCK_READING = struct.Struct("=QQQ")
CLOCK_SIZE = CLOCK_READINGS + 2 * CLOCK_READING.size
