"""The keyed tables of a run on standard output, at its end and at intervals, and the views that replace records."""

from __future__ import annotations

import contextlib
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

from dprobes.cli import console
from dprobes.cli.console import print_lines
from dprobes.engines.engine_registry import engine_row
from dprobes.errors import reason_of
from dprobes.keyed.table_layout import NO_NAMES
from dprobes.keyed.table_text import quantity, shown_rows
from dprobes.record.log_record import Item
from dprobes.rpn.keyed_tables import TableKind, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from dprobes.cli.output.aggregation import HandlerAggregates
    from dprobes.cli.output.stack_profiles import StacksOptions
    from dprobes.cli.output.top_view import TopView
    from dprobes.cli.shared_options import WantedFields
    from dprobes.engines.engine_interface import Attachment
    from dprobes.keyed.table_layout import Names, TableContents
    from dprobes.record.record_origin import RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Program
    from dprobes.sinks import Sink
    from dprobes.sinks.record_aggregates import Aggregates
    from dprobes.sinks.stacks.stack_profile import StackCollector

__all__ = ["TableOptions", "TableOutput", "Views", "lines_of", "short_time"]


class TableOptions(NamedTuple):
    """
    Options of keyed tables.

    ``rows`` is the number of rows to show of each table. ``interval`` is in seconds. With ``as_json``, each row is an
    object in a line. With ``aside``, tables go to standard error, because standard output is in use. ``prometheus`` is
    a file to which they are written, too.
    """

    rows: int | None = None
    interval: float | None = None
    as_json: bool = False
    aside: bool = False
    prometheus: Path | None = None


class TableOutput:
    """A printer of the first ``count`` tables of a session, except those with the names in ``left_out``."""

    def __init__(
        self,
        options: TableOptions,
        session: Attachment,
        count: int,
        names: Names = NO_NAMES,
        left_out: Container[str | None] = (),
    ) -> None:
        self._left_out = left_out
        self.names = names
        self._count = count
        self._options = options
        self._session = session
        self._over = threading.Event()
        self.also: Callable[[Sequence[TableContents]], None] | None = None
        """An additional consumer of the tables at each interval."""

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Print the tables at intervals until the context ends."""
        interval = self._options.interval
        if interval is None:
            yield
            return
        timer = threading.Thread(target=self._repeat, args=(interval,), daemon=True)
        timer.start()
        try:
            yield
        finally:
            self._over.set()
            timer.join()

    def _repeat(self, seconds: float) -> None:
        while not self._over.wait(seconds):
            with contextlib.suppress(BrokenPipeError):
                self.print()
            if self.also is not None and self._count:
                self.also(self._session.tables()[: self._count])

    def print(self) -> None:
        """Print the current rows of the tables once."""
        if not self._count:
            return
        contents = self._session.tables()[: self._count]
        if self._options.prometheus is not None:
            self._write_exposition(self._options.prometheus, contents, self.names)
        self._print([each for each in contents if each.table.name not in self._left_out], self._options.rows)

    def note_short_times(self, engine: str, viewed: Sequence[int] = ()) -> None:
        """Print a note if times in tables, or those ``viewed``, are of the same order as the engine's cost of a hit."""
        row = engine_row(engine)
        is_mixed = row.speedup is not None and any(
            not way.startswith(f"{row.name} (") for count in self._session.counts() for way in count.executed
        )
        if row.speedup is not None and is_mixed:
            row = engine_row(row.speedup.engine)
        found = short_time(self._session.tables()[: self._count] if self._count else (), row.hit_time, viewed)
        if found is not None:
            what = "a breakpoint" if is_mixed else f"the {row.name} engine"
            console.note(
                f"times near {quantity(found, Unit.NANOSECONDS)} are mostly the cost of the probe itself, with {what}",
                "'--engine inline' costs a hundredth of that, for programs and libraries with -c or -p"
                if row.candidacy is not None and not is_mixed
                else None,
            )

    def show(self, number: int, rows: int | None) -> None:
        """Print at most ``rows`` rows of a table, by default the number in the options."""
        self._print([self._session.tables()[number]], self._options.rows if rows is None else rows)

    def _print(self, contents: Sequence[TableContents], rows: int | None) -> None:
        lines = lines_of(contents, rows=rows, as_json=self._options.as_json, names=self.names)
        if not lines:
            return
        if self._options.aside:
            console.write("\n".join(lines))
        else:
            print_lines(lines)

    @staticmethod
    def _write_exposition(path: Path, contents: Sequence[TableContents], names: Names) -> None:
        """Replace a file atomically: readers see either the whole old text or the whole new text."""
        from dprobes.keyed.prometheus_text import exposition

        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(exposition(contents, names), encoding="utf-8")
            new.replace(path)
        except OSError as error:
            console.error(f"'{path}' cannot be written: {reason_of(error)}")


def short_time(contents: Sequence[TableContents], most: int, viewed: Sequence[int] = ()) -> int | None:
    """Return the shortest time in tables and of those ``viewed``, in nanoseconds, or None if it exceeds ``most``."""
    found = [*viewed]
    for each in contents:
        if each.table.unit is not Unit.NANOSECONDS or each.table.kind is TableKind.SUM:
            continue
        for row in shown_rows(each):
            match row.value:
                case {"buckets": [(low, high, *_), *_]}:
                    found.append(low if high is None else high)
                case {"min": least}:
                    found.append(least)
                case {"average": time} | {"value": time}:
                    found.append(int(time))
    shortest = min(found, default=most + 1)
    return shortest if shortest <= most else None


def lines_of(
    contents: Sequence[TableContents], *, rows: int | None = None, as_json: bool = False, names: Names = NO_NAMES
) -> list[str]:
    """
    Return the lines that show tables, as text or as JSON.

    ``rows`` is the maximum number of rows of each table, None for all; ``names`` names addresses.
    """
    if as_json:
        from dprobes.keyed.table_text import table_json_lines

        return [line for each in contents for line in table_json_lines(each, rows, names)]
    from dprobes.keyed.table_text import table_lines

    return [line for each in contents for line in table_lines(each, rows, names)]


# The views of a run that replace records: ``--top``, ``--count``, ``--hist``, ``--sum`` and ``--stacks``.


class Views:
    """The requested views; ``sinks`` consume the records, which must have ``items`` in their headers."""

    def __init__(
        self,
        counted: Sequence[str],
        measured: Sequence[str],
        summed: Sequence[str] = (),
        by: Sequence[str] = (),
        *,
        top: bool,
        stacks: StacksOptions | None = None,
    ) -> None:
        self.items = Item(0)
        self.sinks: list[Sink] = []
        self._aggregates: Aggregates | None = None
        self._top: TopView | None = None
        self._stacks: StackCollector | None = None
        self._stacks_options = stacks
        self.profiled: str | None = None
        """Name of the table whose keys are the stacks of the profile, or None if it is a profile of records."""
        self._at_hits: HandlerAggregates | None = None
        self._wanted: WantedFields | None = None
        if counted or measured or summed or by:
            from dprobes.cli.output.aggregation import aggregates_of
            from dprobes.cli.shared_options import WantedFields

            self._wanted = WantedFields.of_options(counted, measured, summed, by)
            self.items = self._wanted.items
            self._aggregates = aggregates_of(self._wanted)
            self.sinks.append(self._aggregates)
        if stacks is not None:
            from dprobes.cli.output.stack_profiles import check_stacks_target, is_perfetto
            from dprobes.sinks.stacks.stack_profile import StackCollector

            check_stacks_target(stacks.target)
            self.items |= Item.PID | Item.PROCESS_NAME | Item.CS | Item.IP
            if is_trace := is_perfetto(stacks.target):
                self.items |= Item.TIME | Item.TID | Item.CPU
            self._stacks = StackCollector(stacks.weight, keeps_samples=is_trace)
            self.sinks.append(self._stacks)
        if top:
            from dprobes.cli.output.top_view import TopView

            self._top = TopView()
            self.sinks.append(self._top)

    @property
    def shortest_times(self) -> list[int]:
        """The shortest time in nanoseconds of each view of a field with times."""
        if self._aggregates is None:
            return []
        measures = self._aggregates.measures
        found = [
            1 << max(next(bucket for bucket, count in each.buckets if count), 0)
            for each in measures.histograms()
            if each.unit is Unit.NANOSECONDS and each.buckets
        ]
        sums = (each for each in measures.sums() if each.unit is Unit.NANOSECONDS)
        return [*found, *(row.least for each in sums for _, row in each.rows)]

    @property
    def names_functions(self) -> bool:
        """True if a view groups records by function."""
        return self._wanted is not None and "function" in self._wanted.all

    def use_tables(self, tables: Sequence[Table], *, logs_stacks: bool) -> None:
        """
        Make the profile one of the stacks in a table's keys, if it is not one of the stacks that handlers log.

        Raise ``FormatError`` as ``profiled_table``.
        """
        if self._stacks is None or self._stacks_options is None:
            return
        from dprobes.cli.output.stack_profiles import profiled_table
        from dprobes.sinks.stacks.stack_profile import StackCollector

        table = profiled_table(tables, self._stacks_options, logs_stacks=logs_stacks)
        if table is not None:
            self.profiled = table.name
            self.sinks.remove(self._stacks)
            self._stacks = StackCollector()

    def check(self, source: RecordSource) -> None:
        """Raise ``FormatError`` if the program's records have none of the requested fields."""
        if self._aggregates is not None:
            self._aggregates.check(source)

    def at_the_hit(self, program: Program, source: RecordSource, *, carries: bool, verbose: bool) -> Program:
        """
        Return a program whose handlers aggregate in keyed tables, or ``program`` unchanged if records are needed.

        ``carries`` is True if records have other consumers. With ``verbose``, a note reports the choice.
        """
        if self._wanted is None:
            return program
        from dprobes.cli.output.aggregation import HandlerAggregates, NotAtTheHitError

        carries = carries or self._top is not None or self._stacks is not None
        try:
            self._at_hits = HandlerAggregates(program, source, self._wanted, carries=carries)
        except NotAtTheHitError as error:
            if verbose:
                console.note(f"records are counted after the hit: {error}")
            return program
        if verbose:
            console.note("handlers count at the hit, without records")
        return self._at_hits.program

    def collect(self, session: Attachment, word_size: Literal[4, 8]) -> None:
        """Add the results of a program's handlers; ``word_size`` is in bytes."""
        if self._at_hits is not None and self._aggregates is not None:
            self._at_hits.collect(session, self._aggregates, word_size)

    def collect_stacks(self, contents: Iterable[TableContents], names: Names) -> None:
        """Add the stacks in the table of the profile, if it is one of a table."""
        from dprobes.formatters.table_addresses import ProcessAddresses

        for each in contents:
            if each.table.name == self.profiled and self._stacks is not None:
                assert isinstance(names, ProcessAddresses), "its keys are addresses"
                self._stacks.add_table(each, names)

    def shown(self, program: Program, session: Attachment) -> AbstractContextManager[None]:
        """Return the context in which the live table is drawn, if it was requested."""
        return nullcontext() if self._top is None else self._top.shown(program, session)

    def print(self) -> None:
        """Print the results of the requested views, at the end of a run."""
        if self._aggregates is not None:
            from dprobes.cli.output.aggregation import print_aggregates

            print_aggregates(self._aggregates)
        if self._stacks is not None and self._stacks_options is not None:
            from dprobes.cli.output.stack_profiles import write_profile

            write_profile(self._stacks, self._stacks_options)
