"""
What the records of a program say, by name: by the program's templates, else by what its handlers log.

Beside addresses that are shown by their names these are, as in all outputs with fields (``addressfields``).
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.formatters.addressnames import Symboliser
    from dprobes.formatters.templates.program import ProgramTemplates
    from dprobes.record.layout import LogRecord
    from dprobes.record.origin import RecordSource

__all__ = ["ProgramDataReader"]


class ProgramDataReader:
    """Read the records of a program, which come from processes of this machine; any thread may ask."""

    def __init__(self, source: RecordSource, symboliser: Symboliser | None = None) -> None:
        self._source = source
        self._given = symboliser
        self._naming = threading.Lock()

    def values(self, record: LogRecord) -> Mapping[str, object] | None:
        """Return the values of a record's data by their names; None if nothing is known of it."""
        from dprobes.formatters.addressfields import address_fields, code_names_of
        from dprobes.formatters.templates.fields import decode_fields, fields_of

        template = self._templates.of(record)
        if template is None:
            return None
        values = decode_fields(template, record).values
        names = (field.name for field in fields_of(template, record.word_size))
        found: dict[str, object] = dict(zip(names, values, strict=True))
        if record.place is not None and address_fields(template, record.word_size):
            with self._naming:
                found |= code_names_of(template, record, values, record.place, self._symboliser)
        return found

    def function(self, record: LogRecord) -> str:
        """Return the function that a record is of: its probepoint's, else where it hit; nothing if nobody knows."""
        place = record.place
        if place is None or place.is_code or place.function or record.ip is None:
            return "" if place is None else place.routine
        from dprobes.formatters.addressfields import function_of

        with self._naming:
            return function_of(record, place, self._symboliser)

    @cached_property
    def _templates(self) -> ProgramTemplates:
        from dprobes.formatters.templates.program import ProgramTemplates

        return ProgramTemplates.of_source(self._source)

    @cached_property
    def _symboliser(self) -> Symboliser:
        if self._given is not None:
            return self._given
        from dprobes.formatters.addressnames import AddressSymboliser

        return AddressSymboliser(self._source, live=True)
