"""
Formats of ``printf``: C's conversions and those of templates, as template lines (``docs/reference/templates.md``).

A conversion sets the form of output. The size follows from the type of the value, so most length modifiers (``l``,
``z``) have no effect. The exceptions are ``h`` and ``hh``, which truncate a number, and ``%lc``, which is ``%C``, a
character by its code.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.types.c_types import INT, Array, Enumeration, Integer, Network, Pointer, Record, String
from dprobes.dpc.types.c_types import Stack as StackType

if TYPE_CHECKING:
    from dprobes.dpc.types.c_types import CType

__all__ = [
    "WIDTH_MAX",
    "Conversion",
    "FirstElements",
    "Form",
    "conversions",
    "expanded",
    "is_text",
    "lines_of",
    "named",
    "placeholder",
    "widest",
]

_CONVERSION = re.compile(r"%(?:(?P<percent>%)|(?P<flags>[-0+ #]*)(?P<width>[0-9]*)(?P<precision>(?:\.[0-9]*)?)"
                         r"(?P<length>(?:hh|h|ll|l|z|t|j|L|q)?)(?P<letter>[A-Za-z]))")  # fmt: skip
_SIZES = {1: "b", 2: "w", 4: "d", 8: "q"}
_NUMBERS = "diuxXocCpaveT"
_NAMES_MAX = 256
"""Maximum number of enumeration names in a record; other values are printed as numbers."""

WIDTH_MAX = 4095
"""Maximum width and precision in templates."""

_CUT = {"h": 2, "hh": 1}
"""Size in bytes to which length modifiers truncate a number."""

_TEMPLATE_LETTERS = {"i": "d", "C": "c"}
_FLAGGED = "diuxXo"
"""Conversions for which flags other than '-' have an effect."""


class Conversion(NamedTuple):
    """
    Conversion such as ``%-8lx`` at ``start`` to ``end`` (excluded) of a ``printf`` format.

    ``bytes_shown`` is the size in bytes to which a number is truncated, as by ``hh``, or None for all bytes.
    """

    start: int
    end: int
    layout: str
    letter: str
    bytes_shown: int | None = None


def conversions(text: str) -> tuple[list[Conversion], int | None]:
    """Return a format's conversions, and the position of a percent sign that begins no valid one, or None."""
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
    """Return the larger of width and precision, computed from at most the first 20 digits of each."""
    numbers = re.findall(r"[0-9]+", conversion.layout)
    return max((int(number[:20]) for number in numbers), default=0)


def _layout(match: re.Match[str]) -> str:
    """Return flags, width and precision in template form, without flags that have no effect."""
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
    """The form in which a value is logged: its bytes, an item of its bytes, or an item of a word."""

    RAW = "raw"
    BYTES = "bytes"
    WORD = "word"


def placeholder(conversion: Conversion, type_: CType, form: Form) -> str | None:
    """
    Return the template's place-holder for a value of a type, logged as ``form``.

    Return None if the conversion does not fit it.

    Numbers of types smaller than ``int`` are shown as the ``int`` to which C promotes them.
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
        case Integer() | Enumeration() | Pointer() if conversion.letter in _NUMBERS:
            return _number(conversion.layout, letter, type_, form)
    return None


def _number(layout: str, letter: str, type_: Integer | Enumeration | Pointer, form: Form) -> str | None:
    """
    Return the place-holder of a number.

    ``layout`` has flags and width. Return None if the letter does not fit the type.
    """
    if letter == "c" and isinstance(type_, Pointer):
        return None
    integer = type_.base if isinstance(type_, Enumeration) else type_
    if letter == "d" and isinstance(integer, Integer) and not integer.is_signed and integer.size < INT.size:
        letter = "u"
    is_word = form is Form.WORD or isinstance(integer, Pointer) or integer.is_long
    size = "n" if is_word else _SIZES[integer.size]
    return f"%{'' if form is Form.RAW else '*'}{layout}{size}{letter}"


def _string(layout: str, type_: String) -> str:
    """Return the place-holder of a string, with a truncation mark unless the program's precision truncates it."""
    width, _, precision = layout.partition(".")
    if not type_.marks or (precision and int(precision) <= type_.shown):
        return f"%*{layout}s"
    return f"%*{width}.{type_.shown}~s"


def named(holder: str, name: str, *, is_list: bool = False, has_commas: bool = False) -> str:
    """
    Return a place-holder with the name of its field; a list of numbers (``is_list``) has one name for all.

    With ``has_commas`` the numbers are separated by commas.
    """
    brackets = "[,]" if has_commas else "[]"
    return f"%({name}{brackets * (is_list and not holder.endswith('h'))}){holder[1:]}"


def _named(conversion: Conversion, type_: Enumeration, form: Form) -> str:
    """Return the place-holder that prints a number by its name in the enumeration."""
    size = "n" if form is Form.WORD else _SIZES[type_.base.size]
    width = conversion.layout.partition(".")[0]
    first: dict[int, str] = {}  # the first name of each number
    for name, value in type_.values.items():
        first.setdefault(type_.base.cut(value), name)
    names = ",".join(f"{name}={value}" for value, name in list(first.items())[:_NAMES_MAX])
    letter = "E" if type_.base.is_signed else "U"
    return f"%{'' if form is Form.RAW else '*'}{width}{size}{letter}{{{names}}}"


def lines_of(text: str, places: list[tuple[Conversion, str]]) -> list[str]:
    """Return the lines of the template for a format, with conversions replaced by place-holders."""
    parts, position = [], 0
    for conversion, holder in places:
        parts += [text[position : conversion.start], holder]
        position = conversion.end
    whole = "".join([*parts, text[position:]])
    return whole.removesuffix("\n").split("\n")


# ``%S``: a structure printed whole, ``{next=0x0, state=IDLE, name="x", values=[1, 2]}``.

VALUES_MAX = 64
"""Maximum number of values of one structure; each is an item of the record."""

_ELEMENTS_MAX = 8
_DEPTH_MAX = 4


class Expansion(NamedTuple):
    """A ``printf`` format in which the members of a structure replace ``%S``, and the values of its conversions."""

    format: str
    values: tuple[syntax_tree.Expression | FirstElements, ...]


class FirstElements(NamedTuple):
    """The first elements of an array, printed as a list."""

    array: syntax_tree.Expression
    shown: int


def is_text(type_: CType) -> bool:
    """Return whether a type is an array of characters, which is printed as a string."""
    return (
        isinstance(type_, Array)
        and type_.count is not None
        and isinstance(type_.element, Integer)
        and type_.element.size == 1
        and "char" in type_.element.name
    )


def expanded(expression: syntax_tree.Expression, record: Record, word_size: int) -> Expansion:
    """
    Return the ``printf`` format and the values that print a structure's members, each as ``name=value``.

    Dots stand for members after the first ``VALUES_MAX`` values, for values larger than a word, and for virtual bases.
    """
    values: list[syntax_tree.Expression | FirstElements] = []
    return Expansion(_Expander(word_size, values).record(expression, record, 0), tuple(values))


class _Expander:
    def __init__(self, word_size: int, values: list[syntax_tree.Expression | FirstElements]) -> None:
        self._word_size = word_size
        self._values = values

    def record(self, expression: syntax_tree.Expression, record: Record, depth: int) -> str:
        """
        Return the format of a structure's members, and append their values.

        ``depth`` counts the structures around it.
        """
        values = self._values
        parts: list[str] = []
        for member in record.members or ():
            if len(values) >= VALUES_MAX:
                parts.append("...")
                break
            if member.name:
                place = syntax_tree.MemberAccess(expression, member.name, is_arrow=False, span=expression.span)
                parts.append(f"{member.name}={self._value(place, member.type, depth)}")
            elif isinstance(member.type, Record) and member.type.members is None:
                parts.append(f"{member.type.tag}=...")  # a virtual base
            elif isinstance(member.type, Record) and depth < _DEPTH_MAX:
                # The members of an unnamed structure are members of the enclosing structure.
                parts.append(self.record(expression, member.type, depth + 1)[1:-1])
        return f"{{{', '.join(parts)}}}"

    def _value(self, place: syntax_tree.Expression, type_: CType, depth: int) -> str:
        values = self._values
        match type_:
            case Integer(size=size) if size <= self._word_size:
                values.append(place)
                return _conversion_of(type_)
            case Enumeration() if type_.base.size <= self._word_size:
                values.append(place)
                return _conversion_of(type_)
            case Pointer():
                values.append(place)
                return _conversion_of(type_)
            case Record() if depth < _DEPTH_MAX:
                return self.record(place, type_, depth + 1)
            case Array() if is_text(type_) and type_.count:
                values.append(place)
                return '"%s"'
            case Array(Integer() | Enumeration() | Pointer() as element, count) if count:
                values.append(FirstElements(place, min(count, _ELEMENTS_MAX)))
                return f"[{_conversion_of(element)}{', ...' if count > _ELEMENTS_MAX else ''}]"
            case Array(element, count) if depth < _DEPTH_MAX and count is not None:
                parts = []
                for number in range(min(count, _ELEMENTS_MAX)):
                    if len(values) >= VALUES_MAX:
                        break
                    index = syntax_tree.Number(number, "", is_decimal=True, span=place.span)
                    parts.append(self._value(syntax_tree.Index(place, index, place.span), element, depth + 1))
                return f"[{', '.join(parts)}{', ...' if len(parts) < count else ''}]"
        return "..."


def _conversion_of(type_: Integer | Enumeration | Pointer) -> str:
    """Return the conversion that prints a number of a type."""
    match type_:
        case Integer(size=size):
            return "%d" if type_.is_signed or type_.is_bool or size < 4 else "%u"
        case Enumeration():
            return "%v" if type_.values else "%d"
    return "%p"
