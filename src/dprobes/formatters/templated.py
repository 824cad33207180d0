"""The format ``dprobes``: the header line, then what a template makes of the data, or without one hexadecimal bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.formatters.headerlines import HeaderLines
from dprobes.formatters.templates.compiled import compiled_of
from dprobes.formatters.templates.renderer import render
from dprobes.formatters.text import HexFormatter, header_line
from dprobes.record.codec import decode_record, flag_word
from dprobes.record.layout import Item

if TYPE_CHECKING:
    from dprobes.formatters.addressnames import Symboliser
    from dprobes.formatters.templates.collection import TemplateFinder
    from dprobes.formatters.templates.compiled import Compiled
    from dprobes.formatters.templates.model import Template
    from dprobes.record.layout import LogRecord
    from dprobes.record.probeinfo import Place

__all__ = ["TextFormatter", "template_of"]

_CODES = Item.MAJOR | Item.MINOR
_CODES_END = 12
"""Where the flag word, major and minor code of a record end."""

_WAYS_MAX = 1 << 16


def template_of(templates: TemplateFinder, record: LogRecord) -> Template | None:
    """Return the template of a record; a stack trace has none, whatever its codes are."""
    if record.is_stack_trace:
        return None
    return templates.find(record.major or 0, record.minor or 0)


class TextFormatter:
    """Print the header line, and the data as its template says."""

    heading = ""

    def __init__(self, wall_offset: int, templates: TemplateFinder, symboliser: Symboliser | None = None) -> None:
        self.wall_offset = wall_offset
        self._templates = templates
        self._symboliser = symboliser
        self._headers = HeaderLines()
        self._ways: dict[bytes, Compiled | None] = {}

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""
        template = template_of(self._templates, record)
        if template is None:
            return HexFormatter(self.wall_offset)(record, place)
        header = header_line(record, self.wall_offset, place.function)
        text = render(template, record, place, wall_offset=self.wall_offset, symboliser=self._symboliser)
        return f"{header}\n{text}" if text else header

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the text of an encoded record."""
        begin = record[:_CODES_END]
        try:
            way = self._ways[begin]
        except KeyError:
            way = self._way(begin)
        if way is not None and (split := self._headers.split(record, self.wall_offset, place.function)) is not None:
            header, start = split
            if len(record) - start == way.layout.size:
                text = way.text_of(record, start)
                return f"{header}\n{text}" if text else header
        return self(decode_record(record), place)

    def _way(self, begin: bytes) -> Compiled | None:
        """Find out whether records that begin so have a short way."""
        way = None
        flags, byte_order = flag_word(begin)
        if len(begin) == _CODES_END and flags & _CODES == _CODES and not flags & (Item.STACK_TRACE | Item.CUT):
            _, major, minor = struct.unpack("<III" if byte_order == "little" else ">III", begin)
            if (template := self._templates.find(major, minor)) is not None:
                way = compiled_of(template, 8 if flags & Item.WIDE else 4, byte_order)
        if len(self._ways) >= _WAYS_MAX:
            self._ways.clear()
        self._ways[begin] = way
        return way
