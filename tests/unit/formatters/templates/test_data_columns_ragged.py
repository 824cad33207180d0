"""Columns of records of various sizes: the values that each record has by itself."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.formatters.field_values import FieldValues
from dprobes.formatters.templates.data_columns import steps_of
from dprobes.formatters.templates.template_collection import Templates
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place
from dprobes.rpn.instruction_set import Token
from dprobes.sinks.field_columns import FieldColumns, NoColumnError
from dprobes.trace.record_columns import rows_of
from dprobes.trace.trace_content import RecordBlock, TraceProgram
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from unit.sinks.records import SOURCE

if TYPE_CHECKING:
    from dprobes.record.log_record import ByteOrder

PLACE = Place("app", "main")
FILES = {
    "templates.lst": b"1 t",
    "t": b'major = 1\nminor = 1\nfmt = "path=%*.100~s size=%u %+2end=%bd"\nminor = 2\nfmt = "text=%s low=%wd"\n'
    b'minor = 3\nfmt = "size=%u"\nminor = 5\nfmt = "array=%*d size=%u"\nminor = 6\nfmt = "%.3s %s"\n',
}
DERIVED = 'major = 1\nminor = 4\nfmt = "path=%*s size=%v name2=%*s"\n'
PROGRAM = replace(SOURCE, templates=FILES, derived={8: DERIVED, 4: DERIVED})
FIELDS = ["path", "size", "end", "text", "low", "name2", "word0", "word3", "pid", "symbol", "host"]


def item(token: int, data: bytes, order: ByteOrder) -> bytes:
    return bytes([token]) + len(data).to_bytes(2, order) + data


@st.composite
def mixed(draw: st.DrawFn) -> list[tuple[int, LogRecord]]:
    """Return records with the same items, of all templates, most of which are as their templates say."""
    order: ByteOrder = draw(st.sampled_from(["little", "big"]))
    size: Literal[4, 8] = draw(st.sampled_from([4, 8]))
    model = LogRecord(
        1, 1, pid=draw(st.none() | st.just(7)), process_name=draw(st.none() | st.just("x")),
        tid=draw(st.none() | st.just(9)), word_size=size, byte_order=order, is_stack_trace=draw(st.booleans()),
    )  # fmt: skip
    found = []
    for _ in range(draw(st.integers(1, 40))):
        minor = draw(st.sampled_from([1, 1, 2, 3, 4, 4, 5]))
        text = draw(st.sampled_from([b"", b"/etc/hosts", b"a\0b", b"\xff", b"x" * 300]))
        word = draw(st.integers(0, 2 ** (8 * size) - 1)).to_bytes(size, order)
        fault = item(Token.ADDRESS_FAULT, word, order)
        string = fault if draw(st.integers(0, 9)) == 0 else item(Token.STRING, text, order)
        data = {
            1: string + word + b"\1\2\xff",
            2: text.replace(b"\0", b"") + b"\0" + b"\xff\xfe",
            3: word,
            4: string + word + item(Token.STRING, b"end", order),
            5: item(Token.MEMORY, word * 2, order) + word,
        }[minor]
        match draw(st.integers(0, 12)):
            case 0:
                data = data[: draw(st.integers(0, len(data)))]
            case 1:
                data += draw(st.binary(max_size=4))
            case 2:
                data = draw(st.binary(max_size=30))
        record = model._replace(minor=minor, data=data)
        if record.process_name is not None:
            record = record._replace(process_name=draw(st.sampled_from(["x", "", "a longer name"])))
        found.append((draw(st.integers(0, 1)), record))
    return found


@given(mixed(), st.sampled_from(FIELDS))
def test_a_column_has_the_values_of_each_record(records: list[tuple[int, LogRecord]], name: str) -> None:
    values = FieldValues(PROGRAM, "alpha")
    pairs = [(probe, encode_record(record)) for probe, record in records]
    block = RecordBlock(TraceProgram(PROGRAM), records_frame(1, 5, pairs)[12:], RECORDS_HEAD.size, 0, 5, 0)
    expected = [values.find(record, PLACE, name) for _, record in records]
    found: list[Any] = []
    for rows in rows_of(block):
        try:
            column = FieldColumns(rows.rows, lambda _: PLACE, values).values(name)
        except NoColumnError:
            column = expected[len(found) : len(found) + len(rows)]
        found += column if isinstance(column, list) else [column] * len(rows)
    assert found == expected


@pytest.mark.parametrize("name", ["path", "size", "word0"])
def test_records_with_strings_have_columns(name: str) -> None:
    """Or nothing above would say that they are used."""
    strings = [b"/etc/hosts", b"/tmp", b"", b"x" * 50]
    records = [
        (0, encode_record(LogRecord(1, 1, pid=7, process_name="cat", data=data)))
        for n in range(40)
        for data in [item(Token.STRING, strings[n % 4], "little") + struct.pack("<Q", n) + b"\0\0\1"]
    ]
    block = RecordBlock(TraceProgram(PROGRAM), records_frame(1, 5, records)[12:], RECORDS_HEAD.size, 0, 5, 0)
    found: list[Any] = []
    for rows in rows_of(block):
        found += FieldColumns(rows.rows, lambda _: PLACE, FieldValues(PROGRAM)).values(name)  # type: ignore[arg-type]
    assert len(found) == 40
    if name != "word0":
        assert found[:4] == (["/etc/hosts", "/tmp", "", "x" * 50] if name == "path" else [0, 1, 2, 3])


def test_a_template_with_other_things_has_no_steps() -> None:
    templates = Templates.from_files(FILES)
    steps = {template.minor: steps_of(template, 8) for template in templates.all()}
    assert [minor for minor, found in steps.items() if found is None] == [5, 6]
    assert [step.kind for step in steps[1] or ()] == ["item", "number", "number", "number"]
