"""Sinks for text: the formatter's output for each record, written to an outlet."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

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
    from dprobes.sinks import Batch, Sink, SinkOptions

__all__ = ["BatchFormatter", "TextSink", "byte_sink", "refuse_binary", "write_parts"]

# Writing of records to a descriptor that may block: a line, a pipe, a file.


class Written(NamedTuple):
    """
    The result of writing parts: the number of those written completely, and the number of bytes of the next part.

    ``problem`` is the error that ended the writing, None if all was written.
    """

    parts: int
    extra: int
    problem: str | None


def write_parts(descriptor: int, parts: Sequence[bytes], patience: float) -> Written:
    """Write parts to a nonblocking descriptor; give up if no byte is accepted for ``patience`` seconds."""
    data = memoryview(b"".join(parts))
    written = 0
    while written < len(data):
        try:
            written += os.write(descriptor, data[written:])
        except BlockingIOError:
            if not _has_room(descriptor, patience):
                return _written(parts, written, f"no data was accepted for {patience:.0f} s")
        except OSError as error:
            return _written(parts, written, reason_of(error))
    return Written(len(parts), 0, None)


def _has_room(descriptor: int, patience: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(patience * 1000))  # true also if the reader has closed its end: the write reports that


def _written(parts: Sequence[bytes], written: int, problem: str) -> Written:
    taken = whole = 0
    while whole + len(parts[taken]) <= written:
        whole += len(parts[taken])
        taken += 1
    return Written(taken, written - whole, problem)


class BatchFormatter:
    """
    Formatter of batches, which applies the templates of each program to its records.

    ``live`` is True for records of processes of this machine that may still run. ``columns`` are those of a terminal.
    With ``has_items``, header items are written besides the text, which need not contain them all.
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
        """Store the description of a program before its first record, or replace it."""
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
        """Drop the description of a program after its last record."""
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
        """Return the text to print before all records, without its line end, or an empty string if there is none."""
        return self._formatters[source.number].heading

    def _text_of(self, found: Formatter, record: bytes, place: Place, source: RecordSource) -> str:
        """Return an encoded record as text; for an invalid record, return a description of the error."""
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
                return ""  # each line of such a text is a record
        return f"<{batch.lost} records of '{escaped(batch.source.name)}' were lost here>"


_Part_contra = TypeVar("_Part_contra", str, bytes, contravariant=True)


class Outlet(Protocol[_Part_contra]):
    """
    The destination of records: as strings, each without its line end, or as bytes.

    All methods raise ``SinkError``.
    """

    def write(self, parts: Sequence[_Part_contra], /) -> None:
        """Write records, each a part; ``SinkError.taken`` is the number of parts written completely."""

    def flush(self) -> None:
        """Make written records visible to readers, such as those in a buffer of this process."""

    def close(self) -> None:
        """Flush, and release the file or connection."""


class TextSink:
    """
    A sink that writes formatted records to an outlet.

    ``goes_on`` is true if the outlet already contains records. ``columns`` are those of the outlet's terminal. Without
    ``has_tables`` keyed tables are not written.
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
        """Store the description of a program before its first record."""
        self._formatter.create_event(source)

    def log_events(self, batch: Batch) -> None:
        """Format the records of a batch, and write them to the outlet."""
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
        """Write a program's keyed tables to the outlet, if the format can represent them."""
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
        """Drop the description of a program after its last record."""
        self._formatter.destroy_event(source)

    def flush(self) -> None:
        """Make written records visible to readers."""
        self._outlet.flush()

    @property
    def is_holding(self) -> bool:
        """True if flushed records may still turn out to be lost."""
        return getattr(self._outlet, "is_holding", False)

    def close(self) -> None:
        """Flush and close the outlet."""
        self._outlet.close()


# Sinks for byte streams: files, serial lines, commands. They get lines of text, or records in frames.


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
    """Return the sink that writes to an outlet in the format of ``options``; other arguments are as in ``TextSink``."""
    if options.format_name == "binary":
        return _FrameSink(outlet)
    lines = _Lines(outlet, line_end, encoding)
    return TextSink(lines, options.format_name, goes_on=goes_on, columns=columns, has_tables=has_tables)


def refuse_binary(target: str, options: SinkOptions) -> None:
    """Raise ``SinkError`` if binary records are requested for a text target."""
    if options.format_name == "binary":
        raise SinkError(
            f"log target '{target}' takes text, not the format 'binary'",
            hint="files, serial lines and commands take it: file:PATH, serial:DEVICE, command:CMD",
        )


class _Lines:
    """An outlet of strings that writes them as encoded lines to an outlet of bytes."""

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
        if end != "\n":  # lines of CSV already end in CR LF
            lines = [line.replace("\r\n", "\n").replace("\n", end) for line in lines]
        self._outlet.write([line.encode(encoding, "backslashreplace") for line in lines])


class _FrameSink:
    """A sink that writes records as frames (``record.line_frames``)."""

    def __init__(self, outlet: Outlet[bytes]) -> None:
        self._outlet = outlet
        self.flush = outlet.flush
        self.close = outlet.close
        self.abort = getattr(outlet, "abort", None)

    def create_event(self, source: RecordSource) -> None:
        """Do nothing: each record has its major and minor code."""

    def destroy_event(self, source: RecordSource) -> None:
        """Do nothing: no program is registered."""

    def log_events(self, batch: Batch) -> None:
        parts = [_frame(record) for record in batch.records]
        if batch.lost:
            parts[:1] = [b"".join((lost_frame(batch.lost), *parts[:1]))]
        self._outlet.write(parts)


def _frame(record: bytes) -> bytes:
    try:
        return record_frame(record)
    except FormatError:
        return lost_frame(1)  # an invalid record cannot be framed, and must not stop the others
