"""The tables of records: their columns, their directories, and what records become in them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.escapes import escaped
from dprobes.formatters.templates.data_columns import fixed_layout
from dprobes.formatters.templates.data_extraction import Fault, FieldKind, decode_fields
from dprobes.formatters.templates.template_collection import Templates
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.tables.table_conversion import Piece, pieces_of
from dprobes.tables.table_schema import Partition, field_columns, fixed_columns, table_schema
from dprobes.trace.trace_content import LostRecords, PlaceEntry, RecordBlock, TraceProgram
from dprobes.trace.trace_frames import RECORD_HEAD
from support.record_strategies import records

if TYPE_CHECKING:
    from dprobes.formatters.templates.template_model import Template

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

CODES = st.none() | st.integers(0, 2**32 - 1)
PROGRAMS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


def template_of(body: str) -> Template:
    templates = Templates.from_files({"templates.lst": b"1 t", "t": f"major = 1\nminor = 1\n{body}\n".encode()})
    assert templates.diagnostics.render() == ""
    template = templates.find(1, 1)
    assert template is not None
    return template


def tables(
    *found: LogRecord, files: dict[str, bytes] | None = None, lost: int = 0, wall_offset: int = 0
) -> list[Piece]:
    """Return the tables of records of one program; ``lost`` were lost before the first."""
    source = RecordSource(1, "app", "lib", 1, (), files or {})
    program = TraceProgram(source, source.details(), [PlaceEntry("main", "", None), PlaceEntry("f*", "first", 16)])
    body = b""
    for number, record in enumerate(found):
        encoded = encode_record(record)
        body += RECORD_HEAD.pack(number % 2, len(encoded)) + encoded
    block = RecordBlock(program, body, 0, wall_offset, 0, 0)
    return list(pieces_of([LostRecords(program, lost, 0), block] if lost else [block]))


def rows(piece: Piece) -> list[dict[str, Any]]:
    """Return the rows of a table; a time as a number, for nanoseconds do not fit into Python's."""
    import pyarrow as pa

    at = piece.rows.schema.get_field_index("time")
    found: list[dict[str, Any]] = piece.rows.set_column(at, "time", piece.rows["time"].cast(pa.int64())).to_pylist()
    return found


@given(PROGRAMS, CODES, CODES)
def test_a_table_has_a_directory_of_its_own_from_which_it_is_known(
    program: str, major: int | None, minor: int | None
) -> None:
    partition = Partition(program, major, minor)
    parts = partition.directory.parts
    assert len(parts) == 3
    assert all(len(part.encode()) <= 255 and "\0" not in part and part.isprintable() for part in parts)
    found = Partition.of_file(Path("/data/x=y", *parts, "part-1.parquet"))
    assert found is not None
    assert (found.major, found.minor) == (major, minor)
    if "~" not in parts[0]:
        assert found == partition


@pytest.mark.parametrize("program", ["..", "a/../b", "a=b", "%2e%2E", "\n\x1b[2J", ".", "__HIVE_DEFAULT_PARTITION__"])
def test_a_hostile_name_stays_within_its_directory(program: str) -> None:
    partition = Partition(program, 1, 2)
    first, *_ = partition.directory.parts
    assert first.startswith("program=")
    assert first != "program=__HIVE_DEFAULT_PARTITION__"
    assert Partition.of_file(Path("/d") / partition.directory / "x.parquet") == partition


def test_long_names_that_begin_alike_are_two_directories() -> None:
    one, other = (Partition("/" * 300 + end, 1, 1).directory for end in "ab")
    assert one != other
    assert len(one.parts[0]) < 256


@pytest.mark.parametrize("path", ["/d/part.parquet", "/program=a/minor=1/major=2/x", "/program=a/major=-1/minor=1/x"])
def test_a_file_elsewhere_is_of_no_table(path: str) -> None:
    assert Partition.of_file(Path(path)) is None


def test_columns_of_fields_are_not_those_of_the_header_nor_each_other() -> None:
    template = template_of('fmt = "pid=%d PID=%d Count=%u count=%u rest=%x problems=%x %d"')
    assert [name for name, _ in field_columns(template)] == [
        "pid_2", "PID_3", "Count", "count_2", "rest_2", "problems_2", "arg6",
    ]  # fmt: skip
    names = [name.lower() for name in [*fixed_columns(), *table_schema(template).names]]
    assert len(set(names)) == len([*fixed_columns()]) + 7 + 2


def test_types_are_those_of_the_placeholders() -> None:
    template = template_of(
        'fmt = "a=%d b=%bd c=%wu d=%dx e=%qo f=%c g=%s h=%p i=%a j=%*d k=%*bx l=%*s m=%*h n=%r o=%*bc"'
    )
    assert [str(table_schema(template).field(name).type) for name, _ in field_columns(template)] == [
        "int64", "int8", "uint16", "uint32", "uint64", "string", "string", "uint64", "uint64", "list<item: int64>",
        "list<item: uint8>", "string", "binary", "binary", "string",
    ]  # fmt: skip


FILES = {
    "templates.lst": b"1 t.fmt",
    "t.fmt": b'major = 1\nminor = 1\ndesc = "open"\nfmt = "fd=%d flags=%x"\n'
    b'minor = 2\nfmt = "path=%*s mode=%bc words=%*d"\n',
}


def item(token: int, data: bytes) -> bytes:
    return struct.pack("<BH", token, len(data)) + data


def test_records_become_rows_of_the_tables_of_their_codes() -> None:
    words = struct.pack("<qQ", -3, 2**64 - 1)
    made = tables(
        LogRecord(major=1, minor=1, pid=7, time=5, ip=2**64 - 1, process_name="a\udcff", data=words),
        LogRecord(major=1, minor=3, tid=8, data=item(1, b"/etc\xff")),
        LogRecord(major=1, minor=1, data=struct.pack("<qQ", 3, 0)),
        files=FILES,
        wall_offset=10**18,
        lost=4,
    )  # fmt: skip
    assert [(piece.partition, piece.desc) for piece in made] == [
        (Partition("app", 1, 1), "open"),
        (Partition("app", 1, 3), ""),
    ]
    first, second = rows(made[0])
    assert {name: value for name, value in first.items() if value is not None} == {
        "time": 10**18 + 5, "monotonic": 5, "pid": 7, "process_name": "a\\xff", "module": "lib", "symbol": "main",
        "function": "main", "at_return": False, "ip": 2**64 - 1, "word_size": 8, "byte_order": "little",
        "stack_trace": False, "lost_before": 4, "data": struct.pack("<qQ", -3, 2**64 - 1), "fd": -3, "flags": 2**64 - 1,
    }  # fmt: skip
    assert (second["time"], second["fd"], second["lost_before"], second["symbol"]) == (None, 3, None, "main")
    (other,) = rows(made[1])
    assert other["items"] == [{"type": "string", "text": "/etc\\xff"}]
    assert (other["symbol"], other["function"], other["placed"]) == ("f*", "first", 16)


def test_words_of_both_sizes_are_in_one_table() -> None:
    (made,) = tables(
        LogRecord(major=1, minor=1, data=struct.pack("<qQ", -3, 2**64 - 1)),
        LogRecord(major=1, minor=1, word_size=4, data=struct.pack("<iI", -3, 2**32 - 1)),
        LogRecord(major=1, minor=1, word_size=4, byte_order="big", data=struct.pack(">iI", -3, 1)),
        files=FILES,
    )
    assert [(row["word_size"], row["fd"], row["flags"]) for row in rows(made)] == [
        (8, -3, 2**64 - 1),
        (4, -3, 2**32 - 1),
        (4, -3, 1),
    ]


def test_what_is_missing_or_could_not_be_read_is_null_and_said() -> None:
    (made,) = tables(
        LogRecord(major=1, minor=2, data=item(0xFF, struct.pack("<Q", 2**64 - 1)) + b"r" + item(0, b"")),
        LogRecord(major=1, minor=2, data=item(1, b"x")),
        LogRecord(major=1, minor=2, data=item(1, b"x") + b"w" + item(0, struct.pack("<q", -1)) + b"left"),
        LogRecord(major=1, minor=2, data=b"\1\2\3", is_stack_trace=True),
        files=FILES,
    )
    missing = {"problem": "missing", "address": None}
    assert [{name: row[name] for name in ("path", "mode", "words", "problems", "rest")} for row in rows(made)] == [
        {"path": None, "mode": "r", "words": [], "rest": None,
         "problems": [{"field": "path", "problem": "fault", "address": 2**64 - 1}]},
        {"path": "x", "mode": None, "words": None, "rest": None,
         "problems": [{"field": "mode", **missing}, {"field": "words", **missing}]},
        {"path": "x", "mode": "w", "words": [-1], "problems": None, "rest": b"left"},
        {"path": None, "mode": None, "words": None, "problems": None, "rest": None},
    ]  # fmt: skip


def test_a_time_that_is_no_date_is_null() -> None:
    (made,) = tables(LogRecord(major=1, minor=1, time=2**64 - 1), wall_offset=10**18)
    (row,) = rows(made)
    assert (row["time"], row["monotonic"]) == (None, 2**64 - 1)


@pytest.mark.parametrize("placed", [-1, 2**64, 2**100])
def test_numbers_that_no_column_holds_are_null(placed: int) -> None:
    source = RecordSource(1, "app", "lib")
    program = TraceProgram(source, source.details(), [PlaceEntry("main", "\udcff", placed, at_return=True)])
    encoded = encode_record(LogRecord(major=1, minor=1))
    block = RecordBlock(program, RECORD_HEAD.pack(0, len(encoded)) + encoded, 0, 0, 0, 0)
    (made,) = pieces_of([LostRecords(program, 2**64 - 1, 0), LostRecords(program, 5, 0), block])
    (row,) = rows(made)
    assert (row["placed"], row["function"], row["at_return"]) == (None, "\\xff", True)
    assert row["lost_before"] == 2**64 - 1


def test_bytes_that_are_no_record_are_a_row() -> None:
    source = RecordSource(1, "app", "lib")
    block = RecordBlock(TraceProgram(source), RECORD_HEAD.pack(3, 5) + b"\xff\xff\xff\xffx", 0, 0, 0, 0)
    (made,) = pieces_of([block])
    (row,) = rows(made)
    assert made.partition == Partition("app", None, None)
    assert (row["data"], row["symbol"], row["time"]) == (b"\xff\xff\xff\xffx", "probepoint 3", None)


PARTS = st.sampled_from(
    ["%d", "%bd", "%wu", "%dx", "%qo", "%c", "%bc", "%nc", "%p", "%a", "%+3", "%s", "%.4s", "%*d", "%*wx", "%*s", "%*h",
     "%*bc", "x=%d", "pid=%d"]
)  # fmt: skip
LINES = st.lists(PARTS, max_size=5).map(" ".join)


@given(LINES, st.lists(records(), max_size=4), st.binary(max_size=40))
def test_a_table_holds_what_the_fields_of_records_are(line: str, found: list[LogRecord], data: bytes) -> None:
    """Records of one size, of any size, and of what is no data for the template."""
    body = f'fmt = "{line}"'
    template = template_of(body)
    found = [record._replace(major=1, minor=1) for record in found]
    found += [record._replace(data=data) for record in found]
    for each in (found, [record for record in found if record.data == data]):
        made = tables(*each, files={"templates.lst": b"1 t", "t": f"major = 1\nminor = 1\n{body}\n".encode()})
        assert sum(piece.rows.num_rows for piece in made) == len(each)
        for row, record in zip([row for piece in made for row in rows(piece)], each, strict=True):
            check_row(row, record, template)


def check_row(row: dict[str, Any], record: LogRecord, template: Template) -> None:
    for name in ("cpu", "pid", "tid", "uid", "cs", "ip", "ss", "sp", "data", "word_size", "byte_order"):
        assert row[name] == getattr(record, name)
    assert row["monotonic"] == record.time
    assert row["process_name"] == (None if record.process_name is None else escaped(record.process_name))
    assert row["stack_trace"] == record.is_stack_trace
    decoded = decode_fields(template, record)
    problems = {problem["field"] for problem in row["problems"] or ()}
    for (name, field), value in zip(field_columns(template), decoded.values, strict=True):
        if record.is_stack_trace or value is None or isinstance(value, Fault):
            assert row[name] is None
            assert (name in problems) != record.is_stack_trace
        elif field.kind is not FieldKind.CHARACTER:
            assert row[name] == (list(value) if isinstance(value, tuple) else value)
            assert name not in problems
    assert row["rest"] == (None if record.is_stack_trace else decoded.rest or None)


@given(LINES, st.sampled_from([4, 8]), st.binary(max_size=60))
def test_a_fixed_layout_gives_what_the_template_gives(line: str, word_size: Any, data: bytes) -> None:
    template = template_of(f'fmt = "{line}"')
    layout = fixed_layout(template, word_size, "little")
    if layout is None or len(data) < layout.size:
        return
    record = LogRecord(data=data, word_size=word_size)
    decoded = decode_fields(template, record)
    assert layout.unpack_from(data) == decoded.values
    assert data[layout.size :] == decoded.rest
