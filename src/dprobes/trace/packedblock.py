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
from dprobes.trace.content import TraceRecord
from dprobes.trace.frames import BODY_MAX, FrameKind, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.trace.content import TraceProgram

__all__ = ["PACKED_HEAD", "PackedBlock", "packed_frame", "split_packed", "split_table", "table_of"]

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
