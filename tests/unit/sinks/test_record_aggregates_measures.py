"""Histograms and sums by fields, as they are printed."""

from __future__ import annotations

import struct

import pytest

from dprobes.cli.output.aggregation import print_aggregates
from dprobes.errors import FormatError
from dprobes.record.record_origin import Place
from dprobes.sinks import Batch
from dprobes.sinks import record_aggregates as module
from dprobes.sinks.record_aggregates import Aggregates, Measures
from unit.sinks.records import SOURCE, record

READ, WRITE = Place("app", "do_read"), Place("app", "do_write")
ROWS = [(READ, "ls", 1), (READ, "cat", 5), (WRITE, "ls", 7), (READ, "ls", 2)]


def filled(aggregates: Aggregates, rows: list[tuple[Place, str, int]]) -> Aggregates:
    aggregates.create_event(SOURCE)
    records = [record(1, struct.pack("<q", number), process_name=name) for _, name, number in rows]
    aggregates.log_events(Batch(SOURCE, records, [place for place, _, _ in rows], 0))
    return aggregates


def test_sums_are_those_of_places_without_by(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([], [], ["word0"]), ROWS))
    assert capsys.readouterr().out == (
        "place     count  sum of word0  average  least  largest\n"
        "do_read       3             8      2.7      1        5\n"
        "do_write      1             7        7      7        7\n"
    )


def test_sums_and_histograms_by_fields(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([], ["word0"], ["word0"], ["name", "symbol"]), ROWS[:3]))
    full = "@" * 40
    assert capsys.readouterr().out == (
        f"word0 where name = ls, symbol = do_read\n[1]  1 |{full}|\n"
        f"word0 where name = cat, symbol = do_read\n[4, 8)  1 |{full}|\n"
        f"word0 where name = ls, symbol = do_write\n[4, 8)  1 |{full}|\n"
        "name  symbol    count  sum of word0  average  least  largest\n"
        "ls    do_write      1             7        7      7        7\n"
        "cat   do_read       1             5        5      5        5\n"
        "ls    do_read       1             1        1      1        1\n"
    )


def test_what_is_no_number_is_not_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([], [], ["item0"]), ROWS))
    assert capsys.readouterr().out == "no numbers of item0 to sum up\nand 4 records with no number there\n"


def test_there_is_a_limit_to_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "GROUPS_MAX", 1)
    print_aggregates(filled(Aggregates([], ["word0"], ["word0"], ["word0"]), [(READ, "ls", n) for n in (3, 4, 5)]))
    full, half = "@" * 40, "@" * 40
    assert capsys.readouterr().out == (
        f"word0 where word0 = 3\n[2, 4)  1 |{full}|\nword0 of others\n[4, 8)  2 |{half}|\n"
        "word0   count  sum of word0  average  least  largest\n"
        "others      2             9      4.5      4        5\n"
        "3           1             3        3      3        3\n"
    )


def test_more_groups_than_are_printed_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    print_aggregates(filled(Aggregates([], ["word0"], ["word0"], ["word0"]), [(READ, "ls", n) for n in range(52)]))
    lines = capsys.readouterr().out.splitlines()
    assert "and 2 more histograms of word0" in lines
    assert lines[-1].split() == ["2", "others", "2", "1", "0.5", "0", "1"]


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        (Measures([], ["nmae"]), "records have no field 'nmae'"),
        (Measures([], ["name"]), "'name' is not a number"),
        (Measures(["word0"], [], ["nmae"]), "records have no field 'nmae'"),
    ],
)
def test_fields_that_cannot_be_are_refused(measures: Measures, message: str) -> None:
    from dprobes.formatters.field_values import FieldValues

    with pytest.raises(FormatError) as caught:
        measures.check(FieldValues(SOURCE))
    assert caught.value.message == message
