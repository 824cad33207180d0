r"""
The paper's text: a header line, then the data in hexadecimal (seed 000, section 5; recovered reference 3.1).

::

    DProbes(%d,%d) cpu=%d name=%s pid=%d uid=%d cs=%x eip=%08lx ss=%x esp=%08lx tsc=%08lx:%08lx

An item that the record lacks is omitted. Programs with 8-byte words have ``rip=%016lx`` and ``rsp=%016lx``. Three items
that the paper does not have come last: a thread id, ``cut=1`` if the log buffer had no room for all data, and the
function that a pattern matched. ``tsc`` is wall-clock time in seconds and microseconds.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.escapes import escaped
from dprobes.formatters.templates.data_extraction import compiled_of
from dprobes.formatters.templates.template_renderer import hex_dump, render
from dprobes.record.log_record import CODES_END, FIXED_ITEMS, Item, codes_in, decode_record, flag_word, header_struct

if TYPE_CHECKING:
    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import CompiledTemplate
    from dprobes.formatters.templates.template_collection import TemplateFinder
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder, LogRecord
    from dprobes.record.record_origin import Place

__all__ = ["DumpFormatter", "HexFormatter", "TextFormatter"]

# The header line of encoded records, without decoding them: a format string for each flag word that occurs. It yields
# the same text as ``header_line`` in a fifth of the time. Parts of variable length, the process name and all after it,
# are not included.

_NANOSECONDS = 1_000_000_000

_PARTS = {
    Item.CPU: " cpu=%d",
    Item.PID: " pid=%d",
    Item.UID: " uid=%d",
    Item.CS: " cs=%x",
    Item.IP: " eip=%08x",
    Item.SS: " ss=%x",
    Item.SP: " esp=%08x",
    Item.TIME: " tsc=%08x:%08x",
}
_WIDE_PARTS = {Item.IP: " rip=%016x", Item.SP: " rsp=%016x"}

_KNOWN = Item.WIDE | Item.STACK_TRACE | sum(item for item, _ in FIXED_ITEMS)


class HeaderLine(NamedTuple):
    """
    Format of the beginning of records with one flag word.

    ``layout`` unpacks the values for ``template``. With ``has_time``, the last value is printed as two: seconds and
    microseconds.
    """

    layout: struct.Struct
    template: str
    has_time: bool


def header_line_of(flags: int, byte_order: ByteOrder) -> HeaderLine | None:
    """
    Return the fast conversion of records with this flag word to header lines.

    Return None if such records have to be decoded.
    """
    if flags & ~_KNOWN:
        return None
    template = "DProbes({},{})".format(
        "%d" if flags & Item.MAJOR else "0",
        "%d" if flags & Item.MINOR else "0",
    )
    parts = _PARTS | _WIDE_PARTS if flags & Item.WIDE else _PARTS
    template += "".join(part for item, part in parts.items() if flags & item)
    # The flag word itself is not part of the line.
    layout = struct.Struct(header_struct(flags, byte_order).format.replace("I", "4x", 1))
    return HeaderLine(layout, template, bool(flags & Item.TIME))


class HeaderLines:
    """A formatter of the header lines of encoded records, without decoding these if possible."""

    def __init__(self) -> None:
        self._lines: dict[bytes, HeaderLine | None] = {}

    def split(self, record: bytes, wall_offset: int, function: str) -> tuple[str, int] | None:
        """Return the header line of a record, and the byte offset of its data; None if the record has to be decoded."""
        flags = record[:4]
        try:
            line = self._lines[flags]
        except KeyError:
            line = self._lines[flags] = header_line_of(*flag_word(record))
        if line is None or len(record) < line.layout.size:
            return None
        values = line.layout.unpack_from(record)
        if line.has_time:
            seconds, nanoseconds = divmod(values[-1] + wall_offset, _NANOSECONDS)
            values = (*values[:-1], seconds, nanoseconds // 1000)
        header = line.template % values
        return f"{header} function={escaped(function, blanks=True)}" if function else header, line.layout.size


def header_line(record: LogRecord, wall_offset: int, function: str = "") -> str:
    """Return the header line of a record; it includes ``function`` if that is not empty."""
    parts = [f"DProbes({record.major or 0},{record.minor or 0})"]
    if record.cpu is not None:
        parts.append(f"cpu={record.cpu}")
    if record.process_name is not None:
        parts.append(f"name={escaped(record.process_name, blanks=True)}")
    if record.pid is not None:
        parts.append(f"pid={record.pid}")
    if record.uid is not None:
        parts.append(f"uid={record.uid}")
    wide = record.word_size == 8
    if record.cs is not None:
        parts.append(f"cs={record.cs:x}")
    if record.ip is not None:
        parts.append(f"rip={record.ip:016x}" if wide else f"eip={record.ip:08x}")
    if record.ss is not None:
        parts.append(f"ss={record.ss:x}")
    if record.sp is not None:
        parts.append(f"rsp={record.sp:016x}" if wide else f"esp={record.sp:08x}")
    if record.time is not None:
        seconds, nanoseconds = divmod(record.time + wall_offset, _NANOSECONDS)
        parts.append(f"tsc={seconds:08x}:{nanoseconds // 1000:08x}")
    if record.tid is not None:
        parts.append(f"tid={record.tid}")
    if record.is_cut:
        parts.append("cut=1")
    if function:
        parts.append(f"function={escaped(function, blanks=True)}")
    return " ".join(parts)


class HexFormatter:
    """A formatter that prints the header line, and the data as bytes in hexadecimal."""

    heading = ""

    def __init__(self, wall_offset: int) -> None:
        self.wall_offset = wall_offset
        self._headers = HeaderLines()

    def _shown(self, data: bytes) -> str:
        return data.hex(" ")

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` as text, without a final line end."""
        header = header_line(record, self.wall_offset, place.function)
        return f"{header}\n{self._shown(record.data)}" if record.data else header

    def encoded(self, record: bytes, place: Place) -> str:
        """Decode and format a record of the probepoint ``place``; raise ``FormatError`` if the record is invalid."""
        split = self._headers.split(record, self.wall_offset, place.function)
        if split is None:
            return self(decode_record(record), place)
        header, start = split
        data = record[start:]
        return f"{header}\n{self._shown(data)}" if data else header


class DumpFormatter(HexFormatter):
    """A formatter that prints the header line, and the data as a dump."""

    def _shown(self, data: bytes) -> str:
        return hex_dump(data)


# The format ``dprobes``: the header line, then the output of a template, or without one hexadecimal bytes.

_WAYS_MAX = 1 << 16


def template_of(templates: TemplateFinder, record: LogRecord) -> Template | None:
    """Return the template of a record, or None if there is none, and for a stack trace, whatever its codes are."""
    if record.is_stack_trace:
        return None
    return templates.find(record.major or 0, record.minor or 0)


class TextFormatter:
    """A formatter that prints the header line, and the data by their template."""

    heading = ""

    def __init__(self, wall_offset: int, templates: TemplateFinder, symboliser: Symboliser | None = None) -> None:
        self.wall_offset = wall_offset
        self._templates = templates
        self._symboliser = symboliser
        self._headers = HeaderLines()
        self._ways: dict[bytes, CompiledTemplate | None] = {}

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` as text, without a final line end."""
        template = template_of(self._templates, record)
        if template is None:
            return HexFormatter(self.wall_offset)(record, place)
        header = header_line(record, self.wall_offset, place.function)
        text = render(template, record, place, wall_offset=self.wall_offset, symboliser=self._symboliser)
        return f"{header}\n{text}" if text else header

    def encoded(self, record: bytes, place: Place) -> str:
        """Decode and format a record of the probepoint ``place``; raise ``FormatError`` if the record is invalid."""
        begin = record[:CODES_END]
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

    def _way(self, begin: bytes) -> CompiledTemplate | None:
        """
        Return the compiled template for records that begin with these bytes, or None if they have to be decoded.

        ``begin`` are the first ``CODES_END`` bytes: the flag word and the codes.
        """
        template = None
        codes = codes_in(begin)
        if codes is not None and not codes.flags & (Item.STACK_TRACE | Item.CUT):
            template = self._templates.find(codes.major, codes.minor)
        way = None
        if codes is not None and template is not None:
            way = compiled_of(template, codes.word_size, codes.byte_order)
        if len(self._ways) >= _WAYS_MAX:
            self._ways.clear()
        self._ways[begin] = way
        return way
