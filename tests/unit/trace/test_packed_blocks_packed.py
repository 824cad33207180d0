"""Frames of packed records."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_table import RecordTable
from dprobes.trace.packed_blocks import PACKED_HEAD, TableBlock, table_frame
from dprobes.trace.trace_frames import BODY_MAX, FrameKind, frame
from dprobes.trace.trace_reader import TraceParser
from support.trace_files import header, program, seen

FOUND = [
    (n % 3, encode_record(LogRecord(1, n % 5, pid=n, process_name="ab"[: n % 2], data=bytes([n])))) for n in range(99)
]


def packed(found: list[tuple[int, bytes]]) -> RecordTable:
    records = RecordTable.of_records(found)
    assert records is not None
    return records


def test_a_frame_holds_the_records() -> None:
    parser = TraceParser("trace.dpt")
    data = header() + program() + table_frame(1, 5_000, packed(FOUND))
    (block,) = parser.feed(data)
    assert isinstance(block, TableBlock)
    assert [(each.probe, each.record) for each in block] == FOUND
    assert {each.written for each in block} == {block.last_written} == {5_000}
    assert block.position == len(header() + program())


@given(st.data())
def test_any_damage_is_an_error_or_other_records(data: st.DataObject) -> None:
    body = bytearray(table_frame(1, 5_000, packed(FOUND))[12:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    parser = TraceParser("trace.dpt")
    with contextlib.suppress(FormatError):
        assert len(seen(parser.feed(header() + program() + frame(FrameKind.PACKED, bytes(body))))) <= BODY_MAX // 8


def table_head(number: int, count: int, size: int) -> bytes:
    return PACKED_HEAD.pack(number, 0) + struct.pack("<II", count, size)


ROW = bytes(4) + b"\1\0\0\0" + bytes(4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (bytes(19), "there is no program and time"),
        (table_head(1, BODY_MAX // 12 + 1, 12) + ROW + bytes(2), "5592406 rows of 12 bytes are too many"),
        (table_head(1, 2, 12) + ROW + bytes(3), "its size is not that of its rows"),
        (table_head(1, 2, 12) + ROW + struct.pack("<H", 1) + b"a", "its size is not that of its rows"),
        (table_head(1, 2, 12) + ROW + struct.pack("<H", 1 << 12) + b"ab", "its size is not that of its rows"),
        (table_head(1, 2, 8) + ROW[:8] + bytes(1), "a row of records needs 12 bytes, found 8 (at byte 8)"),
        (table_head(9, 2, 12) + ROW + bytes(2), "no program has the number 9"),
    ],
)
def test_each_defect_has_its_message(body: bytes, message: str) -> None:
    parser = TraceParser("trace.dpt")
    with pytest.raises(FormatError) as caught:
        list(parser.feed(header() + program() + frame(FrameKind.PACKED, body)))
    assert caught.value.message.startswith(f"a frame of 'trace.dpt' does not hold what it must: {message}")


@pytest.mark.parametrize("version", [2, 3])
def test_files_of_the_versions_before_are_read(version: int) -> None:
    parser = TraceParser("trace.dpt")
    assert list(parser.feed(header(version=version) + program())) == []
