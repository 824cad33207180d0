"""A record as names and strings, for logs with structured data: syslog and the systemd journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.escapes import escaped
from dprobes.formatters.addressfields import code_names_of, function_of
from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.templates.fields import Fault, Field, FieldKind, decode_fields, fields_of
from dprobes.formatters.templates.program import ProgramTemplates
from dprobes.lazynamedtuple import NamedTuple
from dprobes.record.codec import decode_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters.templates.fields import Value
    from dprobes.formatters.templates.model import Template
    from dprobes.record.layout import LogRecord
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place

__all__ = ["FieldReader", "KnownRecord", "names_text", "place_items", "value_text"]

_NUMBERS = ("major", "minor", "cpu", "pid", "tid", "uid")
_ADDRESSES = ("cs", "ip", "ss", "sp")


class KnownRecord(NamedTuple):
    """
    Hold a record, the items of its header as strings, and the fields that its template or its handler names.

    A last field, ``rest``, is the bytes that no other takes.
    ``names`` are those of the fields' addresses, by fields of their own. ``function`` is where a sampler or a
    watchpoint hit, as far as somebody knows; of other places ``place_items`` tells.
    """

    record: LogRecord
    items: Sequence[tuple[str, str]]
    fields: Sequence[tuple[Field, Value]]
    names: Sequence[tuple[str, str | tuple[str, ...]]] = ()
    function: str = ""


class FieldReader:
    """Read the records of programs with their templates; addresses are named while their processes may still run."""

    def __init__(self) -> None:
        self._templates: dict[int, ProgramTemplates] = {}
        self._symbolisers: dict[int, AddressSymboliser] = {}
        self._fields: dict[tuple[Template, int], tuple[Field, ...]] = {}

    def create_event(self, source: RecordSource) -> None:
        """Know a program, or more of it."""
        self._templates[source.number] = ProgramTemplates.of_source(source)
        if source.number not in self._symbolisers:
            self._symbolisers[source.number] = AddressSymboliser(source, live=True)
        self._symbolisers[source.number].know(source)

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._templates.pop(source.number, None)
        self._symbolisers.pop(source.number, None)
        self._fields.clear()

    def read(self, source: RecordSource, data: bytes, place: Place) -> KnownRecord:
        """Return what is known of a record; raise ``FormatError`` if it is none."""
        record = decode_record(data, place)
        template = self._templates[source.number].of(record)
        symboliser = self._symbolisers[source.number]
        fields: Sequence[tuple[Field, Value]] = ()
        names: Sequence[tuple[str, str | tuple[str, ...]]] = ()
        if template is not None:
            decoded = decode_fields(template, record)
            fields = list(zip(self._fields_of(template, record.word_size), decoded.values, strict=True))
            if decoded.rest:
                fields.append((_rest_field(fields), decoded.rest))
            names = code_names_of(template, record, decoded.values, place, symboliser)
        function = "" if place.is_code else function_of(record, place, symboliser)
        items = _items(record)
        if function and not place.routine:
            items.insert(0, ("function", escaped(function)))
        return KnownRecord(record, items, fields, names, function)

    def _fields_of(self, template: Template, word_size: int) -> tuple[Field, ...]:
        key = (template, word_size)
        if (found := self._fields.get(key)) is None:
            found = self._fields[key] = fields_of(template, word_size)
        return found


def _rest_field(fields: Sequence[tuple[Field, Value]]) -> Field:
    """Return the field of the bytes that no other one takes, of which there are some if a dump was cut."""
    names = {field.name for field, _ in fields}
    name = next(each for each in ("rest", *(f"rest_{n}" for n in range(2, len(names) + 3))) if each not in names)
    return Field(name, FieldKind.BYTES, 0, 16, is_array=False)


def place_items(source: RecordSource, place: Place) -> list[tuple[str, str]]:
    """Return what is known of where records come from, names as all formats have them."""
    items = [("program", source.name), ("module", place.module), ("symbol", place.symbol)]
    if place.routine:
        items.append(("function", place.routine))
    if place.placed is not None:
        items.append(("placed", f"{place.placed:#x}"))
    return [(name, escaped(text)) for name, text in items]


def _items(record: LogRecord) -> list[tuple[str, str]]:
    """Return the items of a record's header; a name has no character that would disturb a line."""
    items = [(name, str(value)) for name in _NUMBERS if (value := getattr(record, name)) is not None]
    if record.process_name is not None:
        items.append(("name", escaped(record.process_name)))
    items += [(name, f"{value:#x}") for name in _ADDRESSES if (value := getattr(record, name)) is not None]
    if record.is_stack_trace:
        items.append(("stack_trace", "1"))
    if record.is_cut:
        items.append(("cut", "1"))
    return items


def value_text(field: Field, value: Value) -> str | None:
    """Return the value of a field as text, None if the record has none."""
    match value:
        case None:
            return None
        case int():
            return _number_text(field, value)
        case tuple():
            return " ".join(_number_text(field, one) for one in value)
        case bytes():
            return value.hex()
        case Fault() | str():
            return str(value)


def names_text(names: str | tuple[str, ...]) -> str:
    """Return the name of an address, or those of several, as one text."""
    return escaped(names if isinstance(names, str) else "; ".join(names))


def _number_text(field: Field, number: int) -> str:
    match field.kind, field.base:
        case FieldKind.CHARACTER, _:
            return chr(number) if 0x20 <= number < 0x7F else f"\\x{number:02x}"
        case FieldKind.ADDRESS, _:
            return f"{number:#x}"
        case _, 16:
            return f"{number:#x}"
        case _, 8:
            return f"0{number:o}"
    return str(number)
