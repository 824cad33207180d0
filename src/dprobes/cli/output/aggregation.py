"""``--count``, ``--hist`` and ``--sum``: the tables that stand for records at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from itertools import compress
from typing import TYPE_CHECKING

from dprobes.cli.output.textoutput import print_line, print_table
from dprobes.errors import FormatError
from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.templates.collection import templates_of
from dprobes.keyed.quantities import power_bucket_label
from dprobes.keyed.text import bar_lines
from dprobes.record.boot import boot_id
from dprobes.sinks.aggregates import Aggregates
from dprobes.sinks.fieldcolumns import columns_of_packed, columns_of_rows
from dprobes.sinks.interface import Batch
from dprobes.sinks.measures import Sum
from dprobes.trace.columns import PackedRows
from dprobes.trace.content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.cli.output.wantedfields import WantedFields
    from dprobes.formatters.templates.collection import Templates
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.aggregates import CountTable
    from dprobes.sinks.measures import Histogram, SumTable
    from dprobes.trace.columns import Rows
    from dprobes.trace.content import TraceProgram
    from dprobes.trace.mixedblock import Block
    from dprobes.trace.selection import Selection

__all__ = ["aggregate_traces", "aggregates_of", "print_aggregates"]

_ROWS = 50
"""Rows of a table that are printed; the others are summed up."""


def aggregates_of(wanted: WantedFields) -> Aggregates:
    """Return what counts as the options say."""
    return Aggregates(wanted.counted, wanted.measured, wanted.summed, wanted.by)


def aggregate_traces(
    found: Iterable[Block | LostRecords],
    selection: Selection,
    wanted: WantedFields,
    templates: Templates | None = None,
) -> Counter[str]:
    """
    Print what the selected records of trace files come to; return how many were lost of each program.

    ``templates`` are asked before those of the programs. Raise ``FormatError`` if there are records, but none of any
    program can have one of the fields.
    """
    aggregates = aggregates_of(wanted)
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
    for each in aggregates.tables():
        _print_table(each)
    shown: Counter[str] = Counter()
    for histogram in aggregates.measures.histograms():
        shown[histogram.field] += 1
        if shown[histogram.field] <= _ROWS:
            _print_histogram(histogram)
    for field, count in shown.items():
        if count > _ROWS:
            print_line(f"and {count - _ROWS} more histograms of {field}")
    for table in aggregates.measures.sums():
        _print_sums(table)


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


def _print_sums(table: SumTable) -> None:
    rows = [(*group, *_columns_of(found)) for group, found in table.rows[:_ROWS]]
    if len(table.rows) > _ROWS:
        hidden = reduce(Sum.plus, (found for _, found in table.rows[_ROWS:]))
        blank = [""] * (len(table.by) - 1)
        rows.append((f"{len(table.rows) - _ROWS} others", *blank, *_columns_of(hidden)))
    if rows:
        print_table((*table.by, "count", f"sum of {table.field}", "average", "least", "largest"), rows)
    else:
        print_line(f"no numbers of {table.field} to sum up")
    if table.odd:
        print_line(_without_number(table.odd))


def _without_number(count: int) -> str:
    return f"and {count} record{'s' * (count != 1)} with no number there"


def _columns_of(found: Sum) -> tuple[str, ...]:
    average = f"{found.total / found.numbers:.1f}".removesuffix(".0")
    return str(found.numbers), str(found.total), average, str(found.least), str(found.largest)


def _print_histogram(histogram: Histogram) -> None:
    print_line(f"{histogram.field} {histogram.where}".rstrip())
    for line in bar_lines([(power_bucket_label(bucket), count) for bucket, count in histogram.buckets]):
        print_line(line)
    if histogram.odd:
        print_line(_without_number(histogram.odd))
