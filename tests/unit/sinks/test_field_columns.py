"""Columns of fields: what is counted by them is what is counted record by record."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.formatters.field_values import HEADER_FIELDS, FieldValues
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place
from dprobes.record.record_rows import PackedRows
from dprobes.record.record_table import RecordTable
from dprobes.sinks import Batch
from dprobes.sinks import record_aggregates as module
from dprobes.sinks.field_columns import FieldColumns, NoColumnError
from dprobes.sinks.record_aggregates import Aggregates
from dprobes.trace.record_columns import rows_of
from dprobes.trace.trace_content import RecordBlock, TraceProgram
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from unit.sinks.records import SOURCE

PLACES = [Place("app", "do_read"), Place("app", "do*", "do_write", at_return=True), Place("app", "\x1bodd")]
TEMPLATES = {
    "templates.lst": b"1 one.fmt\n",
    "one.fmt": b'major = 1\nminor = 2\nfmt = "code=%d %+2half=%wu char=%bc"\nminor = 3\nfmt = "text=%*s"',
}
DERIVED = 'major = 1\nminor = 1\nfmt = "arg0=%v %*s"\nminor = 4\nfmt = "arg0=%v arg1=%v"\n'
PROGRAM = replace(SOURCE, templates=TEMPLATES, derived={8: DERIVED, 4: DERIVED})
COUNTED = [(name,) for name in HEADER_FIELDS] + [
    ("module",), ("symbol",), ("function", "pid"), ("word0",), ("word1", "minor"), ("word9",), ("word_size",),
    ("stack_trace",), ("host",), ("program",), ("code",), ("half", "symbol"), ("arg0",), ("arg1", "word0"), ("char",),
    ("text",), ("item0",),
]  # fmt: skip
MEASURED = ["pid", "word0", "code", "half", "word9", "arg1"]
FIELDS = {name for fields in COUNTED for name in fields} | set(MEASURED)


@st.composite
def alike(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Return records of one shape."""
    model = LogRecord(
        1, 1, pid=draw(st.none() | st.just(7)), tid=draw(st.none() | st.just(8)), time=draw(st.none() | st.just(9)),
        ip=draw(st.none() | st.just(0x401000)), process_name=draw(st.none() | st.just("cat")),
        word_size=draw(st.sampled_from([4, 8])), byte_order=draw(st.sampled_from(["little", "big"])),
        is_stack_trace=draw(st.booleans()),
    )  # fmt: skip
    size = draw(st.sampled_from([0, 4, 8, 10, 16, 20]))
    minors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    found = []
    for _ in range(draw(st.integers(1, 30))):
        record = model._replace(minor=draw(st.sampled_from(minors)), data=draw(st.binary(min_size=size, max_size=size)))
        if record.pid is not None:
            record = record._replace(pid=draw(st.integers(1, 300)))
        if record.process_name is not None:
            record = record._replace(process_name=draw(st.sampled_from(["cat", "", "\n"])))
        found.append((draw(st.integers(0, 2)), encode_record(record)))
    return found


def found_in(aggregates: Aggregates) -> object:
    measures = aggregates.measures
    return list(aggregates.tables()), sorted(measures.histograms(), key=repr), list(measures.sums())


def aggregates(field: str, by: tuple[str, ...]) -> Aggregates:
    counted = [fields for fields in COUNTED if field in fields]
    measured = [name for name in MEASURED if name == field]
    result = Aggregates(counted, measured, measured, by)
    result.create_event_of(PROGRAM, "alpha")
    return result


def each_of(field: str, by: tuple[str, ...], records: list[tuple[int, bytes]]) -> object:
    """Return what is counted record by record."""
    result = aggregates(field, by)
    result.log_events(Batch(PROGRAM, [record for _, record in records], [PLACES[probe] for probe, _ in records], 0))
    return found_in(result)


BY = st.sampled_from([(), (), ("pid",), ("name", "symbol"), ("word1",), ("code", "minor"), ("host",)])


@given(alike(), st.sampled_from(sorted(FIELDS)), BY)
def test_packed_records_are_counted_as_each_of_them_is(
    records: list[tuple[int, bytes]], field: str, by: tuple[str, ...]
) -> None:
    packed = RecordTable.of_records(records)
    assert packed is not None
    result = aggregates(field, by)
    result.log_events(Batch.of(PROGRAM, packed, PLACES, 0))
    assert found_in(result) == each_of(field, by, records)


@st.composite
def with_strings(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Return records of few shapes, most of which hold what their templates say: strings and numbers, or a fault."""
    byte_order: Literal["little", "big"] = draw(st.sampled_from(["little", "big"]))
    found = []
    for _ in range(draw(st.integers(1, 40))):
        text = draw(st.sampled_from([b"", b"GET", b"PUT", b"a longer one", b"\xff\0more"]))
        item = b"\x01" + len(text).to_bytes(2, byte_order) + text
        item = draw(st.sampled_from([item, item, item, b"\x02" + item[1:], item[:-1]]))
        number = draw(st.integers(0, 3)).to_bytes(8, byte_order)
        minor, data = draw(st.sampled_from([(1, number + item), (3, item), (3, item + b"!"), (4, 2 * number)]))
        record = LogRecord(1, minor, pid=draw(st.integers(1, 3)), data=data, word_size=8, byte_order=byte_order)
        found.append((draw(st.integers(0, 2)), encode_record(record)))
    return found


@given(with_strings(), st.sampled_from(["text", "arg0", "arg1", "word0", "word1", "item0", "symbol", "pid"]), BY)
def test_mixed_records_are_counted_as_each_of_them_is(
    records: list[tuple[int, bytes]], field: str, by: tuple[str, ...]
) -> None:
    mixed = RecordTable.of_records(records)
    assert mixed is not None
    result = aggregates(field, by)
    result.log_events(Batch.of(PROGRAM, mixed, PLACES, 0))
    assert found_in(result) == each_of(field, by, records)


def test_there_are_columns_of_strings_and_of_what_is_behind_them() -> None:
    data = [struct.pack("<BH3s", 1, 3, text) for text in (b"GET", b"PUT")]
    records = [(0, encode_record(LogRecord(1, 3 + 2 * (n % 2), data=data[n % 3 % 2]))) for n in range(9)]
    packed = PackedRows.of_records(records)
    assert packed is not None
    columns = FieldColumns(packed, PLACES.__getitem__, FieldValues(PROGRAM, "alpha"))
    assert columns.values("text") == ["GET", None, "GET", None, "PUT", None, "GET", None, "GET"]


@given(alike(), st.sampled_from(sorted(FIELDS)), BY, st.data())
def test_a_mask_and_rows_that_are_not_packed(
    records: list[tuple[int, bytes]], field: str, by: tuple[str, ...], data: st.DataObject
) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    wanted = [record for record, is_wanted in zip(records, mask, strict=True) if is_wanted]
    packed, fields = PackedRows.of_records(records), FieldValues(PROGRAM, "alpha")
    assert packed is not None
    result = aggregates(field, by)
    if result.log_columns(FieldColumns(packed, PLACES.__getitem__, fields, mask)):
        assert found_in(result) == each_of(field, by, wanted)
    result = aggregates(field, by)
    block = RecordBlock(TraceProgram(PROGRAM), records_frame(1, 5, records)[12:], RECORDS_HEAD.size, 0, 5, 0)
    start, is_counted = 0, True
    for rows in rows_of(block):
        part = mask[start : start + len(rows)]
        start += len(rows)
        is_counted &= result.log_columns(FieldColumns(rows.rows, PLACES.__getitem__, fields, part))
    if is_counted:
        assert found_in(result) == each_of(field, by, wanted)


@pytest.mark.parametrize("field", ["pid", "name", "symbol", "word0", "code", "half", "host", "word_size"])
def test_there_are_columns_of_most_fields(field: str) -> None:
    """Or nothing above would say that they are used."""
    data = [struct.pack("=qHHBxxxxxxx", -n, n, n, n)[:16] for n in range(1, 20)]
    records = [(0, encode_record(LogRecord(1, 2, pid=n, process_name="cat", data=data[n]))) for n in range(19)]
    packed = PackedRows.of_records(records)
    assert packed is not None
    columns = FieldColumns(packed, PLACES.__getitem__, FieldValues(PROGRAM, "alpha"))
    columns.values(field)
    with pytest.raises(NoColumnError):
        columns.values("item0")


def test_values_beyond_the_most_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VALUES_MAX", 5)
    numbers = [1, 2, 3, 1, 4, 5, 6, 2, 7, 6]
    result, each = aggregates("pid", ()), aggregates("pid", ())
    for start in (0, 5):
        records = [(0, encode_record(LogRecord(1, 1, pid=pid))) for pid in numbers[start : start + 5]]
        packed = RecordTable.of_records(records)
        assert packed is not None
        result.log_events(Batch.of(PROGRAM, packed, PLACES, 0))
        each.log_events(Batch.of(PROGRAM, records, PLACES, 0))
    assert found_in(result) == found_in(each)
    (table, _) = result.tables()
    assert (sum(count for _, count in table.rows), table.others) == (7, 3)
