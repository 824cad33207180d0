"""
Syslog messages: RFC 5424, and the older form that daemons expect at ``/dev/log`` (RFC 3164, as logger(1) writes it).

A message has one line, for receivers show a line end as they like: the lines of a record are joined by `` | ``. What
the record says is there twice, as text and as structured data::

    <14>1 2026-11-22T04:30:00.123456Z host dprobes 4242 1.2
        [dprobes@32473 program="app" symbol="main" major="1" minor="2" pid="77"][fields@32473 fd="3"]
        04:30:00.123456  [77]  fd=3

MSGID is major.minor, PROCID the process that sends. 32473 is the number that IANA has set apart for what has none
(RFC 5612). A message that is longer than receivers need to take is cut, and says by how much.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.escapes import escaped, json_text
from dprobes.keyed.rows import shown_rows
from dprobes.sinks.recordfields import FieldReader, names_text, place_items, value_text
from dprobes.sinks.textsinks import BatchFormatter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.keyed.parts import Names
    from dprobes.keyed.rows import ShownRow
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.rpn.tables import Table
    from dprobes.sinks.interface import Batch

__all__ = ["FORMS", "SyslogFormatter"]

FORMS = ("5424", "3164")

_INFO = 1 * 8 + 6
_WARNING = 1 * 8 + 4
"""Facility 1, user-level messages, with severities 6 and 4."""

_APP = "dprobes"
_HEADER_ID = "dprobes@32473"
_FIELDS_ID = "fields@32473"

_NAME_MAX = 32
"""The length of a name in structured data (RFC 5424, 6.3.3)."""

_HOST_MAX = 255

_QUOTED = str.maketrans({'"': '\\"', "\\": "\\\\", "]": "\\]"})

_SECOND = 1_000_000_000


class SyslogFormatter:
    """Make messages of records, each of ``limit`` bytes at most; ``is_local`` ones of the old form name no host."""

    def __init__(self, format_name: str, form: str, limit: int, *, is_local: bool) -> None:
        self._strings = BatchFormatter(format_name, has_items=True)
        self._fields = FieldReader()
        self._is_old = form == "3164"
        self._json = format_name == "json"
        self._limit = limit
        self._process = str(os.getpid())
        self._host = _host_name()
        self._old_host = "" if is_local else f"{self._host} "
        self._places: dict[tuple[str, Place], str] = {}
        self._second = -1
        self._second_text = ""

    def create_event(self, source: RecordSource) -> None:
        """Know a program."""
        self._strings.create_event(source)
        self._fields.create_event(source)

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._strings.destroy_event(source)
        self._fields.destroy_event(source)
        self._places.clear()

    def messages(self, batch: Batch) -> list[bytes]:
        """Return the message of each record."""
        strings = self._strings.strings(replace(batch, lost=0) if batch.lost else batch)
        return [
            self._message(batch, record, place, text)
            for record, place, text in zip(batch.records, batch.places, strings, strict=True)
        ]

    def lost_message(self, batch: Batch) -> bytes:
        """Return the message that says how many records before a batch were lost."""
        name, count = batch.source.name, batch.lost
        structured = _element(_HEADER_ID, [("program", name), ("lost", str(count))])
        text = f"{count} records of '{name}' were lost here"
        return self._put_together(_WARNING, time.time_ns(), "lost", structured, "", text)

    def table_messages(self, source: RecordSource, contents: Sequence[TableContents], names: Names) -> list[bytes]:
        """Return a message for each row of keyed tables."""
        now = time.time_ns()
        return [
            self._table_message(source, each.table, row, now) for each in contents for row in shown_rows(each, names)
        ]

    def _table_message(self, source: RecordSource, table: Table, row: ShownRow, now: int) -> bytes:
        is_lost = "lost" in row.value
        items = [("program", source.name), ("table", table.name), ("kind", table.kind.value)]
        items += [("lost", str(row.value["lost"]))] if is_lost else []
        values = [(f"key{number}", key) for number, key in enumerate(row.keys)]
        values += [(name, str(value)) for name, value in row.value.items() if isinstance(value, int | float)]
        fields = "" if is_lost else _element(_FIELDS_ID, values)
        if self._json:
            head = {"table": table.name, "kind": table.kind.value, "keys": row.keys}
            text = json_text(head | row.value)
        else:
            text = row.line
        return self._put_together(
            _WARNING if is_lost else _INFO, now, "table", _element(_HEADER_ID, items), fields, text
        )

    def _message(self, batch: Batch, data: bytes, place: Place, text: str) -> bytes:
        try:
            record, items, fields, names, _ = self._fields.read(batch.source, data, place)
        except FormatError:  # the text says so
            return self._put_together(_INFO, time.time_ns(), "-", "-", "", text)
        when = time.time_ns() if record.time is None else record.time + batch.wall_offset
        if self._is_old:
            return self._put_together(_INFO, when, "", "", "", text)
        named = [(field.name[:_NAME_MAX], value_text(field, value)) for field, value in fields]
        named += [(name[:_NAME_MAX], names_text(each)) for name, each in names]
        return self._put_together(
            _INFO,
            when,
            f"{record.major or 0}.{record.minor or 0}",
            f"[{_HEADER_ID}{self._place_text(batch.source, place)}{''.join(_parameters(items))}]",
            _element(_FIELDS_ID, ((name, value) for name, value in named if value is not None)),
            text,
        )

    def _place_text(self, source: RecordSource, place: Place) -> str:
        key = (source.name, place)
        if (text := self._places.get(key)) is None:
            text = self._places[key] = "".join(_parameters(place_items(source, place)))
        return text

    def _put_together(self, priority: int, when: int, kind: str, header: str, fields: str, text: str) -> bytes:
        text = escaped(" | ".join(line.strip() for line in text.split("\n")))
        if self._is_old:
            stamp = time.strftime("%b %e %H:%M:%S", time.localtime(when // _SECOND))
            return self._cut(f"<{priority}>{stamp} {self._old_host}{_APP}[{self._process}]: ", text)
        begin = f"<{priority}>1 {self._time(when)} {self._host} {_APP} {self._process} {kind} {header}"
        if fields and len((begin + fields).encode()) * 2 > self._limit:
            fields = ""  # the text has them too, and can be cut
        return self._cut(f"{begin}{fields} ", text)

    def _time(self, when: int) -> str:
        second, rest = divmod(when, _SECOND)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{rest // 1000:06}Z"

    def _cut(self, begin: str, text: str) -> bytes:
        data = (begin + text).encode("utf-8", "backslashreplace")
        if len(data) <= self._limit:
            return data
        size = self._limit - len(f" <{len(data)} bytes were cut>")
        while size and data[size] & 0xC0 == 0x80:  # no torn character
            size -= 1
        return data[:size] + f" <{len(data) - size} bytes were cut>".encode()


def _element(name: str, items: Iterable[tuple[str, str]]) -> str:
    parts = "".join(_parameters(items))
    return f"[{name}{parts}]" if parts else ""


def _parameters(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in items:
        yield f' {name}="{escaped(value).translate(_QUOTED)}"'


def _host_name() -> str:
    """Return this machine's name as RFC 5424 wants it: printable ASCII, or ``-``."""
    name = "".join(c for c in socket.gethostname() if "!" <= c <= "~")
    return name[:_HOST_MAX] or "-"
