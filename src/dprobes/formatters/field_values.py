"""Fields of records by name: header items, and fields of templates, or else words and items of the data."""

from __future__ import annotations

import re
import threading
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.formatters.address_fields import address_fields, code_names, function_of
from dprobes.formatters.templates.data_extraction import FieldKind, decode_fields, fields_of, placeholders
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.formatters.templates.template_model import Conversion
from dprobes.record.log_record import Item
from dprobes.rpn.keyed_tables import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import Field
    from dprobes.formatters.templates.template_model import Template, Value
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place, RecordSource

__all__ = ["HEADER_FIELDS", "NUMBERED", "PLACE_FIELDS", "FieldValues", "ProgramDataReader", "names_of", "text_of"]

HEADER_FIELDS = {
    "major": Item.MAJOR,
    "minor": Item.MINOR,
    "cpu": Item.CPU,
    "pid": Item.PID,
    "tid": Item.TID,
    "uid": Item.UID,
    "name": Item.PROCESS_NAME,
    "cs": Item.CS,
    "ip": Item.IP,
    "ss": Item.SS,
    "sp": Item.SP,
    "time": Item.TIME,
}
"""The header items by name, as in JSON lines."""

_TEXTS = ("name", "host", "program", "module", "symbol", "function")
PLACE_FIELDS = ("module", "symbol", "function")
_OTHERS = ("word_size", "stack_trace", "host", "program")
"""Further attributes of a record, as in JSON lines and conditions. Template fields of the same name override them."""

_ADDRESSES = ("ip", "sp")

_NO_NUMBERS = (FieldKind.STRING, FieldKind.BYTES)

NUMBERED = re.compile(r"(word|item)(\d{1,4})\Z")

_TEXT_MAX = 200

_SHOWN = 6
"""Number of words that are shown for data without a template."""


class FieldValues:
    """
    Finder of fields in the records of one program.

    A name is one of HEADER_FIELDS, ``word_size``, ``stack_trace`` (1 or 0), ``host``, ``program``, ``module``,
    ``symbol``, ``function``, a field of a written or derived template, ``word0`` (the first word of the data), or
    ``item0`` (the first item, if the data describe themselves). ``host`` is the name of the records' machine. With
    ``symboliser``, the text of an address that a template prints by name is that name, and samples and accesses have a
    ``function``, too.
    """

    def __init__(self, source: RecordSource, host: str = "", symboliser: Symboliser | None = None) -> None:
        self._program, self._host = source.name, host
        self._templates = ProgramTemplates.of_source(source)
        self._symboliser = symboliser

    def check(self, name: str, *, is_number: bool = False) -> None:
        """
        Raise ``FormatError`` if no record of the program can have a field of this name.

        With ``is_number`` a field that is text in all records is an error, too.
        """
        fields = [*self._template_fields()]
        known = [*HEADER_FIELDS, *PLACE_FIELDS, *_OTHERS, *dict.fromkeys(field.name for field in fields)]
        if name in known or NUMBERED.match(name):
            mine = [field for field in fields if field.name == name]
            is_text = all(field.kind in _NO_NUMBERS for field in mine) if mine else name in _TEXTS
            if is_number and is_text:
                raise FormatError(f"'{name}' is not a number", hint=f"count its values: --count {name}")
            return
        from dprobes.diagnostics import did_you_mean

        listed = ", ".join([*known, "word0, word1, ...", "item0, item1, ..."])
        raise FormatError(
            f"records have no field '{name}'",
            hint=did_you_mean(name, [*known, "word0", "item0"]) or f"fields are {listed}",
        )

    def unit(self, name: str) -> Unit:
        """Return the unit of a field: nanoseconds for ``elapsed`` and for a field that all templates print as times."""
        conversions = {
            part.conversion
            for template in self._templates.all()
            for field, part in zip(fields_of(template, 8), placeholders(template), strict=True)
            if field.name == name
        }
        is_time = name == "elapsed" or conversions == {Conversion.DURATION}
        return Unit.NANOSECONDS if is_time else Unit.NONE

    def _template_fields(self) -> Iterator[Field]:
        for template in self._templates.all():
            yield from fields_of(template, 8)

    def text(self, record: LogRecord, place: Place, name: str) -> str:
        """Return the displayed value of a field, on one line."""
        value = self.find(record, place, name)
        if self._symboliser is not None and name in self._named:
            found = code_names(value, record, place, self._symboliser, is_stack=self._named[name])
            if found is not None:
                return escaped(found if isinstance(found, str) else "; ".join(found))
        return f"{value:#x}" if name in self._named and isinstance(value, int) else text_of(name, value)

    def is_named(self, name: str) -> bool:
        """Return whether a template prints a field by the name of its address."""
        return name in self._named

    @cached_property
    def _named(self) -> dict[str, bool]:
        """The fields that templates print by the names of their addresses; the value is True for call stacks."""
        return {
            name: each.is_stack
            for template in self._templates.all()
            for each in address_fields(template, 8)
            if (name := fields_of(template, 8)[each.position].name) not in (*HEADER_FIELDS, *PLACE_FIELDS)
        }

    def find(self, record: LogRecord, place: Place, name: str) -> Value:
        """Return the value of a field, or None if this record has none of that name."""
        if name in HEADER_FIELDS:
            value: Value = getattr(record, "process_name" if name == "name" else name)
            return value
        if name == "function" and not place.is_code:
            return function_of(record, place, self._symboliser) or None
        if name in PLACE_FIELDS:
            return self.of_place(place, name)
        template = self._templates.of(record)
        if template is not None and name in (names := names_of(template, record.word_size)):
            return decode_fields(template, record).values[names.index(name)]
        if (numbered := NUMBERED.match(name)) is not None:
            return _numbered(record, numbered[1], int(numbered[2]))
        match name:
            case "word_size":
                return record.word_size
            case "stack_trace":
                return int(record.is_stack_trace)
        return self.of_program(name)

    @staticmethod
    def of_place(place: Place, name: str) -> str | None:
        """
        Return the value of a field of PLACE_FIELDS.

        Return None for the function of a place that is not code: it differs by record.
        """
        return (place.routine if name == "function" else str(getattr(place, name))) or None

    def of_program(self, name: str) -> str | None:
        """Return the value that a field has in all records of the program, or None for any other field."""
        return {"host": self._host or None, "program": self._program}.get(name)

    @property
    def templates(self) -> ProgramTemplates:
        """The templates of the program."""
        return self._templates

    def data(self, record: LogRecord) -> dict[str, Value]:
        """Return the contents of a record's data: the fields of its template, its items, or its first words."""
        template = self._templates.of(record)
        if template is not None:
            return dict(zip(names_of(template, record.word_size), decode_fields(template, record).values, strict=True))
        items = record.items()
        count = len(items) or min(len(record.data) // record.word_size, _SHOWN)
        kind = "item" if items else "word"
        return {f"{kind}{n}": _numbered(record, kind, n) for n in range(count)}


@lru_cache(maxsize=1024)
def names_of(template: Template, word_size: int) -> tuple[str, ...]:
    """Return the names of the data fields of a template's records, in order."""
    return tuple(field.name for field in fields_of(template, word_size))


def text_of(name: str, value: Value) -> str:
    """Return the value of the field ``name`` as displayed, on one line."""
    return f"{value:#x}" if name in _ADDRESSES and isinstance(value, int) else shown(value)


def shown(value: Value) -> str:
    """Return a value as displayed, on one line, whatever its field is."""
    match value:
        case None:
            return "-"
        case str():
            return escaped(value[:_TEXT_MAX])
        case bytes():
            return value[: _TEXT_MAX // 3].hex(" ")
        case tuple():
            return " ".join(map(str, value))[:_TEXT_MAX]
    return str(value)


def _numbered(record: LogRecord, kind: str, number: int) -> Value:
    if kind == "word":
        start = number * record.word_size
        word = record.data[start : start + record.word_size]
        return int.from_bytes(word, record.byte_order) if len(word) == record.word_size else None
    items = record.items()
    if number >= len(items):
        return None
    item = items[number]
    return item.value if isinstance(item.value, tuple) else item.text


# The data of a program's records by name: by the program's templates, else derived from the logged expressions.
# Addresses that are displayed by name have companions, as in all outputs with fields (``address_fields``).


class ProgramDataReader:
    """A reader of a program's records, from processes of this machine; any thread may call it."""

    def __init__(self, source: RecordSource, symboliser: Symboliser | None = None) -> None:
        self._source = source
        self._given = symboliser
        self._naming = threading.Lock()

    def values(self, record: LogRecord) -> Mapping[str, object] | None:
        """Return the values of a record's data by their names, or None if the data have no description."""
        from dprobes.formatters.address_fields import code_names_of

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
        """
        Return the function of a record: its probepoint's, or else that of the ip.

        Return an empty string if it is unknown.
        """
        place = record.place
        if place is None or place.is_code or place.function or record.ip is None:
            return "" if place is None else place.routine

        with self._naming:
            return function_of(record, place, self._symboliser)

    @cached_property
    def _templates(self) -> ProgramTemplates:

        return ProgramTemplates.of_source(self._source)

    @cached_property
    def _symboliser(self) -> Symboliser:
        if self._given is not None:
            return self._given
        from dprobes.formatters.address_names import AddressSymboliser

        return AddressSymboliser(self._source, live=True)
