"""
Frames of record tables (``record.record_table``), the blocks that readers return for them, and the choice of packing.

The body of a PACKED frame, for records of one shape::

    u32 program id | u64 time of writing | u32 count of rows | u32 size of a row | the first row |
    a bit for each byte of a row, the lowest bit of a byte first: set if rows differ there |
    for each such byte: its values in all rows

The body of a MIXED frame, for records of several shapes::

    u32 program id | u64 time of writing | u32 count of records | u32 count of parts | for each record a byte: the
    number of its part | for each part what a PACKED frame has after the time of writing
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.record.record_rows import PackedRows
from dprobes.record.record_table import PARTS_MAX, RecordTable
from dprobes.trace.trace_content import RecordBlock, TraceRecord
from dprobes.trace.trace_frames import BODY_MAX, FrameKind, frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.trace.trace_content import TraceProgram

__all__ = [
    "MIXED_HEAD",
    "PACKED_HEAD",
    "Block",
    "TableBlock",
    "joined",
    "packed",
    "size_of",
    "split_mixed",
    "split_packed",
    "table_frame",
]

PACKED_HEAD = struct.Struct("<IQ")
MIXED_HEAD = struct.Struct("<IQII")
_PART_HEAD = struct.Struct("<II")
_WRONG_SIZE = "its size is not that of its rows"


def table_frame(program: int, written: int, table: RecordTable) -> bytes:
    """
    Return the PACKED frame of a table of records of one shape, or the MIXED frame of several shapes.

    ``program`` is its number in the file. ``written`` is the time of writing, CLOCK_MONOTONIC in nanoseconds.
    """
    parts = [piece for part in table.parts for piece in _pieces_of(part)]
    if len(table.parts) == 1:
        return frame(FrameKind.PACKED, b"".join((PACKED_HEAD.pack(program, written), *parts)))
    head = MIXED_HEAD.pack(program, written, len(table), len(table.parts))
    return frame(FrameKind.MIXED, b"".join((head, table.order, *parts)))


def _pieces_of(rows: PackedRows) -> tuple[bytes, ...]:
    """Return the encoded parts of packed records: count and row size, first row, bitmap of planes, and planes."""
    planes = sorted(rows.planes.items())
    bits = sum(1 << place for place, _ in planes)
    return (
        _PART_HEAD.pack(len(rows), rows.row_size),
        rows.first,
        bits.to_bytes(_bitmap_size(rows.row_size), "little"),
        *(plane for _, plane in planes),
    )


def _bitmap_size(row_size: int) -> int:
    return (row_size + 7) // 8


def split_packed(body: bytes) -> tuple[int, int, RecordTable]:
    """
    Return program number, time of writing in nanoseconds, and the records in the body of a PACKED frame.

    Raise ``ValueError`` if the body is invalid.
    """
    if len(body) < PACKED_HEAD.size + _PART_HEAD.size:
        raise ValueError("there is no program and time")
    program, written = PACKED_HEAD.unpack_from(body)
    rows, end = _split_part(body, PACKED_HEAD.size, BODY_MAX)
    if end != len(body):
        raise ValueError(_WRONG_SIZE)
    return program, written, RecordTable.of_rows(rows)


def split_mixed(body: bytes) -> tuple[int, int, RecordTable]:
    """
    Return program number, time of writing in nanoseconds, and the records in the body of a MIXED frame.

    Raise ``ValueError`` if the body is invalid.
    """
    if len(body) < MIXED_HEAD.size:
        raise ValueError("there is no program and time")
    program, written, count, number = MIXED_HEAD.unpack_from(body)
    at = MIXED_HEAD.size + count
    if number > PARTS_MAX:
        raise ValueError(f"{number} shapes of records are too many")
    parts = []
    room = BODY_MAX
    for _ in range(number):
        part, at = _split_part(body, at, room)
        room -= len(part) * part.row_size
        parts.append(part)
    if at != len(body):
        raise ValueError(_WRONG_SIZE)
    try:
        return program, written, RecordTable(parts, body[MIXED_HEAD.size : MIXED_HEAD.size + count])
    except FormatError as error:
        raise ValueError(error.message) from None


def _split_part(body: bytes, at: int, room: int) -> tuple[PackedRows, int]:
    """
    Return the records of one shape that begin at offset ``at``, and the offset of their end.

    ``room`` is the maximum size of their rows in bytes. Raise ``ValueError`` if they are invalid.
    """
    if at + _PART_HEAD.size > len(body):
        raise ValueError(_WRONG_SIZE)
    count, size = _PART_HEAD.unpack_from(body, at)
    if count * size > room:
        raise ValueError(f"{count} rows of {size} bytes are too many")
    first_at = at + _PART_HEAD.size
    bits_at = first_at + size
    at = bits_at + _bitmap_size(size)
    first, bits = body[first_at:bits_at], int.from_bytes(body[bits_at:at], "little")
    end = at + bits.bit_count() * count
    if bits >> size or len(body) < end:
        raise ValueError(_WRONG_SIZE)
    planes = {}
    for place in range(size):
        if bits >> place & 1:
            planes[place] = body[at : at + count]
            at += count
    try:
        return PackedRows(count, first, planes), end
    except FormatError as error:
        raise ValueError(error.message) from None


@dataclass(frozen=True, slots=True)
class TableBlock:
    """
    Table of records of one program. ``written`` and ``position`` are the frame's time of writing and offset.

    Iteration yields the records one by one. ``record_columns`` processes them together.
    """

    program: TraceProgram
    records: RecordTable
    wall_offset: int
    written: int
    position: int

    def __iter__(self) -> Iterator[TraceRecord]:
        program, offset, written = self.program, self.wall_offset, self.written
        for probe, record in self.records:
            yield TraceRecord(program, probe, record, offset, written)

    @property
    def last_written(self) -> int:
        """The time of writing of the last record."""
        return self.written


Block = RecordBlock | TableBlock


# The form in which records are written together: packed if they have few shapes, else unchanged.

_PACKED_MIN = 16
"""Minimum number of records worth packing, in total and, on average, per shape."""
_PACKED_ROW = 1024
"""Size in bytes of the longest record that is packed: long records have little in common."""


def packed(records: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
    """Return the same records, packed if that is possible and saves space."""
    if isinstance(records, RecordTable) or len(records) < _PACKED_MIN:
        return records
    table = _table_of(records)
    return records if table is None or not _is_worth(table) else table


def _table_of(records: Sequence[tuple[int, bytes]]) -> RecordTable | None:
    if isinstance(records, RecordTable):
        return records
    if max([len(record) for _, record in records]) > _PACKED_ROW:
        return None
    return RecordTable.of_records(records)


def _is_worth(table: RecordTable) -> bool:
    """Return whether a table has enough records of each shape for packed frames to save space."""
    return len(table) >= _PACKED_MIN * len(table.parts)


def size_of(records: Sequence[tuple[int, bytes]]) -> int:
    """Return the approximate size of records in bytes."""
    return records.row_bytes if isinstance(records, RecordTable) else sum(len(record) for _, record in records)


def joined(several: Iterable[Sequence[tuple[int, bytes]]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Iterate over the same sequences of numbered records, and join adjacent ones that can be packed together."""
    waiting: list[RecordTable] = []
    for each in _lists_joined(several):
        table = _table_of(each)
        if table is not None:
            waiting.append(table)
            continue
        yield from _worthwhile(waiting)
        waiting = []
        yield each
    yield from _worthwhile(waiting)


def _worthwhile(waiting: Sequence[RecordTable]) -> Iterator[Sequence[tuple[int, bytes]]]:
    for table in RecordTable.joined(waiting):
        yield table if _is_worth(table) else list(table)


def _lists_joined(several: Iterable[Sequence[tuple[int, bytes]]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Iterate over the same sequences of numbered records, and join adjacent lists."""
    waiting: list[tuple[int, bytes]] = []
    for each in several:
        if not isinstance(each, RecordTable):
            waiting += each
            continue
        if waiting:
            yield waiting
            waiting = []
        yield each
    if waiting:
        yield waiting
