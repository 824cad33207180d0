"""
Tables in the text format of Prometheus (https://prometheus.io/docs/instrumenting/exposition_formats/).

::

    # TYPE dprobes_hits counter
    dprobes_hits_total{comm="bash",key1="3"} 42

A count is a counter; other numbers are gauges. ``avg`` and ``stats`` are summaries without quantiles, with gauges for
minimum and maximum. The buckets of a histogram count the values up to ``le`` (included). The labels are the fields of
the key: ``comm``, ``stack`` and ``kernel_stack``, and otherwise ``key0``, ``key1`` by their index. Times are in
seconds, Prometheus's base unit. A stored string or call stack is a label, ``value``, of a gauge with the value 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from dprobes.keyed.table_layout import NO_NAMES, Names, Part, buckets_of, kept_part, parts_of, shown_value
from dprobes.keyed.table_text import ordered_rows
from dprobes.rpn.keyed_tables import KeyKind, TableKind, Unit
from dprobes.rpn.word_arithmetic import signed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.table_layout import TableContents, TableRow
    from dprobes.rpn.keyed_tables import Table

__all__ = ["exposition", "labels_of"]

_LABELS = {
    KeyKind.COMM: "comm",
    KeyKind.USER_STACK: "stack",
    KeyKind.USER_FRAMES: "stack",
    KeyKind.KERNEL_STACK: "kernel_stack",
    KeyKind.FRAMES: "kernel_stack",
}
_UNITS = {Unit.NONE: ("", 1), Unit.BYTES: ("_bytes", 1), Unit.NANOSECONDS: ("_seconds", 1_000_000_000)}


def exposition(contents: Sequence[TableContents], names: Names = NO_NAMES) -> str:
    """Return tables in the Prometheus text exposition format. ``names`` has the names of addresses in keys."""
    return "".join(f"{line}\n" for each in contents for line in _lines(each, names))


def _lines(contents: TableContents, names: Names) -> Iterator[str]:
    table = contents.table
    suffix, divisor = _UNITS[table.unit]
    name = f"dprobes_{table.name}{suffix if table.kind is not TableKind.COUNT else ''}"
    match table.kind:
        case TableKind.COUNT:
            yield f"# TYPE {name} counter"
            for row in ordered_rows(contents):
                yield f"{name}_total{_labels(table, row, names)} {row.cells[0]}"
        case TableKind.HIST | TableKind.LHIST:
            yield f"# TYPE {name} histogram"
            for row in ordered_rows(contents):
                yield from _histogram(name, table, row, divisor, names)
        case TableKind.AVG | TableKind.STATS:
            yield f"# TYPE {name} summary"
            for row in ordered_rows(contents):
                labels = _labels(table, row, names)
                yield f"{name}_count{labels} {row.cells[0]}"
                yield f"{name}_sum{labels} {_scaled(signed(row.cells[1], 64), divisor)}"
            if table.kind is TableKind.STATS:
                yield from _extremes(name, contents, divisor, names)
        case TableKind.SUM | TableKind.MIN | TableKind.MAX | TableKind.LAST:
            yield f"# TYPE {name} gauge"
            for row in ordered_rows(contents):
                yield f"{name}{_labels(table, row, names)} {_scaled(shown_value(table, row.cells), divisor)}"
        case other:
            assert_never(other)
    if contents.lost:
        yield f"# TYPE dprobes_{table.name}_lost counter"
        yield f"dprobes_{table.name}_lost_total {contents.lost}"


def _extremes(name: str, contents: TableContents, divisor: int, names: Names) -> Iterator[str]:
    for what in ("min", "max"):
        yield f"# TYPE {name}_{what} gauge"
        for row in ordered_rows(contents):
            value = (1 << 63) - 1 - row.cells[2] if what == "min" else row.cells[3] - (1 << 63)
            yield f"{name}_{what}{_labels(contents.table, row, names)} {_scaled(value, divisor)}"


def _histogram(name: str, table: Table, row: TableRow, divisor: int, names: Names) -> Iterator[str]:
    labels = _labels(table, row, names)
    head = f"{labels[:-1]}," if labels else "{"
    total = sum(row.cells)
    seen = 0
    for bucket, count in zip(buckets_of(table), row.cells, strict=True):
        seen += count
        if count and bucket.high is not None:
            yield f'{name}_bucket{head}le="{_scaled(bucket.high - 1, divisor)}"}} {seen}'
    yield f'{name}_bucket{head}le="+Inf"}} {total}'
    yield f"{name}_count{labels} {total}"


def _scaled(value: int, divisor: int) -> str:
    return str(value) if divisor == 1 else repr(value / divisor)


def _labels(table: Table, row: TableRow, names: Names) -> str:
    if not table.keys and not table.keeps_bytes:
        return ""
    found = []
    for name, text in labels_of(table, row, names).items():
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        found.append(f'{name}="{escaped}"')
    return f"{{{','.join(found)}}}"


def labels_of(table: Table, row: TableRow, names: Names) -> dict[str, str]:
    """
    Return the Prometheus labels of a row: the fields of its key, and ``value`` for a value that is not a number.

    ``names`` names addresses.
    """
    found: dict[str, str] = {}
    for number, (key, part) in enumerate(zip(table.keys, parts_of(table, row.key, names), strict=True)):
        name = _LABELS.get(key.kind, f"key{number}")
        if name in found:
            name = f"{name}{number}"
        found[name] = _label(part)
    if table.keeps_bytes:
        found["value"] = _label(kept_part(table, row.cells, names))
    return found


def _label(part: Part) -> str:
    return ";".join(reversed(part)) if isinstance(part, list) else str(part)
