"""
Many records of one shape, transposed: what is the same in all of them stands once, the rest byte by byte.

A *row* is a record with its probepoint, and has the same size in all records of a shape::

    u32 number of the probepoint, little-endian | the record (``layout``), in which a process name takes 16 bytes

Of a million hits in a row, most bytes of the header are the same; so the bytes at one place of all rows, a *plane*, are
kept only where they differ. Taking rows apart and putting them together is done by slices with a stride, which takes a
nanosecond for a byte, and a column of an item is had without looking at the others.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Self, overload

from dprobes.errors import FormatError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.record.codec import flag_word
from dprobes.record.layout import FIXED_ITEMS, PROCESS_NAME_MAX, Item, header_struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dprobes.record.layout import ByteOrder

__all__ = ["NAME_SPACE", "PROBE_SIZE", "PackedRecords", "RowShape"]

PROBE_SIZE = 4
"""Bytes of a row before the record."""

NAME_SPACE = PROCESS_NAME_MAX + 1
"""Bytes that a process name takes in a row, zeros behind its end included."""

_FLAGS = 4
_KNOWN = sum(Item)
_TID_SIZE = 4

Column = list[int] | int
"""The numbers of all rows, or one number that they have in common."""


class RowShape(NamedTuple):
    """Say where the parts of a row are; ``name`` is None where records carry no process name."""

    flags: int
    byte_order: ByteOrder
    name: int | None
    tid: int | None
    data: int

    @classmethod
    def of(cls, flags: int, byte_order: ByteOrder) -> RowShape:
        """Return the shape of rows whose records have this flag word; raise ``FormatError`` if there is none."""
        return _shape(flags, byte_order)

    def place(self, item: Item) -> tuple[int, int] | None:
        """Return where in a row a header item of a fixed size is, and its size; None where records lack it."""
        if not self.flags & item:
            return None
        if item is Item.TID:
            return None if self.tid is None else (self.tid, _TID_SIZE)
        width = self.flags & int(Item.WIDE)
        before = header_struct(self.flags & (int(item) - 1) | width, self.byte_order).size
        return PROBE_SIZE + before, header_struct(int(item) | width, self.byte_order).size - _FLAGS


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


class PackedRecords(Sequence[tuple[int, bytes]]):
    """
    Hold records, each with its probepoint; ``planes`` maps places in a row to the bytes there, where they differ.

    ``first`` is the first row. The flag word is the same in all rows, and each process name has an end.
    """

    __slots__ = ("_count", "first", "planes", "shape")

    def __init__(self, count: int, first: bytes, planes: Mapping[int, bytes]) -> None:
        self._count = count
        self.first = first
        self.planes = planes
        if len(first) < PROBE_SIZE + _FLAGS:
            raise FormatError("a row of records has no flag word", offset=0)
        self.shape = shape = RowShape.of(*flag_word(first[PROBE_SIZE : PROBE_SIZE + _FLAGS]))
        if len(first) < shape.data:
            raise FormatError(f"a row of records needs {shape.data} bytes, found {len(first)}", offset=len(first))
        if not planes.keys().isdisjoint(range(PROBE_SIZE, PROBE_SIZE + _FLAGS)):
            raise FormatError("the flag words of packed records differ", offset=PROBE_SIZE)
        if shape.name is not None and (first[end := shape.name + NAME_SPACE - 1] or end in planes):
            raise FormatError("the process name of a record has no end", offset=shape.name)

    @classmethod
    def of_table(cls, table: bytes, stride: int, places: Sequence[int]) -> Self:
        """Pack what is in a table, of which ``stride`` bytes are a line; ``places`` of a line are a row."""
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
        """Pack records, of which there is one at least; None if they are not of one shape."""
        head = records[0][1][:_FLAGS]
        if any(record[:_FLAGS] != head for _, record in records) or len(head) < _FLAGS:
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
            return None  # records that are none: they are kept as they are

    # The rows

    def __len__(self) -> int:
        return self._count

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return len(self.first)

    def rows(self) -> bytes:
        """Return all rows."""
        size = len(self.first)
        rows = bytearray(self.first * self._count)
        for place, plane in self.planes.items():
            rows[place::size] = plane
        return bytes(rows)

    @overload
    def __getitem__(self, index: int) -> tuple[int, bytes]: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> tuple[int, bytes] | Self:
        if isinstance(index, slice):
            numbers = range(self._count)[index]
            if len(numbers) == self._count and numbers.step == 1:
                return self
            if not numbers:
                return type(self)(0, self.first, {})
            planes = {place: plane[index] for place, plane in self.planes.items()}
            return type(self)(len(numbers), self._row(numbers[0]), planes)
        return self._split(self._row(range(self._count)[index]))

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
        return zip(_repeated(self.column(0, PROBE_SIZE), self._count), self.encoded(), strict=True)

    def encoded(self) -> Iterator[bytes]:
        """Iterate over the records without their probepoints."""
        rows, size, name = self.rows(), len(self.first), self.shape.name
        starts = range(0, len(rows), size)
        if name is None:
            return (rows[at + PROBE_SIZE : at + size] for at in starts)
        behind = name + NAME_SPACE
        if self.is_constant(name, NAME_SPACE):
            end = self.first.index(0, name) + 1
            return (rows[at + PROBE_SIZE : at + end] + rows[at + behind : at + size] for at in starts)
        find = rows.index
        return (rows[at + PROBE_SIZE : find(0, at + name) + 1] + rows[at + behind : at + size] for at in starts)

    # Columns

    def is_constant(self, place: int, size: int) -> bool:
        """Return whether some bytes are the same in all rows."""
        return self.planes.keys().isdisjoint(range(place, place + size))

    def raw(self, place: int, size: int, byte_order: ByteOrder = "little") -> bytearray:
        """Return the bytes at some place of all rows, one after the other, those of each as little-endian numbers."""
        step = 1 if byte_order == "little" else -1
        values = bytearray(self.first[place : place + size][::step] * self._count)
        for number in range(size):
            if (plane := self.planes.get(place + number)) is not None:
                values[number if step == 1 else size - 1 - number :: size] = plane
        return values

    def column(self, place: int, size: int, byte_order: ByteOrder = "little") -> Column:
        """Return the unsigned numbers of 1, 2, 4 or 8 bytes at some place."""
        if self.is_constant(place, size):
            return int.from_bytes(self.first[place : place + size], byte_order)
        return numbers_in(self.raw(place, size, byte_order), size)

    def item(self, item: Item) -> Column | None:
        """Return the column of a header item; None where records lack it."""
        place = self.shape.place(item)
        return None if place is None else self.column(*place, self.shape.byte_order)

    def names(self) -> list[bytes] | bytes | None:
        """Return the process names; None where records lack them."""
        place = self.shape.name
        if place is None:
            return None
        if self.is_constant(place, NAME_SPACE):
            return self.first[place : self.first.index(0, place)]
        values = bytes(self.raw(place, NAME_SPACE))
        padded = [values[at : at + NAME_SPACE] for at in range(0, len(values), NAME_SPACE)]
        known = {name: name.partition(b"\0")[0] for name in set(padded)}
        return [known[name] for name in padded]

    def probes(self) -> Column:
        """Return the probepoints."""
        return self.column(0, PROBE_SIZE)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the records of several in a row, which are of one shape and size."""
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

    def goes_with(self, other: PackedRecords) -> bool:
        """Return whether other records are of the same shape and size."""
        return self.shape == other.shape and len(self.first) == len(other.first)

    def chosen(self, mask: Sequence[bool]) -> Self:
        """Return the records for which a mask is true, at least one."""
        planes = {place: bytes(compress(plane, mask)) for place, plane in self.planes.items()}
        count, number = sum(mask), list(mask).index(True)
        return type(self)(count, self._row(number), {place: p for place, p in planes.items() if p.strip(p[:1])})

    def begins(self, size: int) -> set[bytes]:
        """Return the first ``size`` bytes of records, as they occur; they are before the process name."""
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
        """Return the same records with other numbers of probepoints."""
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


def _planes_of(values: bytes, size: int) -> dict[int, bytes]:
    planes = {place: values[place::size] for place in range(size)}
    return {place: plane for place, plane in planes.items() if plane.strip(plane[:1])}


def numbers_in(values: bytearray, size: int) -> list[int]:
    """Return the little-endian numbers of 1, 2, 4 or 8 bytes in some bytes."""
    if size == 1:
        return list(values)
    found = array({2: "H", 4: "I", 8: "Q"}[size], values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def _repeated(column: Column, count: int) -> Sequence[int]:
    return column if isinstance(column, list) else [column] * count


def _padded(record: bytes, name: int) -> bytes:
    """Return a record whose process name, at ``name``, takes its whole space; as it is if it has no end."""
    end = record.find(b"\0", name, name + NAME_SPACE)
    return record if end < 0 else record[:end] + bytes(name + NAME_SPACE - end) + record[end + 1 :]


def _trimmed(record: bytes, name: int) -> bytes:
    return record[: record.index(0, name) + 1] + record[name + NAME_SPACE :]
