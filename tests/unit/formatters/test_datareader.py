"""Values of records by name: templates come before what is derived from handlers."""

from __future__ import annotations

from dprobes import ProgramBuilder
from dprobes.formatters.datareader import ProgramDataReader
from dprobes.record.layout import LogRecord

PROGRAM = ProgramBuilder("libc.so.6", major=1)
PROGRAM.probe("malloc", minor=1).push_r("arg0").log(1).exit()
PROGRAM.probe("free", minor=2).push_r("arg0").log(1).exit()
FILES = {"templates.lst": b"1 a.fmt\n", "a.fmt": b'major = 1\nminor = 2\nfmt = "block=%p"\n'}
WORD = (472).to_bytes(8, "little")


def test_a_written_template_names_the_values_else_the_handler_does() -> None:
    reader = ProgramDataReader(PROGRAM.build(), FILES)
    assert reader(LogRecord(1, 1, data=WORD)) == {"arg0": 472}
    assert reader(LogRecord(1, 2, data=WORD)) == {"block": 472}


def test_nothing_is_known_of_other_records() -> None:
    reader = ProgramDataReader(PROGRAM.build(), {})
    assert reader(LogRecord(1, 3, data=WORD)) is None
    assert reader(LogRecord(2, 1, data=WORD)) is None
    assert reader(LogRecord(1, 1, data=WORD[:3])) is None
    assert reader(LogRecord(1, 1, data=WORD, is_stack_trace=True)) is None
