"""
Frames of packed records (``record.packed_records``), and blocks of them as readers have them.

The body of a PACKED frame::

    u32 program id | u64 time of writing | u32 count of rows | u32 size of a row | the first row |
    a bit for each byte of a row, the lowest bit of a byte first: whether rows differ there | for each such byte: that
    of all rows
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.record.packed_records import PARTS_MAX, MixedRecords, PackedRecords
from dprobes.trace.trace_content import RecordBlock, TraceRecord
from dprobes.trace.trace_frames import BODY_MAX, RECORD_HEAD, FrameKind, frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.trace.trace_content import TraceProgram

__all__ = [
    "MIXED_HEAD",
    "PACKED_HEAD",
    "Block",
    "MixedBlock",
    "PackedBlock",
    "joined",
    "mixed_frame",
    "packed",
    "packed_frame",
    "size_of",
    "split_mixed",
    "split_packed",
]

PACKED_HEAD = struct.Struct("<IQ")
_TABLE_HEAD = struct.Struct("<II")
_WRONG_SIZE = "its size is not that of its rows"


def packed_frame(program: int, written: int, records: PackedRecords) -> bytes:
    """Return a PACKED frame."""
    return frame(FrameKind.PACKED, b"".join((PACKED_HEAD.pack(program, written), *table_of(records))))


def table_of(records: PackedRecords) -> tuple[bytes, ...]:
    """Return the bytes of packed records, in pieces: from their count on."""
    planes = sorted(records.planes.items())
    bits = sum(1 << place for place, _ in planes)
    return (
        _TABLE_HEAD.pack(len(records), records.row_size),
        records.first,
        bits.to_bytes(_bitmap_size(records.row_size), "little"),
        *(plane for _, plane in planes),
    )


def _bitmap_size(row_size: int) -> int:
    return (row_size + 7) // 8


def split_packed(body: bytes) -> tuple[int, int, PackedRecords]:
    """Return the program, the time of writing and the records of a PACKED frame; raise ``ValueError`` if it is none."""
    if len(body) < PACKED_HEAD.size + _TABLE_HEAD.size:
        raise ValueError("there is no program and time")
    program, written = PACKED_HEAD.unpack_from(body)
    records, end = split_table(body, PACKED_HEAD.size, BODY_MAX)
    if end != len(body):
        raise ValueError(_WRONG_SIZE)
    return program, written, records


def split_table(body: bytes, at: int, room: int) -> tuple[PackedRecords, int]:
    """
    Return packed records whose bytes begin at some place, and where they end; raise ``ValueError`` if there are none.

    ``room`` is how many bytes their rows may take.
    """
    if at + _TABLE_HEAD.size > len(body):
        raise ValueError(_WRONG_SIZE)
    count, size = _TABLE_HEAD.unpack_from(body, at)
    if count * size > room:
        raise ValueError(f"{count} rows of {size} bytes are too many")
    first_at = at + _TABLE_HEAD.size
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
        return PackedRecords(count, first, planes), end
    except FormatError as error:
        raise ValueError(error.message) from None


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """
    Hold packed records of one program.

    Iterating gives them one by one; ``columns`` looks at all of them at once. ``written`` and ``position`` are those of
    the frame.
    """

    program: TraceProgram
    records: PackedRecords
    wall_offset: int
    written: int
    position: int

    def __iter__(self) -> Iterator[TraceRecord]:
        program, offset, written = self.program, self.wall_offset, self.written
        for probe, record in self.records:
            yield TraceRecord(program, probe, record, offset, written)

    @property
    def last_written(self) -> int:
        """When the last one was written."""
        return self.written


# Frames of packed records of several shapes (``record.packed_records``), and blocks of them as readers have them.
#
# The body of a MIXED frame::
#
#     u32 program id | u64 time of writing | u32 count of records | u32 count of parts | for each record a byte: the
#     number of its part | for each part what a PACKED frame has behind the time of writing


MIXED_HEAD = struct.Struct("<IQII")


def mixed_frame(program: int, written: int, records: MixedRecords) -> bytes:
    """Return a MIXED frame."""
    head = MIXED_HEAD.pack(program, written, len(records), len(records.parts))
    tables = [piece for part in records.parts for piece in table_of(part)]
    return frame(FrameKind.MIXED, b"".join((head, records.order, *tables)))


def split_mixed(body: bytes) -> tuple[int, int, MixedRecords]:
    """Return the program, the time of writing and the records of a MIXED frame; raise ``ValueError`` if it is none."""
    if len(body) < MIXED_HEAD.size:
        raise ValueError("there is no program and time")
    program, written, count, number = MIXED_HEAD.unpack_from(body)
    at = MIXED_HEAD.size + count
    if number > PARTS_MAX:
        raise ValueError(f"{number} shapes of records are too many")
    parts = []
    room = BODY_MAX
    for _ in range(number):
        part, at = split_table(body, at, room)
        room -= len(part) * part.row_size
        parts.append(part)
    if at != len(body):
        raise ValueError("its size is not that of its rows")
    try:
        return program, written, MixedRecords(parts, body[MIXED_HEAD.size : MIXED_HEAD.size + count])
    except FormatError as error:
        raise ValueError(error.message) from None


@dataclass(frozen=True, slots=True)
class MixedBlock:
    """Hold packed records of one program of several shapes; ``written`` and ``position`` are those of the frame."""

    program: TraceProgram
    records: MixedRecords
    wall_offset: int
    written: int
    position: int

    def __iter__(self) -> Iterator[TraceRecord]:
        program, offset, written = self.program, self.wall_offset, self.written
        for probe, record in self.records:
            yield TraceRecord(program, probe, record, offset, written)

    @property
    def last_written(self) -> int:
        """When the last one was written."""
        return self.written

    def blocks(self) -> list[PackedBlock]:
        """Return a block for the records of each shape."""
        return [
            PackedBlock(self.program, part, self.wall_offset, self.written, self.position)
            for part in self.records.parts
        ]

    def in_a_row(self) -> RecordBlock:
        """Return the same records as they stand one behind the other in a RECORDS frame."""
        pack = RECORD_HEAD.pack
        body = b"".join([piece for probe, each in self.records for piece in (pack(probe, len(each)), each)])
        return RecordBlock(self.program, body, 0, self.wall_offset, self.written, self.position)


Block = RecordBlock | PackedBlock | MixedBlock


# What is written of records together: packed where they are of one shape or of few shapes, else as they are.


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
