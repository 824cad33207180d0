"""
Records of several rings in the order of their time.

Each ring is in order, but a thread may have changed its CPU. So what is read is sorted, and what is younger than the
reading is kept for the next one: by then all that is older has come, but for what a thread writes that does not run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.record.layout import Item, header_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RecordOrder"]

_TIME_SIZE = 8


class RecordOrder:
    """What has been read, and is still to be given out."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, bytes]] = []

    def sorted(self, records: Sequence[tuple[int, bytes]], before: int | None) -> list[tuple[int, bytes]]:
        """
        Return the records from before a time, with those kept from earlier readings; with None all there are.

        Records are given with their probepoints. Those without a time are all of them, and stay as they come.
        """
        for probe, record in records:
            place = _time_place(int.from_bytes(record[:4], "little"))
            time = 0 if place is None else int.from_bytes(record[place : place + _TIME_SIZE], "little")
            self._kept.append((time, probe, record))
        self._kept.sort(key=_time_of)
        count = len(self._kept)
        if before is not None:
            while count and self._kept[count - 1][0] >= before:
                count -= 1
        out, self._kept = self._kept[:count], self._kept[count:]
        return [(probe, record) for _, probe, record in out]


def _time_of(kept: tuple[int, int, bytes]) -> int:
    return kept[0]


@lru_cache(64)
def _time_place(flags: int) -> int | None:
    """Return where in a record with these flags the time is, None if it has none: behind it come names at most."""
    if not flags & Item.TIME:
        return None
    return header_struct(flags, "little").size - _TIME_SIZE
