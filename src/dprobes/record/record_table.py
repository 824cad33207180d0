"""
Tables of records: rows of a few shapes, and the order of the records.

Several probes log records of different sizes, and so does a probe that logs strings. Records of one shape are packed
together as a *part* (``record_rows``). A byte for each record is the number of its part. Counting needs only the parts;
printing also uses the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeVar, overload

from dprobes.errors import FormatError
from dprobes.record.log_record import flag_word
from dprobes.record.record_rows import FLAGS_SIZE, PROBE_SIZE, PackedRows, RowShape, repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.record.record_origin import Place
    from dprobes.record.record_rows import Column

__all__ = ["PARTS_MAX", "RecordTable", "TableBytes", "TablePlaces", "in_order"]

_T = TypeVar("_T")

PARTS_MAX = 256
"""Maximum number of parts: one byte identifies the part of a record."""


class RecordTable(Sequence[tuple[int, bytes]]):
    """
    Encoded records with their probepoint numbers, as a sequence of pairs.

    Each of ``parts`` has records with the same flag word and, apart from the process name, the same size. ``order`` has
    one byte for each record: the number of its part.
    """

    __slots__ = ("order", "parts")

    def __init__(self, parts: Sequence[PackedRows], order: bytes) -> None:
        self.parts = tuple(parts)
        self.order = order
        if not 0 < len(self.parts) <= PARTS_MAX:
            raise FormatError(f"mixed records have 1 to {PARTS_MAX} parts, found {len(self.parts)}", offset=0)
        if sum(map(len, self.parts)) != len(order) or any(
            order.count(number) != len(part) for number, part in enumerate(self.parts)
        ):
            raise FormatError("the order of mixed records is not that of their parts", offset=0)

    @classmethod
    def of_rows(cls, rows: PackedRows) -> Self:
        """Return a table with ``rows`` as its only part."""
        return cls((rows,), bytes(len(rows)))

    @classmethod
    def of_records(cls, records: Sequence[tuple[int, bytes]]) -> Self | None:
        """Pack records; return None if one is invalid, or if they have none or more than ``PARTS_MAX`` shapes."""
        groups: dict[tuple[bytes, int], list[tuple[int, bytes]]] = {}
        keys = [_key(record) for _, record in records]
        for key, each in zip(keys, records, strict=True):
            groups.setdefault(key, []).append(each)
        if not 0 < len(groups) <= PARTS_MAX:
            return None
        parts = []
        for group in groups.values():
            part = PackedRows.of_records(group)
            if part is None:
                return None
            parts.append(part)
        numbers = {key: number for number, key in enumerate(groups)}
        return cls(parts, bytes([numbers[key] for key in keys]) if len(parts) > 1 else bytes(len(records)))

    @classmethod
    def joined(cls, several: Iterable[Self]) -> Iterator[Self]:
        """Iterate over tables that are concatenations of successive ones, each with at most PARTS_MAX shapes."""
        known: dict[tuple[RowShape, int], int] = {}
        groups: list[list[PackedRows]] = []
        order: list[bytes] = []
        for each in several:
            keys = [(part.shape, part.row_size) for part in each.parts]
            if groups and len(known.keys() | set(keys)) > PARTS_MAX:
                yield cls(list(map(PackedRows.joined, groups)), b"".join(order))
                known, groups, order = {}, [], []
            numbers = bytearray(PARTS_MAX)  # maps part numbers of this table to those of the result
            for number, (key, part) in enumerate(zip(keys, each.parts, strict=True)):
                if key not in known:
                    known[key] = len(groups)
                    groups.append([])
                numbers[number] = known[key]
                groups[known[key]].append(part)
            order.append(each.order.translate(numbers))
        if groups:
            yield cls(list(map(PackedRows.joined, groups)), b"".join(order))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def row_bytes(self) -> int:
        """Total size of the rows in bytes."""
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
        return self.parts[number].pair(self.order.count(number, 0, at))

    def _slice(self, start: int, stop: int) -> Self:
        """Return the records from ``start`` to ``stop``, exclusive. Parts without records are dropped."""
        order = self.order[start:stop]
        if len(self.parts) == 1:
            return type(self)((self.parts[0][start:stop],), order)
        numbers = bytearray(PARTS_MAX)
        parts: list[PackedRows] = []
        for number, part in enumerate(self.parts):
            if count := order.count(number):
                numbers[number] = len(parts)
                first = self.order.count(number, 0, start)
                parts.append(part[first : first + count])
        return type(self)(parts or [self.parts[0][:0]], order.translate(numbers))

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return in_order(self.order, self.parts)

    def encoded(self) -> Iterator[bytes]:
        """Iterate over the encoded records in their order, without probepoint numbers."""
        return in_order(self.order, [part.encoded() for part in self.parts])

    def probes(self) -> Column:
        """Return the column of probepoint numbers, in the order of the records."""
        columns = [part.probes() for part in self.parts]
        first = columns[0]
        if len(columns) == 1 or (isinstance(first, int) and all(column == first for column in columns)):
            return first
        spread = [repeated(column, len(part)) for part, column in zip(self.parts, columns, strict=True)]
        return list(in_order(self.order, spread))

    def renumbered(self, number_of: Callable[[int], int]) -> Self:
        """Return the same records, with each probepoint number replaced by the result of ``number_of``."""
        return type(self)([part.renumbered(number_of) for part in self.parts], self.order)


def in_order(order: bytes, columns: Sequence[Iterable[_T]]) -> Iterator[_T]:
    """Iterate over the values of columns, one for each part of a table, in the order of the records."""
    if len(columns) == 1:
        return iter(columns[0])
    return map(next, map([iter(column) for column in columns].__getitem__, order))


def _key(record: bytes) -> tuple[bytes, int]:
    """Return the key of a record's shape: the flag word, and the size without the process name."""
    head = record[:FLAGS_SIZE]
    name = _name_place(head)
    return head, len(record) if name is None else len(record) - record.find(0, name)


@lru_cache(64)
def _name_place(head: bytes) -> int | None:
    """
    Return the byte offset of the process name in records that begin with the flag word ``head``.

    Return None if the records have no process name, or if the flag word is invalid.
    """
    flags, byte_order = flag_word(head)
    try:
        place = RowShape.of(flags, byte_order).name
    except FormatError:
        return None
    return None if place is None else place - PROBE_SIZE


# Sequence views of a table for consumers that take records one by one: their bytes, and their places.


class TableBytes(Sequence[bytes]):
    """The encoded records of a table in their order, without probepoint numbers."""

    __slots__ = ("_known", "table")

    def __init__(self, table: RecordTable) -> None:
        self.table = table
        self._known: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> bytes | Self:
        return type(self)(self.table[index]) if isinstance(index, slice) else self._all()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all())

    def _all(self) -> list[bytes]:
        if self._known is None:
            self._known = list(self.table.encoded())
        return self._known

    @property
    def size(self) -> int:
        """Total size of the records in bytes."""
        return sum([part.size for part in self.table.parts])


class TablePlaces(Sequence["Place"]):
    """Place of each record of a table. ``places`` is indexed by probepoint number."""

    __slots__ = ("places", "table")

    def __init__(self, table: RecordTable, places: Sequence[Place]) -> None:
        self.table = table
        self.places = places

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Place: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Place | Self:
        if isinstance(index, slice):
            return type(self)(self.table[index], self.places)
        return self.places[self.table[index][0]]

    def __iter__(self) -> Iterator[Place]:
        probes = self.table.probes()
        if isinstance(probes, int):
            return iter([self.places[probes]] * len(self.table))
        return iter([self.places[probe] for probe in probes])

    def distinct(self) -> list[Place]:
        """Return each probepoint that occurs in the table once."""
        return [self.places[probe] for probe in set[int]().union(*(part.probe_set() for part in self.table.parts))]
