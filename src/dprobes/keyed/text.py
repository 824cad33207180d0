"""
Tables as lines of text, as bpftrace prints maps: in the order of their values, histograms with bars.

::

    @hits[bash, 3]: 42

    @latency[bash]:
    [1, 2)          2 |@@@@                |
    [2, 4)         10 |@@@@@@@@@@@@@@@@@@@@|
    12 in all; about p50 2.8, p90 3.8, p99 4
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.escapes import escaped
from dprobes.keyed.layout import buckets_of, shown_value
from dprobes.keyed.parts import NO_NAMES, Names, Part, kept_part, parts_of
from dprobes.keyed.quantities import QUANTILES, bucket_label, estimated_quantile, quantity
from dprobes.rpn.arithmetic import signed
from dprobes.rpn.tables import UNNAMED, TableKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.contents import TableContents, TableRow
    from dprobes.rpn.tables import Table

__all__ = ["bar_lines", "lost_text", "ordered_rows", "quantiles_text", "shown_name", "table_lines", "value_text"]

_BAR = 40
_GAP = 3
"""Up to so many empty buckets in a row are printed."""


def ordered_rows(contents: TableContents, rows: int | None = None) -> list[TableRow]:
    """
    Return the rows by their values, the greatest last.

    With ``rows`` so many of those with the greatest ones, and none in which a number has come back to 0.
    """
    table = contents.table
    found = sorted(contents.rows, key=lambda row: (shown_value(table, row.cells), row.key))
    if rows is None:
        return found
    if table.kind in (TableKind.SUM, TableKind.LAST) and not table.keeps_bytes:
        found = [row for row in found if shown_value(table, row.cells)]
    return found[max(0, len(found) - rows) :]


def table_lines(contents: TableContents, rows: int | None = None, names: Names = NO_NAMES) -> Iterator[str]:
    """Iterate over the lines of a table; ``rows`` is how many rows are shown, ``names`` names addresses."""
    table, name = contents.table, shown_name(contents.table)
    shown = ordered_rows(contents, rows)
    if (hidden := len(contents.rows) - len(shown)) > 0:
        what = "1 row with a smaller value is" if hidden == 1 else f"{hidden} rows with smaller values are"
        yield f"{name}: {what} not shown"
    for row in shown:
        head = f"{name}{_key_text(table, row, names)}:"
        if buckets := buckets_of(table):
            yield from head.split("\n")
            labels = [bucket_label(table, bucket) for bucket in buckets]
            yield from bar_lines(list(zip(labels, row.cells, strict=True)))
            yield quantiles_text(table, row.cells)
            yield ""
        else:
            yield from f"{head} {value_text(table, row.cells, names)}".split("\n")
    if contents.lost:
        yield f"{name}: {lost_text(contents)}"


def lost_text(contents: TableContents) -> str:
    """Return how many values found no room for their keys."""
    table, values = contents.table, f"{contents.lost} value{'s' if contents.lost > 1 else ''}"
    if table.has_user_stack and len(contents.rows) < table.capacity:
        advice = "a condition that lets fewer hits through helps, or 'sample'; a larger ring puts it off only"
        return f"{values} found no room: call stacks came faster than they are followed ({advice})"
    return f"{values} found no room: there are {table.capacity} keys already ('room =')"


def shown_name(table: Table) -> str:
    """Return the name of a table for people."""
    return "@" if table.name == UNNAMED else f"@{table.name}"


def value_text(table: Table, cells: Sequence[int], names: Names = NO_NAMES) -> str:
    """Return a value that is no histogram for people."""
    if table.keeps_bytes:
        return _part_text(kept_part(table, cells, names))
    unit = table.unit
    match table.kind:
        case TableKind.COUNT:
            return str(cells[0])
        case TableKind.STATS:
            count, total = cells[0], signed(cells[1], 64)
            average, least, most = total / count if count else 0, (1 << 63) - 1 - cells[2], cells[3] - (1 << 63)
            return (
                f"count {count}, average {_average(average, table)}, total {quantity(total, unit)}, "
                f"min {quantity(least, unit)}, max {quantity(most, unit)}"
            )
        case TableKind.AVG:
            return _average(signed(cells[1], 64) / cells[0] if cells[0] else 0, table)
        case _:
            return quantity(shown_value(table, cells), unit)


def _average(number: float, table: Table) -> str:
    return quantity(number, table.unit) if table.unit.value else f"{number:.6g}"


def _key_text(table: Table, row: TableRow, names: Names) -> str:
    if not table.keys:
        return ""
    return f"[{', '.join(map(_part_text, parts_of(table, row.key, names)))}]"


def _part_text(part: Part) -> str:
    if isinstance(part, list):
        return "\n" + "".join(f"    {escaped(frame)}\n" for frame in part)
    return escaped(str(part))


def quantiles_text(table: Table, cells: Sequence[int]) -> str:
    """Return how many values a histogram has, and about where they lie."""
    text = f"{sum(cells)} in all"
    found = [(percent, estimated_quantile(buckets_of(table), cells, percent)) for percent in QUANTILES]
    shown = [f"p{percent} {_estimate(value, table)}" for percent, value in found if value is not None]
    return f"{text}; about {', '.join(shown)}" if shown else text


def _estimate(value: float, table: Table) -> str:
    if table.unit.value:
        return quantity(value, table.unit)
    return f"{value:.3g}" if abs(value) < 1000 else f"{float(f'{value:.2e}'):.0f}"


def bar_lines(buckets: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Iterate over the lines of a histogram; empty buckets around it are left out, and many inside it cut short."""
    filled = [n for n, (_, count) in enumerate(buckets) if count]
    if not filled:
        return
    rows: list[tuple[str, int]] = []
    empty: list[tuple[str, int]] = []
    for label, count in buckets[filled[0] : filled[-1] + 1]:
        if not count:
            empty.append((label, count))
            continue
        rows += empty if len(empty) <= _GAP else [("...", 0)]
        empty = []
        rows.append((label, count))
    most = max(count for _, count in rows)
    width, digits = max(len(label) for label, _ in rows), len(str(most))
    for label, count in rows:
        yield f"{label:<{width}}  {count:>{digits}} |{'@' * (_BAR * count // most):<{_BAR}}|"
