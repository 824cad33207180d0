"""
What is held back, by numbers that only grow: records one by one or packed, and what is between them.

A part of the queue is a list or packed records. To drop one of the latter is to cut them in two.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.record.mixed import MixedRecords
from dprobes.record.packed import PackedRecords

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Ended", "Item", "ItemQueue", "Part"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A probepoint that is to be removed, because of a hit in thread ``tid`` of process ``pid``."""

    probe: int
    reason: int
    """The operand of ``exit``, or ``layout.LIMIT`` or ``layout.REMOVE``."""
    pid: int
    tid: int


Item = tuple[int, bytes] | Ended | None
"""A record and its probepoint, the end of one, or a dropped record."""

Part = list[Item] | PackedRecords | MixedRecords


class ItemQueue:
    """Hold items; ``first`` is the number of the first one, ``end`` the number behind the last one."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._firsts: list[int] = []
        """The number of the first item of each part."""
        self.first = self.end = 0

    def __bool__(self) -> bool:
        return self.first < self.end

    def add(self, items: Iterable[Item]) -> None:
        """Add items one by one."""
        if not self._parts or not isinstance(part := self._parts[-1], list):
            part = []
            self._begin(part)
        before = len(part)
        part += items
        self.end += len(part) - before

    def add_packed(self, records: PackedRecords | MixedRecords) -> None:
        """Add packed records."""
        self._begin(records)
        self.end += len(records)

    def _begin(self, part: Part) -> None:
        self._parts.append(part)
        self._firsts.append(self.end)

    def probe(self, number: int) -> int:
        """Return the probepoint of a record."""
        at = bisect_right(self._firsts, number) - 1
        item = self._parts[at][number - self._firsts[at]]
        assert isinstance(item, tuple), "this item is a record"
        return item[0]

    def drop(self, number: int) -> None:
        """Drop a record."""
        at = bisect_right(self._firsts, number) - 1
        part, first = self._parts[at], self._firsts[at]
        place = number - first
        if isinstance(part, list):
            part[place] = None
            return
        pieces: tuple[tuple[Part, int], ...] = (
            (part[:place], first), ([None], number), (part[place + 1 :], number + 1)
        )  # fmt: skip
        kept = [(piece, start) for piece, start in pieces if piece]
        self._parts[at : at + 1] = [piece for piece, _ in kept]
        self._firsts[at : at + 1] = [start for _, start in kept]

    def take(self, end: int) -> list[Part]:
        """Take away the items before the number ``end``, and return them in parts."""
        taken: list[Part] = []
        while self._parts and self._firsts[0] < end:
            part, count = self._parts[0], end - self._firsts[0]
            if count >= len(part):
                taken.append(self._parts.pop(0))
                self._firsts.pop(0)
                continue
            taken.append(part[:count])
            self._parts[0] = part[count:]
            self._firsts[0] = end
        self.first = end
        return taken
