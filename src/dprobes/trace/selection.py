"""The selection of records of a trace: counted without decoding them, or one by one, or the last ones."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from dprobes.trace.columns import rows_of
from dprobes.trace.content import LostRecords
from dprobes.trace.filter import all_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.trace.columns import Rows
    from dprobes.trace.content import TraceRecord
    from dprobes.trace.filter import RowFilter
    from dprobes.trace.packedblock import Block

__all__ = ["Selection"]


class Selection:
    """Select the records that all of some filters want; without any, all records."""

    def __init__(self, filters: Iterable[RowFilter] = ()) -> None:
        self._filters = list(filters)
        self._wants = all_of(self._filters)

    def count(self, block: Block) -> int:
        """Return how many records of a block are wanted."""
        count = 0
        for rows in rows_of(block):
            mask = self._wants(rows)
            count += mask.count(True) if isinstance(mask, list) else len(rows) if mask else 0
        return count

    def masked(self, block: Block) -> Iterator[tuple[Rows, list[bool] | None]]:
        """Iterate over the rows of a block of which some are wanted, each with which ones; None says all of them."""
        for rows in rows_of(block):
            mask = self._wants(rows)
            if not isinstance(mask, list):
                if mask:
                    yield rows, None
            elif True in mask:
                yield rows, mask

    def of_block(self, block: Block) -> Iterator[TraceRecord]:
        """Iterate over the wanted records of a block."""
        if not self._filters:
            yield from block
            return
        for rows in rows_of(block):
            for row in self._wanted(rows):
                yield rows.record(row)

    def records(self, found: Iterable[Block | LostRecords]) -> Iterator[TraceRecord | LostRecords]:
        """Iterate over the wanted records of a trace; where some were lost is always wanted."""
        for each in found:
            if isinstance(each, LostRecords):
                yield each
            else:
                yield from self.of_block(each)

    def last(self, found: Iterable[Block | LostRecords], count: int) -> list[TraceRecord | LostRecords]:
        """Return the last ``count`` wanted records, and where some were lost among them."""
        kept: deque[tuple[Rows, Sequence[int]] | LostRecords] = deque()
        total = 0
        for each in found:
            if isinstance(each, LostRecords):
                kept.append(each)
                continue
            for rows in rows_of(each):
                if wanted := self._wanted(rows):
                    kept.append((rows, wanted))
                    total += len(wanted)
            while kept and total - _size(kept[0]) >= count:
                total -= _size(kept.popleft())
        surplus = max(total - count, 0)
        result: list[TraceRecord | LostRecords] = []
        for part in kept:
            if isinstance(part, LostRecords):
                result.append(part)
                continue
            rows, wanted = part
            result += [rows.record(row) for row in wanted[surplus:]]
            surplus = 0  # what is kept first holds one of the last records
        return result

    def _wanted(self, rows: Rows) -> Sequence[int]:
        mask = self._wants(rows)
        if isinstance(mask, list):
            return list(itertools.compress(range(len(rows)), mask))
        return range(len(rows)) if mask else ()


def _size(part: tuple[Rows, Sequence[int]] | LostRecords) -> int:
    return 0 if isinstance(part, LostRecords) else len(part[1])
