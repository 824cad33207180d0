"""
What routines know of the process and the clock without a system call.

::

    process page   0 u32 pid         0 in a process that has just been forked: the page is wiped then (MADV_WIPEONFORK)

    clock page     0 u64 version     odd while the rest is being changed
                   8 u64 counter     the time stamp counter
                  16 u64 time        CLOCK_MONOTONIC, in nanoseconds, when the counter stood there
                  24 u64 rate        nanoseconds for each count, times 2**32
"""

from __future__ import annotations

import struct

__all__ = ["CLOCK", "CLOCK_COUNTER", "CLOCK_RATE", "CLOCK_TIME", "CLOCK_VERSION", "PROCESS_PID"]

PROCESS_PID = 0
CLOCK_VERSION, CLOCK_COUNTER, CLOCK_TIME, CLOCK_RATE = 0, 8, 16, 24
CLOCK = struct.Struct("=QQQQ")
