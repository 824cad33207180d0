from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.output.run_views import TableOptions, TableOutput, short_time
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

    session: Any = Times()
    output = TableOutput(TableOptions(), session, 1)
    output.note_short_times("inline")
    assert capsys.readouterr().err == ""
    output.note_short_times("ptrace")
    assert capsys.readouterr().err == (
        "dprobes: note: times such as 12.3 us are of the order of what hits cost with the ptrace engine, which is in "
        "them\nhint: '--engine inline' costs a hundredth of it, with -c or -p and in programs and libraries\n"
    )
