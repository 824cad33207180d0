"""
The formats of ``printf``: C's conversions, and those of templates, as lines of a template (``docs/templates.md``).

A conversion says how a value is shown. Its type says how large it is, so that length modifiers (``l``, ``z``) mean
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.types.ctype import INT, Array, Enumeration, Integer, Network, Pointer, String
from dprobes.dpc.types.ctype import Stack as StackType
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.quickenum import Enum

if TYPE_CHECKING:
    from dprobes.dpc.types.ctype import CType

__all__ = ["Conversion", "Form", "conversions", "lines_of", "named", "placeholder"]

_CONVERSION = lazy_pattern(r"%(?:(?P<percent>%)|(?P<flags>[-0+ #]*)(?P<width>[0-9]*)(?P<precision>(?:\.[0-9]*)?)"
                         r"(?:hh|h|ll|l|z|t|j|L|q)?(?P<letter>[A-Za-z]))")  # fmt: skip
_SIZES = {1: "b", 2: "w", 4: "d", 8: "q"}
_NUMBERS = "diuxXocpavbeT"
_NAMES_MAX = 256
"""Names of an enumeration that a record knows; others are shown by their numbers."""

_TEMPLATE_LETTERS = {"i": "d", "X": "x", "b": "x"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion: ``start`` and ``end`` are where it stands in the format, ``layout`` is flags, width, precision."""

    start: int
    end: int
    layout: str
    letter: str


def conversions(text: str) -> tuple[list[Conversion], int | None]:
    """Return the conversions of a format, and where a percent sign stands that begins none."""
    found: list[Conversion] = []
    position = 0
    while (start := text.find("%", position)) >= 0:
        match = _CONVERSION.match(text, start)
        if match is None:
            return found, start
        position = match.end()
        if match["percent"] is None:
            flags = "".join(flag for flag in "-0" if flag in match["flags"])
            found.append(Conversion(start, position, flags + match["width"] + match["precision"], match["letter"]))
    return found, None


class Form(Enum):
    """Say how a value is logged: as its bytes, as an item of its bytes, or as an item of a word."""

    RAW = "raw"
    BYTES = "bytes"
    WORD = "word"


def placeholder(conversion: Conversion, type_: CType, form: Form) -> str | None:
    """
    Return the place-holder of a template for a value of a type, None if the conversion does not fit it.

    Numbers of types smaller than ``int`` are shown as the ``int`` that C makes of them.
    """
    letter = _TEMPLATE_LETTERS.get(conversion.letter, conversion.letter)
    match type_:
        case String():
            return f"%*{conversion.layout}s" if letter in "sv" else None
        case Network():
            return f"%*{conversion.layout.partition('.')[0].lstrip('0')}I" if letter in "sv" else None
        case StackType():
            return "%*k" if letter in "ksv" else None
        case Array(element, count) if count is not None and letter not in "hs":
            return placeholder(conversion, element, Form.BYTES)
        case Array():
            return f"%*{conversion.layout}{'h' if letter == 'v' else letter}" if letter in "hvs" else None
        case Enumeration() if conversion.letter in "sv" and type_.values:
            return _named(conversion, type_, form)
        case Integer() | Enumeration() | Pointer():
            if conversion.letter not in _NUMBERS:
                return None
            integer = type_.base if isinstance(type_, Enumeration) else type_
            if letter == "d" and isinstance(integer, Integer) and not integer.is_signed and integer.size < INT.size:
                letter = "u"
            is_word = form is Form.WORD or (letter in "eT" and integer.size == INT.size)  # of a program of 32 bits
            size = "n" if is_word else _SIZES[integer.size]
            return f"%{'' if form is Form.RAW else '*'}{conversion.layout}{size}{letter}"
    return None


def named(holder: str, name: str, *, is_list: bool = False, has_commas: bool = False) -> str:
    """Return a place-holder that says the name of its field; a list of numbers has one name for all."""
    brackets = "[,]" if has_commas else "[]"
    return f"%({name}{brackets * (is_list and not holder.endswith('h'))}){holder[1:]}"


def _named(conversion: Conversion, type_: Enumeration, form: Form) -> str:
    """Return the place-holder that shows a number by the name that an enumeration gives it."""
    size = "n" if form is Form.WORD else _SIZES[type_.base.size]
    width = conversion.layout.partition(".")[0].lstrip("0")
    signed = Integer("", type_.base.size, is_signed=True, rank=0)  # as the place-holder takes the number
    if form is Form.WORD:
        signed = type_.base
    names = ",".join(f"{name}={signed.cut(value)}" for name, value in list(type_.values.items())[:_NAMES_MAX])
    return f"%{'' if form is Form.RAW else '*'}{width}{size}E{{{names}}}"


def lines_of(text: str, places: list[tuple[Conversion, str]]) -> list[str]:
    """Return the lines of a template for a format in which place-holders take the places of conversions."""
    parts, position = [], 0
    for conversion, holder in places:
        parts += [text[position : conversion.start], holder]
        position = conversion.end
    whole = "".join([*parts, text[position:]])
    return whole.removesuffix("\n").split("\n")
