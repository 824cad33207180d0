"""Filters of trace files by fields of the data: what holds, packed or not, and what is said of names that are none."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import SourceError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_table import RecordTable
from dprobes.sinks.field_columns import RecordData
from dprobes.trace.packed_blocks import TableBlock
from dprobes.trace.record_columns import rows_of
from dprobes.trace.trace_content import PlaceEntry, RecordBlock, TraceProgram
from dprobes.trace.trace_filter import compile_filter
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from unit.sinks.records import SOURCE

FILES = {
    "templates.lst": b"1 t",
    "t": b'major = 1\nminor = 1\nfmt = "fd=%d flags=%u retval=%v"\nminor = 2\nfmt = "path=%s size=%u"\n'
    b'minor = 3\nfmt = "at=%a"\n',
}
PLACES = [PlaceEntry("main"), PlaceEntry("99hz", is_code=False)]
Records = list[tuple[int, LogRecord]]


def program() -> TraceProgram:
    source = replace(SOURCE, templates=FILES)
    found = TraceProgram(source, source.details(), PLACES)
    found.names.add(
        {
            "modules": [[0, "one", ""]],
            "mappings": [[7, 0, 0x1000, 0x3000, 0, 0]],
            "functions": [[0, 0, 0x100, "malloc"], [0, 0x100, 0x200, "free"]],
        }
    )
    return found


def selected(text: str, records: Records, *, is_packed: bool) -> list[bool]:
    data = RecordData()
    wants = compile_filter(text, called="--filter", data=data)
    pairs = [(probe, encode_record(record)) for probe, record in records]
    if is_packed:
        packed = RecordTable.of_records(pairs)
        assert packed is not None
        block: TableBlock | RecordBlock = TableBlock(program(), packed, 0, 5, 0)
    else:
        block = RecordBlock(program(), records_frame(1, 5, pairs)[12:], RECORDS_HEAD.size, 0, 5, 0)
    found: list[bool] = []
    for rows in rows_of(block):
        mask = wants(rows)
        found += mask if isinstance(mask, list) else [mask] * len(rows)
    data.check()
    return found


def opened(fd: int, flags: int, retval: int = 0) -> tuple[int, LogRecord]:
    return 0, LogRecord(1, 1, pid=7, process_name="cat", data=struct.pack("<qQQ", fd, flags, retval % 2**64))


OPENED = [opened(3, 0), opened(-1, 2**64 - 1, -2), opened(7, 0x41, 4294967295)]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fd == 3", [True, False, False]),
        ("fd < 0", [False, True, False]),
        ("fd != -1 and name == 'cat'", [True, False, True]),
        ("0 > fd or flags == 'A'", [False, True, True]),
        ("flags > 0x40", [False, True, True]),
        ("flags in (0, 'A')", [True, False, True]),
        ("flags not in (0, 1)", [False, True, True]),
        ("flags:s64 < 0", [False, True, False]),
        ("flags:u8 == 0x41", [False, False, True]),
        ("retval < 0", [False, True, False]),
        ("retval:s32 == -1", [False, False, True]),
        ("retval == -2", [False, True, False]),
        ("word0 == 3 or word1 == 0x41", [True, False, True]),
        ("word1 >= pid", [False, True, True]),
        ("fd == fd", [True, True, True]),
        ("fd == name", [False, False, False]),
        ("not word9 == 1", [True, True, True]),
        ("word9 != 1", [False, False, False]),
        ("fd == 'text'", [False, False, False]),
        ("fd =~ '*'", [False, False, False]),
        ("item0 == 1", [False, False, False]),
    ],
)
def test_numbers_of_the_data(text: str, expected: list[bool], is_packed: bool) -> None:
    assert selected(text, OPENED, is_packed=is_packed) == expected


def read(path: bytes, size: int) -> tuple[int, LogRecord]:
    return 0, LogRecord(1, 2, data=path + b"\0" + struct.pack("<Q", size))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("path == '/etc/hosts'", [True, False, False]),
        ("path != '/etc/hosts'", [False, True, True]),
        ("path =~ '/etc/*'", [True, True, False]),
        ("path !~ '/etc/*'", [False, False, True]),
        ("path startswith '/e'", [True, True, False]),
        ("path contains 'host'", [True, False, False]),
        ("path in ('/etc/hosts', 'x')", [True, False, True]),
        ("path not in ('/etc/hosts', 'yy')", [False, True, True]),
        ("path == 'x'", [False, False, True]),
        ("size > 1K and path startswith '/'", [False, True, False]),
        ("path > 1", [False, False, False]),
        (r"path == '/etc/\\xff'", [False, True, False]),
    ],
)
def test_strings_of_the_data(text: str, expected: list[bool]) -> None:
    records = [read(b"/etc/hosts", 5), read(b"/etc/\xff", 2048), read(b"x", 4096)]
    assert selected(text, records, is_packed=False) == expected


@pytest.mark.parametrize("is_packed", [False, True])
def test_addresses_are_numbers_and_names(is_packed: bool) -> None:
    records = [(0, LogRecord(1, 3, pid=7, data=struct.pack("<Q", at))) for at in (0x1004, 0x1100, 0x9000)]
    assert selected("at == 0x1004", records, is_packed=is_packed) == [True, False, False]
    assert selected("at startswith 'malloc'", records, is_packed=is_packed) == [True, False, False]
    assert selected("at =~ '* [[]one]'", records, is_packed=is_packed) == [True, True, False]
    assert selected("at == '0x9000'", records, is_packed=is_packed) == [False, False, True]


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_function_of_a_sample_is_where_it_was_taken(is_packed: bool) -> None:
    record = LogRecord(1, 4, pid=7, ip=0, data=b"12345678")
    records = [(probe, record._replace(ip=ip)) for probe, ip in ((1, 0x1004), (1, 0x1100), (0, 0x1004), (1, 0x9000))]
    assert selected("function == 'malloc'", records, is_packed=is_packed) == [True, False, False, False]
    assert selected("function =~ 'm*'", records, is_packed=is_packed) == [True, False, True, False]
    assert selected("function in ('main', 'free')", records, is_packed=is_packed) == [False, True, True, False]


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3), st.integers(-2, 2)), min_size=1),
    st.sampled_from(["fd", "flags", "retval", "word0", "word2:s64", "fd:u8", "flags:s16"]),
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    st.integers(-4, 4),
)
def test_packed_records_are_selected_as_each_of_them_is(
    values: list[tuple[int, int, int]], name: str, sign: str, number: int
) -> None:
    records, text = [opened(*each) for each in values], f"{name} {sign} {number}"
    assert selected(text, records, is_packed=True) == selected(text, records, is_packed=False)


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        ("pid == 1 and fdd == 2", "fdd", "records have no field 'fdd'", "did you mean 'fd'?"),
        ("path < 'text'", "path < 'text'", "strings have no order", "compare them with ==, !=, =~ or in"),
        ("fd =~ 5", "fd =~ 5", "'=~' goes between an item and a string", 'as in: name =~ "py*"'),
        ("fd contains 5", "fd contains 5", "'contains' goes between an item and a string", 'as in: name contains "py"'),
        ("fd in (size, 1)", "size", "'size' is not a value", "an item can be compared with another one by ==, <, ..."),
        ("mem(fd, 4) == 5", "mem(fd, 4)", "records have no memory",
         "'dprobes run --filter' looks at it while the program runs"),
        ("pid == -1", "-1", "no item is negative", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(text: str, place: str, message: str, hint: str | None) -> None:
    with pytest.raises(SourceError) as caught:
        selected(text, OPENED, is_packed=False)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.span is not None
    assert (diagnostic.span.text, diagnostic.message, diagnostic.hint) == (place, message, hint)
