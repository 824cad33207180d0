"""Which programs count at the hit, and what their handlers become."""

from __future__ import annotations

import pytest

from dprobes.cli.output.handleraggregates import HandlerAggregates, NotAtTheHitError
from dprobes.diagnostics import Diagnostics
from dprobes.formatters.templates.derived import derived_templates
from dprobes.record.origin import RecordSource
from dprobes.rpn.pipeline import parse_source
from dprobes.rpn.printer import print_program
from dprobes.source import SourceFile

LOGS_TWO = "offset = f\npush r, arg0\npush r, arg1\nlog 2\nexit\n"


def aggregates(text: str, counted: tuple[str, ...] = (), measured: tuple[str, ...] = ()) -> HandlerAggregates:
    program = parse_source(SourceFile("a.rpn", f"name = a\n{text}"), Diagnostics())
    source = RecordSource(1, "a", "a", 0, derived=derived_templates(program))
    return HandlerAggregates(program, source, [counted] if counted else [], measured)


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


@pytest.mark.parametrize(
    ("text", "counted", "measured", "reason"),
    [
        ("offset = \"f*\"\npush r, arg0\nlog 1\nexit\n", ("word0",), (), "a pattern stands for several functions"),
        ("offset = f\njmp x\nx: log 1\nexit\n", ("word0",), (), "a handler has several ways to go"),
        ("offset = f\nsetmin 5\nlog 1\nexit\n", ("word0",), (), "handlers set the codes of records"),
        ("offset = f\ncallk\nlog 1\nexit\n", ("word0",), (), "a handler calls an extension"),
        ("offset = f\npush 9\npush r, arg0\nlog str\nexit\n", ("item0",), (),
         "a handler logs something else than words at once"),
        ("offset = f\nlog 1\nlog 1\nexit\n", ("word0",), (), "a handler logs something else than words at once"),
        ("offset = f\npush r, arg0\npush mem, u64\nlog 1\nexit\n", ("word0",), (), "a handler may fail before it logs"),
        (LOGS_TWO, ("time",), (), "no instruction pushes 'time' as records have it"),
        (LOGS_TWO, ("word_size",), (), "'word_size' is no word that the handler logs"),
        (LOGS_TWO, ("item0",), (), "'item0' is no word that the handler logs"),
        (LOGS_TWO, (), ("minor",), "'minor' is no number that differs from record to record"),
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
