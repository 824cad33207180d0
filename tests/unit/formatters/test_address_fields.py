"""The names beside the fields of records, and the functions of records, in formats with fields."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest

from dprobes.formatters.address_fields import address_fields, code_names, code_names_of, frame_name, function_of
from dprobes.formatters.field_values import FieldValues
from dprobes.formatters.json_formatter import COLUMNS, CsvFormatter, JsonFormatter
from dprobes.formatters.templates.data_extraction import decode_fields
from dprobes.formatters.templates.template_collection import ProgramTemplates, Templates
from dprobes.formatters.templates.template_model import Fault
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place, RecordSource
from dprobes.rpn.instruction_set import StackEnd, Token
from dprobes.target.code_names import CodeName

if TYPE_CHECKING:
    from dprobes.formatters.templates.template_model import Template

CODE, SAMPLE = Place("app", "main"), Place("app", "99hz", is_code=False)
FILES = {
    "templates.lst": b"1 t",
    "t": b'major = 1\nminor = 1\nfmt = "at=%a at_name=%d list=%*a %*k n=%d"\nminor = 2\nfmt = "n=%d"\n'
    b'minor = 3\nfmt = "at=%a"\nminor = 4\nfmt = "%*k"\n',
}


class Names:
    """Know the functions f at 0x1000 and g at 0x2000, each of 0x100 bytes."""

    def code_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        function = {0x10: "f", 0x20: "\x1bg"}.get(address >> 8)
        return None if function is None else CodeName(function, address & 0xFF, "app")

    def caller_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        found = self.code_name(address - 1, record, place)
        return None if found is None else found._replace(distance=found.distance + 1)

    def name_of(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        found = self.code_name(address, record, place)
        return None if found is None else found.text


def template(minor: int) -> Template:
    found = Templates.from_files(FILES).find(1, minor)
    assert found is not None
    return found


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def item(token: Token, *numbers: int) -> bytes:
    count = len(numbers) * (8 if token is Token.MEMORY else 1)
    return bytes([token]) + count.to_bytes(2, "little") + words(*numbers)


def test_fields_with_names_are_those_that_are_shown_by_name() -> None:
    assert [(each.name, each.position, each.is_stack, each.is_array) for each in address_fields(template(1), 8)] == [
        ("at_name_2", 0, False, False),
        ("list_names", 2, False, True),
        ("stack_names", 3, True, True),
    ]
    assert address_fields(template(2), 8) == ()


def test_each_address_has_its_name_and_what_nobody_knows_its_number() -> None:
    data = words(0x1004, 1) + item(Token.MEMORY, 0x2000, 0x5000)
    data += item(Token.USER_STACK, 0x1000, 0x2000, StackEnd.NO_TABLE) + words(7)
    record = LogRecord(1, 1, data=data)
    values = decode_fields(template(1), record).values
    assert code_names_of(template(1), record, values, CODE, Names()) == [
        ("at_name_2", "f+0x4 [app]"),
        ("list_names", ("\x1bg [app]", "0x5000")),
        ("stack_names", ("f [app]", "0x2000", "<no unwind table goes on from here>")),
    ]


@pytest.mark.parametrize("value", [None, Fault(5, is_selector=False), "text", b"bytes"])
def test_what_is_no_address_has_no_name(value: str | bytes | Fault | None) -> None:
    assert code_names(value, LogRecord(), CODE, Names(), is_stack=False) is None


def test_a_return_address_is_named_by_the_call_before_it() -> None:
    assert frame_name(1, 0x1100, LogRecord(), CODE, Names()) == "f+0x100 [app]"
    assert frame_name(0, 0x1100, LogRecord(), CODE, Names()) == "0x1100"


def test_the_function_of_a_sample_is_where_it_was_taken() -> None:
    record = LogRecord(1, 2, ip=0x1008)
    assert function_of(record, SAMPLE, Names()) == "f"
    assert function_of(record, CODE, Names()) == "main"
    assert function_of(record, SAMPLE, None) == ""
    assert function_of(LogRecord(ip=0x9000), SAMPLE, Names()) == ""
    assert function_of(LogRecord(), SAMPLE, Names()) == ""


def test_json_and_csv_say_the_function_of_samples() -> None:
    templates = ProgramTemplates(FILES)
    records = [LogRecord(1, 2, ip=ip, data=words(1)) for ip in (0x1008, 0x2000, 0x9000)]
    lines = [json.loads(JsonFormatter(0, templates, Names())(record, SAMPLE)) for record in records]
    assert [line.get("function") for line in lines] == ["f", "\x1bg", None]
    formatter = CsvFormatter(0, templates, Names())
    rows = [
        *csv.reader(formatter(record, place) for record, place in zip(records, (SAMPLE, SAMPLE, CODE), strict=True))
    ]
    assert [row[COLUMNS.index("function")] for row in rows] == ["f", "\\x1bg", "main"]
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_the_frames_of_json_have_the_names_of_lines() -> None:
    record = LogRecord(1, 4, data=item(Token.USER_STACK, 0x1000, 0x1100, StackEnd.UNREADABLE))
    line = json.loads(JsonFormatter(0, ProgramTemplates(FILES), Names())(record, CODE))
    assert line["fields"]["stack"] == [
        {"address": "0x1000", "name": "f [app]"},
        {"address": "0x1100", "name": "f+0x100 [app]"},
        {"end": "the stack cannot be read here"},
    ]


def test_stacks_are_counted_by_the_names_of_their_frames() -> None:
    fields = FieldValues(RecordSource(1, "app", templates=FILES), symboliser=Names())
    record = LogRecord(1, 4, data=item(Token.USER_STACK, 0x1000, 0x2010))
    assert fields.text(record, CODE, "stack") == "f [app]; \\x1bg+0x10 [app]"
    assert fields.text(LogRecord(1, 3, data=words(0x5000)), CODE, "at") == "0x5000"
    assert fields.text(LogRecord(1, 2, ip=0x1000), SAMPLE, "function") == "f"
