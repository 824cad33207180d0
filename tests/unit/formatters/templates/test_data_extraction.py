"""The names and types of fields."""

from __future__ import annotations

import pytest

from dprobes.formatters.templates.data_extraction import Fault, Field, FieldKind, Value, decode_fields, fields_of
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks.structured_records import FieldReader, value_text
from unit.formatters.templates.support import formatted, item, template_of, values


def names(fmt: str) -> list[str]:
    return [field.name for field in fields_of(template_of(f'fmt = "{fmt}"'), 8)]


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        ("pid=%d sig=%d", ["pid", "sig"]),
        ("pid: %d, %d", ["pid", "arg1"]),
        ("addr = 0x%x", ["addr"]),
        ("file '%*s' (%d)", ["file", "arg1"]),
        ("%d bytes %d", ["arg0", "bytes"]),
        ("a=%d a=%d a_2=%d a=%d", ["a", "a_2", "a_2_2", "a_3"]),
        ("arg1=%d %d", ["arg1", "arg1_2"]),
        ("x=%{pid} %d", ["arg0"]),
        ("x=%+4%d", ["arg0"]),
        ("x=%%%d", ["arg0"]),
        ("größe=%d 2nd=%d", ["arg0", "arg1"]),
        ("0x%x", ["arg0"]),
        ("wait[%d]", ["wait"]),
        ("(%d)", ["arg0"]),
        ("rest: %r", ["rest"]),
        ("*arg0=%d *(8+arg1)=%d ~arg0&lv1=%d", ["at_arg0", "at_8_arg1", "not_arg0_lv1"]),
        ("a=%d r-1=%d next.pid=%d 0-r=%d", ["a", "r_minus_1", "next_pid", "value_0_minus_r"]),
        ("%*k %*k", ["stack", "stack_2"]),
        ("n=" + "a" * 200 + "=%d", ["a" * 64]),
    ],
)
def test_names_come_from_the_text_before(fmt: str, expected: list[str]) -> None:
    assert names(fmt) == expected


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        ("total %(size)d of %(name)*s", ["size", "name"]),
        ("a=%(b)d b=%d", ["b", "b_2"]),
        ("%(value)d %(value)d %(value)u", ["value", "value2", "value3"]),
        ("%(arg0)d %(arg0)d", ["arg0", "arg0_2"]),
        ("%(frames)*k %(all)r", ["frames", "all"]),
    ],
)
def test_place_holders_say_names(fmt: str, expected: list[str]) -> None:
    assert names(fmt) == expected


@pytest.mark.parametrize(
    ("fmt", "data", "value", "rest"),
    [
        ("%(n)*dd", item(0, b"\xfe\xff\xff\xff"), -2, b""),
        ("%(n)*bc", item(0, b"A"), 0x41, b""),
        ("%(n)*dd", item(0, b"\1\0\0\0\2\0"), 1, b"\2\0"),
        ("%(n)*dd", item(0, b"\1\0"), None, b"\1\0"),
        ("%(n)*dd", item(0xFF, bytes(7) + b"\1"), Fault(1 << 56), b""),
        ("%(n)*d", item(7, b"\5" + bytes(7), 1), 5, b""),
        ("%(n[])*dd", item(0, b"\xfe\xff\xff\xff"), (-2,), b""),
        ("%(n[])*wu", item(0, b"\1\0\2\0"), (1, 2), b""),
        ("%(n)*h", item(0, b"\1\0"), b"\1\0", b""),
    ],
)
def test_an_item_with_a_name_is_one_number_or_a_list(fmt: str, data: bytes, value: Value, rest: bytes) -> None:
    template = template_of(f'fmt = "{fmt}"')
    decoded = decode_fields(template, LogRecord(major=1, minor=1, data=data))
    assert (decoded.values, decoded.rest) == ((value,), rest)
    (field,) = fields_of(template, 8)
    assert field.is_array is isinstance(value, tuple)


def test_names_are_found_in_each_line_by_itself() -> None:
    template = template_of('desc = "d="\nfmt = "a="\nfmt = "%d"\nfmt = "b=%d"')
    assert [field.name for field in fields_of(template, 8)] == ["arg0", "b"]


def test_types() -> None:
    template = template_of('fmt = "%d %bu %wx %qo %c %*c %s %.4s %*s %p %da %*d %*bx %*h %r %+4 %{pid}"')
    assert [(f.kind, f.size, f.base, f.is_array) for f in fields_of(template, 4)] == [
        (FieldKind.SIGNED, 4, 10, False),
        (FieldKind.UNSIGNED, 1, 10, False),
        (FieldKind.UNSIGNED, 2, 16, False),
        (FieldKind.UNSIGNED, 8, 8, False),
        (FieldKind.CHARACTER, 4, 10, False),
        (FieldKind.CHARACTER, 1, 10, True),
        (FieldKind.STRING, 0, 10, False),
        (FieldKind.STRING, 0, 10, False),
        (FieldKind.STRING, 0, 10, False),
        (FieldKind.ADDRESS, 4, 16, False),
        (FieldKind.ADDRESS, 4, 16, False),
        (FieldKind.SIGNED, 4, 10, True),
        (FieldKind.UNSIGNED, 1, 16, True),
        (FieldKind.BYTES, 0, 16, False),
        (FieldKind.BYTES, 0, 16, False),
    ]
    assert fields_of(template_of('fmt = "n=%d"'), 8) == (Field("n", FieldKind.SIGNED, 8, 10, is_array=False),)


def test_values() -> None:
    assert values("%bd %bc %*c %s %*s %*h %*wx %r", b"\xffA" + item(0, b"B") + b"c\0" + item(1, b"d") + item(0, b"e")
                  + item(0, b"\1\2\3") + b"rest") == (-1, 0x41, (0x42,), "c", "d", b"e", (0x201,), b"rest")  # fmt: skip


def test_what_is_cut_of_a_dump_is_the_rest() -> None:
    fmt, data = "%(p)*.4~h%(rest)*s", item(0, b"abcde") + item(0, b"x")
    record = LogRecord(major=1, minor=1, data=data, process_name="p")
    decoded = decode_fields(template_of(f'fmt = "{fmt}"'), record)
    assert (decoded.values, decoded.rest) == ((b"abcd", "x"), b"e")
    text = "0x00000000 : 61626364                            : abcd <missing the rest, which is longer>\nx"
    assert formatted(fmt, data) == text
    text = f'major = 1\nminor = 1\nfmt = "{fmt}"\n'
    source = RecordSource(1, "m", major=1, templates={"templates.lst": b"1 t.fmt\n", "t.fmt": text.encode()})
    reader = FieldReader()
    reader.create_event(source)
    known = reader.read(source, encode_record(record), Place("m", "f"))
    assert [(field.name, value_text(field, value)) for field, value in known.fields] == [
        ("p", "61626364"),
        ("rest", "x"),
        ("rest_2", "65"),
    ]


def test_what_is_in_no_field_is_the_rest() -> None:
    from dprobes.formatters.templates.data_extraction import decode_fields
    from dprobes.record.log_record import LogRecord

    template = template_of('fmt = "%*wx %+1"')
    decoded = decode_fields(template, LogRecord(data=item(0, b"\1\2\3") + b"\4\5\6"))
    assert decoded.values == ((0x201,),)
    assert decoded.rest == b"\3\5\6"
