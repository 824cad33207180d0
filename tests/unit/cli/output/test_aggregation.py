"""Which programs count at the hit, and what their handlers become."""

from __future__ import annotations

import pytest

from dprobes.cli.output.aggregation import HandlerAggregates, NotAtTheHitError, sum_of
from dprobes.cli.shared_options import WantedFields
from dprobes.diagnostics import Diagnostics
from dprobes.formatters.templates.derived_templates import derived_templates
from dprobes.keyed.table_entries import TableStore
from dprobes.record.record_origin import RecordSource
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.keyed_tables import Table, TableKind
from dprobes.rpn.program_text import print_program
from dprobes.sinks.record_aggregates import Sum
from dprobes.source_text import SourceFile

LOGS_TWO = "offset = f\npush r, arg0\npush r, arg1\nlog 2\nexit\n"


def aggregates(
    text: str,
    counted: tuple[str, ...] = (),
    measured: tuple[str, ...] = (),
    summed: tuple[str, ...] = (),
    by: tuple[str, ...] = (),
) -> HandlerAggregates:
    program = parse_source(SourceFile("a.rpn", f"name = a\n{text}"), Diagnostics())
    source = RecordSource(1, "a", "a", 0, derived=derived_templates(program))
    return HandlerAggregates(program, source, WantedFields((counted,) if counted else (), measured, summed, by))


def test_a_handler_tallies_instead_of_logging() -> None:
    assert print_program(aggregates(LOGS_TWO, ("word1", "name", "pid", "symbol"), ("arg1",)).program) == (
        'name = "a"\n'
        "table = count0_of_0, count, word, comm, word, room = 100000\n"
        "table = hist0_of_0, hist\n"
        "\n"
        "offset = f\n"
        "    push r, arg0\n"
        "    push r, arg1\n"
        "    push tsp, 1\n"
        "    push pid\n"
        "    tally count0_of_0\n"
        "    push tsp, 0\n"
        "    tally hist0_of_0\n"
        "    ros 2\n"
        "    abort\n"
    )


def test_sums_and_histograms_have_the_keys_that_they_are_by() -> None:
    program = aggregates(LOGS_TWO, (), ("arg1",), ("arg0",), ("name", "arg1")).program
    assert print_program(program) == (
        'name = "a"\n'
        "table = hist0_of_0, hist, comm, word, room = 10000\n"
        "table = stats0_of_0, stats, comm, word, word, room = 20000\n"
        "\n"
        "offset = f\n"
        "    push r, arg0\n"
        "    push r, arg1\n"
        "    push tsp, 0\n"
        "    push tsp, 1\n"
        "    tally hist0_of_0\n"
        "    push tsp, 0\n"
        "    push 0\n"
        "    push tsp, 3\n"
        "    lt\n"
        "    push tsp, 3\n"
        "    tally stats0_of_0\n"
        "    ros 2\n"
        "    abort\n"
    )


def test_functions_of_samples_and_accesses_are_not_known_at_the_hit() -> None:
    watch = "address = cell\nwatchpoint = w\nexit\n"
    with pytest.raises(NotAtTheHitError) as caught:
        aggregates(watch, ("function",))
    assert str(caught.value) == "samples and accesses can be in any function"
    assert aggregates(watch, ("symbol",)).program.tables


@pytest.mark.parametrize(
    ("numbers", "bits"),
    [([5], 64), ([0, 2**64 - 1], 64), ([2**63, 2**63 + 1], 64), ([2**62] * 7, 64), ([2**32 - 1, 2**31], 32), ([0], 32)],
)
def test_a_sum_is_exact_whatever_its_size(numbers: list[int], bits: int) -> None:
    """As tables keep it of numbers of which all have the highest bit, or none."""
    for is_high in (False, True):
        mine = [number for number in numbers if bool(number >> bits - 1) == is_high]
        if mine:
            table = Table("t", TableKind.STATS)
            store = TableStore(table)
            for number in mine:
                store.tally(b"", number - (is_high << bits))
            (row,) = store.contents().rows
            assert sum_of(row.cells, is_high << bits) == Sum(len(mine), sum(mine), min(mine), max(mine))


@pytest.mark.parametrize(
    ("text", "counted", "measured", "reason"),
    [
        ("offset = \"f*\"\npush r, arg0\nlog 1\nexit\n", ("word0",), (), "a pattern matches several functions"),
        ("offset = f\njmp x\nx: log 1\nexit\n", ("word0",), (), "a handler has branches"),
        ("offset = f\nsetmin 5\nlog 1\nexit\n", ("word0",), (), "handlers set the codes of records"),
        ("offset = f\ncallk\nlog 1\nexit\n", ("word0",), (), "a handler calls an extension"),
        ("offset = f\npush 9\npush r, arg0\nlog str\nexit\n", ("item0",), (),
         "a handler logs something other than words at once"),
        ("offset = f\nlog 1\nlog 1\nexit\n", ("word0",), (), "a handler logs something other than words at once"),
        ("offset = f\npush r, arg0\npush mem, u64\nlog 1\nexit\n", ("word0",), (), "a handler may fail before it logs"),
        (LOGS_TWO, ("time",), (), "no instruction pushes 'time' as records have it"),
        (LOGS_TWO, ("word_size",), (), "'word_size' is not a word that the handler logs"),
        (LOGS_TWO, ("item0",), (), "'item0' is not a word that the handler logs"),
        (LOGS_TWO, (), ("minor",), "'minor' is not a number that differs from record to record"),
        (LOGS_TWO, ("word0", "word1", "pid", "tid", "uid", "cpu", "name", "arg0", "arg1"), (), None),
        ("".join(f"table = t{n}, count\n" for n in range(64)) + LOGS_TWO, ("word0",), (),
         "that would take more than 64 tables"),
    ],
)  # fmt: skip
def test_where_records_are_needed_there_is_a_reason(
    text: str, counted: tuple[str, ...], measured: tuple[str, ...], reason: str | None
) -> None:
    if reason is None:
        assert aggregates(text, counted, measured).program.tables
        return
    with pytest.raises(NotAtTheHitError) as caught:
        aggregates(text, counted, measured)
    assert str(caught.value) == reason
