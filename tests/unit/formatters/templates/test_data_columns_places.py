"""Places of fields in packed records: known as far as the strings before them have one size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.formatters.templates.data_columns import FieldPlace, field_places, strings_at
from dprobes.formatters.templates.template_collection import Templates
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_rows import PackedRows

if TYPE_CHECKING:
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder

TEMPLATES = Templates.from_files({
    "templates.lst": b"1 t",
    "t": b'major = 1\nminor = 1\nfmt = "path=%*s %+2end=%bd"\nminor = 2\nfmt = "text=%s"\nminor = 3\nfmt = "a=%*d"',
})  # fmt: skip


def template(minor: int) -> Template:
    found = TEMPLATES.find(1, minor)
    assert found is not None
    return found


def packed(*data: bytes, byte_order: ByteOrder = "little") -> PackedRows:
    encoded = [(0, encode_record(LogRecord(1, 1, data=each, byte_order=byte_order))) for each in data]
    found = PackedRows.of_records(encoded)
    assert found is not None
    return found


def test_what_is_behind_a_string_has_a_place_if_all_have_one_length() -> None:
    expected = [FieldPlace(3, 3, is_text=True), FieldPlace(8, 1, is_signed=True)], 9
    assert field_places(packed(b"\1\3\0GET..5", b"\1\3\0PUT..6"), template(1), 4) == expected
    assert field_places(packed(b"\1\0\3GET..5", byte_order="big"), template(1), 4) == expected


def test_there_are_no_places_behind_strings_of_various_lengths_and_other_items() -> None:
    for data in ((b"\1\3\0GET..5", b"\1\4\0GETT.5"), (b"\2\3\0GET..5",), (b"\1\3\0GE",), (b"\1\3",)):
        assert field_places(packed(*data), template(1), 4) is None
    assert field_places(packed(b"abc\0"), template(2), 4) is None
    assert field_places(packed(b"\1\4\0abcd"), template(3), 4) is None


def test_strings_end_at_a_nul_and_are_cut() -> None:
    records = packed(b"ab\0dGET", b"ab\0d\xffUT")
    assert strings_at(records, FieldPlace(0, 4)) == "ab"
    assert strings_at(records, FieldPlace(4, 3)) == ["GET", "\\xffUT"]
    assert strings_at(records, FieldPlace(4, 3, cut=2)) == ["GE…", "\\xffU…"]
