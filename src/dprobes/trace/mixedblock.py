"""
Frames of packed records of several shapes (``record.mixed``), and blocks of them as readers have them.

The body of a MIXED frame::

    u32 program id | u64 time of writing | u32 count of records | u32 count of parts | for each record a byte: the
    number of its part | for each part what a PACKED frame has behind the time of writing
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.lazydataclass import dataclass
from dprobes.record.mixed import PARTS_MAX, MixedRecords
from dprobes.trace.content import RecordBlock, TraceRecord
from dprobes.trace.frames import BODY_MAX, RECORD_HEAD, FrameKind, frame
from dprobes.trace.packedblock import PackedBlock, split_table, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.trace.content import TraceProgram

__all__ = ["MIXED_HEAD", "Block", "MixedBlock", "mixed_frame", "split_mixed"]

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
