"""Sinks for text: each record as a formatter shows it, to whatever takes lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from dprobes.formatters import formatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters import Formatter
    from dprobes.record.source import RecordSource
    from dprobes.sinks.base import Batch

__all__ = ["BatchFormatter", "Outlet", "TextSink"]


class BatchFormatter:
    """Format the records of batches, those of each program with its templates."""

    def __init__(self, format_name: str) -> None:
        self._format_name = format_name
        self._formatters: dict[int, Formatter] = {}

    def create_event(self, source: RecordSource) -> None:
        """Know a program, or more of it."""
        self._formatters[source.number] = formatter(self._format_name, wall_offset=0, source=source)

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._formatters.pop(source.number, None)

    def texts(self, batch: Batch) -> list[str]:
        """Return the text of each record, which may have several lines, without the last line end."""
        found = self._formatters[batch.source.number]
        found.wall_offset = batch.wall_offset
        encoded = found.encoded
        texts = [encoded(*each) for each in zip(batch.records, batch.places, strict=True)]
        if batch.lost and texts and (note := self._lost_note(batch)):
            texts[0] = f"{note}\n{texts[0]}"
        return texts

    def _lost_note(self, batch: Batch) -> str:
        match self._format_name:
            case "json":
                return json.dumps({"lost": batch.lost, "program": batch.source.name})
            case "csv":
                return ""  # each of its lines is a record
        return f"<{batch.lost} records of '{batch.source.name}' were lost here>"


class Outlet(Protocol):
    """Take text; all methods raise ``SinkError``."""

    def write(self, texts: Sequence[str]) -> None:
        """Write records, each with a line end behind it; ``SinkError.taken`` says how many have been written."""

    def flush(self) -> None:
        """Make visible what was written."""

    def close(self) -> None:
        """Flush and give up."""


class TextSink:
    """Write formatted records to an outlet."""

    def __init__(self, outlet: Outlet, format_name: str) -> None:
        self._outlet = outlet
        self._formatter = BatchFormatter(format_name)

    def create_event(self, source: RecordSource) -> None:
        """Know a program."""
        self._formatter.create_event(source)

    def log_events(self, batch: Batch) -> None:
        """Write the records of a batch."""
        self._outlet.write(self._formatter.texts(batch))

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._formatter.destroy_event(source)

    def flush(self) -> None:
        """Make visible what was written."""
        self._outlet.flush()

    def close(self) -> None:
        """Give up the outlet."""
        self._outlet.close()
