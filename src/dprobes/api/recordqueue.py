"""Records between the threads that take them from engines and those that read them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.record.probeinfo import Place

__all__ = ["RecordQueue"]


class RecordQueue:
    """
    Keep encoded records until somebody reads them, up to ``limit`` bytes; what comes then is lost, and counted.

    It is at its end when as many writers have closed it as have opened it, and nothing is left.
    """

    def __init__(self, limit: int) -> None:
        self.lost = 0
        self._limit = limit
        self._size = 0
        self._writers = 0
        self._batches: deque[tuple[int, Sequence[tuple[bytes, Place]]]] = deque()
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def listener(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have ``tell`` called, by any thread, when there may be something to take or the end has come."""
        with self._changed:
            self._listeners.append(tell)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(tell)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left, and nothing will come."""
        with self._changed:
            return not self._writers and not self._batches

    def _tell(self) -> None:
        for tell in self._listeners:
            tell()

    def open(self) -> None:
        """Expect records of one writer more."""
        with self._changed:
            self._writers += 1

    def close(self) -> None:
        """Expect no more of one writer."""
        with self._changed:
            self._writers -= 1
            self._changed.notify_all()
            self._tell()

    def put(self, batch: Sequence[tuple[bytes, Place]]) -> None:
        """Add records; from the first one that finds no room they are lost."""
        size = sum(len(record) for record, _ in batch)
        with self._changed:
            if self._size + size > self._limit:
                ends = accumulate((len(record) for record, _ in batch), initial=self._size)
                count = sum(end <= self._limit for end in ends) - 1
                self.lost += len(batch) - max(count, 0)
                batch = batch[: max(count, 0)]
                if not batch:
                    return
                size = sum(len(record) for record, _ in batch)
            self._size += size
            self._batches.append((size, batch))
            self._changed.notify()
            self._tell()

    def take(self, timeout: float | None) -> Sequence[tuple[bytes, Place]]:
        """Wait for records and return them; nothing at the end, and if none came for ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._batches:
                left = None if until is None else until - time.monotonic()
                if not self._writers or (left is not None and left <= 0):
                    return ()
                self._changed.wait(left)
            size, batch = self._batches.popleft()
            self._size -= size
            return batch

    def put_back(self, batch: Sequence[tuple[bytes, Place]]) -> None:
        """Put records that were taken and not read in front of all others."""
        if batch:
            size = sum(len(record) for record, _ in batch)
            with self._changed:
                self._size += size
                self._batches.appendleft((size, batch))
                self._changed.notify()
                self._tell()
