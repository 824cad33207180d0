"""Tables of records of various sizes: the same as those that are made record by record."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.rpn.instruction_set import Token
from dprobes.tables import arrow_columns, table_conversion
from dprobes.trace.trace_content import LostRecords, PlaceEntry, RecordBlock, TraceProgram
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from unit.formatters.templates.test_data_columns_ragged import PROGRAM, item, mixed
from unit.tables.test_arrow_columns_packed_columns import rows_of

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

Records = list[tuple[int, LogRecord]]


def block_of(records: Records, offset: int = 0) -> RecordBlock:
    places = [PlaceEntry("main"), PlaceEntry("f*", "first", 16, at_return=True)]
    pairs = [(probe, encode_record(record)) for probe, record in records]
    program = TraceProgram(PROGRAM, PROGRAM.details(), places)
    return RecordBlock(program, records_frame(1, 5, pairs)[12:], RECORDS_HEAD.size, offset, 5, 0)


@given(mixed(), st.sampled_from([0, 3]), st.sampled_from([0, 10**18]), st.booleans())
def test_rows_are_those_that_each_record_has(records: Records, lost: int, offset: int, has_time: bool) -> None:
    if has_time:
        records = [(probe, record._replace(time=n, ip=0x1234)) for n, (probe, record) in enumerate(records)]

    def found(*, by_columns: bool) -> dict[object, list[object]]:
        block = block_of(records, offset)
        with pytest.MonkeyPatch.context() as patch:
            if not by_columns:
                patch.setattr(arrow_columns, "steps_of", lambda *_: None)
            return rows_of([LostRecords(block.program, lost, 0), block] if lost else [block])

    assert found(by_columns=True) == found(by_columns=False)


def test_strings_and_numbers_are_made_by_columns() -> None:
    """Or nothing above would say that they are."""
    strings = [b"/etc/hosts", b"/tmp", b""]
    records = [
        (0, LogRecord(1, 1, pid=7, process_name="cat", data=item(Token.STRING, text, "little") + number + b"\0\0\1"))
        for n in range(30)
        for text, number in [(strings[n % 3], struct.pack("<Q", n))]
    ]
    block = block_of(records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_columns, "decode_fields", None)
        (piece,) = table_conversion.pieces_of([block])
    table = piece.rows
    assert table["path"].to_pylist() == [text.decode() for text in strings] * 10
    assert table["size"].to_pylist() == [*range(30)]
    assert table["process_name"].to_pylist() == ["cat"] * 30


def test_what_is_no_record_is_a_row_of_data() -> None:
    block = block_of([(0, LogRecord(1, 1))])
    broken = RecordBlock(block.program, block.body + b"\0\0\0\0\5\0\0\0\xff\xff\xff\xffx", RECORDS_HEAD.size, 0, 5, 0)
    rows = [row for rows in rows_of([broken]).values() for row in rows if isinstance(row, dict)]
    assert [row["data"] for row in rows] == [b"", b"\xff\xff\xff\xffx"]
