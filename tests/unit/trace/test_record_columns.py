"""Columns: the same items as decoding each record gives, whatever the shapes of records and their order are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.trace.record_columns import ITEM_COLUMNS, rows_of
from dprobes.trace.trace_content import PlaceEntry, RecordBlock, TraceOrigin, TraceProgram
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from dprobes.trace.trace_reader import TraceParser
from support import trace_files
from support.record_strategies import records

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = TraceProgram(RecordSource(1, "app"), {}, [PlaceEntry("main", "", None)], TraceOrigin("trace.dpt"))


def block_of(encoded: Sequence[bytes]) -> RecordBlock:
    body = records_frame(1, 5, [(n % 3, record) for n, record in enumerate(encoded)])[12:]
    return RecordBlock(PROGRAM, body, RECORDS_HEAD.size, 7, 5, 100)


def column(block: RecordBlock, name: str) -> list[Any]:
    result: list[Any] = []
    for rows in rows_of(block):
        values = rows.column(name)
        result += values if isinstance(values, list) else [values] * len(rows)
    return result


def items_of(record: LogRecord) -> dict[str, Any]:
    fixed = {name: getattr(record, name) for name in ITEM_COLUMNS if name != "stack_trace"}
    name = record.process_name
    return fixed | {"stack_trace": int(record.is_stack_trace), "name": None if name is None else escaped(name)}


# Runs of one record many times, and of various records.
RUNS = st.lists(st.tuples(records(), st.integers(1, 70)), max_size=6).map(
    lambda runs: [encode_record(record) for record, count in runs for _ in range(count)]
)


@given(RUNS)
def test_columns_hold_what_decoding_gives(encoded: list[bytes]) -> None:
    block = block_of(encoded)
    decoded = [items_of(decode_record(record)) for record in encoded]
    for name in (*ITEM_COLUMNS, "name"):
        assert column(block, name) == [record[name] for record in decoded]
    assert column(block, "symbol") == [("main", "probepoint 1", "probepoint 2")[n % 3] for n in range(len(encoded))]
    assert [rows.record(n) for rows in rows_of(block) for n in range(len(rows))] == list(block)
    assert [(each.probe, each.record) for each in block] == [(n % 3, record) for n, record in enumerate(encoded)]


def test_records_of_one_flag_word_are_taken_together_whatever_their_sizes() -> None:
    def record(size: int, **items: Any) -> bytes:
        return encode_record(LogRecord(major=1, pid=2, data=bytes(size), **items))

    for many in ([record(5)] * 10_000, [record(n % 7) for n in range(10_000)]):
        assert [len(rows) for rows in rows_of(block_of(many))] == [4096, 4096, 1808]
    mixed = [record(n % 7, is_stack_trace=n % 1000 == 999) for n in range(2000)]
    assert [len(rows) for rows in rows_of(block_of(mixed))] == [999, 1, 999, 1]


@given(RUNS, st.data())
def test_a_damaged_record_is_refused_or_has_other_values(encoded: list[bytes], data: st.DataObject) -> None:
    body = bytearray(block_of(encoded).body)
    for _ in range(data.draw(st.integers(1, 3))):
        if len(body) > RECORDS_HEAD.size:
            body[data.draw(st.integers(RECORDS_HEAD.size, len(body) - 1))] = data.draw(st.integers(0, 255))
    block = RecordBlock(PROGRAM, bytes(body), RECORDS_HEAD.size, 7, 5, 100)
    try:
        decoded = [items_of(decode_record(each.record)) for each in block]
    except FormatError:
        decoded = None
    for name in (*ITEM_COLUMNS, "name"):
        try:
            values = column(block, name)
        except FormatError:
            assert decoded is None
            continue
        # A column does not look at the rest of the record.
        assert decoded is None or values == [record[name] for record in decoded]


@pytest.mark.parametrize(
    ("record", "name", "message"),
    [
        (b"", "pid", "a frame of 'trace.dpt' holds a damaged record: a record of 0 bytes has no flag word (at byte 0)"),
        (
            b"\0\x80\0\0", "pid",
            "a frame of 'trace.dpt' holds a damaged record: unknown flags 0x8000 in a record (at byte 0)",
        ),
        (
            b"\3\0\0\0\1\0\0\0", "cpu",
            "a frame of 'trace.dpt' holds a damaged record: a record needs 12 bytes, found 8 (at byte 8)",
        ),
        (
            b"\0\4\0\0" + b"x" * 16, "name",
            "a frame of 'trace.dpt' holds a damaged record: the process name of a record has no end (at byte 4)",
        ),
        (
            b"\0\x24\0\0" + b"x" * 20 + b"\0", "tid",
            "a frame of 'trace.dpt' holds a damaged record: the process name of a record has no end (at byte 4)",
        ),
        (
            b"\0\x20\0\0abc", "tid",
            "a frame of 'trace.dpt' holds a damaged record: a record ends in its thread id (at byte 4)",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 100])
def test_each_defect_is_named_with_the_file(record: bytes, name: str, message: str, count: int) -> None:
    with pytest.raises(FormatError) as caught:
        column(block_of([record] * count), name)
    assert caught.value.message == f"{message} (at byte 100)"
    sound = encode_record(LogRecord(pid=1, process_name="a", tid=1))
    with pytest.raises(FormatError) as caught:
        column(block_of([sound] * count + [record]), name)
    assert caught.value.message == f"{message} (at byte 100)"


def test_a_defect_is_at_its_own_frame_where_several_were_put_together() -> None:
    sound, odd = encode_record(LogRecord(pid=1)), b"\0\x80\0\0"
    start = trace_files.header() + trace_files.program(1)
    frames = [trace_files.records(1, (0, sound))] * 40
    (block,) = TraceParser("trace.dpt").feed(b"".join([start, *frames, trace_files.records(1, (0, odd)), *frames]))
    assert isinstance(block, RecordBlock)
    with pytest.raises(FormatError) as caught:
        column(block, "pid")
    assert caught.value.offset == len(start) + 40 * len(frames[0])
