"""
The list of processes that handlers have stopped for a core (``exit 3``): ``MapName.STOPS``.

::

     0 u64 count     how many stops have been noted
     8 u64 closed    not 0: nobody is stopped any more
    16 ...           STOPS_MAX stops; that number n is in the place n % STOPS_MAX

A stop::

     0 u32 process   its id
     4 u32 keeper    who lets the process go on: 0 for nobody yet, the process that writes the core, or ENDED
     8 u64 time      CLOCK_MONOTONIC in nanoseconds, just before the stop

A handler takes a place, writes the stop, looks at ``closed``, and then stops the process. So whoever has set ``closed``
finds all processes in the list that are still to be stopped. Where a place is not free, nobody is stopped.
"""

from __future__ import annotations

__all__ = ["CLOSED", "COUNT", "ENDED", "FIRST", "KEEPER", "PROCESS", "STOPS_MAX", "STOPS_SIZE", "STOP_SIZE", "TIME"]

COUNT, CLOSED, FIRST = 0, 8, 16
PROCESS, KEEPER, TIME = 0, 4, 8
STOP_SIZE = 16
STOPS_MAX = 1024
"""How many processes can be stopped at once: a power of two."""
STOPS_SIZE = FIRST + STOPS_MAX * STOP_SIZE

ENDED = 0x7FFF_FFFF
"""The keeper of a process that has gone on; no process has this id, and an immediate can hold it."""
