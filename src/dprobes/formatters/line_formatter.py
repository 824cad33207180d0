"""
The format ``text``: a record in one readable line. The output of its template and dumps may take several lines.

::

    16:20:31.004217  redis-server[812]  malloc  arg0=472
    time of day      process and id     place   the data

An item that the record lacks is omitted. Without a written template, the data are printed by a template that was
derived from the handler, or else as their items, or else in hexadecimal. The place is omitted if the user wrote a
template, whose text identifies the hit.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dprobes.escapes import CUT, escaped
from dprobes.record.log_record import CODES_END, PROCESS_NAME_MAX, Item, codes_in, decode_record, header_struct

if TYPE_CHECKING:
    from typing import TextIO

    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import CompiledTemplate
    from dprobes.formatters.templates.template_collection import ProgramTemplates
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder, LogRecord
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.trace.carried_names import CarriedNames

__all__ = ["LineFormatter", "TerminalColumns", "columns_of"]

# The columns of lines at a terminal: aligned, and in colours if the user enables them.

STYLES = {"time": "2", "process": "36", "place": "1"}
"""The columns, with their styles: dim, cyan, bold (ECMA-48, 8.3.117, "select graphic rendition")."""

_WIDTH_MAX = 40
"""Maximum width of a column; wider contents shift the rest of their own line only."""


class TerminalColumns:
    """The current widths of an output's columns; formatters that share an instance have aligned lines."""

    def __init__(self, *, has_colours: bool) -> None:
        self._has_colours = has_colours
        self._widths = dict.fromkeys(STYLES, 0)

    def shown(self, column: str, text: str) -> str:
        """Return ``text`` padded to the width of the column called ``column``, in the column's style."""
        if len(text) <= _WIDTH_MAX:
            self._widths[column] = max(self._widths[column], len(text))
        padding = " " * (self._widths[column] - len(text))
        return f"\x1b[{STYLES[column]}m{text}\x1b[0m{padding}" if self._has_colours else text + padding


def columns_of(stream: TextIO) -> TerminalColumns | None:
    """
    Return the columns for a stream, or None if it is not a terminal.

    NO_COLOR disables colours (https://no-color.org).
    """
    if not stream.isatty():
        return None
    return TerminalColumns(has_colours=not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb")


_NANOSECONDS = 1_000_000_000
_FURTHER = "\n    "
"""The beginning of all lines of a record after the first."""

_EXTRA = (("uid", "uid={}"), ("cs", "cs={:#x}"), ("ip", "ip={:#x}"), ("ss", "ss={:#x}"), ("sp", "sp={:#x}"))
"""Items that are shown if the user requested them. The CPU, which records have by default, is not shown."""

_SHORT = Item.MAJOR | Item.MINOR | Item.CPU | Item.PID | Item.TIME | Item.PROCESS_NAME | Item.WIDE
"""The items of records that may be printed without decoding them."""

_CACHED_MAX = 1 << 14

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


class LineFormatter:
    """
    Formatter that prints a record in one line, unless its template has several.

    The records are of ``source``. With ``live``, they are of processes of this machine that may still run. ``carried``
    has the names in their trace file. ``columns`` are those of a terminal; without them nothing is aligned, so that
    lines suit tools like cut(1). With ``is_brief``, user and registers are not printed, for records with all items that
    were not requested individually.

    The imports for templates are deferred to the first record, because a run may have none.
    """

    heading = ""

    def __init__(
        self,
        wall_offset: int,
        source: RecordSource | None = None,
        *,
        live: bool = False,
        carried: CarriedNames | None = None,
        columns: TerminalColumns | None = None,
        is_brief: bool = False,
    ) -> None:
        self.wall_offset = wall_offset
        self._source = source
        self._live = live
        self._carried = carried
        self._columns = columns
        self._is_brief = is_brief
        self._ways: dict[bytes, _ShortWay | None] = {}
        self._processes: dict[tuple[bytes | None, int | None], str] = {}
        self._last_place: Place | None = None
        self._last_where = ""

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` as text, without a final line end."""
        written = None
        if not record.is_stack_trace:
            written = self._templates.written.find(record.major or 0, record.minor or 0)
        says = _header_items(written) if written is not None else frozenset()
        parts = self._columns_of(record, says)
        if written is None:
            parts.append(self._shown("place", _where(place) or f"{record.major or 0},{record.minor or 0}"))
        if written is not None and record.cs is None:
            says |= {"ip"}  # not requested: it shows which of many places was hit
        extra = [(name, form, value) for name, form in _EXTRA if (value := getattr(record, name)) is not None]
        if not self._is_brief or len(extra) < len(_EXTRA):
            parts += [form.format(value) for name, form, value in extra if name not in says]
        return _line(parts, self._text(record, place, written or self._templates.of(record)))

    def _columns_of(self, record: LogRecord, says: frozenset[str]) -> list[str]:
        """Return the columns of time and process without those in ``says``, which a template prints itself."""
        parts = []
        if record.time is not None and "time" not in says:
            parts.append(self._shown("time", _time_of_day(record.time, self.wall_offset)))
        process = _process(record.process_name, record.pid, record.tid)
        if process and says.isdisjoint(("name", "pid")):
            parts.append(self._shown("process", process))
        return parts

    def encoded(self, record: bytes, place: Place) -> str:
        """Decode and format a record of the probepoint ``place``; raise ``FormatError`` if the record is invalid."""
        begin = record[:CODES_END]
        try:
            way = self._ways[begin]
        except KeyError:
            way = self._way(begin)
        if way is not None and len(record) >= (at := way.header.size):
            values = way.header.unpack_from(record)
            name = None
            if way.has_name and (end := record.find(0, at, at + PROCESS_NAME_MAX + 1)) >= 0:
                name, at = record[at:end], end + 1
            text = way.text_of(record, at) if way.has_name == (name is not None) else None
            if text is not None:
                parts = []
                if way.has_time:
                    parts.append(self._shown("time", _time_of_day(values[-1], self.wall_offset)))
                if process := self._process(name, values[0] if way.has_pid else None):
                    parts.append(self._shown("process", process))
                if not way.is_written:
                    parts.append(self._shown("place", self._where(place) or way.codes))
                return _line(parts, text)
        return self(decode_record(record), place)

    @cached_property
    def _templates(self) -> ProgramTemplates:
        from dprobes.formatters.templates.template_collection import ProgramTemplates

        return ProgramTemplates.of_source(self._source)

    @cached_property
    def _symboliser(self) -> Symboliser:
        from dprobes.formatters.address_names import AddressSymboliser

        return AddressSymboliser(self._source, live=self._live, carried=self._carried)

    def _shown(self, column: str, text: str) -> str:
        return text if self._columns is None else self._columns.shown(column, text)

    def _text(self, record: LogRecord, place: Place, template: Template | None) -> str:
        if record.is_stack_trace:
            return f"stack trace: {record.data.hex(' ')}"
        if template is None:
            text = _unnamed(record.data, record.word_size, record.byte_order)
            return f"{text} {CUT}".lstrip() if record.is_cut else text
        from dprobes.formatters.templates.template_renderer import render

        text = render(template, record, place, wall_offset=self.wall_offset, symboliser=self._symboliser)
        return ("\n" * _begins_below(template) + text).replace("\n", _FURTHER)

    def _where(self, place: Place) -> str:
        if place is not self._last_place:
            self._last_place, self._last_where = place, _where(place)
        return self._last_where

    def _process(self, name: bytes | None, pid: int | None) -> str:
        try:
            return self._processes[name, pid]
        except KeyError:
            decoded = name.decode("utf-8", "surrogateescape") if name is not None else None
            return _kept(self._processes, (name, pid), _process(decoded, pid))

    def _way(self, begin: bytes) -> _ShortWay | None:
        """
        Return a conversion that prints records without decoding them, or None if these records have to be decoded.

        ``begin`` has the first ``CODES_END`` bytes of such records: the flag word and the codes. The result is cached.
        """
        from dprobes.formatters.templates.data_extraction import compiled_of

        way = None
        codes = codes_in(begin)
        if codes is not None and not codes.flags & ~_SHORT:
            flags, byte_order, major, minor = codes
            word_size = codes.word_size
            written = self._templates.written.find(major, minor)
            template = written or self._templates.derived(word_size, major, minor)
            data = compiled_of(template, word_size, byte_order) if template is not None else None
            if template is None or data is not None:
                way = _ShortWay(
                    struct.Struct(_header_of(flags, byte_order)),
                    data,
                    word_size,
                    byte_order,
                    f"{major},{minor}",
                    is_written=written is not None,
                    has_pid=bool(flags & Item.PID),
                    has_time=bool(flags & Item.TIME),
                    has_name=bool(flags & Item.PROCESS_NAME),
                )
        return _kept(self._ways, begin, way)


class _ShortWay(NamedTuple):
    """
    Conversion of records with one flag word, major and minor code to text, without decoding them.

    ``header`` unpacks process id and time, if present; process name and data follow them. ``data`` is None if the data
    have no template. ``codes`` is printed instead of an unknown place. ``is_written`` is True if a user wrote the
    template.
    """

    header: struct.Struct
    data: CompiledTemplate | None
    word_size: int
    byte_order: ByteOrder
    codes: str
    is_written: bool
    has_pid: bool
    has_time: bool
    has_name: bool

    def text_of(self, record: bytes, start: int) -> str | None:
        """Return the text of the data, which begin at ``start``, or None if their size differs from the template's."""
        if self.data is None:
            return _unnamed(record[start:], self.word_size, self.byte_order)
        if len(record) != start + self.data.layout.size:
            return None
        return self.data.text_of(record, start).replace("\n", _FURTHER)


def _header_of(flags: int, byte_order: ByteOrder) -> str:
    """
    Return the ``struct`` format of the items before the process name; items that are not printed are padding.

    ``flags`` is the flag word of the records.
    """
    form = header_struct(flags, byte_order).format
    order, codes = form[0], form[1:]
    skipped = len(codes) - bool(flags & Item.PID) - bool(flags & Item.TIME)
    return f"{order}{4 * skipped}x{codes[skipped:]}"


def _kept(cache: dict[_Key, _Kept], key: _Key, value: _Kept) -> _Kept:
    if len(cache) >= _CACHED_MAX:
        cache.clear()
    cache[key] = value
    return value


def _line(columns: list[str], text: str) -> str:
    line = "  ".join(columns)
    return f"{line}  {text}" if line and text and not text.startswith("\n") else line + text


@lru_cache(4096)
def _header_items(template: Template) -> frozenset[str]:
    """Return the names of the header items that a template prints itself with ``%{name}``."""
    from dprobes.formatters.templates.template_model import HeaderValue

    return frozenset(part.name for line in template.lines for part in line if isinstance(part, HeaderValue))


@lru_cache(4096)
def _begins_below(template: Template) -> bool:
    """Return whether the first part of a template fills whole lines, as dumps and call stacks do."""
    from dprobes.formatters.templates.template_model import Conversion, Placeholder

    first = next((part for line in template.lines for part in line), None)
    is_long = isinstance(first, Placeholder) and first.conversion in (Conversion.STACK, Conversion.DUMP)
    return is_long and not template.desc


def _process(name: str | None, pid: int | None, tid: int | None = None) -> str:
    shown = "" if name is None else escaped(name, blanks=True)
    if pid is None:
        return shown
    thread = f"/{tid}" if tid is not None and tid != pid else ""
    return f"{shown}[{pid}{thread}]"


@lru_cache(4096)
def _where(place: Place) -> str:
    name = escaped(place.function or place.symbol)
    return f"{name} (return)" if place.at_return and not name.endswith(" (return)") else name


def _time_of_day(monotonic: int, wall_offset: int) -> str:
    """Return the local time of day; the seconds since boot if ``wall_offset`` is 0."""
    seconds, rest = divmod(monotonic + wall_offset, _NANOSECONDS)
    return f"{_clock(seconds) if wall_offset else seconds}.{rest // 1000:06}"


@lru_cache(16)
def _clock(seconds: int) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return str(seconds)


def _unnamed(data: bytes, word_size: int, byte_order: ByteOrder) -> str:
    """Return data without a template: as self-describing items if they consist of these, else in hexadecimal."""
    from dprobes.record.log_record import split_items

    items = split_items(data, word_size, byte_order)
    if items is None or not any(item.text for item in items):  # zeros are items without contents
        return data.hex(" ")
    return " ".join(f'"{escaped(item.text)}"' if item.kind == "string" else escaped(item.text) for item in items)
