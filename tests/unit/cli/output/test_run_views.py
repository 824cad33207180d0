from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.output.run_views import TableOptions, TableOutput, short_time
from dprobes.engines.engine_interface import Counts
from dprobes.keyed.table_entries import TableStore
from dprobes.rpn.keyed_tables import Table, TableKind, Unit

if TYPE_CHECKING:
    from dprobes.keyed.table_layout import TableContents


def contents_of(kind: TableKind, *values: int, unit: Unit = Unit.NANOSECONDS) -> TableContents:
    """Return a table without keys, which keeps what it has been given."""
    store = TableStore(Table("t", kind, (), unit=unit))
    for each in values:
        store.tally(b"", each)
    return store.contents()


@pytest.mark.parametrize(
    ("kind", "times", "shortest"),
    [
        (TableKind.AVG, (100, 300), 200),
        (TableKind.STATS, (100, 300), 100),
        (TableKind.MIN, (700, 500), 500),
        (TableKind.MAX, (700, 500), 700),
        (TableKind.LAST, (700, 900), 900),
        (TableKind.HIST, (700, 5000), 1024),
        (TableKind.AVG, (2000,), None),
        (TableKind.SUM, (5,), None),
    ],
)
def test_times_of_the_order_of_a_hit_are_found(kind: TableKind, times: tuple[int, ...], shortest: int | None) -> None:
    assert short_time([contents_of(kind, *times)], 1024) == shortest
    assert short_time([contents_of(kind, *times, unit=Unit.BYTES)], 1024) is None
    assert short_time([contents_of(kind, *times)], 0) is None


def test_a_note_names_the_cheaper_engine(capsys: pytest.CaptureFixture[str]) -> None:
    class Times:
        def tables(self) -> list[TableContents]:
            return [contents_of(TableKind.MIN, 12_300)]

        def counts(self) -> tuple[Counts, ...]:
            return ()

    session: Any = Times()
    output = TableOutput(TableOptions(), session, 1)
    output.note_short_times("inline")
    assert capsys.readouterr().err == ""
    output.note_short_times("ptrace")
    assert capsys.readouterr().err == (
        "dprobes: note: times near 12.3 us are mostly the cost of the probe itself, with the ptrace engine\n"
        "hint: '--engine inline' costs a hundredth of that, for programs and libraries with -c or -p\n"
    )


def test_a_note_is_about_the_breakpoints_of_a_run_with_jumps(capsys: pytest.CaptureFixture[str]) -> None:
    class Times:
        def __init__(self, *ways: str) -> None:
            self._ways = ways

        def tables(self) -> list[TableContents]:
            return [contents_of(TableKind.MIN, 12_300)]

        def counts(self) -> tuple[Counts, ...]:
            return (Counts(1, executed=self._ways),)

    session: Any = Times("inline (punned jump)", "in a page")
    TableOutput(TableOptions(), session, 1).note_short_times("inline")
    assert capsys.readouterr().err == (
        "dprobes: note: times near 12.3 us are mostly the cost of the probe itself, with a breakpoint\n"
    )
    session = Times("inline (punned jump)")
    TableOutput(TableOptions(), session, 0).note_short_times("inline", [5])
    assert capsys.readouterr().err == ""
    TableOutput(TableOptions(), session, 0).note_short_times("ebpf", [1 << 40, 2048])
    assert "times near 2.05 us are mostly the cost" in capsys.readouterr().err
