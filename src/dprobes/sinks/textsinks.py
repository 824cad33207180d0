"""Sinks for text: each record as a formatter shows it, to whatever takes lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from dprobes.errors import FormatError, SinkError
from dprobes.escapes import escaped, json_text
from dprobes.formatters import formatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters import Formatter
    from dprobes.formatters.terminalcolumns import TerminalColumns
    from dprobes.keyed.contents import TableContents
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.interface import Batch

__all__ = ["BatchFormatter", "Outlet", "TextSink"]


class BatchFormatter:
    """
    Format the records of batches, those of each program with its templates.

    ``live`` says that they are of processes of this machine that may still run. ``columns`` are those of a terminal.
    ``has_items`` says that header items are written beside the text, which need not have them all.
    """

    def __init__(
        self,
        format_name: str,
        *,
        live: bool = True,
        columns: TerminalColumns | None = None,
        has_items: bool = False,
    ) -> None:
        self._format_name = format_name
        self._live = live
        self._columns = columns
        self._has_items = has_items
        self._formatters: dict[int, Formatter] = {}

    def create_event(self, source: RecordSource) -> None:
        """Know a program, or more of it."""
        self._formatters[source.number] = formatter(
            self._format_name,
            wall_offset=0,
            source=source,
            live=self._live,
            host=os.uname().nodename,
            columns=self._columns,
            is_brief=self._has_items,
        )

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._formatters.pop(source.number, None)

    def strings(self, batch: Batch) -> list[str]:
        """Return the text of each record, which may have several lines, without the last line end."""
        found = self._formatters[batch.source.number]
        found.wall_offset = batch.wall_offset
        encoded = found.encoded
        try:
            strings = [encoded(*each) for each in zip(batch.records, batch.places, strict=True)]
        except FormatError:
            strings = [
                self._text_of(found, *each, batch.source) for each in zip(batch.records, batch.places, strict=True)
            ]
        if batch.lost and (note := self._lost_note(batch)):
            strings[:1] = ["\n".join((note, *strings[:1]))]
        return strings

    def heading(self, source: RecordSource) -> str:
        """Return what is to stand before all records, without its line end, or nothing."""
        return self._formatters[source.number].heading

    def _text_of(self, found: Formatter, record: bytes, place: Place, source: RecordSource) -> str:
        """Return the text of what may be no record: it must not hold up the others, and is shown."""
        try:
            return found.encoded(record, place)
        except FormatError as error:
            problem, data = error.message, record.hex(" ")
        match self._format_name:
            case "json":
                return json_text({"malformed": problem, "program": source.name, "data": record.hex()})
            case "csv":
                from dprobes.formatters.csv import COLUMNS

                return f'{"," * (len(COLUMNS) - 1)}"<malformed: {problem}: {data}>"\r'
        return f"<a malformed record of '{escaped(source.name)}': {problem}>\n{data}"

    def _lost_note(self, batch: Batch) -> str:
        match self._format_name:
            case "json":
                return json_text({"lost": batch.lost, "program": batch.source.name})
            case "csv":
                return ""  # each of its lines is a record
        return f"<{batch.lost} records of '{escaped(batch.source.name)}' were lost here>"


class Outlet(Protocol):
    """Take text; all methods raise ``SinkError``."""

    def write(self, strings: Sequence[str]) -> None:
        """Write records, each with a line end behind it; ``SinkError.taken`` says how many have been written."""

    def flush(self) -> None:
        """Make visible what was written."""

    def close(self) -> None:
        """Flush and give up."""


class TextSink:
    """
    Write formatted records to an outlet.

    ``goes_on`` says that there are records in it already. ``columns`` are its own if it is a terminal. Without
    ``has_tables`` keyed tables are left to others.
    """

    def __init__(
        self,
        outlet: Outlet,
        format_name: str,
        *,
        goes_on: bool = False,
        columns: TerminalColumns | None = None,
        has_tables: bool = True,
    ) -> None:
        self._outlet = outlet
        self.abort = getattr(outlet, "abort", None)
        self.settle = getattr(outlet, "settle", outlet.flush)
        self._has_heading = goes_on
        self._format_name = format_name
        self._has_tables = has_tables
        self._formatter = BatchFormatter(format_name, columns=columns)

    def create_event(self, source: RecordSource) -> None:
        """Know a program."""
        self._formatter.create_event(source)

    def log_events(self, batch: Batch) -> None:
        """Write the records of a batch."""
        strings = self._formatter.strings(batch)
        if not self._has_heading and strings:
            if heading := self._formatter.heading(batch.source):
                strings[0] = f"{heading}\n{strings[0]}"
            try:
                self._outlet.write(strings)
            except SinkError as error:
                self._has_heading = error.taken > 0
                raise
            self._has_heading = True
            return
        self._outlet.write(strings)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Write keyed tables, in the formats that have a form for them."""
        if not self._has_tables:
            return
        from dprobes.formatters.tablenames import names_for

        names = names_for(source, [each.table for each in contents])
        lines: list[str] = []
        match self._format_name:
            case "text":
                from dprobes.keyed.text import table_lines

                lines = [line for each in contents for line in table_lines(each, names=names)]
            case "json":
                from dprobes.keyed.json import table_json_lines

                lines = [line for each in contents for line in table_json_lines(each, names=names)]
        if lines:
            self._outlet.write(["\n".join(map(escaped, lines))])

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._formatter.destroy_event(source)

    def flush(self) -> None:
        """Make visible what was written."""
        self._outlet.flush()

    @property
    def is_holding(self) -> bool:
        """Whether some of what was flushed may still turn out to be lost."""
        return getattr(self._outlet, "is_holding", False)

    def close(self) -> None:
        """Give up the outlet."""
        self._outlet.close()
