"""Formatters: from a log record to text. Each is a function of the record and what is known of its probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.record.place import Place

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord

__all__ = ["FORMATS", "Formatter", "Place", "formatter"]

FORMATS = ("text", "dump", "hex", "json")
"""The names that ``--format`` takes."""


class Formatter(Protocol):
    """Turn one record into text without a final line end."""

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the same for an encoded record; raises ``FormatError`` if it is none."""


def formatter(name: str, *, wall_offset: int) -> Formatter:
    """
    Return the formatter called ``name``.

    ``wall_offset`` is added to a record's time, CLOCK_MONOTONIC, to get nanoseconds since 1970.
    """
    match name:
        case "text" | "hex":
            from dprobes.formatters.text import HexFormatter

            return HexFormatter(wall_offset)
        case "dump":
            from dprobes.formatters.text import DumpFormatter

            return DumpFormatter(wall_offset)
        case "json":
            from dprobes.formatters.json import JsonFormatter

            return JsonFormatter()
    raise KeyError(name)
