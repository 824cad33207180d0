"""Formatters: from a log record to text. Each is a function of the record and what is known of its probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.record.place import Place

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord
    from dprobes.record.source import RecordSource

__all__ = ["FORMATS", "Formatter", "Place", "formatter"]

FORMATS = ("text", "dump", "hex", "json")
"""The names that ``--format`` takes."""


class Formatter(Protocol):
    """
    Turn one record into text without a final line end.

    ``wall_offset`` is added to a record's time, CLOCK_MONOTONIC, to get nanoseconds since 1970; it may be set.
    """

    wall_offset: int

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the same for an encoded record; raises ``FormatError`` if it is none."""


def formatter(name: str, *, wall_offset: int, source: RecordSource | None = None) -> Formatter:  # noqa: ARG001
    """Return the formatter called ``name``, one of ``FORMATS``, for records of one program."""
    match name:
        case "text" | "hex":
            from dprobes.formatters.text import HexFormatter

            return HexFormatter(wall_offset)
        case "dump":
            from dprobes.formatters.text import DumpFormatter

            return DumpFormatter(wall_offset)
        case "json":
            from dprobes.formatters.json import JsonFormatter

            return JsonFormatter(wall_offset)
    raise KeyError(name)
