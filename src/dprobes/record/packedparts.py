"""Packed records without what is not wanted of them: their bytes alone, or their places alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, overload

from dprobes.record.items import ITEM_TOKENS
from dprobes.record.mixed import parts_of
from dprobes.record.packed import NAME_SPACE, PROBE_SIZE
from dprobes.rpn.isa import Token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.record.mixed import MixedRecords
    from dprobes.record.packed import PackedRecords
    from dprobes.record.probeinfo import Place

__all__ = ["PackedBytes", "PackedPlaces", "rows_with_stacks"]

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
