"""
List of the processes that handlers have stopped for a core dump (``exit 3``): ``MapName.STOPS``.

::

     0 u64 count     the number of entries taken so far
     8 u64 closed    not 0: no process is stopped any more
    16 ...           STOPS_MAX entries; stop number n is in entry n % STOPS_MAX

An entry::

     0 u32 process   its id
     4 u32 keeper    0 if no process resumes it yet; the process that writes the core dump; or ENDED
     8 u64 time      CLOCK_MONOTONIC in nanoseconds, just before the stop

A handler allocates an entry, writes it, reads ``closed``, and then stops the process. So after user space has set
``closed``, the list contains all processes that handlers may still stop. If the entry is in use, the handler stops no
process.
"""

from __future__ import annotations

__all__ = ["CLOSED", "COUNT", "ENDED", "FIRST", "KEEPER", "PROCESS", "STOPS_MAX", "STOPS_SIZE", "STOP_SIZE", "TIME"]

COUNT, CLOSED, FIRST = 0, 8, 16
PROCESS, KEEPER, TIME = 0, 4, 8
STOP_SIZE = 16
STOPS_MAX = 1024
"""Maximum number of processes that can be stopped at once, a power of two."""
STOPS_SIZE = FIRST + STOPS_MAX * STOP_SIZE

ENDED = 0x7FFF_FFFF
"""Keeper of a process that has been resumed. No process has this id, and it fits a 32-bit immediate."""
