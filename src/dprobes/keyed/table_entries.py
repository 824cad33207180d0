"""
Entries of a table in memory that one process writes, and others may read at the same time.

::

    u64 tallies without room | u64 entries that were ever in use
    for each entry: u64 nonzero if it is in use | key | value, as in ``table_layout``

Readers need no lock: a key is written before its entry is marked as in use, and each cell changes atomically.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, assert_never

from dprobes.keyed.table_layout import Change, TableContents, TableRow, changes, hist_bucket, lhist_bucket, shown_value
from dprobes.rpn.keyed_tables import TableKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.rpn.keyed_tables import Table

__all__ = ["KeyedStore", "TableReader", "TableStore", "cells_of", "stores_of"]

_HEAD = 2
_LOST, _USED = 0, 1
_MASK = (1 << 64) - 1


def cells_of(table: Table) -> int:
    """Return the number of 64-bit cells of memory that a table needs."""
    return _HEAD + table.memory // 8


class KeyedStore(Protocol):
    """A table as handlers use it, independent of its storage. Keys are encoded as in ``table_layout``."""

    table: Table

    def tally(self, key: bytes, value: int = 0) -> None:
        """Add a signed number to a key's entry: to its count, sum, extremes or histogram, by the table's kind."""

    def add(self, key: bytes, value: int) -> None:
        """Add a signed number to the entry of a key, in a table that keeps the last number."""

    def value(self, key: bytes) -> int:
        """Return the number in the entry of a key (``table_layout.shown_value``), 0 if there is none."""

    def keep(self, key: bytes, value: bytes) -> None:
        """
        Store a string or a call stack, padded to the table's value size, in the entry of a key.

        Without room for another key, count the key as lost.
        """

    def kept(self, key: bytes) -> bytes:
        """Return the bytes in the entry of a key, zeros if there is none."""

    def delete(self, key: bytes) -> None:
        """Delete the entry of a key, if it exists."""

    def clear(self) -> None:
        """Delete all entries, and reset the number of lost tallies."""

    def contents(self) -> TableContents:
        """Return a copy of the rows and of the number of lost values."""


class TableReader:
    """A reader of a table in ``cells``, memory of the size ``cells_of``."""

    def __init__(self, table: Table, cells: memoryview) -> None:
        self.table = table
        self._cells = cells
        self._key_cells = table.key_size // 8
        self._stride = 1 + self._key_cells + table.value_cells

    def __repr__(self) -> str:
        contents = self.contents()
        return f"{type(self).__name__}({contents.table}, {sorted(contents.rows)}, lost={contents.lost})"

    def contents(self) -> TableContents:
        """Return a copy of the rows and of the number of lost values."""
        rows = []
        for entry in range(self._cells[_USED]):
            start = _HEAD + entry * self._stride
            if not self._cells[start]:
                continue
            value = start + 1 + self._key_cells
            key = self._cells[start + 1 : value].tobytes()
            rows.append(TableRow(key, tuple(self._cells[value : start + self._stride])))
        return TableContents(self.table, tuple(rows), self._cells[_LOST])


class TableStore(TableReader):
    """The only writer of a table in memory, which it allocates unless ``cells`` is given."""

    def __init__(self, table: Table, cells: memoryview | None = None) -> None:
        if cells is None:
            cells = memoryview(bytearray(8 * cells_of(table))).cast("Q")
        super().__init__(table, cells)
        self._values: dict[bytes, int] = {}
        self._free: list[int] = []

    @classmethod
    def taken_over(cls, table: Table, cells: memoryview) -> Self:
        """Return the store of ``table`` in memory that another writer has filled. That writer must have stopped."""
        store = cls(table, cells)
        for entry in range(cells[_USED]):
            start = _HEAD + entry * store._stride
            value = start + 1 + store._key_cells
            if cells[start]:
                store._values[cells[start + 1 : value].tobytes()] = value
            else:
                store._free.append(start)
        return store

    def tally(self, key: bytes, value: int = 0) -> None:
        """Add a signed number to a key's entry: to its count, sum, extremes or histogram, by the table's kind."""
        place = self._entered(key)
        if place is None:
            return
        cells, table = self._cells, self.table
        match table.kind:  # fast path for the common kinds, which change one cell
            case TableKind.COUNT:
                cells[place] += 1
            case TableKind.HIST:
                cells[place + hist_bucket(value)] += 1
            case TableKind.LHIST:
                assert table.range is not None
                cells[place + lhist_bucket(value, table.range)] += 1
            case TableKind.SUM | TableKind.MIN | TableKind.MAX | TableKind.LAST | TableKind.AVG | TableKind.STATS:
                self._change(place, value)
            case other:
                assert_never(other)

    def add(self, key: bytes, value: int) -> None:
        """Add a signed number to the entry of a key, in a table that keeps the last number."""
        place = self._entered(key)
        if place is not None:
            self._cells[place] = self._cells[place] + value & _MASK

    def _entered(self, key: bytes) -> int | None:
        """Return the index of the value of a key, which is entered if necessary; count the key as lost without room."""
        place = self._values.get(key)
        if place is None and (place := self._enter(key)) is None:
            self._cells[_LOST] += 1
        return place

    def keep(self, key: bytes, value: bytes) -> None:
        """Store a string or a call stack, padded to the table's value size. Without room, count the key as lost."""
        place = self._entered(key)
        if place is None:
            return
        self._cells[place : place + self.table.value_cells] = memoryview(value).cast("Q")

    def kept(self, key: bytes) -> bytes:
        """Return the bytes in the entry of a key, zeros if there is none."""
        place, cells = self._values.get(key), self.table.value_cells
        return bytes(8 * cells) if place is None else self._cells[place : place + cells].tobytes()

    def _change(self, place: int, value: int) -> None:
        cells = self._cells
        for cell, change, number in changes(self.table, value):
            match change:
                case Change.ADD:
                    cells[place + cell] = cells[place + cell] + number & _MASK
                case Change.GREATEST:
                    cells[place + cell] = max(cells[place + cell], number)
                case Change.SET:
                    cells[place + cell] = number

    def value(self, key: bytes) -> int:
        """Return the number in the entry of a key (``table_layout.shown_value``), 0 if there is none."""
        place = self._values.get(key)
        if place is None:
            return 0
        return shown_value(self.table, self._cells[place : place + self.table.value_cells])

    def delete(self, key: bytes) -> None:
        """Delete the entry of a key, if it exists."""
        place = self._values.pop(key, None)
        if place is not None:
            start = place - self._key_cells - 1
            self._cells[start] = 0
            self._free.append(start)

    def clear(self) -> None:
        """Delete all entries, and reset the number of lost tallies."""
        for key in list(self._values):
            self.delete(key)
        self._cells[_LOST] = 0

    def _enter(self, key: bytes) -> int | None:
        """Return the position of the value in a new entry for a key, or None if the table is full."""
        cells = self._cells
        if self._free:
            start = self._free.pop()
        elif cells[_USED] < self.table.capacity:
            start = _HEAD + cells[_USED] * self._stride
            cells[_USED] += 1
        else:
            return None
        place = start + 1 + self._key_cells
        cells[start + 1 : place] = memoryview(key).cast("Q")
        for cell in range(place, start + self._stride):
            cells[cell] = 0
        cells[start] = 1
        self._values[key] = place
        return place


def stores_of(tables: Sequence[Table]) -> list[TableStore]:
    """Return the tables of a program, in newly allocated memory."""
    return [TableStore(table) for table in tables]
