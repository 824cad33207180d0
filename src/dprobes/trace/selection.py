"""The selection of records of a trace: counted without decoding them, or one by one, or the last ones."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from dprobes.record.mixed import in_order
from dprobes.trace.columns import PackedRows, rows_of
from dprobes.trace.content import LostRecords
from dprobes.trace.filter import all_of
from dprobes.trace.mixedblock import MixedBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.trace.columns import Rows
    from dprobes.trace.content import TraceRecord
    from dprobes.trace.filter import RowFilter
    from dprobes.trace.mixedblock import Block

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
        for rows in self._in_order(block):
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
        kept: deque[tuple[Rows | _MixedRows, Sequence[int]] | LostRecords] = deque()
        total = 0
        for each in found:
            if isinstance(each, LostRecords):
                kept.append(each)
                continue
            for rows in self._in_order(each):
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

    @staticmethod
    def _in_order(block: Block) -> Iterator[Rows | _MixedRows]:
        return iter((_MixedRows(block),)) if isinstance(block, MixedBlock) else rows_of(block)

    def _wanted(self, rows: Rows | _MixedRows) -> Sequence[int]:
        mask = rows.mask(self._wants) if isinstance(rows, _MixedRows) else self._wants(rows)
        if isinstance(mask, list):
            return list(itertools.compress(range(len(rows)), mask))
        return range(len(rows)) if mask else ()


class _MixedRows:
    """The records of a block of mixed ones, in order."""

    def __init__(self, block: MixedBlock) -> None:
        self._order = block.records.order
        self._parts = [PackedRows(each) for each in block.blocks()]
        self._numbers: list[int] | None = None
        """The number that each record has among those of its part."""

    def __len__(self) -> int:
        return len(self._order)

    def mask(self, wants: RowFilter) -> list[bool] | bool:
        """Return which records a filter wants."""
        masks = [wants(rows) if rows else False for rows in self._parts]
        if not any(isinstance(mask, list) for mask in masks) and len(set(map(bool, masks))) == 1:
            return masks[0]
        spread = [
            mask if isinstance(mask, list) else [mask] * len(rows)
            for rows, mask in zip(self._parts, masks, strict=True)
        ]
        return list(in_order(self._order, spread))

    def record(self, row: int) -> TraceRecord:
        """Return one record."""
        if self._numbers is None:
            self._numbers = list(in_order(self._order, [range(len(rows)) for rows in self._parts]))
        return self._parts[self._order[row]].record(self._numbers[row])


def _size(part: tuple[Rows | _MixedRows, Sequence[int]] | LostRecords) -> int:
    return 0 if isinstance(part, LostRecords) else len(part[1])
