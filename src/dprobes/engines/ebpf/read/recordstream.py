"""
The records of a run: taken from the ring into a spool as fast as possible, and given out in turns.

Where the kernel finds no room a record is lost, and counted; so the ring is emptied before anything else, whatever
becomes of the records then. While records come, it is looked at every few milliseconds; a handler wakes us only if
nothing came for a while, because waking up costs it ten times as much as the record.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.ring import wait
from dprobes.engines.ebpf.read.heldrecords import SETTLING, Ended
from dprobes.engines.ebpf.read.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.ebpf.kernel.ring import RingBuffer
    from dprobes.engines.ebpf.read.heldrecords import HeldRecords
    from dprobes.engines.ebpf.read.userstacks import UserStacks
    from dprobes.engines.interface import RecordBatch

__all__ = ["RecordStream"]

_SPOOL_SIZE = 64 << 20
"""Bytes of records that are taken from the ring before anybody has looked at them."""

_PIECE = 1 << 20
"""About so many bytes are taken from the ring at once: looking at them takes some milliseconds, then there are more."""

_TURN = 0.1
"""Seconds for which records are given out before something else is looked at."""

_BUSY_TIME = 0.05
"""Seconds after the last record during which the ring is looked at again and again."""

_BUSY_SLEEP = 0.005
"""Seconds between two looks then: what comes in them is looked at together, and has room in the ring."""


class RecordStream:
    """The reader of a ring; ``status`` are the words by which handlers know whether it sleeps."""

    def __init__(
        self,
        ring: RingBuffer,
        status: memoryview,
        held: HeldRecords,
        bank_size: int,
        stacks: UserStacks | None = None,
    ) -> None:
        self._ring = ring
        self._status = status
        self._spool = Spool(held, _SPOOL_SIZE, bank_size, stacks)
        self._taking: Iterator[RecordBatch | Ended | None] | None = None
        self._last_record = float("-inf")
        self._room = min(_PIECE // 4, ring.size // 16)
        """How much may wait in the ring while records are given out: many are looked at together."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read or given out."""
        return self._spool.is_empty and not self._ring.pending

    def _take(self) -> bool:
        """Move what the ring holds to the spool; return whether there was something."""
        ring, spool = self._ring, self._spool
        for number in range(max(1, ring.size // _PIECE)):
            if spool.is_full:
                return True
            with ring.window(_PIECE) as window:
                size = len(window)
                is_all = size < _PIECE
                spool.add(window, time.monotonic(), is_all=is_all)
            ring.advance(size)
            if is_all:
                return bool(number or size)
        return True

    def turn(self, is_stopping: Callable[[], bool]) -> Iterator[RecordBatch | Ended]:
        """Give out what has come, for a limited time or until the run is to stop, and take all that comes meanwhile."""
        if self._take():
            self._last_record = time.monotonic()
        until = time.monotonic() + _TURN
        if self._taking is None:
            self._taking = self._spool.take()
        for each in self._taking:
            if isinstance(each, Ended):
                yield each
                continue
            if each is not None:
                yield each
            if self._ring.pending >= self._room:
                self._take()
            if time.monotonic() > until or is_stopping():
                return  # the rest comes in the next turn, even if nothing was given out: changes of tables never are
        self._taking = None

    def pause(self) -> bool:
        """Sleep for a moment if more is about to come; return False if not, so that ``wait`` is the thing to do."""
        if self._taking is None:
            if self._spool.is_holding:
                time.sleep(SETTLING)
            elif time.monotonic() - self._last_record < _BUSY_TIME:
                time.sleep(_BUSY_SLEEP)
            else:
                return False
        return True

    def wait(self, timeout: float, others: Iterable[int]) -> None:
        """Sleep until a record comes, one of the descriptors ``others`` can be read, or the time has passed."""
        if wait(self._ring, self._status, timeout, others):
            self._last_record = time.monotonic()

    def rest(self) -> Iterator[RecordBatch | Ended | None]:
        """Iterate over all that there is, once no handler runs any more; None comes now and then."""
        yield from self._taking or ()
        while self._take() and self._ring.pending:
            yield from self._spool.take()
        while True:
            yield from self._spool.take()
            if not self._spool.is_holding:
                return
            time.sleep(SETTLING)
            self._take()

    def close(self) -> None:
        """Give up what has not been given out."""
        self._spool.close()
