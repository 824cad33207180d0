"""What is written of records together: packed where they are of one shape or of few shapes, else as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.record.mixed import MixedRecords
from dprobes.record.packed import PackedRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["joined", "packed", "size_of"]

_PACKED_MIN = 16
"""Fewer records are not worth packing, neither in all nor, on average, of each shape."""
_PACKED_ROW = 1024
"""Bytes of the longest record that is packed: of long ones little is the same."""


def packed(records: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
    """Return the same records, packed if that is worth it and possible."""
    if isinstance(records, PackedRecords | MixedRecords) or len(records) < _PACKED_MIN:
        return records
    if max([len(record) for _, record in records]) > _PACKED_ROW:
        return records
    return _worth(MixedRecords.of_records(records)) or records


def _worth(records: PackedRecords | MixedRecords | None) -> PackedRecords | MixedRecords | None:
    """Return packed records unless there are too few of each shape."""
    if isinstance(records, MixedRecords) and len(records) < _PACKED_MIN * len(records.parts):
        return None
    return records


def size_of(records: Sequence[tuple[int, bytes]]) -> int:
    """Return about how many bytes records take."""
    if isinstance(records, PackedRecords):
        return records.row_size * len(records)
    if isinstance(records, MixedRecords):
        return records.size
    return sum(len(record) for _, record in records)


def joined(parts: Iterable[Sequence[tuple[int, bytes]]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Put records together: what can be packed with what is packed before and behind, and what cannot."""
    waiting: list[PackedRecords | MixedRecords] = []
    for part in _lists_joined(parts):
        records = _packable(part)
        if records is not None:
            waiting.append(records)
            continue
        yield from _worthwhile(waiting)
        waiting = []
        yield part
    yield from _worthwhile(waiting)


def _packable(part: Sequence[tuple[int, bytes]]) -> PackedRecords | MixedRecords | None:
    if isinstance(part, PackedRecords | MixedRecords):
        return part
    if max([len(record) for _, record in part]) > _PACKED_ROW:
        return None
    return MixedRecords.of_records(part)


def _worthwhile(waiting: Sequence[PackedRecords | MixedRecords]) -> Iterator[Sequence[tuple[int, bytes]]]:
    for records in MixedRecords.joined(waiting):
        yield records if len(records) >= _PACKED_MIN and _worth(records) is not None else list(records)


def _lists_joined(parts: Iterable[Sequence[tuple[int, bytes]]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Put lists together that follow each other."""
    waiting: list[tuple[int, bytes]] = []
    for part in parts:
        if not isinstance(part, PackedRecords | MixedRecords):
            waiting += part
            continue
        if waiting:
            yield waiting
            waiting = []
        yield part
    if waiting:
        yield waiting
