"""
Event classes: what TSDL says of the events that are alike, and their bytes.

An event class has an event context, the items of the record's header, and a payload, the fields of its data. All
integers are little-endian and all fields begin at whole bytes, so ``struct`` packs them. A field of bytes or an array
is a sequence, behind its length.

Names of fields begin with an underscore here, which readers take away, so that they cannot be words of TSDL.
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dprobes.escapes import escaped
from dprobes.formatters.templates.fields import FieldKind
from dprobes.record.layout import FIXED_ITEMS, Item, LogRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.formatters.templates.fields import Field
    from dprobes.sinks.typedvalues import ArgumentValue, Shape

__all__ = ["EVENT_HEADER", "TYPES", "EventClass", "HeaderItems", "quoted"]

EVENT_HEADER = struct.Struct("<IQ")
"""The number of the event class, and the time; written in TSDL by ``metadata``."""

_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}
"""Those of signed integers; those of unsigned ones are capital."""

_LENGTH = struct.Struct("<I")

_NAME_MAX = 1024

_WORDS_OF_TSDL = ("_Bool", "_Complex", "_Imaginary")
"""Those that begin with an underscore."""

_BASES = {8: "o", 10: "", 16: "x"}
"""How numbers are shown, and what the names of their types begin with."""

_HEXADECIMAL = (Item.CS, Item.IP, Item.SS, Item.SP)
_WORDS = (Item.IP, Item.SP)
_ELSEWHERE = (Item.CPU, Item.TIME)
"""The items that the packet and the event's header have."""


def quoted(text: str) -> str:
    """Return a string of TSDL; what would not be shown as it is becomes an escape sequence that readers show."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_NAME_MAX])
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"'


class HeaderItems:
    """
    Make event contexts of records with the same items in their header as a certain one.

    With ``has_function`` they say in which function the hit was, for places that are no code.
    """

    def __init__(self, record: LogRecord, *, has_function: bool = False) -> None:
        names: list[str] = []
        codes = "<"
        self.declarations: list[str] = []
        for item, name in FIXED_ITEMS:
            if getattr(record, name) is not None and item not in _ELSEWHERE:
                size = record.word_size if item in _WORDS else 4
                names.append(name)
                codes += _CODES[size].upper()
                self.declarations.append(f"{_integer(size, base=16 if item in _HEXADECIMAL else 10)} _{name};")
        self._layout = struct.Struct(codes)
        self._items = _getter([LogRecord._fields.index(name) for name in names])
        self._has_name = record.process_name is not None
        self._has_tid = record.tid is not None
        if self._has_name:
            self.declarations.append("string _name;")
        if self._has_tid:
            self.declarations.append(f"{_integer(4)} _tid;")
        self.has_function = has_function
        if has_function:
            self.declarations.append("string _function;")

    def encode(self, record: LogRecord, function: str = "") -> bytes:
        """Return the event context of a record."""
        data = self._layout.pack(*self._items(record))
        if self._has_name:
            data += escaped(record.process_name or "").encode() + b"\0"
        if self._has_tid:
            data += _LENGTH.pack(record.tid)
        if self.has_function:
            data += escaped(function).encode() + b"\0"
        return data


class EventClass:
    """
    Describe the events that have one name, the same items in their header, and one shape.

    ``text`` is what metadata say of them, ``content`` what of that would be the same with another number.
    """

    def __init__(self, number: int, stream_class: int, name: str, header: HeaderItems, shape: Shape) -> None:
        self.number = number
        self._header = header
        self._encode = [_encoder(field) for field in shape.fields]
        self._numbers = _numbers(shape.fields)
        context = " ".join(header.declarations)
        fields = " ".join(_declarations(shape.fields))
        self.content = (
            f"\tname = {quoted(name)};\n\tstream_id = {stream_class};\n"
            f"\tcontext := struct {{ {context} }};\n\tfields := struct {{ {fields} }};\n"
        )
        self.text = f"event {{\n\tid = {number};\n{self.content}}};\n"

    def encode(self, time: int, record: LogRecord, values: Sequence[ArgumentValue], function: str = "") -> bytes:
        """Return the bytes of an event."""
        start = EVENT_HEADER.pack(self.number, time) + self._header.encode(record, function)
        if self._numbers is not None:
            return start + self._numbers.pack(*values)
        return start + b"".join([encode(value) for encode, value in zip(self._encode, values, strict=True)])


def _getter(indices: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda record: tuple(record[index] for index in indices)


def _integer(size: int, *, signed: bool = False, base: int = 10) -> str:
    """Return the name of a type of integers."""
    return f"{_BASES[base]}{'' if signed else 'u'}int{8 * size}_t"


def _alias(size: int, *, signed: bool, base: int) -> str:
    name, sign = _integer(size, signed=signed, base=base), str(signed).lower()
    return f"typealias integer {{ size = {8 * size}; align = 8; signed = {sign}; base = {base}; }} := {name};\n"


TYPES = "".join(
    _alias(size, signed=signed, base=base)
    for signed, base in ((True, 10), *((False, base) for base in _BASES))
    for size in _CODES
)
"""What makes the names of types known; nothing else is needed, since a string is UTF-8 if nothing is said."""


def _type(field: Field) -> str:
    match field.kind:
        case FieldKind.STRING:
            return "string"
        case FieldKind.BYTES:
            return _integer(1, base=16)
    return _integer(field.size, signed=field.kind is FieldKind.SIGNED, base=field.base)


def _declarations(fields: Sequence[Field]) -> list[str]:
    """Return what declares fields, by names of which there are no two."""
    taken = {f"_{field.name}" for field in fields}

    def free(identifier: str) -> str:
        while identifier in taken:
            identifier += "_"
        taken.add(identifier)
        return identifier

    declarations = []
    for field in fields:
        name = f"_{field.name}"
        if name in _WORDS_OF_TSDL:
            name = free(f"{name}_")
        if field.is_array or field.kind is FieldKind.BYTES:
            length = free(f"__{field.name}_length")  # readers show it with the second underscore
            declarations.append(f"{_integer(4)} {length}; {_type(field)} {name}[ {length} ];")
        else:
            declarations.append(f"{_type(field)} {name};")
    return declarations


def _code(field: Field) -> str:
    code = _CODES[field.size]
    return code if field.kind is FieldKind.SIGNED else code.upper()


def _numbers(fields: Sequence[Field]) -> struct.Struct | None:
    """Return the structure of the payload if there are but numbers in it."""
    if any(field.is_array or not field.size for field in fields):
        return None
    return struct.Struct("<" + "".join(_code(field) for field in fields))


def _encoder(field: Field) -> Callable[[Any], bytes]:
    match field.kind:
        case FieldKind.STRING if field.is_array:
            return lambda strings: _LENGTH.pack(len(strings)) + b"".join(map(_string, strings))
        case FieldKind.STRING:
            return _string
        case FieldKind.BYTES:
            return _bytes
    code = _code(field)
    if not field.is_array:
        return struct.Struct(f"<{code}").pack
    return lambda values: struct.pack(f"<I{len(values)}{code}", len(values), *values)


def _string(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace").replace(b"\0", b"\\0") + b"\0"


def _bytes(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data
