"""Data types of templates, and of the values that they extract."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.source_text import Span

__all__ = [
    "AMOUNT",
    "ERROR_MAX",
    "HEADER_ITEMS",
    "Conversion",
    "Fault",
    "HeaderValue",
    "Part",
    "Placeholder",
    "Skip",
    "Template",
    "Text",
    "Value",
    "Width",
    "character",
    "readable_number",
]

# The values that templates extract from records.

ERROR_MAX = 4095
"""MAX_ERRNO: results of the kernel from -MAX_ERRNO to -1 are errors (include/linux/err.h)."""

_UNICODE_MAX = 0x10FFFF

_AMOUNT_MAX = {4: 1 << 27, 8: 1 << 40}
"""
Limits of amounts by size in bytes: a greater number is probably an address.

32-bit programs begin above the first limit.
"""

_INT_END = 1 << 32

_SMALL = {4: _AMOUNT_MAX[4], 8: _INT_END - ERROR_MAX}
"""Limits by size in bytes, below which a number is certainly an amount."""

AMOUNT = min(_SMALL.values())
"""Limit below which a number of any size is an amount."""


@dataclass(frozen=True, slots=True)
class Fault:
    """
    Data that could not be read: the address of the fault, or, with ``is_selector``, a segment selector.

    With ``is_unseen`` the data were to be read at the entry of a call, and only the return was seen.
    """

    address: int
    is_selector: bool = False
    is_unseen: bool = False

    def __str__(self) -> str:
        if self.is_unseen:
            return "<entry not seen>"
        return f"<{'selector ' if self.is_selector else ''}fault at {self.address:#x}>"


Value = int | str | bytes | tuple[int, ...] | Fault | None
"""The value of a field, or None if the data ended before it."""


def readable_number(number: int, size: int) -> str:
    """
    Return an unsigned number of ``size`` bytes in readable form: amounts in decimal, probable addresses in hexadecimal.

    Possible errors, -4095 to -1, are printed as negative numbers, also as an ``int`` of 32 bits in 8 bytes.
    """
    if size < 4 or number < _SMALL[size]:
        return str(number)
    if number >= (1 << 8 * size) - ERROR_MAX:
        return str(number - (1 << 8 * size))
    if number < _INT_END:
        return str(number - _INT_END) if size == 8 else f"{number:#x}"
    return str(number) if number < _AMOUNT_MAX[size] else f"{number:#x}"


def character(code: int) -> str:
    """Return the character with a code, or a substitute for an invalid code."""
    return chr(code) if code <= _UNICODE_MAX else f"<no character: {code:#x}>"


class Conversion(enum.Enum):
    """The conversion of a placeholder; the value is its letter."""

    SIGNED = "d"
    UNSIGNED = "u"
    HEXADECIMAL = "x"
    OCTAL = "o"
    CHARACTER = "c"
    STRING = "s"
    POINTER = "p"
    ADDRESS = "a"
    DUMP = "h"
    REST = "r"
    ERROR = "e"
    VALUE = "v"
    STACK = "k"
    ENUMERATION = "E"
    UNSIGNED_ENUMERATION = "U"
    DURATION = "T"
    NETWORK = "I"

    @property
    def is_signed(self) -> bool:
        """True if numbers are signed."""
        return self in (Conversion.SIGNED, Conversion.ERROR, Conversion.ENUMERATION, Conversion.DURATION)


HEADER_ITEMS = {
    "major": "major",
    "minor": "minor",
    "cpu": "cpu",
    "pid": "pid",
    "tid": "tid",
    "uid": "uid",
    "name": "process_name",
    "cs": "cs",
    "ip": "ip",
    "ss": "ss",
    "sp": "sp",
    "time": "time",
}
"""The valid names in ``%{...}``, with their fields of ``LogRecord``."""


@dataclass(frozen=True, slots=True)
class Width:
    """
    Width of a printed value: a minimum number of characters, padded on the left with blanks.

    With ``to_left``, it is padded on the right; with ``with_zeros``, by zeros. ``plus`` is the prefix of a signed
    number that is not negative, ``+`` or a blank. With ``has_prefix``, hexadecimal numbers begin with ``0x`` and octal
    numbers with ``0``. ``in_capitals`` is set for ``%X``.
    """

    columns: int = 0
    to_left: bool = False
    with_zeros: bool = False
    plus: str = ""
    has_prefix: bool = False
    in_capitals: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Literal text of a template, which is printed unchanged."""

    text: str


@dataclass(frozen=True, slots=True)
class Placeholder:
    """
    A placeholder for data, which are extracted and printed.

    ``size`` is that of one number in bytes: None for the record's word, 0 for other values. With ``is_item`` the data
    are one prefixed item, else raw bytes. ``span`` is its place in the source. ``names`` are the numbers of an
    enumeration with their names. ``field`` is the explicit name of the field; then an item is one number, unless it
    ``is_list``. With ``marks_cut`` a string longer than ``precision`` bytes is truncated, and followed by a mark.
    """

    conversion: Conversion
    size: int | None = None
    is_item: bool = False
    width: Width = Width()
    precision: int | None = None
    span: Span | None = None
    names: tuple[tuple[int, str], ...] = ()
    field: str = ""
    is_list: bool = False
    has_commas: bool = False
    marks_cut: bool = False

    @property
    def is_array(self) -> bool:
        """True if the field's value is a list of numbers."""
        if not self.is_item or self.size == 0:
            return False
        return self.is_list or not self.field or self.conversion is Conversion.STACK


@dataclass(frozen=True, slots=True)
class HeaderValue:
    """
    A placeholder for an item of the record's header; ``name`` is a key of ``HEADER_ITEMS``.

    ``precision`` is the maximum number of characters of a process name that are printed.
    """

    name: str
    width: Width = Width()
    precision: int | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """The part ``%+N`` of a template: ``count`` bytes of the data that are not printed."""

    count: int


Part = Text | Placeholder | HeaderValue | Skip


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """
    The template of the records with one major and minor code.

    ``desc`` is printed first if it is not empty, then each of ``lines``. ``probe`` is the name that an instrumentation
    set promises for the probe. Templates are compared by identity, so that derived data can be cached in dictionaries.
    """

    major: int
    minor: int
    desc: str = ""
    lines: tuple[tuple[Part, ...], ...] = ()
    span: Span | None = None
    probe: str = ""
