"""Golden output of each formatter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.formatters import FORMATS, Place, formatter
from dprobes.record.codec import decode_record, encode_record
from dprobes.record.layout import LogRecord
from record_strategies import records

PLACE = Place("libc.so.6", "malloc+0x4")

WALL = 1_700_000_000_000_000_000

FULL = LogRecord(
    major=1, minor=2, cpu=0, pid=42, uid=1000, cs=0x33, ip=0x7F0000001234, ss=0x2B, sp=0x7FFC00000010,
    time=1_000_002_000, process_name="my prog\x1b", tid=43, data=b"\x01\x02\x00hi\xff" + bytes(range(20)),
)  # fmt: skip

NARROW = LogRecord(major=0, minor=0, cs=0x23, ip=0x08048000, ss=0x2B, sp=0xFFFF0000, word_size=4)

HEADER = (
    "DProbes(1,2) cpu=0 name=my?prog? pid=42 uid=1000 cs=33 rip=00007f0000001234 ss=2b rsp=00007ffc00000010 "
    "tsc=6553f101:00000002 tid=43"
)


@pytest.mark.parametrize("name", ["text", "hex"])
def test_text_is_the_papers_header_and_the_bytes_in_hexadecimal(name: str) -> None:
    data = "01 02 00 68 69 ff 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10 11 12 13"
    assert f"{HEADER}\n{data}" == formatter(name, wall_offset=WALL)(FULL, PLACE)


def test_dump_has_offsets_groups_and_the_ascii_column() -> None:
    expected = (
        f"{HEADER}\n"
        "0x00000000 : 01020068 69ff0001 02030405 06070809 : ...hi...........\n"
        "0x00000010 : 0a0b0c0d 0e0f1011 1213              : .........."
    )
    assert expected == formatter("dump", wall_offset=WALL)(FULL, PLACE)


def test_4_byte_words_have_the_original_names_and_widths() -> None:
    expected = "DProbes(0,0) cs=23 eip=08048000 ss=2b esp=ffff0000"
    assert expected == formatter("text", wall_offset=0)(NARROW, PLACE)


def test_json_is_one_line_with_the_documented_keys() -> None:
    text = formatter("json", wall_offset=WALL)(FULL, PLACE)
    assert "\n" not in text
    assert json.loads(text) == {
        "major": 1,
        "minor": 2,
        "cpu": 0,
        "pid": 42,
        "tid": 43,
        "uid": 1000,
        "name": "my prog\x1b",
        "ip": 0x7F0000001234,
        "sp": 0x7FFC00000010,
        "time": 1_000_002_000,
        "module": "libc.so.6",
        "symbol": "malloc+0x4",
        "data": FULL.data.hex(),
    }


def test_json_shows_the_items_of_data_that_describes_itself() -> None:
    data = bytes.fromhex("01 0200 c3a4 00 0100 ff ff 0800 0010000000000000 05 0100 0700000000000000")
    line = json.loads(formatter("json", wall_offset=0)(LogRecord(major=1, minor=1, data=data), PLACE))
    assert line["items"] == [
        {"type": "string", "value": "ä"},
        {"type": "memory", "value": "ff"},
        {"type": "fault", "value": 0x1000},
        {"type": "lv", "value": [7]},
    ]


def test_json_marks_a_stack_trace() -> None:
    record = LogRecord(major=0, minor=0, data=b"\x01\0\0", is_stack_trace=True)
    line = json.loads(formatter("json", wall_offset=0)(record, PLACE))
    assert line["stack_trace"] is True
    assert "items" not in line


@given(records(), st.sampled_from(FORMATS), st.sampled_from(["", "malloc"]))
def test_an_encoded_record_has_the_same_text(record: LogRecord, name: str, function: str) -> None:
    text, place = formatter(name, wall_offset=WALL), Place("libc.so.6", "malloc+0x4", function)
    encoded = encode_record(record)
    assert text(decode_record(encoded), place) == text.encoded(encoded, place)


@pytest.mark.parametrize("size", [0, 3, 10])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_record_is_an_error(name: str, size: int) -> None:
    with pytest.raises(FormatError):
        formatter(name, wall_offset=0).encoded(encode_record(FULL)[:size], PLACE)


def test_every_format_of_the_command_line_exists() -> None:
    for name in FORMATS:
        assert formatter(name, wall_offset=0)(NARROW, PLACE)
    with pytest.raises(KeyError):
        formatter("xml", wall_offset=0)
