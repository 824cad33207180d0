"""Sinks for text: each record as a formatter shows it, to whatever takes lines."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from dprobes.errors import FormatError, SinkError, reason_of
from dprobes.escapes import escaped, json_text
from dprobes.formatters import formatter
from dprobes.record.line_frames import lost_frame, record_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters import Formatter
    from dprobes.formatters.line_formatter import TerminalColumns
    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.sinks.sink_interface import Batch, Sink, SinkOptions

__all__ = ["BatchFormatter", "TextSink", "byte_sink", "refuse_binary", "write_parts"]

# Write records to a descriptor that may take its time: a line, a pipe, a file.


@dataclass(frozen=True, slots=True)
class Written:
    """The parts that were written as a whole, the bytes of the next one, and the problem, if there was any."""

    parts: int
    extra: int
    problem: str | None


def write_parts(descriptor: int, parts: Sequence[bytes], patience: float) -> Written:
    """Write parts to a descriptor that does not block; it is a problem if it takes nothing for ``patience`` seconds."""
    data = memoryview(b"".join(parts))
    written = 0
    while written < len(data):
        try:
            written += os.write(descriptor, data[written:])
        except BlockingIOError:
            if not _has_room(descriptor, patience):
                return _written(parts, written, f"nothing was taken for {patience:.0f} s")
        except OSError as error:
            return _written(parts, written, reason_of(error))
    return Written(len(parts), 0, None)


def _has_room(descriptor: int, patience: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(patience * 1000))  # also if nobody is at the other end any more: writing says so


def _written(parts: Sequence[bytes], written: int, problem: str) -> Written:
    taken = whole = 0
    while whole + len(parts[taken]) <= written:
        whole += len(parts[taken])
        taken += 1
    return Written(taken, written - whole, problem)


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
        """Take note of a program, or more of it."""
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
                from dprobes.formatters.json_formatter import COLUMNS

                return f'{"," * (len(COLUMNS) - 1)}"<malformed: {problem}: {data}>"\r'
        return f"<a malformed record of '{escaped(source.name)}': {problem}>\n{data}"

    def _lost_note(self, batch: Batch) -> str:
        match self._format_name:
            case "json":
                return json_text({"lost": batch.lost, "program": batch.source.name})
            case "csv":
                return ""  # each of its lines is a record
        return f"<{batch.lost} records of '{escaped(batch.source.name)}' were lost here>"


_Part_contra = TypeVar("_Part_contra", str, bytes, contravariant=True)


class Outlet(Protocol[_Part_contra]):
    """The way of records out of here: as strings, each without its line end, or as bytes. All raise ``SinkError``."""

    def write(self, parts: Sequence[_Part_contra], /) -> None:
        """Write records, each a part; ``SinkError.taken`` says how many have been written."""

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
        outlet: Outlet[str],
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
        """Take note of a program."""
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
        from dprobes.formatters.table_addresses import names_for

        names = names_for(source, [each.table for each in contents])
        lines: list[str] = []
        match self._format_name:
            case "text":
                from dprobes.keyed.table_text import table_lines

                lines = [line for each in contents for line in table_lines(each, names=names)]
            case "json":
                from dprobes.keyed.table_text import table_json_lines

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


# Sinks for whatever takes bytes: files, serial lines, commands. They get lines of text, or records in frames.


def byte_sink(
    outlet: Outlet[bytes],
    options: SinkOptions,
    *,
    line_end: str = "\n",
    encoding: str = "utf-8",
    goes_on: bool = False,
    columns: TerminalColumns | None = None,
    has_tables: bool = True,
) -> Sink:
    """Return the sink that writes to an outlet what the options say; all else as in ``TextSink``."""
    if options.format_name == "binary":
        return _FrameSink(outlet)
    lines = _Lines(outlet, line_end, encoding)
    return TextSink(lines, options.format_name, goes_on=goes_on, columns=columns, has_tables=has_tables)


def refuse_binary(target: str, options: SinkOptions) -> None:
    """Raise ``SinkError`` if a target that takes text is to get bytes."""
    if options.format_name == "binary":
        raise SinkError(
            f"log target '{target}' takes text, not the format 'binary'",
            hint="files, serial lines and commands take it: file:PATH, serial:DEVICE, command:CMD",
        )


class _Lines:
    """Make bytes of text."""

    def __init__(self, outlet: Outlet[bytes], line_end: str, encoding: str) -> None:
        self._outlet = outlet
        self._line_end = line_end
        self._encoding = encoding
        self.flush = outlet.flush
        self.close = outlet.close
        self.abort = getattr(outlet, "abort", None)

    def write(self, strings: Sequence[str]) -> None:
        end, encoding = self._line_end, self._encoding
        lines = [text + "\n" for text in strings]
        if end != "\n":  # the lines of CSV end as those of a serial line do already
            lines = [line.replace("\r\n", "\n").replace("\n", end) for line in lines]
        self._outlet.write([line.encode(encoding, "backslashreplace") for line in lines])


class _FrameSink:
    """Write records as frames (``record.line_frames``)."""

    def __init__(self, outlet: Outlet[bytes]) -> None:
        self._outlet = outlet
        self.flush = outlet.flush
        self.close = outlet.close
        self.abort = getattr(outlet, "abort", None)

    def create_event(self, source: RecordSource) -> None:
        """Do nothing: a record has its major and minor code."""

    def destroy_event(self, source: RecordSource) -> None:
        """Do nothing."""

    def log_events(self, batch: Batch) -> None:
        parts = [_frame(record) for record in batch.records]
        if batch.lost:
            parts[:1] = [b"".join((lost_frame(batch.lost), *parts[:1]))]
        self._outlet.write(parts)


def _frame(record: bytes) -> bytes:
    try:
        return record_frame(record)
    except FormatError:
        return lost_frame(1)  # what is no record can be in no frame, and must not hold up the others
