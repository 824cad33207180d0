"""Fields of records by name."""

from __future__ import annotations

import struct

import pytest

from dprobes.errors import FormatError
from dprobes.formatters.field_values import FieldValues
from dprobes.formatters.templates.template_model import Fault
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place, RecordSource
from dprobes.rpn.instruction_set import Token

PLACE = Place("app", "main+4", "main")
TEMPLATES = {
    "templates.lst": b"1 app.fmt\n",
    "app.fmt": b'major = 1\nminor = 2\nfmt = "fd=%d path=%*s"\n',
}
PLAIN = FieldValues(RecordSource(1, "app", "app", 1))
TYPED = FieldValues(RecordSource(1, "app", "app", 1, templates=TEMPLATES))


def item(token: Token, body: bytes) -> bytes:
    return bytes([token]) + struct.pack("<H", len(body)) + body


RECORD = LogRecord(major=1, minor=2, pid=42, process_name="ls", data=struct.pack("<q", -3) + item(Token.STRING, b"/x"))


def test_fields_are_called_as_the_handler_tells() -> None:
    derived = dict.fromkeys((4, 8), 'major = 1\nminor = 2\nfmt = "arg0=%nd *arg1=%nv"\n')
    values = FieldValues(RecordSource(1, "app", "app", 1, derived=derived))
    record = LogRecord(major=1, minor=2, data=struct.pack("<qQ", -3, 7))
    assert [values.find(record, PLACE, name) for name in ("arg0", "at_arg1", "word1")] == [-3, 7, 7]
    assert values.data(record) == {"arg0": -3, "at_arg1": 7}
    values.check("at_arg1", is_number=True)
    short = record._replace(data=b"\1" * 8)
    assert (values.find(short, PLACE, "arg0"), values.find(short, PLACE, "word0")) == (None, 0x0101010101010101)


def test_header_items_and_the_place() -> None:
    found = {name: PLAIN.find(RECORD, PLACE, name) for name in ("pid", "name", "uid", "module", "symbol", "function")}
    assert found == {
        "pid": 42, "name": "ls", "uid": None, "module": "app", "symbol": "main+4", "function": "main"
    }  # fmt: skip


def test_fields_of_a_template() -> None:
    assert TYPED.data(RECORD) == {"fd": -3, "path": "/x"}
    assert TYPED.find(RECORD, PLACE, "fd") == -3
    fault = RECORD._replace(data=struct.pack("<q", 1) + item(Token.ADDRESS_FAULT, struct.pack("<Q", 0x1234)))
    assert TYPED.find(fault, PLACE, "path") == Fault(0x1234)
    assert TYPED.find(RECORD._replace(data=b""), PLACE, "fd") is None


def test_words_and_items_where_there_is_no_template() -> None:
    words = LogRecord(major=1, minor=3, data=struct.pack(">3I", 7, 8, 9) + b"\1", word_size=4, byte_order="big")
    assert PLAIN.data(words) == {"word0": 7, "word1": 8, "word2": 9}
    assert TYPED.find(words, PLACE, "word2") == 9
    assert TYPED.find(words, PLACE, "word3") is None
    assert TYPED.find(words, PLACE, "fd") is None
    items = LogRecord(major=1, minor=3, data=item(Token.STRING, b"abc") + item(Token.MEMORY, b"\1\2"))
    assert PLAIN.data(items) == {"item0": "abc", "item1": "01 02"}
    assert PLAIN.find(items, PLACE, "item2") is None


@pytest.mark.parametrize("name", ["pid", "module", "fd", "path", "word0", "item12"])
def test_names_that_can_be(name: str) -> None:
    TYPED.check(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pth", "did you mean 'path'?"),
        ("wod0", "did you mean 'word0'?"),
        (
            "nowhere near",
            (
                "fields are major, minor, cpu, pid, tid, uid, name, cs, ip, ss, sp, time, module, symbol, function, "
                "word_size, stack_trace, host, program, "
                "fd, path, word0, word1, ..., item0, item1, ..."
            ),
        ),
    ],
)
def test_names_that_cannot_be(name: str, hint: str) -> None:
    with pytest.raises(FormatError) as caught:
        TYPED.check(name)
    assert (caught.value.message, caught.value.hint) == (f"records have no field '{name}'", hint)
