"""
Tables as JSON: an object for each row.

::

    {"table": "hits", "kind": "count", "keys": ["bash", 3], "value": 42}
    {"table": "files", "kind": "last", "keys": [1234], "value": "/etc/passwd"}
    {"table": "t", "kind": "stats", "keys": [], "count": 2, "sum": 5, "min": 1, "max": 4, "average": 2.5}
    {"table": "h", "kind": "hist", "keys": [], "count": 2, "buckets": [[1, 2, 1], [2, 4, 1]],
     "estimates": {"p50": 2, ...}}

A bucket is its lower bound, its upper bound, which is not in it, and its count; a bound is null where there is none.
``lost`` is there where values found no room for their keys: {"table": "hits", "kind": "count", "lost": 3}.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dprobes.keyed.layout import buckets_of, shown_value
from dprobes.keyed.parts import NO_NAMES, Names, kept_part, parts_of
from dprobes.keyed.quantities import QUANTILES, estimated_quantile
from dprobes.keyed.text import ordered_rows
from dprobes.rpn.arithmetic import signed
from dprobes.rpn.tables import TableKind, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.rpn.tables import Table

__all__ = ["table_json_lines", "table_objects", "value_object"]


def table_json_lines(contents: TableContents, rows: int | None = None, names: Names = NO_NAMES) -> Iterator[str]:
    """Iterate over the lines of a table."""
    for each in table_objects(contents, rows, names):
        yield json.dumps(each, ensure_ascii=False)


def table_objects(
    contents: TableContents, rows: int | None = None, names: Names = NO_NAMES
) -> Iterator[dict[str, Any]]:
    """Iterate over what is said of each row, the greatest value last."""
    table = contents.table
    head: dict[str, Any] = {"table": table.name, "kind": table.kind.value}
    if table.unit is not Unit.NONE:
        head["unit"] = table.unit.value
    for row in ordered_rows(contents, rows):
        yield {**head, "keys": list(parts_of(table, row.key, names)), **value_object(table, row.cells, names)}
    if contents.lost:
        yield {**head, "lost": contents.lost}


def value_object(table: Table, cells: Sequence[int], names: Names = NO_NAMES) -> dict[str, Any]:
    """Return what a value says."""
    if table.keeps_bytes:
        return {"value": kept_part(table, cells, names)}
    match table.kind:
        case TableKind.AVG | TableKind.STATS:
            count, total = cells[0], signed(cells[1], 64)
            found: dict[str, Any] = {"count": count, "sum": total}
            if table.kind is TableKind.STATS:
                found |= {"min": (1 << 63) - 1 - cells[2], "max": cells[3] - (1 << 63)}
            return {**found, "average": total / count if count else 0}
        case TableKind.HIST | TableKind.LHIST:
            buckets = buckets_of(table)
            filled = [[*bucket, count] for bucket, count in zip(buckets, cells, strict=True) if count]
            estimates = {f"p{percent}": estimated_quantile(buckets, cells, percent) for percent in QUANTILES}
            known = {name: value for name, value in estimates.items() if value is not None}
            return {"count": sum(cells), "buckets": filled, "estimates": known}
        case _:
            return {"value": shown_value(table, cells)}
