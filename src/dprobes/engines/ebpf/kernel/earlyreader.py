"""
The reader of a ring whose uprobes are armed before the run has one: it makes room where there would soon be none.

What it takes is handed to the run's own reader, before anything that is in the ring then.
"""

from __future__ import annotations

import time
from _thread import allocate_lock, start_new_thread

# Nothing that takes long is imported here: no typing, no threading.

__all__ = ["EarlyReader"]

_SLEEP = 0.005
_FULL = 4
"""The ring is emptied when so much of it, one part in four, is in use."""

_MOST = 64 << 20
"""Bytes that are taken at most: who is slower than that loses records, which are counted as ever."""


class EarlyReader:
    """A thread that reads a ring of ``size`` bytes, whose descriptor stays open until ``stop``."""

    def __init__(self, descriptor: int, size: int) -> None:
        # Here and not in the thread: the command line is imported at the same time.
        from dprobes.engines.ebpf.kernel.ring import RingBuffer

        self._ring = RingBuffer.of(descriptor, size)
        self._is_wanted = True
        self._taken: list[tuple[bytes, float]] = []
        self._ended = allocate_lock()
        self._ended.acquire()
        start_new_thread(self._run, ())

    def stop(self) -> list[tuple[bytes, float]]:
        """End the thread; return what it took, in order, each piece with the time of that."""
        self._is_wanted = False
        with self._ended:
            return self._taken

    def _run(self) -> None:
        ring, left = self._ring, _MOST
        try:
            while self._is_wanted:
                if ring.pending >= ring.size // _FULL and left > 0:
                    left -= self._take()
                time.sleep(_SLEEP)
        finally:
            ring.detach()
            ring.close()
            self._ended.release()

    def _take(self) -> int:
        with self._ring.window() as window:
            data = bytes(window)
        self._ring.advance(len(data))
        if data:
            self._taken.append((data, time.monotonic()))
        return len(data)
