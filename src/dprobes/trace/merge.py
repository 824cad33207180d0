"""Traces of several files, or hosts, in the order of time."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from dprobes.trace.content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.trace.content import TraceRecord

__all__ = ["merged"]

_DELAY = 1_000_000_000
"""Nanoseconds: a record that is written later than that after its hit may come behind others in a merge."""


def merged(traces: Iterable[Iterable[TraceRecord | LostRecords]]) -> Iterator[TraceRecord | LostRecords]:
    """Iterate over the records of traces in the order of wall-clock time; those of one time keep their order."""
    ordered = [_in_order(trace) for trace in traces]
    return (found for _, found in heapq.merge(*ordered, key=lambda each: each[0]))


def _in_order(trace: Iterable[TraceRecord | LostRecords]) -> Iterator[tuple[int, TraceRecord | LostRecords]]:
    """Put in order what engines and programs that write to one file do not: but for ``_DELAY`` of it that is there."""
    waiting: list[tuple[int, int, TraceRecord | LostRecords]] = []
    for number, found in zip(itertools.count(), trace, strict=False):
        time = found.wall_time
        heapq.heappush(waiting, (time, number, found))
        written = time if isinstance(found, LostRecords) else found.written + found.wall_offset
        while waiting and waiting[0][0] < written - _DELAY:
            first, _, earliest = heapq.heappop(waiting)
            yield first, earliest
    while waiting:
        first, _, earliest = heapq.heappop(waiting)
        yield first, earliest
