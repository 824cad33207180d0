"""Frames of packed records."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.codec import encode_record
from dprobes.record.layout import LogRecord
from dprobes.record.packed import PackedRecords
from dprobes.trace.frames import BODY_MAX, FrameKind, frame
from dprobes.trace.packedblock import PACKED_HEAD, PackedBlock, joined, packed_frame
from dprobes.trace.parser import TraceParser
from trace_files import header, program, seen

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUND = [
    (n % 3, encode_record(LogRecord(1, n % 5, pid=n, process_name="ab"[: n % 2], data=bytes([n])))) for n in range(99)
]


def packed(found: list[tuple[int, bytes]]) -> PackedRecords:
    records = PackedRecords.of_records(found)
    assert records is not None
    return records


def test_a_frame_holds_the_records() -> None:
    parser = TraceParser("trace.dpt")
    data = header() + program() + packed_frame(1, 5_000, packed(FOUND))
    (block,) = parser.feed(data)
    assert isinstance(block, PackedBlock)
    assert [(each.probe, each.record) for each in block] == FOUND
    assert {each.written for each in block} == {block.last_written} == {5_000}
    assert block.position == len(header() + program())


@given(st.data())
def test_any_damage_is_an_error_or_other_records(data: st.DataObject) -> None:
    body = bytearray(packed_frame(1, 5_000, packed(FOUND))[12:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    parser = TraceParser("trace.dpt")
    with contextlib.suppress(FormatError):
        assert len(seen(parser.feed(header() + program() + frame(FrameKind.PACKED, bytes(body))))) <= BODY_MAX // 8


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.sampled_from([0, 1, 8]))))
def test_what_is_joined_stays_in_order(parts: list[tuple[bool, int, int]]) -> None:
    given_parts: list[Sequence[tuple[int, bytes]]] = []
    expected: list[tuple[int, bytes]] = []
    for is_packed, count, size in parts:
        found = [(n, encode_record(LogRecord(1, n, data=bytes(size)))) for n in range(count)]
        expected += found
        if found:
            given_parts.append(packed(found) if is_packed else found)
    result = list(joined(given_parts))
    assert [pair for part in result for pair in part] == expected
    assert len(result) <= len(parts)


ROW = bytes(4) + b"\1\0\0\0" + bytes(4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (bytes(19), "there is no program and time"),
        (PACKED_HEAD.pack(1, 0, BODY_MAX // 12 + 1, 12) + ROW + bytes(2), "5592406 rows of 12 bytes are too many"),
        (PACKED_HEAD.pack(1, 0, 2, 12) + ROW + bytes(3), "its size is not that of its rows"),
        (PACKED_HEAD.pack(1, 0, 2, 12) + ROW + struct.pack("<H", 1) + b"a", "its size is not that of its rows"),
        (PACKED_HEAD.pack(1, 0, 2, 12) + ROW + struct.pack("<H", 1 << 12) + b"ab", "its size is not that of its rows"),
        (PACKED_HEAD.pack(1, 0, 2, 8) + ROW[:8] + bytes(1), "a row of records needs 12 bytes, found 8 (at byte 8)"),
        (PACKED_HEAD.pack(9, 0, 2, 12) + ROW + bytes(2), "no program has the number 9"),
    ],
)
def test_each_defect_has_its_message(body: bytes, message: str) -> None:
    parser = TraceParser("trace.dpt")
    with pytest.raises(FormatError) as caught:
        list(parser.feed(header() + program() + frame(FrameKind.PACKED, body)))
    assert caught.value.message.startswith(f"a frame of 'trace.dpt' does not hold what it must: {message}")


def test_files_of_the_version_before_are_read() -> None:
    parser = TraceParser("trace.dpt")
    assert list(parser.feed(header(version=2) + program())) == []
