"""Counts and histograms of fields."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.output.aggregation import print_aggregates
from dprobes.errors import FormatError
from dprobes.record.record_origin import Place
from dprobes.sinks import Batch
from dprobes.sinks import record_aggregates as module
from dprobes.sinks.record_aggregates import Aggregates
from unit.sinks.records import SOURCE, record

if TYPE_CHECKING:
    from dprobes.record.record_origin import RecordSource

READ, WRITE = Place("app", "do_read"), Place("app", "do_write")


def filled(aggregates: Aggregates, rows: list[tuple[Place, str, int]], source: RecordSource = SOURCE) -> Aggregates:
    aggregates.create_event(source)
    records = [record(1, struct.pack("<q", number), process_name=name) for _, name, number in rows]
    aggregates.log_events(Batch(source, records, [place for place, _, _ in rows], 0))
    aggregates.destroy_event(source)
    return aggregates


ROWS = [
    (READ, "ls", 0),
    (READ, "ls", 1),
    (WRITE, "ls", 5),
    (READ, "cat", 7),
    (READ, "cat", 4096),
    (READ, "ls", 6),
    (READ, "ls", 5),
]


def test_tables_and_histograms_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([("name",), ("name", "symbol")], ["word0"]), ROWS))
    assert capsys.readouterr().out == (
        "name  count  share\n"
        "ls        5  71.4%\n"
        "cat       2  28.6%\n"
        "name  symbol    count  share\n"
        "ls    do_read       4  57.1%\n"
        "cat   do_read       2  28.6%\n"
        "ls    do_write      1  14.3%\n"
        "word0 at do_read\n"
        "[0]       1 |@@@@@@@@@@@@@                           |\n"
        "[1]       1 |@@@@@@@@@@@@@                           |\n"
        "[2, 4)    0 |                                        |\n"
        "[4, 8)    3 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|\n"
        "...       0 |                                        |\n"
        "[4K, 8K)  1 |@@@@@@@@@@@@@                           |\n"
        "word0 at do_write\n"
        "[4, 8)  1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|\n"
    )


def test_entry_and_return_have_histograms_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    returned = Place("app", "do_read", at_return=True)
    print_aggregates(filled(Aggregates([], ["word0"]), [(READ, "ls", 1), (returned, "ls", 0)]))
    full = "@" * 40
    assert capsys.readouterr().out == (
        f"word0 at do_read\n[1]  1 |{full}|\nword0 at do_read (return)\n[0]  1 |{full}|\n"
    )


def test_what_is_no_number_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([], ["item0"]), ROWS[:1]))
    assert capsys.readouterr().out == "item0 at do_read\nand 1 record with no number there\n"


def test_nothing_to_count(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(Aggregates([("name", "pid")], ["word0"]))
    assert capsys.readouterr().out == "no records to count by name, pid\n"


def test_there_is_a_limit_to_different_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "VALUES_MAX", 2)
    print_aggregates(filled(Aggregates([("word0",)], []), [(READ, "ls", n) for n in (1, 2, 3, 1, 4, 2, 2)]))
    assert capsys.readouterr().out == (
        "word0   count  share\n2           3  42.9%\n1           2  28.6%\nothers      2  28.6%\n"
    )


def test_a_field_that_no_record_can_have_is_refused() -> None:
    with pytest.raises(FormatError) as caught:
        Aggregates([("name", "mnor")], []).create_event(SOURCE)
    assert caught.value.message == "records have no field 'mnor'"
    assert caught.value.hint == "did you mean 'minor'?"


def test_what_disturbs_a_terminal_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([("name",)], []), [(READ, "a\x1b[2J\nb", 1)]))
    assert capsys.readouterr().out == "name         count  share\na\\x1b[2J\\nb      1  100.0%\n"
