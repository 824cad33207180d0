"""
Tables as lines of text, in bpftrace's format for maps: sorted by value, histograms with bars.

::

    @hits[bash, 3]: 42

    @latency[bash]:
    [1, 2)          2 |@@@@                |
    [2, 4)         10 |@@@@@@@@@@@@@@@@@@@@|
    12 in all; about p50 2.8, p90 3.8, p99 4
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from dprobes.escapes import escaped
from dprobes.keyed.table_layout import NO_NAMES, Names, Part, bucket_of, buckets_of, kept_part, parts_of, shown_value
from dprobes.rpn.keyed_tables import UNNAMED, TableKind, Unit
from dprobes.rpn.word_arithmetic import signed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.table_layout import Bucket, TableContents, TableRow
    from dprobes.rpn.keyed_tables import Table

__all__ = [
    "KeyedTable",
    "ShownRow",
    "bar_lines",
    "estimated_quantile",
    "lost_text",
    "ordered_rows",
    "quantity",
    "shown_rows",
    "table_json_lines",
    "table_lines",
]

# Numbers of tables as displayed: with units, labels of histogram buckets, and quantiles estimated from buckets.

QUANTILES = (50, 90, 99)
"""Quantiles displayed for a histogram, in percent."""

_BINARY = ("", "K", "M", "G", "T", "P", "E")
_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def quantity(number: float, unit: Unit) -> str:
    """Return a number with its unit: ``1.2 ms``, ``4 KiB``. Without a unit, the number is unchanged."""
    if number < 0:
        return f"-{quantity(-number, unit)}"
    match unit:
        case Unit.NANOSECONDS:
            for size, name in _TIMES:
                if number >= size:
                    return f"{_short(number / size)} {name}"
            return f"{_short(number)} ns"
        case Unit.BYTES:
            size = 0
            while number >= 1024 and size + 1 < len(_BINARY):
                number, size = number / 1024, size + 1
            return f"{_short(number)} {_BINARY[size]}iB" if size else f"{_short(number)} B"
        case Unit.NONE:
            return str(number) if isinstance(number, int) else f"{number:.0f}"
    assert_never(unit)


def _short(number: float) -> str:
    """Return a number with at most three significant digits, but all digits before the point."""
    text = f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def power_text(exponent: int) -> str:
    """Return 2 to the power of ``exponent`` in short form, such as ``64K``."""
    size, rest = divmod(exponent, 10)
    return f"{1 << rest}{_BINARY[size]}" if size < len(_BINARY) else f"2^{exponent}"


def power_bucket_label(bucket: int, unit: Unit = Unit.NONE) -> str:
    """Return the label of bucket ``bucket`` of a power-of-two histogram, such as ``[64, 128)``, or ``[4K, 8K)``."""
    if unit is not Unit.NONE:
        low, high = quantity(1 << max(abs(bucket) - 1, 0), unit), quantity(1 << abs(bucket), unit)
        if bucket in (-1, 0, 1):
            return f"[{quantity(bucket, unit)}]"
        return f"[{low}, {high})" if bucket > 0 else f"(-{high}, -{low}]"
    if bucket in (-1, 0, 1):
        return f"[{bucket}]"
    low, high = power_text(abs(bucket) - 1), power_text(abs(bucket))
    return f"[{low}, {high})" if bucket > 0 else f"(-{high}, -{low}]"


def bucket_label(table: Table, bucket: Bucket) -> str:
    """Return the label of a bucket of a table's histogram, such as ``[64, 128)``."""
    low, high = bucket
    if low is None:
        assert high is not None
        return f"(..., {quantity(high, table.unit)})"
    if high is None:
        return f"[{quantity(low, table.unit)}, ...)"
    if table.kind is TableKind.HIST and table.unit is Unit.NONE:
        return power_bucket_label(bucket_of(low))
    if high == low + 1:
        return f"[{quantity(low, table.unit)}]"
    if high <= 0 and table.kind is TableKind.HIST:
        return f"({quantity(low - 1, table.unit)}, {quantity(high - 1, table.unit)}]"
    return f"[{quantity(low, table.unit)}, {quantity(high, table.unit)})"


def estimated_quantile(buckets: Sequence[Bucket], counts: Sequence[int], percent: float) -> float | None:
    """
    Return an estimate of a percentile, assuming that numbers are evenly distributed within a bucket.

    ``counts`` has the count of each bucket. Return None if the percentile is in an unbounded bucket, or if there are no
    numbers.
    """
    total = sum(counts)
    if not total:
        return None
    rank = percent / 100 * total
    before = 0
    for (low, high), count in zip(buckets, counts, strict=True):
        if count and before + count >= rank:
            if low is None or high is None:
                return None
            return min(low + (high - low) * (rank - before) / count, high - 1)
        before += count
    return None


_BAR = 40
_GAP = 3
"""Maximum number of consecutive empty buckets that are printed."""


def ordered_rows(contents: TableContents, rows: int | None = None) -> list[TableRow]:
    """
    Return the rows sorted by value, the greatest last.

    At most ``rows`` rows are returned, which have the greatest values; rows whose number has returned to 0 are then
    omitted. None means all rows.
    """
    table = contents.table
    found = sorted(contents.rows, key=lambda row: (shown_value(table, row.cells), row.key))
    if rows is None:
        return found
    if table.kind in (TableKind.SUM, TableKind.LAST) and not table.keeps_bytes:
        found = [row for row in found if shown_value(table, row.cells)]
    return found[max(0, len(found) - rows) :]


def table_lines(contents: TableContents, rows: int | None = None, names: Names = NO_NAMES) -> Iterator[str]:
    """
    Iterate over the lines that show a table: rows by value, the greatest last, with bars for histograms.

    ``rows`` is the maximum number of rows, or None for all. ``names`` has the names of addresses.
    """
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
    """Return the message that values were lost because the table had no room for their keys, with advice."""
    table, values = contents.table, f"{contents.lost} value{'s' if contents.lost > 1 else ''}"
    if table.has_user_stack and len(contents.rows) < table.capacity:
        advice = "use a condition that fewer hits match, or 'sample'; a larger ring only delays this"
        return f"{values} did not fit: call stacks arrived faster than they are followed ({advice})"
    room = "1 key" if table.capacity == 1 else f"{table.capacity} keys"
    return f"{values} did not fit: the table has room for {room} ('room =')"


def shown_name(table: Table) -> str:
    """Return the name of a table as in DProbes C: ``@NAME``, or ``@`` for the unnamed one."""
    return "@" if table.name == UNNAMED else f"@{table.name}"


def value_text(table: Table, cells: Sequence[int], names: Names = NO_NAMES) -> str:
    """
    Return the displayed form of a value that is not a histogram.

    ``names`` has the names of a call stack's addresses.
    """
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
        case TableKind.SUM | TableKind.MIN | TableKind.MAX | TableKind.LAST | TableKind.HIST | TableKind.LHIST:
            return quantity(shown_value(table, cells), unit)
    assert_never(table.kind)


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
    """Return the total count of a histogram, and estimates of its quantiles, as one line."""
    text = f"{sum(cells)} in all"
    found = [(percent, estimated_quantile(buckets_of(table), cells, percent)) for percent in QUANTILES]
    shown = [f"p{percent} {_estimate(value, table)}" for percent, value in found if value is not None]
    return f"{text}; about {', '.join(shown)}" if shown else text


def _estimate(value: float, table: Table) -> str:
    if table.unit.value:
        return quantity(value, table.unit)
    return f"{value:.3g}" if abs(value) < 1000 else f"{float(f'{value:.2e}'):.0f}"


def bar_lines(buckets: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Iterate over the lines of a histogram, without empty buckets around it. Long gaps in it are abbreviated."""
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


# Tables as JSON: an object for each row.
#
# ::
#
#     {"table": "hits", "kind": "count", "keys": ["bash", 3], "value": 42}
#     {"table": "files", "kind": "last", "keys": [1234], "value": "/etc/passwd"}
#     {"table": "t", "kind": "stats", "keys": [], "count": 2, "sum": 5, "min": 1, "max": 4, "average": 2.5}
#     {"table": "h", "kind": "hist", "keys": [], "count": 2, "buckets": [[1, 2, 1], [2, 4, 1]],
#      "estimates": {"p50": 2, ...}}
#
# A bucket is its lower bound, its exclusive upper bound, and its count; a missing bound is null. ``lost`` exists if
# values had no room for their keys: {"table": "hits", "kind": "count", "lost": 3}.


def table_json_lines(contents: TableContents, rows: int | None = None, names: Names = NO_NAMES) -> Iterator[str]:
    """Iterate over the results of ``table_objects``, each as a line of JSON."""
    for each in table_objects(contents, rows, names):
        yield json.dumps(each, ensure_ascii=False)


def table_objects(
    contents: TableContents, rows: int | None = None, names: Names = NO_NAMES
) -> Iterator[dict[str, Any]]:
    """
    Iterate over JSON objects for the rows, the greatest value last, and one for the number of lost values.

    ``rows`` is the maximum number of rows, or None for all. ``names`` has the names of addresses.
    """
    table = contents.table
    head: dict[str, Any] = {"table": table.name, "kind": table.kind.value}
    if table.unit is not Unit.NONE:
        head["unit"] = table.unit.value
    for row in ordered_rows(contents, rows):
        yield {**head, "keys": list(parts_of(table, row.key, names)), **value_object(table, row.cells, names)}
    if contents.lost:
        yield {**head, "lost": contents.lost}


def value_object(table: Table, cells: Sequence[int], names: Names = NO_NAMES) -> dict[str, Any]:
    """Return the members of a row's JSON object that show its value, by the kind of the table."""
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
        case TableKind.COUNT | TableKind.SUM | TableKind.MIN | TableKind.MAX | TableKind.LAST:
            return {"value": shown_value(table, cells)}
    assert_never(table.kind)


# Rows of tables as single lines together with their data, for messages and events.
#
# ::
#
#     @hits[bash, 3]: 42
#     @latency[bash]: [1, 2) 2, [2, 4) 10; 12 in all; about p50 2.8, p90 3.8, p99 4
#     @leaks[malloc+0x4 [libc.so.6]; main]: 16
#
# The data of a row are the same as in JSON.


class ShownRow(NamedTuple):
    """
    Row as text and as data.

    ``title`` is the table with the key, ``text`` the value, and ``keys`` the fields of the key as text. ``value`` has
    the value's fields as in JSON. Lost tallies are a last row, whose value has the field ``lost``.
    """

    title: str
    text: str
    keys: tuple[str, ...]
    value: dict[str, Any]

    @property
    def line(self) -> str:
        """The title and the value."""
        return f"{self.title}: {self.text}"


def shown_rows(contents: TableContents, names: Names = NO_NAMES, limit: int | None = None) -> Iterator[ShownRow]:
    """Iterate over the rows of a table, the greatest value last. ``limit`` restricts their number."""
    table, name = contents.table, shown_name(contents.table)
    for row in ordered_rows(contents, limit):
        keys = tuple(
            "; ".join(part) if isinstance(part, list) else str(part) for part in parts_of(table, row.key, names)
        )
        title = f"{name}[{', '.join(keys)}]" if keys else name
        if buckets := buckets_of(table):
            filled = [
                f"{bucket_label(table, bucket)} {count}"
                for bucket, count in zip(buckets, row.cells, strict=True)
                if count
            ]
            text = "; ".join((", ".join(filled), quantiles_text(table, row.cells)))
        else:
            text = value_text(table, row.cells, names)
            if isinstance(part := value_object(table, row.cells, names).get("value"), list):
                text = "; ".join(part)
        yield ShownRow(title, text, keys, value_object(table, row.cells, names))
    if contents.lost:
        yield ShownRow(name, lost_text(contents), (), {"lost": contents.lost})


# A keyed table in the Python API.


class KeyedTable:
    """
    Snapshot of a table: a mapping from keys, which are tuples of key fields, to values.

    ``lost`` counts the values whose keys had no room. A key field is a number, a string, or a tuple of the frames of a
    stack. The value is the number that ``push table`` yields, or, in a table of strings or stacks, a string or a tuple
    of frames. ``details`` returns all fields of a key's value.
    """

    def __init__(self, contents: TableContents, names: Names = NO_NAMES) -> None:
        self.contents = contents
        self.name = contents.table.name
        self.kind = contents.table.kind.value
        self.unit = contents.table.unit.value
        self.lost = contents.lost
        self._names = names
        self._rows = {self._key(row.key): row.cells for row in contents.rows}

    def _key(self, key: bytes) -> tuple[Any, ...]:
        parts = parts_of(self.contents.table, key, self._names)
        return tuple(tuple(part) if isinstance(part, list) else part for part in parts)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        table, cells = self.contents.table, self._rows[key]
        if not table.keeps_bytes:
            return shown_value(table, cells)
        part = kept_part(table, cells, self._names)
        return tuple(part) if isinstance(part, list) else part

    def get(self, key: tuple[Any, ...], default: Any = 0) -> Any:
        """Return the value of a key, or ``default``."""
        return self[key] if key in self._rows else default

    def items(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Iterate over pairs of key, a tuple of its fields, and value."""
        return ((key, self[key]) for key in self._rows)

    def details(self, key: tuple[Any, ...]) -> dict[str, Any]:
        """Return all fields of a key's value: ``value``, or ``count``, ``sum``, ``buckets`` and so on, as in JSON."""
        return value_object(self.contents.table, self._rows[key], self._names)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as the dictionaries of JSON output, the greatest number last."""
        return list(table_objects(self.contents, names=self._names))

    def __str__(self) -> str:
        return "\n".join(table_lines(self.contents, names=self._names))

    def __repr__(self) -> str:
        return f"<KeyedTable {self.name}: {self.kind}, {len(self)} keys>"
