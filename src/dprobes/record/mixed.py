"""
Packed records of several shapes, in the order in which they came.

Several probes log records of different sizes, and so does one that logs strings. What is alike is packed together
(``packed``), and a byte for each record says which of these *parts* it is from: so whoever counts looks at the parts,
and whoever prints has the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeVar, overload

from dprobes.errors import FormatError
from dprobes.record.codec import flag_word
from dprobes.record.packed import PROBE_SIZE, PackedRecords, RowShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["PARTS_MAX", "MixedRecords", "in_order", "parts_of"]

_T = TypeVar("_T")

_FLAGS = 4

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
