"""
Rows: records of one shape with their probepoints, stored as planes with the bytes that differ between rows.

A *row* is a record with its probepoint, and has the same size in all records of a shape::

    u32 number of the probepoint, little-endian | the record (``log_record``), in which a process name takes 16 bytes

Most bytes of the header are equal in a million consecutive hits. So the bytes at one place of all rows, a *plane*, are
stored only if they differ. Slices with a stride split and join rows, at a nanosecond per byte. The column of an item
can be read without the others.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, overload

from dprobes.errors import FormatError
from dprobes.record.log_record import FIXED_ITEMS, ITEM_TOKENS, PROCESS_NAME_MAX, Item, flag_word, header_struct
from dprobes.rpn.instruction_set import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.record.log_record import ByteOrder

__all__ = [
    "FLAGS_SIZE",
    "ITEM_COLUMNS",
    "NAME_SPACE",
    "PROBE_SIZE",
    "Column",
    "PackedRows",
    "RowShape",
    "Rows",
    "Strings",
    "mapped",
    "numbers_in",
    "repeated",
]

_T = TypeVar("_T")
_U = TypeVar("_U")

PROBE_SIZE = 4
"""Size in bytes of the probepoint's number, which precedes the record in a row."""

NAME_SPACE = PROCESS_NAME_MAX + 1
"""Space in bytes of a process name in a row, including the zeros after its end."""

ITEM_COLUMNS = {name: item for item, name in FIXED_ITEMS} | {
    "tid": Item.TID,
    "stack_trace": Item.STACK_TRACE,
    "word_size": Item.WIDE,
}
"""The flags of the header items whose columns are numbers, keyed by the name of the column."""

FLAGS_SIZE = 4
"""Size in bytes of the flag word, with which a record begins."""

_KNOWN = sum(Item)
_WIDE = int(Item.WIDE)
_TID_SIZE = 4

Column = list[int] | int
"""The numbers of all rows, or the number that all rows share."""

Strings = list[str] | str
"""The strings of all rows, or the string that all rows share."""


class RowShape(NamedTuple):
    """
    The layout of a row: flag word, byte order, and the byte offsets of its parts.

    ``name`` is None if records carry no process name.
    """

    flags: int
    byte_order: ByteOrder
    name: int | None
    tid: int | None
    data: int

    @classmethod
    def of(cls, flags: int, byte_order: ByteOrder) -> RowShape:
        """Return the layout of rows whose records have this flag word; raise ``FormatError`` if it is invalid."""
        return _shape(flags, byte_order)

    def place(self, item: Item) -> tuple[int, int] | None:
        """
        Return the byte offset in a row and the size of a header item of fixed size.

        Return None if records lack the item.
        """
        return _place(self, item)

    @property
    def word_size(self) -> int:
        """Size of a word in bytes."""
        return 8 if self.flags & _WIDE else 4


@lru_cache(256)
def _shape(flags: int, byte_order: ByteOrder) -> RowShape:
    if flags & ~_KNOWN:
        raise FormatError(f"unknown flags {flags & ~_KNOWN:#x} in a record", offset=0)
    fixed = flags & sum(item for item, _ in FIXED_ITEMS) | flags & int(Item.WIDE)
    end = PROBE_SIZE + header_struct(fixed, byte_order).size
    name = tid = None
    if flags & Item.PROCESS_NAME:
        name, end = end, end + NAME_SPACE
    if flags & Item.TID:
        tid, end = end, end + _TID_SIZE
    return RowShape(flags, byte_order, name, tid, end)


@lru_cache(1024)
def _place(shape: RowShape, item: Item) -> tuple[int, int] | None:
    if not shape.flags & item:
        return None
    if item is Item.TID:
        return None if shape.tid is None else (shape.tid, _TID_SIZE)
    width = shape.flags & int(Item.WIDE)
    before = header_struct(shape.flags & (int(item) - 1) | width, shape.byte_order).size
    return PROBE_SIZE + before, header_struct(int(item) | width, shape.byte_order).size - FLAGS_SIZE


class Rows(ABC):
    """Records with one flag word, each with the number of its probepoint."""

    __slots__ = ("shape",)

    shape: RowShape

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pair(self, row: int) -> tuple[int, bytes]:
        """Return the probepoint number and the encoded record in row ``row``."""

    @abstractmethod
    def probes(self) -> Column:
        """Return the probepoint number of each record, or a single number if all are equal."""

    @abstractmethod
    def item(self, item: Item) -> Column | None:
        """
        Return the column of a header item, or None if records lack it.

        Raise ``FormatError`` if a record is too short.
        """

    @abstractmethod
    def names(self) -> list[bytes] | bytes | None:
        """Return the process names, or None if records lack them."""

    @abstractmethod
    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return a buffer, and the offsets in it where the data of each record start and end."""

    @abstractmethod
    def chosen(self, wanted: Sequence[int]) -> Self:
        """Return the rows whose indices are in ``wanted``, which must not be empty."""

    @abstractmethod
    def headers(self) -> PackedRows:
        """Return packed rows of these records, which need not contain their data."""

    def column(self, name: str) -> Column | Strings | None:
        """Return the column of a header item by its name, or None if records lack it."""
        match name:
            case "name":
                return self.strings()
            case "word_size":
                return self.shape.word_size
            case "stack_trace":
                return int(bool(self.shape.flags & Item.STACK_TRACE))
        return self.item(ITEM_COLUMNS[name])

    def strings(self) -> Strings | None:
        """Return the process names as strings, or None if records lack them."""
        names = self.names()
        return None if names is None else mapped(names, lambda name: name.decode("utf-8", "surrogateescape"))

    def probe_set(self) -> set[int]:
        """Return the numbers of the probepoints that occur."""
        probes = self.probes()
        return {probes} if isinstance(probes, int) else set(probes)


class PackedRows(Rows):
    """
    Records of one shape.

    ``first`` is the first row. ``planes`` maps an offset in a row to the bytes of all rows at this offset, if they
    differ. The flag word is the same in all rows, and each process name is terminated.
    """

    __slots__ = ("_count", "first", "planes")

    def __init__(self, count: int, first: bytes, planes: Mapping[int, bytes]) -> None:
        self._count = count
        self.first = first
        self.planes = planes
        if len(first) < PROBE_SIZE + FLAGS_SIZE:
            raise FormatError("a row of records has no flag word", offset=0)
        self.shape = shape = RowShape.of(*flag_word(first[PROBE_SIZE : PROBE_SIZE + FLAGS_SIZE]))
        if len(first) < shape.data:
            raise FormatError(f"a row of records needs {shape.data} bytes, found {len(first)}", offset=len(first))
        if not planes.keys().isdisjoint(range(PROBE_SIZE, PROBE_SIZE + FLAGS_SIZE)):
            raise FormatError("the flag words of packed records differ", offset=PROBE_SIZE)
        if shape.name is not None and (first[end := shape.name + NAME_SPACE - 1] or end in planes):
            raise FormatError("the process name of a record has no end", offset=shape.name)

    @classmethod
    def of_table(cls, table: bytes, stride: int, places: Sequence[int]) -> Self:
        """
        Pack rows that are part of the lines of a table.

        A line of ``table`` has ``stride`` bytes. ``places`` are the offsets in a line of the bytes of a row, in order.
        """
        count = len(table) // stride
        first = bytes([table[at] for at in places])
        planes = {}
        for place, at in enumerate(places):
            plane = table[at::stride]
            if plane != table[at : at + 1] * count:
                planes[place] = plane
        return cls(count, first, planes)

    @classmethod
    def of_records(cls, records: Sequence[tuple[int, bytes]]) -> Self | None:
        """Pack records, at least one. Return None if they differ in shape, or if one is invalid."""
        head = records[0][1][:FLAGS_SIZE]
        if any(record[:FLAGS_SIZE] != head for _, record in records) or len(head) < FLAGS_SIZE:
            return None
        flags, byte_order = flag_word(head)
        if flags & ~_KNOWN:
            return None
        name = RowShape.of(flags, byte_order).name
        encoded = [record for _, record in records]
        if name is not None:
            encoded = [_padded(record, name - PROBE_SIZE) for record in encoded]
        size = len(encoded[0])
        if any(len(record) != size for record in encoded):
            return None
        heads = [probe.to_bytes(PROBE_SIZE, "little") for probe, _ in records]
        rows = b"".join([part for row in zip(heads, encoded, strict=True) for part in row])
        try:
            return cls.of_table(rows, PROBE_SIZE + size, range(PROBE_SIZE + size))
        except FormatError:
            return None  # invalid records: they are kept unpacked

    # The rows

    def __len__(self) -> int:
        return self._count

    @property
    def row_size(self) -> int:
        """Size of a row in bytes."""
        return len(self.first)

    def rows(self) -> bytes:
        """Return the bytes of all rows: encoded records of equal size, each preceded by its probepoint number."""
        size = len(self.first)
        rows = bytearray(self.first * self._count)
        for place, plane in self.planes.items():
            rows[place::size] = plane
        return bytes(rows)

    def pair(self, row: int) -> tuple[int, bytes]:
        """Return the probepoint number and the encoded record in row ``row``."""
        return self._split(self._row(range(self._count)[row]))

    def __getitem__(self, index: slice) -> Self:
        numbers = range(self._count)[index]
        if len(numbers) == self._count and numbers.step == 1:
            return self
        if not numbers:
            return type(self)(0, self.first, {})
        planes = {place: plane[index] for place, plane in self.planes.items()}
        return type(self)(len(numbers), self._row(numbers[0]), planes)

    def _row(self, number: int) -> bytes:
        row = bytearray(self.first)
        for place, plane in self.planes.items():
            row[place] = plane[number]
        return bytes(row)

    def _split(self, row: bytes) -> tuple[int, bytes]:
        name = self.shape.name
        probe, record = int.from_bytes(row[:PROBE_SIZE], "little"), row[PROBE_SIZE:]
        return probe, record if name is None else _trimmed(record, name - PROBE_SIZE)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return zip(repeated(self.probes(), self._count), self.encoded(), strict=True)

    def encoded(self) -> Iterator[bytes]:
        """Iterate over the encoded records, without probepoint numbers."""
        rows, size, name = self.rows(), len(self.first), self.shape.name
        starts = range(0, len(rows), size)
        if name is None:
            return (rows[at + PROBE_SIZE : at + size] for at in starts)
        after = name + NAME_SPACE
        if self.is_constant(name, NAME_SPACE):
            end = self.first.index(0, name) + 1
            return (rows[at + PROBE_SIZE : at + end] + rows[at + after : at + size] for at in starts)
        find = rows.index
        return (rows[at + PROBE_SIZE : find(0, at + name) + 1] + rows[at + after : at + size] for at in starts)

    # Columns

    def is_constant(self, place: int, size: int) -> bool:
        """Return whether ``size`` bytes at ``place`` are the same in all rows."""
        return self.planes.keys().isdisjoint(range(place, place + size))

    def raw(self, place: int, size: int, byte_order: ByteOrder = "little") -> bytearray:
        """
        Return the ``size`` bytes at offset ``place`` of all rows, concatenated.

        The bytes of a row are converted from ``byte_order`` to little-endian.
        """
        step = 1 if byte_order == "little" else -1
        values = bytearray(self.first[place : place + size][::step] * self._count)
        for number in range(size):
            if (plane := self.planes.get(place + number)) is not None:
                values[number if step == 1 else size - 1 - number :: size] = plane
        return values

    def numbers(self, place: int, size: int, byte_order: ByteOrder = "little") -> Column:
        """Return the column of the unsigned numbers of ``size`` bytes (1, 2, 4 or 8) at offset ``place``."""
        if self.is_constant(place, size):
            return int.from_bytes(self.first[place : place + size], byte_order)
        return numbers_in(self.raw(place, size, byte_order), size)

    def item(self, item: Item) -> Column | None:
        """Return the column of a header item, or None if records lack it."""
        place = self.shape.place(item)
        return None if place is None else self.numbers(*place, self.shape.byte_order)

    def names(self) -> list[bytes] | bytes | None:
        """Return the process names, or None if records lack them."""
        place = self.shape.name
        if place is None:
            return None
        if self.is_constant(place, NAME_SPACE):
            return self.first[place : self.first.index(0, place)]
        values = bytes(self.raw(place, NAME_SPACE))
        padded = [values[at : at + NAME_SPACE] for at in range(0, len(values), NAME_SPACE)]
        return mapped(padded, lambda name: name.partition(b"\0")[0])

    def probes(self) -> Column:
        """Return the probepoint number of each record, or a single number if all are equal."""
        return self.numbers(0, PROBE_SIZE)

    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return the rows, and the offsets in them where the data of each record start and end."""
        rows, size = self.rows(), self.row_size
        starts = range(self.shape.data, len(rows) + 1, size)[: self._count]
        return rows, list(starts), list(range(size, len(rows) + 1, size))

    @property
    def data_size(self) -> int:
        """Size in bytes of the data of each record."""
        return len(self.first) - self.shape.data

    @property
    def size(self) -> int:
        """Total size of the records in bytes, without probepoint numbers and the padding of process names."""
        size = (len(self.first) - PROBE_SIZE) * self._count
        match self.names():
            case None:
                return size
            case bytes() as name:
                return size - (NAME_SPACE - 1 - len(name)) * self._count
            case names:
                return size - (NAME_SPACE - 1) * self._count + sum(map(len, names))

    def rows_with_stacks(self) -> list[int]:
        """Return the numbers of the rows whose data may contain a call stack item. The others have none."""
        first, end = self.shape.data, self.row_size
        if first >= end:
            return []
        mask = 0
        for place in range(first, end):
            mask |= self._rows_with(place, _STACKS)
        mask &= self._rows_with(first, _ITEMS)
        return [row for row, byte in enumerate(mask.to_bytes(self._count, "little")) if byte] if mask else []

    def _rows_with(self, place: int, table: bytes) -> int:
        """
        Translate the bytes at offset ``place`` of all rows with ``table``.

        Return them as one little-endian number.
        """
        plane = self.planes.get(place)
        if plane is None:
            plane = self.first[place : place + 1] * self._count
        return int.from_bytes(plane.translate(table), "little")

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of ``parts`` in their order. All parts must have the same shape and row size."""
        if len(parts) == 1:
            return parts[0]
        size, same = len(parts[0].first), int.from_bytes(parts[0].first, "little")
        differing = 0
        for part in parts:
            differing |= int.from_bytes(part.first, "little") ^ same
        changes = {place for place, byte in enumerate(differing.to_bytes(size, "little")) if byte}
        changes.update(*(part.planes for part in parts))
        planes = {
            place: b"".join([part.planes.get(place) or part.first[place : place + 1] * len(part) for part in parts])
            for place in sorted(changes)
        }
        return cls(sum(map(len, parts)), parts[0].first, planes)

    def chosen(self, wanted: Sequence[int]) -> Self:
        """Return the rows whose indices are in ``wanted``, which must not be empty."""
        planes = {place: bytes([plane[row] for row in wanted]) for place, plane in self.planes.items()}
        first = self._row(wanted[0])
        return type(self)(len(wanted), first, {place: p for place, p in planes.items() if p.strip(p[:1])})

    def headers(self) -> PackedRows:
        """Return these rows: a packed row contains its header items."""
        return self

    def begins(self, size: int) -> set[bytes]:
        """Return the distinct first ``size`` bytes of records. These bytes must precede the process name."""
        end = PROBE_SIZE + size
        changing = [self.planes[place] for place in range(PROBE_SIZE, end) if place in self.planes]
        if not changing:
            return {self.first[PROBE_SIZE:end]}
        rows = set(zip(*changing, strict=True))
        places = [place - PROBE_SIZE for place in range(PROBE_SIZE, end) if place in self.planes]
        found = set()
        for row in rows:
            begin = bytearray(self.first[PROBE_SIZE:end])
            for place, value in zip(places, row, strict=True):
                begin[place] = value
            found.add(bytes(begin))
        return found

    def renumbered(self, number_of: Callable[[int], int]) -> Self:
        """Return the same records, with each probepoint number replaced by the result of ``number_of``."""
        probes = self.probes()
        if isinstance(probes, int):
            number = number_of(probes)
            if number == probes:
                return self
            return type(self)(self._count, number.to_bytes(PROBE_SIZE, "little") + self.first[PROBE_SIZE:], self.planes)
        known = {probe: number_of(probe) for probe in set(probes)}
        if all(probe == number for probe, number in known.items()):
            return self
        values = b"".join([known[probe].to_bytes(PROBE_SIZE, "little") for probe in probes])
        numbers = _planes_of(values, PROBE_SIZE)
        planes = {**numbers, **{place: plane for place, plane in self.planes.items() if place >= PROBE_SIZE}}
        return type(self)(self._count, values[:PROBE_SIZE] + self.first[PROBE_SIZE:], planes)


_STACKS = bytes(byte in (Token.KERNEL_STACK, Token.USER_STACK) for byte in range(256))
_ITEMS = bytes(byte in ITEM_TOKENS for byte in range(256))
"""Tables for ``bytes.translate``: 1 for bytes that can begin a call stack, and for those that can begin an item."""


def _planes_of(values: bytes, size: int) -> dict[int, bytes]:
    planes = {place: values[place::size] for place in range(size)}
    return {place: plane for place, plane in planes.items() if plane.strip(plane[:1])}


def numbers_in(values: bytearray, size: int) -> list[int]:
    """Return the little-endian numbers of 1, 2, 4 or 8 bytes in a buffer."""
    if size == 1:
        return list(values)
    found = array({2: "H", 4: "I", 8: "Q"}[size], values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def repeated(column: list[_T] | _T, count: int) -> list[_T]:
    """Return a list with the value of each of ``count`` rows, from a column that may be one value for all."""
    return column if isinstance(column, list) else [column] * count


@overload
def mapped(column: list[_T], function: Callable[[_T], _U]) -> list[_U]: ...


@overload
def mapped(column: _T, function: Callable[[_T], _U]) -> list[_U] | _U: ...


def mapped(column: Any, function: Callable[[Any], Any]) -> Any:
    """Return the column of a function's results. The function is called once for each distinct value."""
    if not isinstance(column, list):
        return function(column)
    known = {value: function(value) for value in set(column)}
    return [known[value] for value in column]


def _padded(record: bytes, name: int) -> bytes:
    """
    Return a record with its process name, at byte ``name``, padded to ``NAME_SPACE``.

    A record without a NUL in this space is invalid, and is returned unchanged.
    """
    end = record.find(b"\0", name, name + NAME_SPACE)
    return record if end < 0 else record[:end] + bytes(name + NAME_SPACE - end) + record[end + 1 :]


def _trimmed(record: bytes, name: int) -> bytes:
    return record[: record.index(0, name) + 1] + record[name + NAME_SPACE :]
