"""The maps of keyed tables in shared memory, which all CPUs share: a thread may change its CPU within a handler."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.inline.memory.arrays import SharedArray
from dprobes.engines.inline.memory.hashes import SharedHash
from dprobes.engines.tablemaps import TableMaps
from dprobes.keyed.layout import count_cells
from dprobes.native.routines.hashtable import HEAD_SIZE, TableShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.inline.memory.region import Region
    from dprobes.keyed.contents import TableContents
    from dprobes.rpn.tables import Table

__all__ = ["SharedTables", "tables_size"]


class _SharedMaps:
    """Make maps in a region."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def array(self, size: int, name: str) -> SharedArray:  # noqa: ARG002 - what is shared has no names
        """Return an array of one element."""
        return SharedArray(self._region, size)

    def hash(
        self,
        key_size: int,
        value_size: int,
        entries: int,
        name: str,  # noqa: ARG002
        *,
        per_cpu: bool,
    ) -> SharedHash:
        """Return a hash."""
        assert not per_cpu
        return SharedHash(self._region, TableShape(key_size, value_size, entries))


class SharedTables(TableMaps[SharedArray, SharedHash]):
    """Own the maps of the tables of a program."""

    keeps_stacks = True

    def __init__(self, tables: Sequence[Table], region: Region) -> None:
        super().__init__(tables, frozenset(range(len(tables))), 1, _SharedMaps(region))
        self.refused: dict[int, int] = {}
        """The most keys at once, by the number of a table, whose value cannot be a count of hits."""

    def contents(self) -> tuple[TableContents, ...]:
        """Return what the tables hold, without what no hits can have counted: a process can write anything there."""
        most = counted_at_most()
        return tuple(self._without(number, each, most) for number, each in enumerate(super().contents()))

    def _without(self, number: int, contents: TableContents, most: int) -> TableContents:
        cells = count_cells(contents.table)
        bad = {row.key for row in contents.rows if any(row.cells[cell] > most for cell in cells)}
        if not bad:
            return contents
        self.refused[number] = max(self.refused.get(number, 0), len(bad))
        return replace(contents, rows=tuple(row for row in contents.rows if row.key not in bad))


def counted_at_most() -> int:
    """Return how many hits there may have been since the machine was started: each takes a nanosecond of a CPU."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) * (os.cpu_count() or 1)


def tables_size(tables: Sequence[Table]) -> int:
    """Return about how many bytes the maps of tables take."""
    hashes = (TableShape(table.key_size, 8 * table.value_cells, table.room).size for table in tables if table.keys)
    return sum(hashes) + sum(8 * (table.value_cells + 2) + 2 * HEAD_SIZE for table in tables)
