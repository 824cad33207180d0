"""Frames of packed records of several shapes."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_table import RecordTable
from dprobes.trace.packed_blocks import MIXED_HEAD, TableBlock, table_frame
from dprobes.trace.record_columns import rows_of
from dprobes.trace.trace_frames import BODY_MAX, FrameKind, frame
from dprobes.trace.trace_reader import TraceParser
from support.trace_files import header, program, seen

FOUND = [
    (n % 3, encode_record(LogRecord(1, n % 5, pid=n, process_name="ab"[: n % 2], data=bytes(n % 4)))) for n in range(99)
]


def mixed(found: list[tuple[int, bytes]]) -> RecordTable:
    records = RecordTable.of_records(found)
    assert isinstance(records, RecordTable)
    return records


def block_of(data: bytes) -> TableBlock:
    (block,) = TraceParser("trace.dpt").feed(header() + program() + data)
    assert isinstance(block, TableBlock)
    return block


def test_a_frame_holds_the_records_in_order() -> None:
    block = block_of(table_frame(1, 5_000, mixed(FOUND)))
    assert [(each.probe, each.record) for each in block] == FOUND
    assert {each.written for each in block} == {block.last_written} == {5_000}
    assert block.position == len(header() + program())


def test_its_rows_are_of_one_shape_each() -> None:
    block = block_of(table_frame(1, 5_000, mixed(FOUND)))
    rows = list(rows_of(block))
    assert [len(each) for each in rows] == [25, 25, 25, 24]
    assert [rows[1].record(n).record for n in range(25)] == [record for _, record in FOUND[1::4]]


@given(st.data())
def test_any_damage_is_an_error_or_other_records(data: st.DataObject) -> None:
    body = bytearray(table_frame(1, 5_000, mixed(FOUND))[12:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    parser = TraceParser("trace.dpt")
    with contextlib.suppress(FormatError):
        assert len(seen(parser.feed(header() + program() + frame(FrameKind.MIXED, bytes(body))))) <= BODY_MAX // 8


ROW = struct.pack("<II", 2, 12) + bytes(4) + b"\1\0\0\0" + bytes(4) + bytes(2)
"""Two rows that are the same."""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (bytes(19), "there is no program and time"),
        (MIXED_HEAD.pack(1, 0, 2, 257) + bytes(2) + ROW, "257 shapes of records are too many"),
        (MIXED_HEAD.pack(1, 0, 0, 0), "mixed records have 1 to 256 parts, found 0 (at byte 0)"),
        (MIXED_HEAD.pack(1, 0, 2, 2) + bytes(2) + ROW, "its size is not that of its rows"),
        (MIXED_HEAD.pack(1, 0, 2, 1) + bytes(2) + ROW + b"a", "its size is not that of its rows"),
        (MIXED_HEAD.pack(1, 0, BODY_MAX, 1) + bytes(2) + ROW, "its size is not that of its rows"),
        (
            MIXED_HEAD.pack(1, 0, 2, 1) + b"\0\1" + ROW,
            "the order of mixed records is not that of their parts (at byte 0)",
        ),
        (
            MIXED_HEAD.pack(1, 0, 2, 1) + bytes(2) + struct.pack("<I", BODY_MAX // 12 + 1) + ROW[4:],
            "5592406 rows of 12 bytes are too many",
        ),
        (MIXED_HEAD.pack(9, 0, 2, 1) + bytes(2) + ROW, "no program has the number 9"),
    ],
)
def test_each_defect_has_its_message(body: bytes, message: str) -> None:
    parser = TraceParser("trace.dpt")
    with pytest.raises(FormatError) as caught:
        list(parser.feed(header() + program() + frame(FrameKind.MIXED, body)))
    assert caught.value.message.startswith(f"a frame of 'trace.dpt' does not hold what it must: {message}")


def test_rows_of_all_parts_together_have_a_limit() -> None:
    half = struct.pack("<I", BODY_MAX // 24 + 1) + ROW[4:]
    parser = TraceParser("trace.dpt")
    body = MIXED_HEAD.pack(1, 0, 0, 2) + half + half
    with pytest.raises(FormatError, match="2796203 rows of 12 bytes are too many"):
        list(parser.feed(header() + program() + frame(FrameKind.MIXED, body)))
