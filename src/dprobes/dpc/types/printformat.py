"""
The formats of ``printf``: C's conversions, and those of templates, as lines of a template (``docs/templates.md``).

A conversion says how a value is shown. Its type says how large it is, so that most length modifiers (``l``, ``z``) mean
nothing; those are left that cut a number (``h``, ``hh``), and ``%lc`` is ``%C``, a character by its code.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.dpc.types.ctype import INT, Array, Enumeration, Integer, Network, Pointer, String
from dprobes.dpc.types.ctype import Stack as StackType
from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.quickenum import Enum

if TYPE_CHECKING:
    from dprobes.dpc.types.ctype import CType

__all__ = ["WIDTH_MAX", "Conversion", "Form", "conversions", "lines_of", "named", "placeholder", "widest"]

_CONVERSION = lazy_pattern(r"%(?:(?P<percent>%)|(?P<flags>[-0+ #]*)(?P<width>[0-9]*)(?P<precision>(?:\.[0-9]*)?)"
                         r"(?P<length>(?:hh|h|ll|l|z|t|j|L|q)?)(?P<letter>[A-Za-z]))")  # fmt: skip
_SIZES = {1: "b", 2: "w", 4: "d", 8: "q"}
_NUMBERS = "diuxXocCpaveT"
_NAMES_MAX = 256
"""Names of an enumeration that a record knows; others are shown by their numbers."""

WIDTH_MAX = 4095
"""The largest width and precision, those of templates."""

_CUT = {"h": 2, "hh": 1}
"""Bytes that are left of a number by length modifiers."""

_TEMPLATE_LETTERS = {"i": "d", "C": "c"}
_FLAGGED = "diuxXo"
"""Conversions whose flags mean something but for '-'."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """
    A conversion: ``start`` and ``end`` are where it stands in the format, ``layout`` is flags, width, precision.

    Of a number it shows ``bytes_shown`` bytes, None if all of its type.
    """

    start: int
    end: int
    layout: str
    letter: str
    bytes_shown: int | None = None


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
            letter, length = match["letter"], match["length"]
            if letter == "c":
                letter, length = ("C", "") if length == "l" else ("c", "hh")
            cut = _CUT.get(length) if letter in f"{_FLAGGED}c" else None
            found.append(Conversion(start, position, _layout(match), letter, cut))
    return found, None


def widest(conversion: Conversion) -> int:
    """Return the larger one of a width and a precision; of more digits than make sense a number that is too large."""
    numbers = re.findall(r"[0-9]+", conversion.layout)
    return max((int(number[:20]) for number in numbers), default=0)


def _layout(match: re.Match[str]) -> str:
    """Return flags, width and precision as a template has them: no flag is there that does nothing."""
    flags, width, precision = match["flags"], match["width"], match["precision"]
    if match["letter"] not in _FLAGGED:
        flags = "-" if "-" in flags else ""
    elif match["letter"] not in "di":
        flags = flags.replace("+", "").replace(" ", "")
    if not width:
        flags = flags.replace("-", "").replace("0", "")
    kept = "".join(flag for flag in "-0+ #" if flag in flags)
    return kept + width + (f"{precision}0" if precision == "." else precision)


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
            return _string(conversion.layout, type_) if letter in "sv" else None
        case Network():
            return f"%*{conversion.layout.partition('.')[0]}I" if letter in "sv" else None
        case StackType():
            return "%*k" if letter in "ksv" else None
        case Array(element, count) if count is not None and letter not in "hs":
            return placeholder(conversion, element, Form.BYTES)
        case Array(shown=shown) if letter in "hvs":
            if letter == "s":
                return _string(conversion.layout, String(shown + 1, marks=bool(shown)))
            return f"%*.{shown}~h" if shown else f"%*{conversion.layout}h"
        case Array():
            return None
        case Enumeration() if conversion.letter in "sv" and type_.values:
            return _named(conversion, type_, form)
        case Integer() | Enumeration() | Pointer():
            if conversion.letter not in _NUMBERS or (letter == "c" and isinstance(type_, Pointer)):
                return None
            integer = type_.base if isinstance(type_, Enumeration) else type_
            if letter == "d" and isinstance(integer, Integer) and not integer.is_signed and integer.size < INT.size:
                letter = "u"
            is_word = form is Form.WORD or isinstance(integer, Pointer) or integer.is_long
            size = "n" if is_word else _SIZES[integer.size]
            return f"%{'' if form is Form.RAW else '*'}{conversion.layout}{size}{letter}"
    return None


def _string(layout: str, type_: String) -> str:
    """Return the place-holder of a string, with a mark where it is cut that the program has not asked for."""
    width, _, precision = layout.partition(".")
    if not type_.marks or (precision and int(precision) <= type_.shown):
        return f"%*{layout}s"
    return f"%*{width}.{type_.shown}~s"


def named(holder: str, name: str, *, is_list: bool = False, has_commas: bool = False) -> str:
    """Return a place-holder that says the name of its field; a list of numbers has one name for all."""
    brackets = "[,]" if has_commas else "[]"
    return f"%({name}{brackets * (is_list and not holder.endswith('h'))}){holder[1:]}"


def _named(conversion: Conversion, type_: Enumeration, form: Form) -> str:
    """Return the place-holder that shows a number by the name that an enumeration gives it."""
    size = "n" if form is Form.WORD else _SIZES[type_.base.size]
    width = conversion.layout.partition(".")[0]
    first: dict[int, str] = {}  # of several names of a number the first one
    for name, value in type_.values.items():
        first.setdefault(type_.base.cut(value), name)
    names = ",".join(f"{name}={value}" for value, name in list(first.items())[:_NAMES_MAX])
    letter = "E" if type_.base.is_signed else "U"
    return f"%{'' if form is Form.RAW else '*'}{width}{size}{letter}{{{names}}}"


def lines_of(text: str, places: list[tuple[Conversion, str]]) -> list[str]:
    """Return the lines of a template for a format in which place-holders take the places of conversions."""
    parts, position = [], 0
    for conversion, holder in places:
        parts += [text[position : conversion.start], holder]
        position = conversion.end
    whole = "".join([*parts, text[position:]])
    return whole.removesuffix("\n").split("\n")
