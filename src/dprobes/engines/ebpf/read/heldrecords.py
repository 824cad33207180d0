"""
Records that wait until their instruction is known to have completed, of threads that got no signal for a fault.

There may be a million of them in a second, so they are bare pairs here. All records of a thread but the last one are
certain: it has come to another hit. What comes behind an uncertain record waits with it, so that the order stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Thread", "Waiting"]

Item = TypeVar("Item")


class Thread:
    """
    Hold what is known of a thread since its last record, which came at the time ``stamp``.

    ``mark`` is the result of looking where it is, and ``look`` the number of the last drain before that.
    """

    __slots__ = ("look", "mark", "stamp", "tid")

    def __init__(self, tid: int, stamp: float) -> None:
        self.tid = tid
        self.stamp = stamp
        self.mark: int | None = None
        self.look = 0


class Waiting(Generic[Item]):
    """
    Hold items in their order, each with its thread, or 0 if the item is certain.

    ``has_settled`` says whether a thread is beyond the instruction of its last record; it is asked of one after the
    other until it denies.
    """

    def __init__(self, has_settled: Callable[[Thread], bool]) -> None:
        self._has_settled = has_settled
        self._items: list[Item] = []
        self._tids: list[int] = []
        self._threads: dict[int, Thread] = {}
        self._first: Thread | None = None

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Sequence[Item], tids: Sequence[int], stamp: float) -> None:
        """Add items that came at the time ``stamp``, and their threads."""
        self._items += items
        self._tids += tids
        for tid in set(tids):
            self._threads[tid] = Thread(tid, stamp)
            if self._first is not None and self._first.tid == tid:
                self._first = None

    def take_certain(self) -> list[Item]:
        """Take away the items before the first one that is not certain."""
        if self._first is not None and not self._has_settled(self._first):
            return []
        self._first = None
        count = len(self._items)
        last = dict(zip(self._tids, range(count), strict=True))
        for tid, place in sorted(last.items(), key=lambda pair: pair[1]):
            if tid and not self._has_settled(self._threads[tid]):
                self._first, count = self._threads[tid], place
                break
        items, self._items = self._items[:count], self._items[count:]
        self._tids = self._tids[count:]
        if not self._items:
            self._threads.clear()
        return items

    def take_all(self) -> Iterator[tuple[Item, int, float]]:
        """Take away everything; iterate over items, their threads, and the times of these threads' last items."""
        items, tids, threads = self._items, self._tids, self._threads
        self._items, self._tids, self._threads, self._first = [], [], {}, None
        for item, tid in zip(items, tids, strict=True):
            yield item, tid, threads[tid].stamp
