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
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar, overload

from dprobes.errors import FormatError
from dprobes.record.log_items import ITEM_TOKENS
from dprobes.record.log_record import FIXED_ITEMS, PROCESS_NAME_MAX, Item, flag_word, header_struct
from dprobes.rpn.instruction_set import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dprobes.record.log_record import ByteOrder
    from dprobes.record.record_origin import Place

__all__ = [
    "NAME_SPACE",
    "PARTS_MAX",
    "PROBE_SIZE",
    "MixedRecords",
    "PackedBytes",
    "PackedPlaces",
    "PackedRecords",
    "RowShape",
    "in_order",
    "parts_of",
    "rows_with_stacks",
]

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


# Packed records of several shapes, in the order in which they came.
#
# Several probes log records of different sizes, and so does one that logs strings. What is alike is packed together
# (``packed``), and a byte for each record says which of these *parts* it is from: so whoever counts looks at the parts,
# and whoever prints has the order.


_T = TypeVar("_T")

PARTS_MAX = 256
"""A byte says which part a record is of."""


class MixedRecords(Sequence[tuple[int, bytes]]):
    """Hold records, each with its probepoint; ``order`` has the number of a part for each of them."""

    __slots__ = ("order", "parts")

    def __init__(self, parts: Sequence[PackedRecords], order: bytes) -> None:
        self.parts = tuple(parts)
        self.order = order
        if not 0 < len(self.parts) <= PARTS_MAX:
            raise FormatError(f"mixed records have 1 to {PARTS_MAX} parts, found {len(self.parts)}", offset=0)
        if sum(map(len, self.parts)) != len(order) or any(
            order.count(number) != len(part) for number, part in enumerate(self.parts)
        ):
            raise FormatError("the order of mixed records is not that of their parts", offset=0)

    @classmethod
    def of_records(cls, records: Sequence[tuple[int, bytes]]) -> Self | PackedRecords | None:
        """Pack records; None if one of them is none, or there are too many shapes."""
        groups: dict[tuple[bytes, int], list[tuple[int, bytes]]] = {}
        keys = [_key(record) for _, record in records]
        for key, each in zip(keys, records, strict=True):
            groups.setdefault(key, []).append(each)
        if not 0 < len(groups) <= PARTS_MAX:
            return None
        parts = []
        for group in groups.values():
            part = PackedRecords.of_records(group)
            if part is None:
                return None
            parts.append(part)
        numbers = {key: number for number, key in enumerate(groups)}
        return parts[0] if len(parts) == 1 else cls(parts, bytes([numbers[key] for key in keys]))

    @classmethod
    def joined(cls, several: Iterable[Self | PackedRecords]) -> Iterator[Self | PackedRecords]:
        """Put records together that follow each other: packed if all are of one shape, else mixed."""
        known: dict[tuple[object, int], int] = {}
        groups: list[list[PackedRecords]] = []
        order: list[bytes] = []
        for each in several:
            parts = parts_of(each)
            keys = [(part.shape, part.row_size) for part in parts]
            if groups and len(known.keys() | set(keys)) > PARTS_MAX:
                yield cls._of_groups(groups, order)
                known, groups, order = {}, [], []
            numbers = bytearray(PARTS_MAX)  # those here of the parts of this one
            for number, (key, part) in enumerate(zip(keys, parts, strict=True)):
                if key not in known:
                    known[key] = len(groups)
                    groups.append([])
                numbers[number] = known[key]
                groups[known[key]].append(part)
            order.append(
                each.order.translate(numbers) if isinstance(each, MixedRecords) else bytes(numbers[:1]) * len(each)
            )
        if groups:
            yield cls._of_groups(groups, order)

    @classmethod
    def _of_groups(cls, groups: Sequence[Sequence[PackedRecords]], order: Iterable[bytes]) -> Self | PackedRecords:
        parts = [PackedRecords.joined(group) for group in groups]
        return parts[0] if len(parts) == 1 else cls(parts, b"".join(order))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def size(self) -> int:
        """How many bytes their rows take."""
        return sum([part.row_size * len(part) for part in self.parts])

    @overload
    def __getitem__(self, index: int) -> tuple[int, bytes]: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> tuple[int, bytes] | Self:
        if isinstance(index, slice):
            numbers = range(len(self))[index]
            if numbers.step != 1:
                raise ValueError("a slice of mixed records has no step")
            return self if len(numbers) == len(self) else self._slice(numbers.start, numbers.stop)
        at = range(len(self))[index]
        number = self.order[at]
        return self.parts[number][self.order.count(number, 0, at)]

    def _slice(self, start: int, stop: int) -> Self:
        """Return the records from ``start`` to ``stop``, in parts of which none is empty if there is one at all."""
        order = self.order[start:stop]
        numbers = bytearray(PARTS_MAX)
        parts: list[PackedRecords] = []
        for number, part in enumerate(self.parts):
            if count := order.count(number):
                numbers[number] = len(parts)
                first = self.order.count(number, 0, start)
                parts.append(part[first : first + count])
        return type(self)(parts or [self.parts[0][:0]], order.translate(numbers))

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return in_order(self.order, self.parts)

    def encoded(self) -> Iterator[bytes]:
        """Iterate over the records without their probepoints."""
        return in_order(self.order, [part.encoded() for part in self.parts])

    def probes(self) -> list[int] | int:
        """Return the probepoints of all records, or the one that they have in common."""
        columns = [part.probes() for part in self.parts]
        first = columns[0]
        if isinstance(first, int) and all(column == first for column in columns):
            return first
        spread = [
            [column] * len(part) if isinstance(column, int) else column
            for part, column in zip(self.parts, columns, strict=True)
        ]
        return list(in_order(self.order, spread))

    def renumbered(self, number_of: Callable[[int], int]) -> Self:
        """Return the same records with other numbers of probepoints."""
        return type(self)([part.renumbered(number_of) for part in self.parts], self.order)


def parts_of(records: PackedRecords | MixedRecords) -> tuple[PackedRecords, ...]:
    """Return packed records of one shape each, in which all records are."""
    return records.parts if isinstance(records, MixedRecords) else (records,)


def in_order(order: bytes, columns: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """Put together what the parts of mixed records have of something, in the order of the records."""
    return map(next, map([iter(column) for column in columns].__getitem__, order))


def _key(record: bytes) -> tuple[bytes, int]:
    """Return what records of one shape have in common: the flag word, and their size without a process name."""
    head = record[:_FLAGS]
    name = _name_place(head)
    return head, len(record) if name is None else len(record) - record.find(0, name)


@lru_cache(64)
def _name_place(head: bytes) -> int | None:
    """Return where in records with this flag word a process name is; None if they have none, or are no records."""
    flags, byte_order = flag_word(head)
    try:
        place = RowShape.of(flags, byte_order).name
    except FormatError:
        return None
    return None if place is None else place - PROBE_SIZE


# Packed records without what is not wanted of them: their bytes alone, or their places alone.


_STACKS = bytes(byte in (Token.KERNEL_STACK, Token.USER_STACK) for byte in range(256))
_ITEMS = bytes(byte in ITEM_TOKENS for byte in range(256))
"""Whether a byte can begin a call stack, and an item."""


class PackedBytes(Sequence[bytes]):
    """Give packed records without their probepoints."""

    __slots__ = ("_known", "packed")

    def __init__(self, packed: PackedRecords | MixedRecords) -> None:
        self.packed = packed
        self._known: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> bytes | Self:
        if isinstance(index, slice):
            return type(self)(self.packed[index])
        return self._all()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all())

    def _all(self) -> list[bytes]:
        if self._known is None:
            self._known = list(self.packed.encoded())
        return self._known

    @property
    def size(self) -> int:
        """How many bytes the records take."""
        return sum([_size(part) for part in parts_of(self.packed)])


def _size(packed: PackedRecords) -> int:
    size = (packed.row_size - PROBE_SIZE) * len(packed)
    match packed.names():
        case None:
            return size
        case bytes() as name:
            return size - (NAME_SPACE - 1 - len(name)) * len(packed)
        case names:
            return size - (NAME_SPACE - 1) * len(packed) + sum(map(len, names))


def rows_with_stacks(packed: PackedRecords) -> list[int]:
    """Return the rows whose data may be items with a call stack among them; the others have none."""
    first, end = packed.shape.data, packed.row_size
    if first >= end:
        return []
    mask = 0
    for place in range(first, end):
        mask |= _rows_with(packed, place, _STACKS)
    mask &= _rows_with(packed, first, _ITEMS)
    return [row for row, byte in enumerate(mask.to_bytes(len(packed), "little")) if byte] if mask else []


def _rows_with(packed: PackedRecords, place: int, table: bytes) -> int:
    """Return what a table has for the bytes at one place of all rows, as one number."""
    plane = packed.planes.get(place)
    if plane is None:
        plane = packed.first[place : place + 1] * len(packed)
    return int.from_bytes(plane.translate(table), "little")


class PackedPlaces(Sequence["Place"]):
    """Give the place of each of some packed records; ``table`` has those of probepoints."""

    __slots__ = ("packed", "table")

    def __init__(self, packed: PackedRecords | MixedRecords, table: Sequence[Place]) -> None:
        self.packed = packed
        self.table = table

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, index: int) -> Place: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Place | Self:
        if isinstance(index, slice):
            return type(self)(self.packed[index], self.table)
        return self.table[self.packed[index][0]]

    def __iter__(self) -> Iterator[Place]:
        probes, table = self.packed.probes(), self.table
        if isinstance(probes, int):
            return iter([table[probes]] * len(self.packed))
        return iter([table[probe] for probe in probes])

    def distinct(self) -> list[Place]:
        """Return the places that occur."""
        probes: set[int] = set()
        for part in parts_of(self.packed):
            found = part.probes()
            probes |= {found} if isinstance(found, int) else set(found)
        return [self.table[probe] for probe in probes]
