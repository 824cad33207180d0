"""
Frames of packed records (``record.packed``), and blocks of them as readers have them.

The body of a PACKED frame::

    u32 program id | u64 time of writing | u32 count of rows | u32 size of a row | the first row |
    a bit for each byte of a row, the lowest bit of a byte first: whether rows differ there | for each such byte: that
    of all rows
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.lazydataclass import dataclass
from dprobes.record.packed import PackedRecords
from dprobes.trace.content import RecordBlock, TraceRecord
from dprobes.trace.frames import BODY_MAX, FrameKind, frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.trace.content import TraceProgram

__all__ = ["PACKED_HEAD", "Block", "PackedBlock", "joined", "packed", "packed_frame", "size_of", "split_packed"]

_PACKED_MIN = 16
"""Fewer records are not worth packing."""
_PACKED_ROW = 1024
"""Bytes of the longest record that is packed: of long ones little is the same."""

PACKED_HEAD = struct.Struct("<IQII")


def packed(records: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
    """Return the same records, packed if that is worth it and possible."""
    if isinstance(records, PackedRecords) or len(records) < _PACKED_MIN or len(records[0][1]) > _PACKED_ROW:
        return records
    return PackedRecords.of_records(records) or records


def size_of(records: Sequence[tuple[int, bytes]]) -> int:
    """Return about how many bytes records take."""
    if isinstance(records, PackedRecords):
        return records.row_size * len(records)
    return sum(len(record) for _, record in records)


def joined(parts: Iterable[Sequence[tuple[int, bytes]]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Put records together: what is packed with others of the same shape, and what is not."""
    waiting: list[PackedRecords] = []
    for part in _lists_joined(parts):
        if isinstance(part, PackedRecords):
            records: PackedRecords | None = part
        else:
            records = PackedRecords.of_records(part) if len(part[0][1]) <= _PACKED_ROW else None
        if waiting and (records is None or not waiting[0].goes_with(records)):
            yield PackedRecords.joined(waiting)
            waiting = []
        if records is None:
            yield part
        else:
            waiting.append(records)
    if waiting:
        records = PackedRecords.joined(waiting)
        yield records if len(records) >= _PACKED_MIN else list(records)


def _lists_joined(parts: Iterable[Sequence[tuple[int, bytes]]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Put lists together that follow each other."""
    waiting: list[tuple[int, bytes]] = []
    for part in parts:
        if not isinstance(part, PackedRecords):
            waiting += part
            continue
        if waiting:
            yield waiting
            waiting = []
        yield part
    if waiting:
        yield waiting


def packed_frame(program: int, written: int, records: PackedRecords) -> bytes:
    """Return a PACKED frame."""
    planes = sorted(records.planes.items())
    bits = sum(1 << place for place, _ in planes)
    return frame(
        FrameKind.PACKED,
        b"".join(
            (
                PACKED_HEAD.pack(program, written, len(records), records.row_size),
                records.first,
                bits.to_bytes(_bitmap_size(records.row_size), "little"),
                *(plane for _, plane in planes),
            )
        ),
    )


def _bitmap_size(row_size: int) -> int:
    return (row_size + 7) // 8


def split_packed(body: bytes) -> tuple[int, int, PackedRecords]:
    """Return the program, the time of writing and the records of a PACKED frame; raise ``ValueError`` if it is none."""
    if len(body) < PACKED_HEAD.size:
        raise ValueError("there is no program and time")
    program, written, count, size = PACKED_HEAD.unpack_from(body)
    if count * size > BODY_MAX:
        raise ValueError(f"{count} rows of {size} bytes are too many")
    bits_at = PACKED_HEAD.size + size
    at = bits_at + _bitmap_size(size)
    first, bits = body[PACKED_HEAD.size : bits_at], int.from_bytes(body[bits_at:at], "little")
    if bits >> size or len(body) != at + bits.bit_count() * count:
        raise ValueError("its size is not that of its rows")
    planes = {}
    for place in range(size):
        if bits >> place & 1:
            planes[place] = body[at : at + count]
            at += count
    try:
        return program, written, PackedRecords(count, first, planes)
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


Block = RecordBlock | PackedBlock
