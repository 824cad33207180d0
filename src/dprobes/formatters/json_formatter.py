"""
JSON lines: one object for each record.

Keys: ``major minor cpu pid tid uid name cs ip ss sp word_size time wall_time host program module symbol function
at_return placed data``. Numbers are numbers, ``time`` is CLOCK_MONOTONIC in nanoseconds and ``wall_time`` the time of
day. Many readers convert numbers to double-precision floating point, which is exact up to 2**53 only. So addresses are
strings, ``"0x7f0000001234"``, also those of fields and faults, and any greater number of the data is a decimal string.
Names are the same strings in all formats, with unprintable characters escaped. ``data`` is hexadecimal. ``function`` is
the function of the probepoint, or the one where a sampler or a watchpoint hit, if known. ``at_return`` exists, and is
true, at its return. ``placed`` (a file offset) exists if the breakpoint differs from the place in the program.

For data with a template, ``probe`` is the name of the probe in its instrumentation set, ``desc`` the description of the
template, ``fields`` has the values by their names, and ``rest`` the other
bytes in hexadecimal. Without a template, names are derived from the expressions that the handler logged. An address of
code (``%a``, ``%k``) is ``{"address": ..., "name": ...}``, without a name if it is unknown, and ``{"end": ...}`` is the
reason why a stack ends early. A field may be null, if the data ended before it, ``{"fault": address}``,
``{"selector_fault": selector}``, or ``{"entry_not_seen": true}`` where only the return of a call was seen. Data without
names have ``items`` if they describe themselves: a list of ``{"type": ..., "value": ...}``. A stack trace has
``"stack_trace": true``. A record for which the log buffer had no room has ``"cut": true``, and ``null`` for each
missing field.
"""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dprobes.escapes import CUT, as_unicode, escaped, json_text
from dprobes.formatters.address_fields import function_of
from dprobes.formatters.templates.data_extraction import Fault, FieldKind, decode_fields, fields_of, placeholders
from dprobes.formatters.templates.template_model import Conversion, character
from dprobes.formatters.templates.template_renderer import STACK_ENDS, render
from dprobes.record.log_record import UNSEEN, LogItem, decode_record, split_items
from dprobes.record.record_origin import wall_time
from dprobes.rpn.instruction_set import StackEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import Field, Value
    from dprobes.formatters.templates.template_collection import ProgramTemplates
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place

__all__ = ["COLUMNS", "CsvFormatter", "JsonFormatter", "exact"]

PLACES_MAX = 1 << 16
"""Maximum number of places that are remembered."""

_EXACT_MAX = (1 << 53) - 1
"""Greatest number up to which doubles represent all integers (RFC 8259, section 6)."""


def address_text(address: int | None) -> str | None:
    """Return an address as hexadecimal text, as in all formats with columns or names; None if there is none."""
    return None if address is None else f"{address:#x}"


def exact(value: Any) -> Any:
    """Return a JSON value in which integers beyond 2**53, which readers may round, are decimal strings."""
    match value:
        case bool():
            return value
        case int():
            return value if -_EXACT_MAX <= value <= _EXACT_MAX else str(value)
        case list() | tuple():
            return [exact(each) for each in value]
        case dict():
            return {key: exact(each) for key, each in value.items()}
    return value


COLUMNS = (
    "major", "minor", "cpu", "pid", "tid", "uid", "name", "cs", "ip", "ss", "sp", "word_size", "time", "wall_time",
    "host", "program", "module", "symbol", "function", "at_return", "placed", "stack_trace", "data", "text",
)  # fmt: skip


class _ProgramFormatter(ABC):
    """A formatter that prints the program and the host with each record."""

    heading = ""

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
        self._known: dict[Place, Any] = {}

    def _know(self, place: Place) -> Any:
        """Return the output that all records of a place share, and cache it."""
        if len(self._known) >= PLACES_MAX:
            self._known.clear()
        known = self._known[place] = self._describe(place)
        return known

    @abstractmethod
    def _describe(self, place: Place) -> Any: ...

    @abstractmethod
    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` as text, without a final line end."""

    def encoded(self, record: bytes, place: Place) -> str:
        """Decode and format a record of the probepoint ``place``; raise ``FormatError`` if the record is invalid."""
        return self(decode_record(record), place)


class JsonFormatter(_ProgramFormatter):
    """A formatter that prints a record as one line of JSON."""

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` as text, without a final line end."""
        line: dict[str, Any] = {
            "major": record.major,
            "minor": record.minor,
            "cpu": record.cpu,
            "pid": record.pid,
            "tid": record.tid,
            "uid": record.uid,
            "name": None if record.process_name is None else as_unicode(record.process_name),
            "cs": record.cs,
            "ip": address_text(record.ip),
            "ss": record.ss,
            "sp": address_text(record.sp),
            "word_size": record.word_size,
            "time": record.time,
            "wall_time": wall_time(record.time, self.wall_offset),
        }
        line |= self._known.get(place) or self._know(place)
        if not place.is_code:
            line["function"] = as_unicode(function_of(record, place, self._symboliser)) or None
        line["data"] = record.data.hex()
        if record.is_stack_trace:
            line["stack_trace"] = True
        elif (template := self._templates.of(record)) is not None:
            line |= self._data(template, record, place)
        elif items := record.items():
            line["items"] = [_item(item) for item in items]
        if record.is_cut:
            line["cut"] = True
        return json_text({key: value for key, value in line.items() if value is not None})

    def _describe(self, place: Place) -> dict[str, Any]:
        return {
            "host": as_unicode(self._host) or None,
            "program": as_unicode(self._program) or None,
            "module": as_unicode(place.module),
            "symbol": as_unicode(place.symbol),
            "function": as_unicode(place.routine) or None,
            "at_return": place.at_return or None,
            "placed": place.placed,
        }

    def _data(self, template: Template, record: LogRecord, place: Place) -> dict[str, Any]:
        decoded = decode_fields(template, record)
        values: dict[str, Any] = {}
        for field, value, part in zip(
            fields_of(template, record.word_size), decoded.values, placeholders(template), strict=True
        ):
            if part.conversion is Conversion.REST and part.is_item and isinstance(value, bytes):
                items = split_items(value, record.word_size, record.byte_order) or ()
                values[field.name] = [_item(item) for item in items]
            elif part.conversion is Conversion.ADDRESS and isinstance(value, int):
                values[field.name] = self._code(value, record, place)
            elif part.conversion is Conversion.ADDRESS and isinstance(value, tuple):
                values[field.name] = [self._code(each, record, place) for each in value]
            elif part.conversion is Conversion.STACK and isinstance(value, tuple):
                values[field.name] = [self._frame(n, each, record, place) for n, each in enumerate(value)]
            else:
                values[field.name] = _value(field, value)
        return {
            "probe": as_unicode(template.probe) or None,
            "desc": template.desc or None,
            "fields": values,
            "rest": decoded.rest.hex() or None,
        }

    def _code(self, address: int, record: LogRecord, place: Place) -> dict[str, Any]:
        """Return the object of a code address: the address, and its symbolic name if that is known."""
        name = self._symboliser.name_of(address, record, place) if self._symboliser is not None and address else None
        return {"address": address_text(address)} | ({} if name is None else {"name": as_unicode(name)})

    def _frame(self, number: int, address: int, record: LogRecord, place: Place) -> dict[str, Any]:
        """
        Return the object of frame ``number`` of a call stack, 0 being the innermost.

        A return address is named by the call instruction before it.
        """
        if number and address in STACK_ENDS:
            return {"end": STACK_ENDS[StackEnd(address)]}
        found = None
        if self._symboliser is not None:
            find = self._symboliser.caller_name if number else self._symboliser.code_name
            found = find(address, record, place)
        inlined = (
            {"inlined": [as_unicode(each) for each in found.inlined]} if found is not None and found.inlined else {}
        )
        if not number:
            return self._code(address, record, place) | inlined
        name = {} if found is None else {"name": as_unicode(found.text)}
        return {"address": address_text(address)} | name | inlined


def _value(field: Field, value: Value) -> Any:
    match value:
        case Fault(is_unseen=True):
            return {"entry_not_seen": True}
        case Fault(address, is_selector):
            return {"selector_fault": address} if is_selector else {"fault": address_text(address)}
        case bytes():
            return value.hex()
        case int() if field.kind is FieldKind.CHARACTER:
            return character(value)
        case tuple() if field.kind is FieldKind.CHARACTER:
            return "".join(map(character, value))
        case int() if field.kind is FieldKind.ADDRESS:
            return address_text(value)
        case tuple() if field.kind is FieldKind.ADDRESS:
            return [address_text(each) for each in value]
    return exact(value)


def _item(item: LogItem) -> dict[str, Any]:
    match item.kind, item.value:
        case (("string" | "cut"), bytes() as value):
            return {"type": item.kind, "value": value.decode("utf-8", "backslashreplace")}
        case kind, bytes() as value:
            return {"type": kind, "value": value.hex()}
        case "fault", int() as value:
            return {"type": item.kind, "value": address_text(value)}
        case kind, _ if kind == UNSEEN:
            return {"type": kind, "value": None}
        case kind, value:
            return {"type": kind, "value": exact(value)}


# CSV according to RFC 4180: a heading, then one line for each record. The columns are ``COLUMNS``. Most have the same
# names and values as in JSON lines: addresses are hexadecimal. ``stack_trace`` and ``at_return`` are 1 or empty.
# ``text`` is the output of the template, which may have several lines, or without one the values by their derived
# names. Missing values are empty.

_FUNCTION = COLUMNS.index("function") - COLUMNS.index("host")
"""Index of the function among the columns of the place."""


class CsvFormatter(_ProgramFormatter):
    """A formatter that prints a record as one line of CSV."""

    heading = ",".join(COLUMNS) + "\r"

    @cached_property
    def _line(self) -> io.StringIO:
        return io.StringIO()

    @cached_property
    def _write(self) -> Callable[[Iterable[object]], object]:
        return csv.writer(self._line, lineterminator="\r\n").writerow

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return a decoded record of the probepoint ``place`` as text, without a final line end."""
        template = self._templates.of(record)
        text = ""
        if template is not None:
            text = render(template, record, place, wall_offset=self.wall_offset, symboliser=self._symboliser)
        elif record.is_cut:
            text = CUT
        self._line.seek(0)
        self._line.truncate()
        self._write(
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
        known: tuple[object, ...] = self._known.get(place) or self._know(place)
        if place.is_code:
            return known
        function = escaped(function_of(record, place, self._symboliser))
        return (*known[:_FUNCTION], function, *known[_FUNCTION + 1 :])

    def _describe(self, place: Place) -> tuple[object, ...]:
        at_return = 1 if place.at_return else None
        names = (self._host, self._program, place.module, place.symbol, place.routine)
        return (*map(escaped, names), at_return, place.placed)
