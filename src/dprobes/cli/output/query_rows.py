"""Rows of a query on standard output: as a table, as CSV, as JSON lines. They are printed as they arrive."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from dprobes.escapes import escaped, escaped_lines, json_text
from dprobes.formatters.json_formatter import exact
from dprobes.formatters.templates.data_extraction import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

__all__ = ["print_csv", "print_json", "print_table"]

ROWS = 1000
"""
Number of rows that are laid out together.

On a terminal it is the maximum. In a pipe, later rows use the column widths of the first ones.
"""

_GAP = 2


def print_table(reader: pa.RecordBatchReader) -> int:
    """Print columns; at a narrow terminal, a block for each row. Return the number of omitted rows."""
    schema = reader.schema
    right = [_is_number(field.type) for field in schema]
    header = [escaped(name) for name in schema.names]
    pieces = _pieces(reader, lambda values: [[escaped(_text(value, "NULL")) for value in each] for each in values])
    if not sys.stdout.isatty():
        _print_aligned(header, right, pieces)
        return 0
    rows = next(pieces, [])
    left_out = sum(len(piece) for piece in pieces)
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    if sum(widths) + _GAP * (len(widths) - 1) > shutil.get_terminal_size().columns and rows:
        _print_blocks(header, rows)
    else:
        _print_framed(header, right, rows)
    return left_out


def print_csv(reader: pa.RecordBatchReader) -> None:
    """Print a header line, and a line for each row; null is empty."""
    _print_csv_lines([reader.schema.names])
    for rows in _pieces(reader, lambda values: [[_text(value, "") for value in each] for each in values]):
        _print_csv_lines(rows)


def _print_csv_lines(rows: Sequence[Sequence[str]]) -> None:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    text = lines.getvalue()
    if sys.stdout.isatty():
        text = escaped_lines(text)
    click.echo(text, nl=False, color=True)  # elsewhere escape sequences are data


def print_json(reader: pa.RecordBatchReader) -> None:
    """Print each row as a JSON object on a line; bytes are displayed in hexadecimal, times as strings."""
    taken: set[str] = set()
    names = [unique_name(name, taken) for name in reader.schema.names]
    for rows in _pieces(reader, lambda values: values):
        lines = (json_text(exact(dict(zip(names, row, strict=True)))) for row in rows)
        click.echo("\n".join(lines))


# Values


def _pieces(reader: pa.RecordBatchReader, show: Callable[[list[tuple[Any, ...]]], Any]) -> Iterator[list[Any]]:
    """Iterate over lists of rows as they are read, each list converted by ``show``."""
    for batch in reader:
        columns = [_values(column) for column in batch.columns]
        rows = list(zip(*columns, strict=True))
        for start in range(0, len(rows), ROWS):
            yield show(rows[start : start + ROWS])


def _values(column: pa.Array) -> list[Any]:
    """Return the values as Python objects: numbers, strings, True, None, and lists and dictionaries of these."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = _plain_type(column.type)
    if kind != column.type:
        column = column.cast(kind)
    return [_plain(value) for value in column.to_pylist()]


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with times replaced by strings, because Python's ``datetime`` has no nanoseconds."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type)) for field in kind])
    return kind


def _plain(value: Any) -> Any:
    from decimal import Decimal

    import pyarrow as pa

    match value:
        case bytes():
            return value.hex()
        case Decimal():
            return int(value) if value == value.to_integral_value() and value.as_tuple().exponent == 0 else float(value)
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)  # JSON cannot represent these numbers
        case None | bool() | int() | float() | str():
            return value
        case pa.MonthDayNano():
            return _interval(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {name: _plain(each) for name, each in value.items()}
    return str(value)


def _interval(value: pa.MonthDayNano) -> str:
    counts = ((value.months, "months"), (value.days, "days"), (value.nanoseconds / 1e9, "s"))
    return " ".join(f"{count:.15g} {unit}" for count, unit in counts if count) or "0 s"


def _text(value: Any, null: str) -> str:
    match value:
        case None:
            return null
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case list() | dict():
            return json.dumps(value, ensure_ascii=False)
    return str(value)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


# Layouts


def _print_aligned(header: list[str], right: list[bool], pieces: Iterator[list[list[str]]]) -> None:
    widths = [len(name) for name in header]
    first = True
    for rows in pieces:
        widths = [max(width, *map(len, cells)) for width, cells in zip(widths, zip(*rows, strict=True), strict=True)]
        for row in [header, *rows] if first else rows:
            cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            click.echo("  ".join(cells).rstrip())
        first = False
    if first:
        click.echo("  ".join(header))


def _print_framed(header: list[str], right: list[bool], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, is_number in zip_longest(header, right):
        shown.add_column(escape(name), justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    Console().print(shown)


def _print_blocks(header: list[str], rows: list[list[str]]) -> None:
    width = max(map(len, header))
    for number, row in enumerate(rows, 1):
        click.secho(f"row {number}", bold=True)
        for name, cell in zip(header, row, strict=True):
            click.echo(f"  {name.ljust(width)}  {cell}")
