"""Golden output of each formatter."""

from __future__ import annotations

import csv
import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.formatters import FORMATS, Place, formatter
from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.record.record_origin import RecordSource, wall_time
from support.record_strategies import records

PLACE = Place("libc.so.6", "malloc+0x4")

WALL = 1_700_000_000_000_000_000

FULL = LogRecord(
    major=1, minor=2, cpu=0, pid=42, uid=1000, cs=0x33, ip=0x7F0000001234, ss=0x2B, sp=0x7FFC00000010,
    time=1_000_002_000, process_name="my prog\x1b", tid=43, data=b"\x01\x02\x00hi\xff" + bytes(range(20)),
)  # fmt: skip

NARROW = LogRecord(major=0, minor=0, cs=0x23, ip=0x08048000, ss=0x2B, sp=0xFFFF0000, word_size=4)

HEADER = (
    "DProbes(1,2) cpu=0 name=my\\x20prog\\x1b pid=42 uid=1000 cs=33 rip=00007f0000001234 ss=2b rsp=00007ffc00000010 "
    "tsc=6553f101:00000002 tid=43"
)


@pytest.mark.parametrize("name", ["dprobes", "hex"])
def test_it_is_the_papers_header_and_the_bytes_in_hexadecimal(name: str) -> None:
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
    assert expected == formatter("dprobes", wall_offset=0)(NARROW, PLACE)


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
        "cs": 0x33,
        "ip": "0x7f0000001234",
        "ss": 0x2B,
        "sp": "0x7ffc00000010",
        "word_size": 8,
        "time": 1_000_002_000,
        "wall_time": "2023-11-14T22:13:21.000002000Z",
        "module": "libc.so.6",
        "symbol": "malloc+0x4",
        "function": "malloc",
        "data": FULL.data.hex(),
    }


def test_json_escapes_a_name_once() -> None:
    record = NARROW._replace(process_name='a"b\\c\x01\udcff\u202eé')
    place = Place("./m\n\udcfe", "main")
    line = formatter("json", wall_offset=0, source=RecordSource(1, "p\x1b", "m", 1))(record, place)
    assert '"name": "a\\"b\\\\c\\u0001\\\\xff\\u202eé"' in line
    found = json.loads(line)
    assert (found["name"], found["module"], found["program"]) == ('a"b\\c\x01\\xff\u202eé', "./m\n\\xfe", "p\x1b")


def test_json_and_csv_name_the_program_and_the_machine() -> None:
    of = RecordSource(1, "my\nprogram", "libc.so.6", 1)
    place = Place("libc.so.6", "malloc", at_return=True)
    line = json.loads(formatter("json", wall_offset=0, source=of, host="alpha")(NARROW, place))
    assert (line["host"], line["program"], line["word_size"], line["at_return"]) == ("alpha", "my\nprogram", 4, True)
    form = formatter("csv", wall_offset=0, source=of, host="alpha")
    (row,) = csv.DictReader(io.StringIO(f"{form.heading}\n{form(NARROW, place)}", newline=""))
    assert (row["host"], row["program"], row["word_size"], row["at_return"]) == ("alpha", "my\\nprogram", "4", "1")
    for name in ("json", "csv"):
        assert "None" not in formatter(name, wall_offset=0)(NARROW, place)


DERIVED = RecordSource(
    1,
    "numbers",
    "libc.so.6",
    1,
    derived={
        8: 'major = 1\nminor = 9\nfmt = "arg0=%nv *(8+arg1)=%nv name=\\"%*s\\""\nfmt = "%*k"\n',
        4: 'major = 1\nminor = 9\nfmt = "arg0=%nv"\n',
    },
)


def test_what_a_handler_tells_names_its_data() -> None:
    stack = struct.pack("<BHQQQ", 10, 3, 0x401000, 0x401234, 6)
    data = struct.pack("<QQ", 5, 1 << 60) + b"\1\2\0ab" + stack
    record = LogRecord(major=1, minor=9, data=data)
    fields = json.loads(formatter("json", wall_offset=0, source=DERIVED)(record, PLACE))["fields"]
    assert fields == {
        "arg0": 5,
        "at_8_arg1": str(1 << 60),
        "name": "ab",
        "stack": [
            {"address": "0x401000"},
            {"address": "0x401234"},
            {"end": "the process had ended before its stack was followed"},
        ],
    }
    text = formatter("csv", wall_offset=0, source=DERIVED)(record, PLACE)
    assert 'arg0=5 *(8+arg1)=0x1000000000000000 name=""ab""\n0x401000' in text
    short = record._replace(data=data[:8])  # an exception has ended the handler
    assert "fields" not in json.loads(formatter("json", wall_offset=0, source=DERIVED)(short, PLACE))
    narrow = record._replace(data=struct.pack("<I", 7), word_size=4)
    assert json.loads(formatter("json", wall_offset=0, source=DERIVED)(narrow, PLACE))["fields"] == {"arg0": 7}


def test_json_has_numbers_only_as_far_as_all_readers_keep_them() -> None:
    most = (1 << 53) - 1
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in (most, most + 1, -most, -most - 1))
    record = LogRecord(major=1, minor=6, ip=0xFFFF_FFFF_8123_4567, time=1 << 60, data=data + b"\1" * 8)
    line = json.loads(formatter("json", wall_offset=0, source=NUMBERS)(record, PLACE))
    assert line["fields"] == {
        "a": most, "b": "9007199254740992", "c": -most, "d": "-9007199254740992",
        "to": {"address": "0x101010101010101"},
    }  # fmt: skip
    assert line["ip"] == "0xffffffff81234567"
    assert line["time"] == 1 << 60  # one type for all, whatever the uptime is


@pytest.mark.parametrize(
    ("place", "function"),
    [
        (Place("m", "main"), "main"),
        (Place("m", "main+0x1f"), "main"),
        (Place("m", "main - 0x4"), "main"),
        (Place("m", "operator+"), "operator+"),
        (Place("m", "f*", "free"), "free"),
        (Place("m", "0x1f00"), ""),
        (Place("*", "99hz", is_code=False), ""),
        (Place("m", "environ", is_code=False), ""),
    ],
)
def test_the_function_is_that_of_the_place(place: Place, function: str) -> None:
    line = json.loads(formatter("json", wall_offset=0)(NARROW, place))
    assert line.get("function", "") == function


def source(**files: str) -> RecordSource:
    names = {name.replace("_", "."): text.encode() for name, text in files.items()}
    return RecordSource(1, "p", "libc.so.6", 1, templates=names)


TEMPLATES = source(
    templates_lst="1 t.fmt",
    t_fmt="""major = 1
        minor = 2 /* */
        probe = "sample.call.begin"
        desc = "a call"
        fmt = "n=%wd c=%bc chars=%*c"
        fmt = "name=%*s, words %*nu, hole=%*bx gone=%d to=%a"
        minor = 5
        fmt = "argv: %*r; %r"
        minor = 4
        desc = "two"
        fmt = "lines"
        """,
)

NUMBERS = source(templates_lst="1 t.fmt", t_fmt='major = 1\nminor = 6\nfmt = "a=%d b=%d c=%d d=%d to=%a"')

CALL = FULL._replace(
    data=bytes.fromhex(
        "feff 41 00 0200 4243 01 0500 c3a422 0a2c 05 0100 ffffffffffffffff ff 0800 0010000000000000 1122"
    )
)
CALL_TEXT = (
    "a call\nn=-2 c=A chars=BC\n"
    'name=ä"\\n,, words 18446744073709551615, hole=<fault at 0x1000> gone=<missing 6 bytes> to=<missing 8 bytes>\n'
    "<2 bytes left: 11 22>"
)


def test_the_papers_text_is_what_the_template_says() -> None:
    text = formatter("dprobes", wall_offset=WALL, source=TEMPLATES)
    assert text(CALL, PLACE) == f"{HEADER}\n{CALL_TEXT}"
    assert text(CALL, Place("libc.so.6", "malloc", "malloc")) == f"{HEADER} function=malloc\n{CALL_TEXT}"


def test_the_papers_text_without_a_template_is_hexadecimal() -> None:
    text = formatter("dprobes", wall_offset=WALL, source=TEMPLATES)
    assert text(NARROW, PLACE) == "DProbes(0,0) cs=23 eip=08048000 ss=2b esp=ffff0000"
    other = LogRecord(major=1, minor=3, data=b"\1\2")
    trace = LogRecord(major=1, minor=2, data=b"\1\2", is_stack_trace=True)
    for name in ("dprobes", "hex"):
        form = formatter(name, wall_offset=0, source=TEMPLATES)
        assert form(other, PLACE) == form.encoded(encode_record(other), PLACE) == "DProbes(1,3)\n01 02"
        assert form(trace, PLACE) == form.encoded(encode_record(trace), PLACE) == "DProbes(1,2)\n01 02"
    assert formatter("hex", wall_offset=WALL, source=TEMPLATES)(CALL, PLACE) == f"{HEADER}\n{CALL.data.hex(' ')}"


def test_json_has_the_fields_of_a_template() -> None:
    line = json.loads(formatter("json", wall_offset=0, source=TEMPLATES)(CALL, PLACE))
    assert "items" not in line
    assert line["probe"] == "sample.call.begin"
    assert line["desc"] == "a call"
    assert line["fields"] == {
        "n": -2,
        "c": "A",
        "chars": "BC",
        "name": 'ä"\n,',
        "words": ["18446744073709551615"],
        "hole": {"fault": "0x1000"},
        "gone": None,
        "to": None,
    }
    assert line["rest"] == "1122"
    assert line["data"] == CALL.data.hex()


def test_json_lists_the_items_of_a_field_that_takes_all_of_them() -> None:
    data = bytes.fromhex("01 0200 6c73 ff 0800 0010000000000000 07")
    record = LogRecord(major=1, minor=5, data=data)
    line = json.loads(formatter("json", wall_offset=0, source=TEMPLATES)(record, PLACE))
    items = [{"type": "string", "value": "ls"}, {"type": "fault", "value": "0x1000"}]
    assert line["fields"] == {"argv": items, "arg1": "07"}
    assert "rest" not in line


def test_csv_has_a_heading_and_a_line_for_each_record() -> None:
    form = formatter("csv", wall_offset=WALL, source=TEMPLATES)
    assert form.heading == (
        "major,minor,cpu,pid,tid,uid,name,cs,ip,ss,sp,word_size,time,wall_time,"
        "host,program,module,symbol,function,at_return,placed,stack_trace,data,text\r"
    )
    assert form(FULL._replace(minor=3, data=b"\1\2"), Place("libc.so.6", "malloc+0x4", "malloc", 0x1234)) == (
        "1,3,0,42,43,1000,my prog\\x1b,51,0x7f0000001234,43,0x7ffc00000010,8,1000002000,"
        "2023-11-14T22:13:21.000002000Z,,p,libc.so.6,malloc+0x4,malloc,,4660,,0102,\r"
    )
    quoted = CALL_TEXT.replace('"', '""')
    assert form(CALL, PLACE).endswith(f',libc.so.6,malloc+0x4,malloc,,,,{CALL.data.hex()},"{quoted}"\r')
    assert form(NARROW, PLACE) == "0,0,,,,,,35,0x8048000,43,0xffff0000,4,,,,p,libc.so.6,malloc+0x4,malloc,,,,,\r"
    trace = LogRecord(major=1, minor=2, data=b"\1\2", is_stack_trace=True)
    assert form(trace, PLACE) == "1,2,,,,,,,,,,8,,,,p,libc.so.6,malloc+0x4,malloc,,,1,0102,\r"


@given(st.lists(records(), max_size=5), st.text(max_size=20))
def test_csv_is_read_back_by_another_reader(some: list[LogRecord], symbol: str) -> None:
    form = formatter("csv", wall_offset=WALL, source=TEMPLATES)
    some = [*some, LogRecord(major=1, minor=4)]
    lines = [form.heading, *(form(record, Place("a,b", symbol)) for record in some)]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines), newline="")))
    assert len(rows) == len(some)
    assert rows[-1]["text"] == "two\nlines"
    for row, record in zip(rows, some, strict=True):
        assert row["module"] == "a,b"
        assert bytes.fromhex(row["data"]) == record.data
        assert row["stack_trace"] == ("1" if record.is_stack_trace else "")
        for column in ("major", "minor", "cpu", "pid", "tid", "uid", "cs", "ip", "ss", "sp", "time"):
            assert (int(row[column], 0) if row[column] else None) == getattr(record, column)


@given(records(), st.sampled_from(FORMATS))
def test_with_templates_an_encoded_record_has_the_same_text(record: LogRecord, name: str) -> None:
    form = formatter(name, wall_offset=WALL, source=TEMPLATES)
    for some in (record, record._replace(major=1, minor=2), record._replace(major=1, minor=2, data=CALL.data)):
        encoded = encode_record(some)
        assert form(decode_record(encoded), PLACE) == form.encoded(encoded, PLACE)


def test_the_time_of_day_is_left_out_where_it_is_not_known() -> None:
    assert "wall_time" not in json.loads(formatter("json", wall_offset=0)(FULL, PLACE))
    assert wall_time(None, WALL) is None
    assert wall_time(2**64 - 1, 1) == "2554-07-21T23:34:33.709551616Z"
    assert wall_time(2**90, 1) == "1237940039285380274.899124225"


def test_json_shows_the_items_of_data_that_describes_itself() -> None:
    data = bytes.fromhex("01 0200 c3a4 00 0100 ff ff 0800 0010000000000000 05 0100 0700000000000000")
    line = json.loads(formatter("json", wall_offset=0)(LogRecord(major=1, minor=1, data=data), PLACE))
    assert line["items"] == [
        {"type": "string", "value": "ä"},
        {"type": "memory", "value": "ff"},
        {"type": "fault", "value": "0x1000"},
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
@pytest.mark.parametrize("of", [None, TEMPLATES])
def test_what_is_no_record_is_an_error(of: RecordSource | None, name: str, size: int) -> None:
    with pytest.raises(FormatError):
        formatter(name, wall_offset=0, source=of).encoded(encode_record(FULL)[:size], PLACE)


def test_every_format_of_the_command_line_exists() -> None:
    for name in FORMATS:
        assert formatter(name, wall_offset=0)(NARROW, PLACE)
    with pytest.raises(KeyError):
        formatter("xml", wall_offset=0)
