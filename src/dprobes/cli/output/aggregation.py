"""``--count`` and ``--hist``: the tables that stand for records at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

from dprobes.cli.output.textoutput import print_line, print_table
from dprobes.errors import FormatError
from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.fieldvalues import HEADER_FIELDS
from dprobes.formatters.templates.collection import templates_of
from dprobes.keyed.quantities import power_bucket_label
from dprobes.keyed.text import bar_lines
from dprobes.record.boot import boot_id
from dprobes.record.layout import Item
from dprobes.sinks.aggregates import Aggregates
from dprobes.sinks.fieldcolumns import columns_of_packed, columns_of_rows
from dprobes.sinks.interface import Batch
from dprobes.trace.columns import PackedRows
from dprobes.trace.content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.formatters.templates import Templates
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.aggregates import CountTable, Histogram
    from dprobes.trace.columns import Rows
    from dprobes.trace.content import TraceProgram
    from dprobes.trace.packedblock import Block
    from dprobes.trace.selection import Selection

__all__ = ["aggregates_of", "fields_of_option", "items_of_fields", "print_aggregates"]

_ROWS = 50
"""Rows of a table that are printed; the others are summed up."""


def aggregates_of(counted: Sequence[str], measured: Sequence[str]) -> Aggregates:
    """Return what counts as the options say."""
    return Aggregates([fields_of_option(text) for text in counted], [text.strip() for text in measured])


def fields_of_option(text: str) -> tuple[str, ...]:
    """Return the fields that a ``--count`` names."""
    return tuple(field.strip() for field in text.split(","))


def items_of_fields(counted: Sequence[str], measured: Sequence[str]) -> Item:
    """Return the header items that are needed for what is counted."""
    items = Item(0)
    for field in (*(field for text in counted for field in fields_of_option(text)), *measured):
        items |= HEADER_FIELDS.get(field.strip(), Item(0))
    return items


def aggregate_traces(
    found: Iterable[Block | LostRecords],
    selection: Selection,
    counted: Sequence[str],
    measured: Sequence[str],
    templates: Templates | None = None,
) -> Counter[str]:
    """
    Print what the selected records of trace files come to; return how many were lost of each program.

    ``templates`` are asked before those of the programs. Raise ``FormatError`` if there are records, but none of any
    program can have one of the fields.
    """
    aggregates = aggregates_of(counted, measured)
    sources: dict[TraceProgram, RecordSource] = {}
    refusals: list[FormatError] = []
    lost: Counter[str] = Counter()
    own = boot_id()
    for each in found:
        program = each.program
        if isinstance(each, LostRecords):
            lost[program.name] += each.count
            continue
        if program not in sources:
            # The numbers of several files may be the same.
            source = replace(program.source, number=len(sources))
            if templates is not None:
                source = replace(source, templates=templates.over(templates_of(source.templates)))
            sources[program] = source
            try:
                is_live = bool(own) and program.origin.boot_id == own
                symboliser = AddressSymboliser(source, live=is_live, carried=program.names)
                aggregates.create_event_of(source, program.origin.host, symboliser)
            except FormatError as error:
                refusals.append(error)
        for rows, mask in selection.masked(each):
            _log_rows(aggregates, sources[program], rows, mask)
    if sources and len(refusals) == len(sources):
        raise refusals[0]
    print_aggregates(aggregates)
    return lost


def _log_rows(aggregates: Aggregates, source: RecordSource, rows: Rows, mask: Sequence[bool] | None) -> None:
    program = rows.block.program

    def place(probe: int) -> Place:
        return program.place(probe).in_module(program.source.module)

    fields = aggregates.fields_of(source)
    if isinstance(rows, PackedRows):
        columns = columns_of_packed(rows.records, place, fields, mask)
    else:
        columns = columns_of_rows(rows, place, fields, mask)
    if aggregates.log_columns(columns):
        return
    wanted = range(len(rows)) if mask is None else compress(range(len(rows)), mask)
    found = [rows.record(row) for row in wanted]
    places = [place(each.probe) for each in found]
    aggregates.log_events(Batch(source, [each.record for each in found], places, rows.block.wall_offset))


def print_aggregates(aggregates: Aggregates) -> None:
    """Print tables and histograms on standard output."""
    for table in aggregates.tables():
        _print_table(table)
    for histogram in aggregates.histograms():
        _print_histogram(histogram)


def _print_table(table: CountTable) -> None:
    total = sum(count for _, count in table.rows) + table.others
    rows = [(*values, str(count), f"{100 * count / total:.1f}%") for values, count in table.rows[:_ROWS]]
    if (hidden := sum(count for _, count in table.rows[_ROWS:]) + table.others) > 0:
        what = f"{len(table.rows) - _ROWS} others" if len(table.rows) > _ROWS else "others"
        blank = [""] * (len(table.fields) - 1)
        rows.append((what, *blank, str(hidden), f"{100 * hidden / total:.1f}%"))
    if not rows:
        print_line(f"no records to count {', '.join(table.fields)} of")
        return
    print_table((*table.fields, "count", "share"), rows)


def _print_histogram(histogram: Histogram) -> None:
    print_line(f"{histogram.field} at {histogram.place}" if histogram.place else histogram.field)
    for line in bar_lines([(power_bucket_label(bucket), count) for bucket, count in histogram.buckets]):
        print_line(line)
    if histogram.odd:
        print_line(f"and {histogram.odd} records with no number there")
