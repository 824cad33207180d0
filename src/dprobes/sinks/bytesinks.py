"""Sinks for whatever takes bytes: files, serial lines, commands. They get lines of text, or records in frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.errors import FormatError, SinkError
from dprobes.record.lineframes import lost_frame, record_frame
from dprobes.sinks.textsinks import TextSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters.terminalcolumns import TerminalColumns
    from dprobes.record.origin import RecordSource
    from dprobes.sinks.interface import Batch, Sink, SinkOptions

__all__ = ["ByteOutlet", "byte_sink", "refuse_binary"]


class ByteOutlet(Protocol):
    """Take bytes; all methods raise ``SinkError``."""

    def write(self, parts: Sequence[bytes]) -> None:
        """Write records, each a part; ``SinkError.taken`` says how many have been written."""

    def flush(self) -> None:
        """Make visible what was written."""

    def close(self) -> None:
        """Flush and give up."""


def byte_sink(
    outlet: ByteOutlet,
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

    def __init__(self, outlet: ByteOutlet, line_end: str, encoding: str) -> None:
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
    """Write records as frames (``record.lineframes``)."""

    def __init__(self, outlet: ByteOutlet) -> None:
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
