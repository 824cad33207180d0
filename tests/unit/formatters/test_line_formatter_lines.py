"""The format ``text``: lines for people."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.formatters import Place, formatter
from dprobes.formatters.line_formatter import TerminalColumns
from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.record.record_origin import RecordSource
from support.record_strategies import records
from unit.formatters.templates.support import item

if TYPE_CHECKING:
    from collections.abc import Iterator

WALL = 1_700_000_000_000_000_000
"""2023-11-14 22:13:20 in UTC."""

PLACE = Place("libc.so.6", "malloc")
BY_HAND = (
    'major = 1\nminor = 2\ndesc = "a call"\nfmt = "n=%d"\nfmt = "by %{name} at %{time}"\nminor = 6\nfmt = "n=%d"\n'
)
DERIVED = r"""major = 1
minor = 1
fmt = "arg0=%nv"
minor = 2
fmt = "never=%nv"
minor = 3
fmt = "arg0=\"%*s\" arg1=%nv"
minor = 4
fmt = "size=%nv"
fmt = "%*k"
fmt = "then=%nv"
minor = 5
fmt = "%*k"
"""
SOURCE = RecordSource(
    1, "p", "libc.so.6", 1,
    templates={"templates.lst": b"1 t.fmt\n", "t.fmt": BY_HAND.encode()},
    derived={8: DERIVED, 4: 'major = 1\nminor = 1\nfmt = "word=%nv"\n'},
)  # fmt: skip


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def line(minor: int, data: bytes, place: Place = PLACE, source: RecordSource | None = SOURCE, **more: Any) -> str:
    """Return the text of a record with the items of one for people; both ways to it must give the same."""
    record = LogRecord(
        **{"major": 1, "minor": minor, "cpu": 1, "pid": 42, "time": 4_217_000, "process_name": "ls", **more}, data=data
    )
    form = formatter("text", wall_offset=WALL, source=source)
    text = form(record, place)
    assert form.encoded(encode_record(record), place) == text
    return text


def test_a_line_says_when_who_where_and_what() -> None:
    assert line(1, words(472)) == "22:13:20.004217  ls[42]  malloc  arg0=472"
    assert line(1, words(2**64 - 2)) == "22:13:20.004217  ls[42]  malloc  arg0=-2"
    assert line(3, item(1, b"LC_ALL") + words(7)) == '22:13:20.004217  ls[42]  malloc  arg0="LC_ALL" arg1=7'


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ({"time": None}, "ls[42]  malloc  arg0=7"),
        ({"process_name": None}, "22:13:20.004217  [42]  malloc  arg0=7"),
        ({"pid": None}, "22:13:20.004217  ls  malloc  arg0=7"),
        ({"pid": None, "process_name": None}, "22:13:20.004217  malloc  arg0=7"),
        ({"pid": None, "process_name": None, "time": None, "cpu": None}, "malloc  arg0=7"),
        ({"tid": 42}, "22:13:20.004217  ls[42]  malloc  arg0=7"),
        ({"tid": 43}, "22:13:20.004217  ls[42/43]  malloc  arg0=7"),
        ({"process_name": "a b\n\x1b"}, r"22:13:20.004217  a\x20b\n\x1b[42]  malloc  arg0=7"),
        (
            {"uid": 0, "cs": 0x33, "ip": 0x1234, "ss": 0x2B, "sp": 0x7FFC00000010},
            "22:13:20.004217  ls[42]  malloc  uid=0  cs=0x33  ip=0x1234  ss=0x2b  sp=0x7ffc00000010  arg0=7",
        ),
        ({"time": 2**64 - 1}, "21:47:53.709551  ls[42]  malloc  arg0=7"),
    ],
)
def test_what_a_record_lacks_is_left_out(items: dict[str, Any], text: str) -> None:
    assert line(1, words(7), **items) == text


def test_records_with_all_items_are_printed_with_less_if_nobody_asked_for_them() -> None:
    record = LogRecord(1, 1, 0, 42, 0, 0x33, 0x1234, 0x2B, 0x7FFC00000010, 0, "ls", 43, words(7))
    brief = formatter("text", wall_offset=WALL, source=SOURCE, is_brief=True)
    assert brief(record, PLACE) == "22:13:20.000000  ls[42/43]  malloc  arg0=7"
    assert brief(record._replace(sp=None, ss=None), PLACE) == (
        "22:13:20.000000  ls[42/43]  malloc  uid=0  cs=0x33  ip=0x1234  arg0=7"
    )


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        (Place("m", "main+0x4"), "main+0x4"),
        (Place("m", "wr*", "write_file"), "write_file"),
        (Place("m", "main", at_return=True), "main (return)"),
        (Place("m", "main (return)", at_return=True), "main (return)"),
        (Place("*", "99hz", is_code=False), "99hz"),
        (Place("m", "a\nb\x1b[31m"), r"a\nb\x1b[31m"),
        (Place("", ""), "1,1"),
    ],
)
def test_the_place_is_that_of_the_hit(place: Place, shown: str) -> None:
    assert line(1, words(7), place) == f"22:13:20.004217  ls[42]  {shown}  arg0=7"


def test_a_written_template_says_what_was_hit_and_what_it_prints_itself_stands_once() -> None:
    assert line(6, words(7)) == "22:13:20.004217  ls[42]  n=7"
    assert line(2, words(7)) == "a call\n    n=7\n    by ls at 1700000000.004217"
    assert line(2, b"\1") == (
        "a call\n    n=<missing 7 bytes>\n    by ls at 1700000000.004217\n    <1 byte left: 01>"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ({"ip": 0x1234}, "22:13:20.004217  ls[42]  n=7"),
        ({"uid": 5, "ip": 0x1234}, "22:13:20.004217  ls[42]  uid=5  n=7"),
        ({"cs": 0x33, "ip": 0x1234}, "22:13:20.004217  ls[42]  cs=0x33  ip=0x1234  n=7"),
    ],
)
def test_the_ip_stands_before_a_written_template_only_if_it_was_asked_for(items: dict[str, Any], text: str) -> None:
    assert line(6, words(7), **items) == text


def test_what_is_long_has_lines_of_its_own() -> None:
    stack = item(10, words(0x401136, 0x401200), 2)
    assert line(5, stack) == "22:13:20.004217  ls[42]  malloc\n    0x401136\n    0x401200"
    assert line(4, words(5) + stack + words(6)) == (
        "22:13:20.004217  ls[42]  malloc  size=5\n    0x401136\n    0x401200\n    then=6"
    )


def test_data_that_a_derived_template_does_not_take_exactly_is_shown_as_it_is() -> None:
    assert line(1, b"\1\2") == "22:13:20.004217  ls[42]  malloc  01 02"
    assert line(1, b"") == "22:13:20.004217  ls[42]  malloc"
    assert line(1, words(7) + b"\0") == "22:13:20.004217  ls[42]  malloc  07 00 00 00 00 00 00 00 00"
    # 'push mem' behind 'log str' has found nothing, and ended the handler.
    assert line(3, item(1, b"LC_ALL")) == '22:13:20.004217  ls[42]  malloc  "LC_ALL"'
    assert line(3, item(0xFF, words(16)) + words(7)) == (
        '22:13:20.004217  ls[42]  malloc  arg0="<fault at 0x10>" arg1=7'
    )


def test_data_without_a_template_is_shown_by_its_items_or_in_hexadecimal() -> None:
    data = item(1, b"a\n") + item(0, b"\1\2") + item(5, words(7), 1) + item(10, words(0x401136), 1)
    assert line(9, data) == r'22:13:20.004217  ls[42]  malloc  "a\n" 01 02 7 0x401136'
    assert line(9, data[:-1]) == f"22:13:20.004217  ls[42]  malloc  {data[:-1].hex(' ')}"
    assert line(1, words(7), source=None) == "22:13:20.004217  ls[42]  malloc  07 00 00 00 00 00 00 00"
    assert line(1, words(7), major=2) == "22:13:20.004217  ls[42]  malloc  07 00 00 00 00 00 00 00"


def test_a_stack_trace_is_no_record_of_the_handler() -> None:
    assert line(1, b"\2\0\1", is_stack_trace=True) == "22:13:20.004217  ls[42]  malloc  stack trace: 02 00 01"


def test_words_and_byte_order_are_those_of_the_record() -> None:
    narrow: dict[str, Any] = {"word_size": 4, "byte_order": "big"}
    assert line(1, b"\0\0\1\0", **narrow) == "22:13:20.004217  ls[42]  malloc  word=256"
    assert line(1, b"\xff\xff\xff\xff", **narrow) == "22:13:20.004217  ls[42]  malloc  word=-1"
    assert line(6, b"\0\0\1\0", **narrow) == "22:13:20.004217  ls[42]  n=256"


def test_without_the_time_of_day_it_is_that_since_the_machine_was_started() -> None:
    record = LogRecord(major=1, minor=1, time=61_000_002_000, data=words(7))
    for form in (formatter("text", wall_offset=0, source=SOURCE),):
        assert form(record, PLACE) == form.encoded(encode_record(record), PLACE) == "61.000002  malloc  arg0=7"


def test_a_hostile_trace_file_has_no_derived_templates_that_are_wrong() -> None:
    for text in ("", "major = 2\nminor = 1\n", 'major = 1\nminor = 1\nfmt = "%y"\n', "\ud800", "x" * 2_000_000):
        source = RecordSource(1, "p", "m", 1, derived={8: text})
        assert line(1, words(7), source=source) == "22:13:20.004217  ls[42]  malloc  07 00 00 00 00 00 00 00"


def test_at_a_terminal_columns_are_aligned_and_coloured() -> None:
    records_ = [
        LogRecord(major=1, minor=1, pid=pid, time=0, process_name=name, data=words(7))
        for pid, name in ((1, "ls"), (4711, "bash"), (2, "ls"))
    ]
    places = (Place("m", "read"), Place("m", "f" * 41), Place("m", "read_all"))
    for colours, expected in (
        (False, [
            "22:13:20.000000  ls[1]  read  arg0=7",
            f"22:13:20.000000  bash[4711]  {'f' * 41}  arg0=7",
            "22:13:20.000000  ls[2]       read_all  arg0=7",
        ]),
        (True, [
            "\x1b[2m22:13:20.000000\x1b[0m  \x1b[36mls[1]\x1b[0m  \x1b[1mread\x1b[0m  arg0=7",
            f"\x1b[2m22:13:20.000000\x1b[0m  \x1b[36mbash[4711]\x1b[0m  \x1b[1m{'f' * 41}\x1b[0m  arg0=7",
            "\x1b[2m22:13:20.000000\x1b[0m  \x1b[36mls[2]\x1b[0m       \x1b[1mread_all\x1b[0m  arg0=7",
        ]),
    ):  # fmt: skip
        for encodes in (False, True):
            form = formatter("text", wall_offset=WALL, source=SOURCE, columns=TerminalColumns(has_colours=colours))
            pairs = list(zip(records_, places, strict=True))
            texts = [form.encoded(encode_record(r), p) if encodes else form(r, p) for r, p in pairs]
            assert texts == expected


@given(records(), st.sampled_from([8, 7, 0, 16]))
def test_an_encoded_record_has_the_same_text(record: LogRecord, size: int) -> None:
    form = formatter("text", wall_offset=WALL, source=SOURCE)
    for minor in (1, 2, 3, 6, record.minor):
        some = record._replace(major=1, minor=minor, data=record.data[:size])
        encoded = encode_record(some)
        assert form(decode_record(encoded), PLACE) == form.encoded(encoded, PLACE)
