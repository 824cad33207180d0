"""Values of records by name: templates come before what is derived from handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes import ProgramBuilder
from dprobes.formatters.field_values import ProgramDataReader
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place, RecordSource
from dprobes.target.code_names import CodeName

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = ProgramBuilder("libc.so.6", major=1)
PROGRAM.probe("malloc", minor=1).push_r("arg0").log(1).exit()
PROGRAM.probe("free", minor=2).push_r("arg0").log(1).exit()
FILES = {
    "templates.lst": b"1 a.fmt\n",
    "a.fmt": b'major = 1\nminor = 2\nfmt = "block=%p"\nminor = 4\nfmt = "caller=%a size=%d"\n',
}
WORD = (472).to_bytes(8, "little")
SAMPLE = Place("libc.so.6", "99hz", is_code=False)


class Names:
    """Know the function f at 0x1000."""

    def code_name(self, address: int, record: LogRecord, place: Place | None) -> CodeName | None:
        return CodeName("f", address & 0xFF, "app") if address >> 8 == 0x10 else None

    caller_name = code_name

    def name_of(self, address: int, record: LogRecord, place: Place | None) -> str | None:
        found = self.code_name(address, record, place)
        return None if found is None else found.text


def reader_with(files: Mapping[str, bytes]) -> ProgramDataReader:
    derived = derived_templates(PROGRAM.build())
    return ProgramDataReader(RecordSource(1, "libc.so.6", major=1, templates=files, derived=derived), Names())


def test_a_written_template_names_the_values_else_the_handler_does() -> None:
    reader = reader_with(FILES)
    assert reader.values(LogRecord(1, 1, data=WORD)) == {"arg0": 472}
    assert reader.values(LogRecord(1, 2, data=WORD)) == {"block": 472}


def test_nothing_is_known_of_other_records() -> None:
    reader = reader_with({})
    assert reader.values(LogRecord(1, 3, data=WORD)) is None
    assert reader.values(LogRecord(2, 1, data=WORD)) is None
    assert reader.values(LogRecord(1, 1, data=WORD[:3])) is None
    assert reader.values(LogRecord(1, 1, data=WORD, is_stack_trace=True)) is None


def test_an_address_has_its_name_beside_it() -> None:
    place = Place("libc.so.6", "malloc")
    reader = reader_with(FILES)
    for address, name in ((0x1004, "f+0x4 [app]"), (0x5000, "0x5000")):
        record = LogRecord(1, 4, data=address.to_bytes(8, "little") + WORD, place=place)
        assert reader.values(record) == {"caller": address, "size": 472, "caller_name": name}
        assert reader.values(record._replace(place=None)) == {"caller": address, "size": 472}


def test_the_function_of_a_sample_is_where_it_was_taken() -> None:
    reader = reader_with(FILES)
    assert reader.function(LogRecord(1, 1, ip=0x1008, place=SAMPLE)) == "f"
    assert reader.function(LogRecord(1, 1, ip=0x9000, place=SAMPLE)) == ""
    assert reader.function(LogRecord(1, 1, place=SAMPLE)) == ""
    assert reader.function(LogRecord(1, 1, ip=0x1008, place=Place("libc.so.6", "malloc+0x4"))) == "malloc"
    assert reader.function(LogRecord(1, 1, ip=0x1008)) == ""
