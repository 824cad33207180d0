"""
The decomposition of a record's data by its template.

The data may be anything: missing data are reported as such, and data without a placeholder are kept unchanged.
"""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.escapes import CUT, cut_text, escaped
from dprobes.formatters.templates.template_model import (
    AMOUNT,
    Conversion,
    Fault,
    Placeholder,
    Skip,
    Text,
    Value,
    readable_number,
)
from dprobes.record.log_record import ItemHead, is_unseen_entry, item_head
from dprobes.rpn.instruction_set import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder, LogRecord

__all__ = [
    "CUT_OFF",
    "NO_ROOM",
    "CompiledTemplate",
    "Decoded",
    "Fault",
    "Field",
    "FieldKind",
    "Taken",
    "Value",
    "compiled_of",
    "data_parts",
    "decode_fields",
    "fields_of",
    "fits",
    "placeholders",
    "read",
    "stacks_in",
    "unique_name",
]

CUT_OFF = "the rest, which is longer"
"""The problem of a truncated dump; the bytes that it omits are ``odd``, and the rest in formats with fields."""

NO_ROOM = CUT
"""The problem of data that are not in the record because the log buffer had no room."""

_IPV4, _IPV6 = 4, 16
"""Sizes of internet addresses in bytes."""

_FAULTS = (Token.ADDRESS_FAULT, Token.SELECTOR_FAULT)


class Taken(NamedTuple):
    """
    Bytes of a record that one part of a template has consumed.

    ``value`` is their decoded value, or None if it is missing. ``missing`` is the number of its bytes that are not in
    the record. ``odd`` has bytes of an item that do not form a whole number. ``problem`` is the reason why there is no
    item, or an empty string.
    """

    value: Value
    missing: int = 0
    odd: bytes = b""
    problem: str = ""


_NO_ROOM = Taken(None, problem=NO_ROOM)


@lru_cache(maxsize=4096)
def data_parts(template: Template) -> tuple[Placeholder | Skip, ...]:
    """Return the parts of a template that consume data."""
    return tuple(part for line in template.lines for part in line if isinstance(part, (Placeholder, Skip)))


@lru_cache(maxsize=4096)
def placeholders(template: Template) -> tuple[Placeholder, ...]:
    """Return the parts of a template that have values."""
    return tuple(part for part in data_parts(template) if isinstance(part, Placeholder))


def read(template: Template, record: LogRecord) -> tuple[list[Taken], bytes]:
    """Return the bytes that each of ``data_parts`` consumes of a record's data, and the remaining bytes."""
    reader = _Reader(record)
    taken = [reader.take(part) for part in data_parts(template)]
    if record.is_cut:
        taken = [_NO_ROOM if each.value is None and not each.odd else each for each in taken]
    return taken, record.data[reader.position :]


def stacks_in(template: Template, record: LogRecord) -> dict[Token, tuple[int, ...]]:
    """Return the addresses of the first call stack of each kind in the parts of a template."""
    reader = _Reader(record)
    found: dict[Token, tuple[int, ...]] = {}
    for part in data_parts(template):
        at = reader.position
        taken = reader.take(part)
        if isinstance(part, Placeholder) and part.conversion is Conversion.STACK and isinstance(taken.value, tuple):
            head = item_head(record.data, at, record.word_size, record.byte_order)
            if head is not None:
                found.setdefault(head.token, taken.value)
    return found


def fits(template: Template, record: LogRecord) -> bool:
    """Return whether a template covers the data of a record exactly, apart from data without room in the log buffer."""
    taken, rest = read(template, record)
    return not rest and not any(each.missing or each.odd or each.problem not in ("", NO_ROOM) for each in taken)


class _Reader:
    def __init__(self, record: LogRecord) -> None:
        self.position = 0
        self._data = record.data
        self._word_size = record.word_size
        self._order = record.byte_order
        self._ended = False  # after missing data the positions of the following are unknown

    def take(self, part: Placeholder | Skip) -> Taken:
        if isinstance(part, Skip):
            left = self._left
            skipped = self._bytes(part.count)
            return Taken(skipped) if skipped else Taken(None, part.count - left)
        if part.conversion is Conversion.REST:
            return Taken(b"" if self._ended else self._rest(only_items=part.is_item))
        if part.is_item:
            return self._item(part)
        if part.conversion is Conversion.STRING:
            return self._string(part.precision)
        return self._number(part.conversion, part.size or self._word_size)

    @property
    def _left(self) -> int:
        return 0 if self._ended else len(self._data) - self.position

    def _bytes(self, count: int) -> bytes:
        """Consume and return ``count`` bytes; none if fewer are left."""
        if self._ended or self.position + count > len(self._data):
            self._ended = True
            return b""
        start = self.position
        self.position += count
        return self._data[start : self.position]

    def _number(self, conversion: Conversion, size: int) -> Taken:
        left = self._left
        data = self._bytes(size)
        if not data:
            return Taken(None, size - left)
        return Taken(int.from_bytes(data, self._order, signed=conversion.is_signed))

    def _string(self, length: int | None) -> Taken:
        left = self._left
        if length is not None:
            data = self._bytes(length)
            return Taken(_text(data)) if len(data) == length else Taken(None, length - left)
        if left == 0:
            self._ended = True
            return Taken(None, problem="string")
        end = self._data.find(b"\0", self.position)
        start, self.position = self.position, (end + 1 if end >= 0 else len(self._data))
        return Taken(_text(self._data[start : self.position]))

    def _rest(self, *, only_items: bool) -> bytes:
        """Consume and return all remaining bytes, or, with ``only_items``, the whole items at their start."""
        start = self.position
        while only_items and (end := self._item_end()) is not None:
            self.position = end
        if not only_items:
            self.position = len(self._data)
        return self._data[start : self.position]

    def _item_end(self) -> int | None:
        head = item_head(self._data, self.position, self._word_size, self._order)
        if head is None or head.start + head.size > len(self._data):
            return None
        return None if head.token in _FAULTS and head.size != self._word_size else head.start + head.size

    def _item(self, part: Placeholder) -> Taken:
        if self._ended:
            return Taken(None, problem="item")
        head = item_head(self._data, self.position, self._word_size, self._order)
        if head is None:
            self._ended = True
            left = len(self._data) - self.position
            return Taken(None, problem=f"item: {self._data[self.position]:02x} begins none" if left else "item")
        body = self._data[head.start : head.start + head.size]
        self.position = head.start + len(body)
        missing = head.size - len(body)
        self._ended = missing > 0
        if head.token in _FAULTS:
            return self._fault(head, body, missing)
        match part.conversion:
            case Conversion.STRING:
                text = self._in_order(head, body).partition(b"\0")[0]
                if part.marks_cut and part.precision is not None and len(text) > part.precision:
                    text = cut_text(text, part.precision)
                return Taken(_text(text), missing)
            case Conversion.DUMP if part.marks_cut and part.precision is not None and len(body) > part.precision:
                return Taken(body[: part.precision], missing, body[part.precision :], problem=CUT_OFF)
            case Conversion.DUMP:
                return Taken(body, missing)
            case Conversion.NETWORK:
                return self._network(head, body, missing)
        return self._numbers(part, head, body, missing)

    def _numbers(self, part: Placeholder, head: ItemHead, body: bytes, missing: int) -> Taken:
        """
        Return the number in the body of an item, or all its numbers if ``part`` is an array.

        ``missing`` is the number of announced bytes that are not in the record.
        """
        size = part.size or self._word_size
        signed = part.conversion.is_signed
        if not part.is_array:
            value = int.from_bytes(body[:size], self._order, signed=signed) if len(body) >= size else None
            return Taken(value, missing, body if value is None else body[size:])
        end = len(body) // size * size
        values = tuple(int.from_bytes(body[n : n + size], self._order, signed=signed) for n in range(0, end, size))
        if part.conversion is Conversion.STACK and head.token is Token.STACK_COUNT:
            values = _without_zeros(values)
        return Taken(values, missing, body[end:])

    def _network(self, head: ItemHead, body: bytes, missing: int) -> Taken:
        """
        Return an internet address: 4 or 16 bytes in network order, or a word that was loaded from such bytes.

        ``missing`` is the number of announced bytes that are not in the record.
        """
        if head.token is Token.STACK_COUNT and len(body) == self._word_size:
            body = body[:_IPV4] if self._order == "little" else body[-_IPV4:]
        if len(body) not in (_IPV4, _IPV6):
            return Taken(None, missing, body)
        from ipaddress import ip_address

        return Taken(str(ip_address(body)), missing)

    def _in_order(self, head: ItemHead, body: bytes) -> bytes:
        """
        Return the bytes of a string in the order of its characters.

        In a string that was logged as words, the first byte of each word is in the low bits.
        """
        if head.token is not Token.STACK_COUNT or self._order == "little":
            return body
        size = self._word_size
        return b"".join(body[n : n + size][::-1] for n in range(0, len(body), size))

    def _fault(self, head: ItemHead, body: bytes, missing: int) -> Taken:
        if len(body) != self._word_size:
            return Taken(None, missing, body, "address of a fault")
        address, is_selector = int.from_bytes(body, self._order), head.token == Token.SELECTOR_FAULT
        is_unseen = not is_selector and is_unseen_entry(address, self._word_size)
        return Taken(Fault(address, is_selector, is_unseen))


def _without_zeros(words: tuple[int, ...]) -> tuple[int, ...]:
    """Return words without trailing zeros, which tables store after a call stack."""
    count = len(words)
    while count and not words[count - 1]:
        count -= 1
    return words[:count]


def _text(data: bytes) -> str:
    """Return the text of a string, which ends at its first NUL as in C."""
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


# The fast path for common templates, whose placeholders are all numbers of fixed size. Its data are one structure, and
# its text one format string of Python, whose conversions are those of C. Records that do not match exactly take the
# slow path, which yields the same text; a test compares them.

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_NUMBERS = {
    Conversion.SIGNED: "d",
    Conversion.UNSIGNED: "d",
    Conversion.HEXADECIMAL: "x",
    Conversion.OCTAL: "o",
    Conversion.VALUE: "s",
}


class CompiledTemplate(NamedTuple):
    """
    The structure of a record's data, and the format string for its values.

    ``readable`` are the values printed by ``readable_number``, each with its size in bytes.
    """

    layout: struct.Struct
    form: str
    readable: tuple[tuple[int, int], ...]

    def text_of(self, data: bytes, start: int) -> str:
        """Return the text of the data at ``start``, which must have the size of the structure."""
        values = self.layout.unpack_from(data, start)
        if not self.readable or max(values) < AMOUNT:  # the common case
            return self.form % values
        shown: list[int | str] = [*values]
        for at, size in self.readable:
            shown[at] = readable_number(values[at], size)
        return self.form % tuple(shown)


@lru_cache(maxsize=4096)
def compiled_of(template: Template, word_size: int, byte_order: ByteOrder) -> CompiledTemplate | None:
    """
    Return the ``struct`` and the format string that print a template's records without decoding parts.

    Return None if the template has placeholders other than plain numbers.
    """
    codes = "<" if byte_order == "little" else ">"
    lines = [_literal(template.desc)] if template.desc else []
    readable: list[tuple[int, int]] = []
    count = 0
    for parts in template.lines:
        line = ""
        for part in parts:
            match part:
                case Text(text):
                    line += _literal(text)
                case Skip(count):
                    codes += f"{count}x"
                case Placeholder() if not part.is_item and (conversion := _conversion(part)) is not None:
                    size = part.size or word_size
                    codes += _CODES[size].lower() if part.conversion is Conversion.SIGNED else _CODES[size]
                    if part.conversion is Conversion.VALUE:
                        readable.append((count, size))
                    count += 1
                    line += conversion
                case _:
                    return None
        lines.append(line)
    return CompiledTemplate(struct.Struct(codes), "\n".join(lines), tuple(readable))


def _literal(text: str) -> str:
    return escaped(text, "\n\t").replace("%", "%%")


def _conversion(part: Placeholder) -> str | None:
    """Return the conversion of Python's ``%`` operator with the same output for a number, or None if there is none."""
    width = part.width
    if part.conversion is Conversion.POINTER and not width.columns:
        return "0x%x"
    letter = _NUMBERS.get(part.conversion)
    if letter is None or part.precision == 0 or width.has_prefix:  # C and Python differ for these
        return None
    if width.in_capitals:
        letter = letter.upper()
    text = (
        "%"
        + width.plus * (part.conversion is Conversion.SIGNED)
        + "-" * width.to_left
        + "0" * (width.with_zeros and not width.to_left and part.precision is None)
    )
    text += str(width.columns) if width.columns else ""
    return text + (f".{part.precision}" if part.precision is not None else "") + letter


# The data of a template's records as named, typed fields, for formats that have columns or types. The name of a field
# is in its placeholder, ``%(pid)d``, or in the text before it: ``pid=%d`` is ``pid``, ``*arg0=%nv`` is ``at_arg0``.
# Fields are in the order of the placeholders, one for each, but not for header items and skipped bytes.

_NAME = re.compile(r"(?<!\w)([A-Za-z_][A-Za-z0-9_]*)[\s\"'(\[{<]*[=:]?[\s\"'(\[{<]*(?:0[xX])?\Z")
_EXPRESSION = re.compile(r"(?:^|\s)(?P<what>[^\s=]*[^\w\s=.][^\s=]*|\w+(?:\.\w+)+)=[\"']?\Z")
"""The name in a derived template for the contents of memory, or a computed value: ``*(8+arg0)=``."""
_NAME_MAX = 64
_NAME_REACH = 100
"""Number of characters before a placeholder in which its name is searched."""


class FieldKind(enum.Enum):
    """Types of the values of a template's fields."""

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
    Field of a template.

    ``name`` is a C identifier that is unique in the template. ``size`` is the size of one element in bytes, or 0 for
    STRING and BYTES. ``base`` is the base in which numbers are printed. The value of an array is a tuple.
    """

    name: str
    kind: FieldKind
    size: int
    base: int
    is_array: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """
    The values of a record's fields, and the bytes outside of them.

    A value may be a ``Fault`` if it could not be read at the hit, or None if the data ended before. The value of a
    CHARACTER is its code.
    """

    values: tuple[Value, ...]
    rest: bytes


@lru_cache(maxsize=4096)
def fields_of(template: Template, word_size: int) -> tuple[Field, ...]:
    """Return the fields of a template's records; a number without a size has ``word_size`` bytes."""
    fields: list[Field] = []
    taken: set[str] = set()
    for placeholder, before in _with_text_before(template):
        kind, base = _KINDS[placeholder.conversion]
        size = word_size if placeholder.size is None else placeholder.size
        unnamed = "stack" if placeholder.conversion is Conversion.STACK else f"arg{len(fields)}"
        name = placeholder.field or _name_in(before[-_NAME_REACH:]) or unnamed
        joint = "" if placeholder.field and not name[-1].isdigit() else "_"
        fields.append(Field(unique_name(name, taken, joint=joint), kind, size, base, placeholder.is_array))
    return tuple(fields)


def unique_name(name: str, taken: set[str], *, joint: str = "_", fold: Callable[[str], str] = str) -> str:
    """
    Return ``name`` with the first number that makes it unique, and add the result to ``taken``.

    ``joint`` separates name and number. Names are compared after ``fold``, such as ``str.lower``.
    """
    found, number = name, 2
    while fold(found) in taken:
        found, number = f"{name}{joint}{number}", number + 1
    taken.add(fold(found))
    return found


def _name_in(before: str) -> str:
    """
    Return the field name at the end of the text before a placeholder, or an empty string if there is none.

    ``*(8+arg0)=`` yields ``at_8_arg0``.
    """
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
    """Return the values of the fields in a record; this never raises, whatever its data are."""
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
