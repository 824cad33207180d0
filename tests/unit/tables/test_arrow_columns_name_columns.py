"""The columns of names in tables of records: as the trace file tells, alike for packed records and for single ones."""

from __future__ import annotations

from typing import Any

import pytest

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.record.record_table import RecordTable
from dprobes.rpn.instruction_set import StackEnd, Token
from dprobes.tables.table_conversion import pieces_of
from dprobes.tables.table_schema import name_columns, table_schema
from dprobes.trace.packed_blocks import TableBlock
from dprobes.trace.trace_content import PlaceEntry, RecordBlock, TraceProgram
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

FILES = {
    "templates.lst": b"1 t",
    "t": b'major = 1\nminor = 1\nfmt = "at=%a AT_NAME=%d"\nminor = 2\nfmt = "%*k"\nminor = 3\nfmt = "n=%d"\n',
}
PLACES = [PlaceEntry("main"), PlaceEntry("99hz", is_code=False)]


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def program_with_names() -> TraceProgram:
    """Return a program whose process 7 began to execute another file at the time 100."""
    source = RecordSource(1, "app", "app", 1, templates=FILES)
    program = TraceProgram(source, source.details(), PLACES)
    program.names.add(
        {
            "modules": [[0, "one", ""], [1, "other", ""]],
            "mappings": [[7, 0, 0x1000, 0x3000, 0, 0], [7, 100, 0x1000, 0x3000, 0, 1], [8, 0, 0x1000, 0x3000, 0, 0]],
            "functions": [[0, 0, 0x100, "f"], [0, 0x100, 0x200, "\x1bg"], [1, 0, 0x200, "h"]],
        }
    )
    return program


def rows_of(records: list[tuple[int, LogRecord]], *, is_packed: bool) -> list[dict[str, Any]]:
    program = program_with_names()
    pairs = [(probe, encode_record(record)) for probe, record in records]
    if is_packed:
        packed = RecordTable.of_records(pairs)
        assert packed is not None
        (piece,) = pieces_of([TableBlock(program, packed, 0, 5, 0)])
    else:
        (piece,) = pieces_of([RecordBlock(program, records_frame(1, 5, pairs)[12:], RECORDS_HEAD.size, 0, 5, 0)])
    found: list[dict[str, Any]] = piece.rows.drop_columns(["time"]).to_pylist()
    return found


def at(address: int, *, pid: int = 7, time: int = 50) -> LogRecord:
    return LogRecord(1, 1, pid=pid, time=time, data=words(address, 0))


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_address_has_the_name_of_its_process_and_moment(is_packed: bool) -> None:
    records = [at(0x1004), at(0x1110), at(0x1004, time=100), at(0x1004, pid=8, time=100), at(0x9000), at(0x1000, pid=9)]
    rows = rows_of([(0, record) for record in records], is_packed=is_packed)
    names = ["f+0x4 [one]", "\\x1bg+0x10 [one]", "h+0x4 [other]", "f+0x4 [one]", "0x9000", "0x1000"]
    assert [row["at_name_2"] for row in rows] == names
    assert [row["at"] for row in rows] == [0x1004, 0x1110, 0x1004, 0x1004, 0x9000, 0x1000]


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_the_same_in_all_records_is_repeated(is_packed: bool) -> None:
    rows = rows_of([(0, at(0x1004))] * 3, is_packed=is_packed)
    assert [row["at_name_2"] for row in rows] == ["f+0x4 [one]"] * 3


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_function_of_a_sample_is_that_of_its_ip(is_packed: bool) -> None:
    probes, addresses = (1, 1, 0, 1), (0x1000, 0x1110, 0x1000, 0x9000)
    record = LogRecord(1, 3, pid=7, time=5, data=words(1))
    rows = rows_of(
        [(probe, record._replace(ip=ip)) for probe, ip in zip(probes, addresses, strict=True)], is_packed=is_packed
    )
    assert [row["function"] for row in rows] == ["f", "\\x1bg", "main", None]


def test_a_stack_has_a_list_of_names() -> None:
    stack = words(0x1000, 0x1100, StackEnd.GONE)
    data = bytes([Token.USER_STACK]) + (3).to_bytes(2, "little") + stack
    records = [LogRecord(1, 2, pid=7, time=5, data=data), LogRecord(1, 2, pid=7, time=5, data=b"")]
    rows = rows_of([(0, record) for record in records], is_packed=False)
    assert [row["stack_names"] for row in rows] == [
        ["f [one]", "f+0x100 [one]", "<the process had ended before its stack was followed>"],
        None,
    ]


def test_columns_of_names_stand_behind_those_of_fields() -> None:
    templates = program_with_names().source
    from dprobes.formatters.templates.template_collection import ProgramTemplates

    template = ProgramTemplates.of_source(templates).find(1, 1)
    assert template is not None
    assert [name for name, _ in name_columns(template)] == ["at_name_2"]
    assert table_schema(template).names[-5:] == ["at", "AT_NAME", "at_name_2", "problems", "rest"]
