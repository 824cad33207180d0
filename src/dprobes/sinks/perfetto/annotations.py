"""What a record says, as debug annotations: its data by their names, and the items of its header together."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from dprobes.escapes import escaped
from dprobes.formatters.templates.fields import FieldKind
from dprobes.sinks.perfetto import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters.templates.fields import Field
    from dprobes.record.layout import LogRecord
    from dprobes.sinks.typedvalues import ArgumentValue, Shape

__all__ = ["annotations_of", "header_of"]

_UNICODE_MAX = 0x10FFFF

_HEADER = (
    ("major", messages.unsigned),
    ("minor", messages.unsigned),
    ("cpu", messages.unsigned),
    ("uid", messages.unsigned),
    ("cs", messages.pointer),
    ("ip", messages.pointer),
    ("ss", messages.pointer),
    ("sp", messages.pointer),
)
"""The items of the header that neither the time nor the track tells."""


def header_of(record: LogRecord, function: str = "") -> bytes:
    """Return the items of a record's header under one name, and where it hit if the event does not say so."""
    entries = [_entry(index, value) for index, value in enumerate(_items(record)) if value is not None]
    if function:
        entries.append(messages.entry(messages.string("function", escaped(function))))
    return messages.dictionary_of("record", entries)


_items = attrgetter(*(name for name, _ in _HEADER))


@lru_cache(maxsize=1 << 14)
def _entry(index: int, value: int) -> bytes:
    """Return an item; most have few values."""
    name, make = _HEADER[index]
    return messages.entry(make(name, value))


def annotations_of(shape: Shape, values: Sequence[ArgumentValue]) -> list[bytes]:
    """Return the data of a record, value by value."""
    return [_annotation(field, value) for field, value in zip(shape.fields, values, strict=True)]


def _annotation(field: Field, value: ArgumentValue) -> bytes:
    match value:
        case int():
            return _number(field.name, field.kind, value)
        case str():
            return messages.string(field.name, value)
        case bytes():
            return messages.string(field.name, value.hex(" "))
    if field.kind is FieldKind.CHARACTER:
        return messages.string(field.name, "".join(_character(code) for code in value if isinstance(code, int)))
    values = [messages.string("", e) if isinstance(e, str) else _number("", field.kind, e) for e in value]
    return messages.array(field.name, values)


def _number(name: str, kind: FieldKind, value: int) -> bytes:
    match kind:
        case FieldKind.SIGNED:
            return messages.integer(name, value)
        case FieldKind.ADDRESS:
            return messages.pointer(name, value)
        case FieldKind.CHARACTER:
            return messages.string(name, _character(value))
    return messages.unsigned(name, value)


def _character(code: int) -> str:
    return chr(code) if code <= _UNICODE_MAX else f"<{code:#x}>"
