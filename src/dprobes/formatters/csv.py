"""
CSV as RFC 4180 has it: a heading, then one line for each record.

The columns are ``COLUMNS``, most of which JSON lines have, too, with the same values: addresses are hexadecimal.
``stack_trace`` and ``at_return`` are 1 or empty, and ``text`` is what the template says, which may have several lines,
or without one the values by the names that the handler tells. What a record lacks is empty.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from dprobes.escapes import CUT, escaped
from dprobes.formatters.addressfields import function_of
from dprobes.formatters.json import PLACES_MAX, address_text
from dprobes.formatters.templates.renderer import render
from dprobes.formatters.walltime import wall_time
from dprobes.record.codec import decode_record

if TYPE_CHECKING:
    from dprobes.formatters.addressnames import Symboliser
    from dprobes.formatters.templates.program import ProgramTemplates
    from dprobes.record.layout import LogRecord
    from dprobes.record.probeinfo import Place

__all__ = ["COLUMNS", "CsvFormatter"]

COLUMNS = (
    "major", "minor", "cpu", "pid", "tid", "uid", "name", "cs", "ip", "ss", "sp", "word_size", "time", "wall_time",
    "host", "program", "module", "symbol", "function", "at_return", "placed", "stack_trace", "data", "text",
)  # fmt: skip

_FUNCTION = COLUMNS.index("function") - COLUMNS.index("host")
"""Where the function is among the columns that tell of the place."""


class CsvFormatter:
    """Print a record as one line of CSV."""

    heading = ",".join(COLUMNS) + "\r"

    def __init__(
        self,
        wall_offset: int,
        templates: ProgramTemplates,
        symboliser: Symboliser | None = None,
        program: str = "",
        host: str = "",
    ) -> None:
        self.wall_offset = wall_offset
        self._templates = templates
        self._symboliser = symboliser
        self._program, self._host = program, host
        self._known: dict[Place, tuple[object, ...]] = {}
        self._line = io.StringIO()
        self._writer = csv.writer(self._line, lineterminator="\r\n")

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""
        template = self._templates.of(record)
        text = ""
        if template is not None:
            text = render(template, record, place, wall_offset=self.wall_offset, symboliser=self._symboliser)
        elif record.is_cut:
            text = CUT
        self._line.seek(0)
        self._line.truncate()
        self._writer.writerow(
            (
                record.major,
                record.minor,
                record.cpu,
                record.pid,
                record.tid,
                record.uid,
                escaped(record.process_name or ""),
                record.cs,
                address_text(record.ip),
                record.ss,
                address_text(record.sp),
                record.word_size,
                record.time,
                wall_time(record.time, self.wall_offset),
                *self._of_place(record, place),
                1 if record.is_stack_trace else None,
                record.data.hex(),
                text,
            )
        )
        return self._line.getvalue()[:-1]

    def _of_place(self, record: LogRecord, place: Place) -> tuple[object, ...]:
        known = self._known.get(place) or self._know(place)
        if place.is_code:
            return known
        function = escaped(function_of(record, place, self._symboliser))
        return (*known[:_FUNCTION], function, *known[_FUNCTION + 1 :])

    def _know(self, place: Place) -> tuple[object, ...]:
        """Return the columns that are the same in all records of a place of code."""
        if len(self._known) >= PLACES_MAX:
            self._known.clear()
        at_return = 1 if place.at_return else None
        names = (self._host, self._program, place.module, place.symbol, place.routine)
        self._known[place] = (*map(escaped, names), at_return, place.placed)
        return self._known[place]

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the text of an encoded record."""
        return self(decode_record(record), place)
