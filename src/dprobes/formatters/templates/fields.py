"""
The data of a template's records as named, typed fields, for formats that have columns or types.

A place-holder says the name of its field, ``%(pid)d``, or the text before it does: ``pid=%d`` is ``pid``, ``*arg0=%nv``
is ``at_arg0``. Fields are in the order of the place-holders, and there is one for each, but not for header items and
skipped bytes.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.formatters.templates.compiled import compiled_of
from dprobes.formatters.templates.extraction import data_parts, read
from dprobes.formatters.templates.model import Conversion, Placeholder, Skip, Text
from dprobes.formatters.templates.values import Fault, Value
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.formatters.templates.model import Template
    from dprobes.record.layout import LogRecord

__all__ = ["Decoded", "Fault", "Field", "FieldKind", "Value", "decode_fields", "fields_of"]

_NAME = lazy_pattern(r"(?<!\w)([A-Za-z_][A-Za-z0-9_]*)[\s\"'(\[{<]*[=:]?[\s\"'(\[{<]*(?:0[xX])?\Z")
_EXPRESSION = lazy_pattern(r"(?:^|\s)(?P<what>[^\s=]*[^\w\s=.][^\s=]*|\w+(?:\.\w+)+)=[\"']?\Z")
"""What a derived template calls the content of memory, or a value that was worked out: ``*(8+arg0)=``."""
_NAME_MAX = 64
_NAME_REACH = 100
"""How many characters before a place-holder its name is looked for in."""


class FieldKind(enum.Enum):
    """Tell the types of fields apart."""

    SIGNED = "signed"
    UNSIGNED = "unsigned"
    CHARACTER = "character"
    STRING = "string"
    ADDRESS = "address"
    BYTES = "bytes"


_KINDS = {
    Conversion.SIGNED: (FieldKind.SIGNED, 10),
    Conversion.UNSIGNED: (FieldKind.UNSIGNED, 10),
    Conversion.HEXADECIMAL: (FieldKind.UNSIGNED, 16),
    Conversion.OCTAL: (FieldKind.UNSIGNED, 8),
    Conversion.CHARACTER: (FieldKind.CHARACTER, 10),
    Conversion.STRING: (FieldKind.STRING, 10),
    Conversion.POINTER: (FieldKind.ADDRESS, 16),
    Conversion.ADDRESS: (FieldKind.ADDRESS, 16),
    Conversion.DUMP: (FieldKind.BYTES, 16),
    Conversion.ERROR: (FieldKind.SIGNED, 10),
    Conversion.REST: (FieldKind.BYTES, 16),
    Conversion.VALUE: (FieldKind.UNSIGNED, 10),
    Conversion.STACK: (FieldKind.ADDRESS, 16),
    Conversion.ENUMERATION: (FieldKind.SIGNED, 10),
    Conversion.UNSIGNED_ENUMERATION: (FieldKind.UNSIGNED, 10),
    Conversion.DURATION: (FieldKind.SIGNED, 10),
    Conversion.NETWORK: (FieldKind.STRING, 10),
}


@dataclass(frozen=True, slots=True)
class Field:
    """
    Describe a field.

    ``name`` is a C identifier that no other field of the template has. ``size`` is that of one element in bytes, 0 for
    STRING and BYTES; ``base`` is how numbers are printed. The value of an array is a tuple.
    """

    name: str
    kind: FieldKind
    size: int
    base: int
    is_array: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """
    Hold the values of a record's fields, and what is in none of them.

    A value may be a ``Fault`` in place of what could not be read when the record was made, or None if the data ended
    before. The value of a CHARACTER is its code.
    """

    values: tuple[Value, ...]
    rest: bytes


@lru_cache(maxsize=4096)
def fields_of(template: Template, word_size: int) -> tuple[Field, ...]:
    """Return the fields of the records that a template is for."""
    fields: list[Field] = []
    taken: set[str] = set()
    for placeholder, before in _with_text_before(template):
        kind, base = _KINDS[placeholder.conversion]
        size = word_size if placeholder.size is None else placeholder.size
        unnamed = "stack" if placeholder.conversion is Conversion.STACK else f"arg{len(fields)}"
        name = placeholder.field or _name_in(before[-_NAME_REACH:]) or unnamed
        joint = "" if placeholder.field and not name[-1].isdigit() else "_"
        unique, number = name, 2
        while unique in taken:
            unique, number = f"{name}{joint}{number}", number + 1
        taken.add(unique)
        fields.append(Field(unique, kind, size, base, placeholder.is_array))
    return tuple(fields)


def _name_in(before: str) -> str:
    """Return the name of what comes behind a text: ``*(8+arg0)=`` gives ``at_8_arg0``; nothing if there is none."""
    if (expression := _EXPRESSION.search(before)) is not None:
        words = expression["what"].replace("*", " at ").replace("~", " not ").replace("-", " minus ")
        name = "_".join(re.findall(r"\w+", words))
        if name and not name[0].isdigit():
            return name[:_NAME_MAX]
        return f"value_{name}"[:_NAME_MAX] if name else ""
    match = _NAME.search(before)
    return match.group(1)[:_NAME_MAX] if match is not None else ""


def _with_text_before(template: Template) -> Iterator[tuple[Placeholder, str]]:
    for line in template.lines:
        before = ""
        for part in line:
            if isinstance(part, Placeholder):
                yield part, before
            before = part.text if isinstance(part, Text) else ""


def decode_fields(template: Template, record: LogRecord) -> Decoded:
    """Return the values of the fields in a record; never raises, whatever its data is."""
    compiled = compiled_of(template, record.word_size, record.byte_order)
    if compiled is not None and len(record.data) == compiled.layout.size and not record.is_cut:
        return Decoded(compiled.layout.unpack(record.data), b"")
    taken, rest = read(template, record)
    values: list[Value] = []
    left = b""
    for part, one in zip(data_parts(template), taken, strict=True):
        left += one.odd
        if not isinstance(part, Skip):
            values.append(one.value)
    return Decoded(tuple(values), left + rest)
