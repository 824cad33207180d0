r"""
Lines of templates: the parser of the strings in ``fmt`` statements.

::

    %[field][*][flags][width][.precision][b|w|d|q|n]c      c = d u x X o c s p a e v T, with * also h k
    %[field][*][-][width][b|w|d|q|n]E{NAME=number,...}     U instead of E for unsigned numbers
    %[field]*[-][width].precision~s   a string with a mark where it is truncated
    %[field]r     %[field]*r     %+N     %[-][width][.precision]{item}     %%
    field = (NAME) | (NAME[])     flags = C's, of - 0 + # and a blank; '%+' and a digit is the skip

A letter ``d`` is a size if one of ``d u x X o c s p a h v``, ``E{`` or ``U{`` follows at once, and the conversion
otherwise.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import did_you_mean
from dprobes.formatters.templates.template_model import (
    HEADER_ITEMS,
    Conversion,
    HeaderValue,
    Part,
    Placeholder,
    Skip,
    Text,
    Width,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import Span

__all__ = ["Character", "parse_parts"]

_SIZES = {"b": 1, "w": 2, "d": 4, "q": 8, "n": None}

_NUMBERS = "duxXo"
_ADDRESSES = "pa"
_CONVERSIONS = "duxXocspahevkTEUI"
_AFTER_SIZE = "duxXocspahv"
"""Conversions before which a letter d is a size. Before any other letter, it is a conversion itself."""

_FROM_C = {
    "i": "write '%d'",
    "l": "sizes are b (1), w (2), d (4), q (8) and n (word): '%qd'",
    "z": "sizes are b (1), w (2), d (4), q (8) and n (word): '%nu'",
    "f": "there are no floating-point numbers; '%qx' prints the bits of a double",
    "*": "for an item '*' comes first: '%*8d'",
}
"""Hints with the equivalents of C's conversions and flags."""

_FIELD = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<list>\[,?\])?\Z")
_NAMED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<number>-?[0-9]{1,20})\Z")

FIELD_MAX = 64
"""Maximum length of a field's name in characters."""
WIDTH_MAX = 4095
"""Maximum width of a value in columns, which every C library supports (C17 7.21.6.1, 15)."""

PRECISION_MAX = 4095

ARRAY_WIDTH_MAX = 80
"""Maximum width and precision of an element of an array: an item may have very many elements."""

BYTES_MAX = 65535
"""Maximum size of a log buffer in bytes, and thus of all lengths and distances."""


class Character(NamedTuple):
    """A character of a string, with its escapes decoded, and its start and end in the file's text."""

    text: str
    start: int
    end: int


class _WrongError(Exception):
    def __init__(self, span: Span, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.span = span
        self.message = message
        self.hint = hint


def parse_parts(
    characters: Sequence[Character], place: Callable[[int, int], Span], diagnostics: Diagnostics, limit: int
) -> tuple[Part, ...]:
    """
    Return the parts of a line; parsing ends soon after ``limit`` parts. Errors go to ``diagnostics``.

    ``place`` returns the span between two positions in the text.
    """
    parts: list[Part] = []
    text: list[str] = []
    reader = _Reader(characters, place)
    while not reader.at_end and len(parts) <= limit:
        if reader.peek() != "%":
            text.append(reader.take())
            continue
        start = reader.position
        try:
            part = _placeholder(reader)
        except _WrongError as error:
            diagnostics.error(error.span, error.message, hint=error.hint)
            reader.position = max(reader.position, start + 1)
            continue
        if isinstance(part, str):
            text.append(part)
            continue
        if text:
            parts.append(Text("".join(text)))
            text = []
        parts.append(part)
    if text:
        parts.append(Text("".join(text)))
    return tuple(parts)


class _Reader:
    def __init__(self, characters: Sequence[Character], place: Callable[[int, int], Span]) -> None:
        self._characters = characters
        self._place = place
        self.position = 0

    @property
    def at_end(self) -> bool:
        return self.position >= len(self._characters)

    def peek(self, ahead: int = 0) -> str:
        """Return the character ``ahead`` positions after the next one, or an empty string after the end."""
        at = self.position + ahead
        return self._characters[at].text if at < len(self._characters) else ""

    def take(self) -> str:
        text = self._characters[self.position].text
        self.position += 1
        return text

    def takes(self, text: str) -> bool:
        if self.peek() == text:
            self.position += 1
            return True
        return False

    def digits(self) -> str:
        found = ""
        while self.peek() and self.peek() in "0123456789":
            found += self.take()
        return found

    def text_from(self, start: int) -> str:
        """Return the text that was read from ``start`` on."""
        return "".join(each.text for each in self._characters[start : self.position])

    def since(self, start: int) -> Span:
        """Return the span of the text read from ``start`` on, or of the character there if nothing was read."""
        return self.span(start, self.position)

    def span(self, start: int, end: int) -> Span:
        """Return the span of characters, at least one."""
        last = len(self._characters) - 1
        start = min(start, last)
        end = max(start, min(end - 1, last))
        return self._place(self._characters[start].start, self._characters[end].end)

    def here(self, start: int) -> Span:
        """Return the span of the next character, or at the end the span of all since ``start``."""
        if self.at_end:
            return self.since(start)
        character = self._characters[self.position]
        return self._place(character.start, character.end)


def _placeholder(reader: _Reader) -> Part | str:
    """Return the part for a placeholder; for ``%%`` the character."""
    start = reader.position
    reader.take()
    if reader.takes("%"):
        return "%"
    if reader.peek() == "+" and reader.peek(1) in "0123456789":  # also at the end of the text
        reader.take()
        return _skip(reader, start)
    field, brackets = _field(reader, start)
    is_list = bool(brackets)
    after_field = reader.position
    part = _after_field(reader, start)
    written = reader.since(start)
    if not field:
        return _checked(part, written)
    if not isinstance(part, Placeholder):
        raise _WrongError(written, "a name in brackets is for data; a header item has one")
    part = replace(part, field=field, is_list=is_list, has_commas="," in brackets, span=written)
    if is_list and (not part.is_item or part.size == 0 or part.conversion is Conversion.STACK):
        hint = f"write '%({field}){reader.text_from(after_field)}'"
        raise _WrongError(written, f"'{brackets}' is for the numbers of an item", hint)
    return _checked(part, written)


class _Written(NamedTuple):
    """The flags, width and precision of a conversion specification, and their positions in the line."""

    start: int
    """Position of the percent sign."""
    first: int
    """Position after the name of the field."""
    is_item: bool
    width_at: int
    width: Width
    precision_at: int
    precision: int | None
    marks_cut: bool
    size_at: int
    size: int | None
    has_size: bool
    end: int


def _after_field(reader: _Reader, start: int) -> Part:
    """Return the part for a placeholder, after its percent sign at ``start`` and its optional name were read."""
    first = reader.position
    is_item = reader.takes("*")
    width_at = reader.position
    width = _width(reader, start)
    precision_at = reader.position
    precision = _precision(reader, start)
    if reader.peek() == "{":
        if is_item:
            raise _WrongError(reader.since(start), "'*' is for data; a header item takes none")
        return _header_value(reader, start, width, precision)
    if precision is not None and reader.peek() not in ("s", "~", "h") and precision > PRECISION_MAX:
        message = f"expected a precision of at most {PRECISION_MAX}, found {precision}"
        raise _WrongError(reader.span(precision_at, reader.position), message)
    marks_cut = precision is not None and reader.takes("~")
    size_at = reader.position
    size, has_size = _size(reader, is_item=is_item)
    written = _Written(
        start, first, is_item, width_at, width, precision_at, precision, marks_cut,
        size_at, size, has_size, reader.position,
    )  # fmt: skip
    letter = reader.peek()
    if letter == "r" and not has_size:
        reader.take()
        if reader.position - first > 1 + is_item:
            raise _WrongError(reader.since(start), f"'%{'*' * is_item}r' takes no width, precision or size")
        return Placeholder(Conversion.REST, 0, is_item, span=reader.since(start))
    if not letter or letter not in _CONVERSIONS:
        raise _unknown(reader, start)
    reader.take()
    if letter == "X":
        written, letter = written._replace(width=replace(width, in_capitals=True)), "x"
    conversion = Conversion(letter)
    if conversion in (Conversion.DUMP, Conversion.STACK, Conversion.NETWORK):
        return _whole_item(reader, conversion, written)
    return _value(reader, conversion, written)


def _whole_item(reader: _Reader, conversion: Conversion, written: _Written) -> Placeholder:
    """
    Return the placeholder of a conversion that prints a whole self-describing item, and has almost no options.

    ``written`` are the options before the letter.
    """
    start, is_item, width, precision = written.start, written.is_item, written.width, written.precision
    if conversion is Conversion.NETWORK:
        if not is_item or written.has_size or precision is not None:
            raise _WrongError(
                reader.since(start), "'I' prints an item as a network address", "write '%*I', or '%*-15I'"
            )
        return Placeholder(conversion, 0, is_item, width, span=reader.since(start))
    if conversion is Conversion.STACK:
        _check_bare_item(reader, written, "k", "lists the addresses of", "write '%*k'")
        return Placeholder(conversion, None, is_item, span=reader.since(start))
    if written.marks_cut and is_item and not written.has_size and not width.columns:
        return Placeholder(conversion, 0, is_item, width, precision, reader.since(start), marks_cut=True)
    _check_bare_item(reader, written, "h", "dumps", "write '%*h', or '%r' for all the rest in hexadecimal")
    return Placeholder(conversion, 0, is_item, span=reader.since(start))


def _value(reader: _Reader, conversion: Conversion, written: _Written) -> Placeholder:
    """Return the placeholder of a number or a string, whose letter was read. ``written`` has the options before it."""
    width, precision = written.width, written.precision
    is_errno = conversion is Conversion.ERROR  # its '#' prints -1 as a number
    flag = _flag_of_numbers(replace(width, has_prefix=False) if is_errno else width)
    if conversion.value not in _NUMBERS and flag:
        raise _WrongError(reader.span(written.width_at, written.precision_at), f"flag '{flag}' is for numbers")
    size = _checked_size(reader, conversion, written)
    is_named = conversion in (Conversion.ENUMERATION, Conversion.UNSIGNED_ENUMERATION)
    names = _names(reader, written.start, conversion.value) if is_named else ()
    if written.marks_cut and (conversion is not Conversion.STRING or not written.is_item):
        raise _WrongError(reader.since(written.start), "'~' is for the string of an item: '%*.200~s'")
    span = reader.since(written.start)
    return Placeholder(
        conversion, size, written.is_item, width, precision, span, names, marks_cut=written.marks_cut
    )  # fmt: skip


def _checked_size(reader: _Reader, conversion: Conversion, written: _Written) -> int | None:
    """
    Return the size of one number in bytes: None for the word, 0 for a string.

    ``written`` has the options before the letter. Raise ``_WrongError`` for an invalid size or precision.
    """
    size, has_size = written.size, written.has_size
    if conversion is Conversion.STRING:
        if has_size:
            is_ambiguous = size == _SIZES["d"]
            hint = "write '%nds' for a number and the letter 's'" if is_ambiguous else "'%.16s' takes 16 characters"
            raise _WrongError(reader.span(written.size_at, written.end), "conversion 's' takes no size", hint)
        return 0
    if written.precision is not None and conversion.value not in _NUMBERS:
        span = reader.span(written.precision_at, written.size_at)
        raise _WrongError(span, f"conversion '{conversion.value}' takes no precision")
    if conversion.value in _ADDRESSES and has_size and size in (1, 2):
        message = f"an address has no {size} byte{'s' * (size > 1)}; sizes are d (4), q (8), n (word)"
        raise _WrongError(reader.span(written.size_at, written.end), message)
    if conversion is Conversion.CHARACTER and written.is_item and not has_size:
        return 1
    return size


def _checked(part: Part, written: Span) -> Part:
    """
    Return ``part``, or raise ``_WrongError`` if it is an array whose width or precision exceeds ``ARRAY_WIDTH_MAX``.

    ``written`` is the span of the part in the text, for the error.
    """
    if isinstance(part, Placeholder) and part.is_array:
        found = max(part.width.columns, part.precision or 0)
        if found > ARRAY_WIDTH_MAX:
            message = f"expected a width and precision of at most {ARRAY_WIDTH_MAX} for elements, found {found}"
            raise _WrongError(written, message)
    return part


def _field(reader: _Reader, start: int) -> tuple[str, str]:
    """
    Consume ``(NAME)`` or ``(NAME[])`` after a percent sign; return the name and ``[]``, or empty strings without them.

    ``start`` is the position of the percent sign.
    """
    if not reader.takes("("):
        return "", ""
    at = reader.position
    while not reader.at_end and reader.peek() != ")":
        reader.take()
    text = reader.text_from(at)
    if not reader.takes(")"):
        raise _WrongError(reader.since(start), "'%(' without its ')'", "'%(size)d' is a number whose field is 'size'")
    match = _FIELD.match(text)
    if match is None:
        message = f"expected the name of a field, found '{text}'"
        raise _WrongError(reader.since(start), message, "names are of letters, digits and underscores: '%(size)d'")
    if len(match["name"]) > FIELD_MAX:
        message = f"expected a name of at most {FIELD_MAX} characters, found {len(match['name'])}"
        raise _WrongError(reader.since(start), message)
    return match["name"], match["list"] or ""


def _flag_of_numbers(width: Width) -> str:
    """Return a flag of ``width`` that is valid only for numbers (``0``, ``#``, ``+`` or blank), or an empty string."""
    return "0" if width.with_zeros else "#" if width.has_prefix else width.plus


def _names(reader: _Reader, start: int, letter: str) -> tuple[tuple[int, str], ...]:
    """
    Consume ``{NAME=number,...}`` after the letter of an enumeration; return pairs of number and name.

    ``start`` is the position of the percent sign, for errors.
    """
    hint = "write the names: '%dE{IDLE=0,BUSY=7}'"
    if not reader.takes("{"):
        raise _WrongError(reader.since(start), f"conversion '{letter}' prints the name of a number", hint)
    at = reader.position
    text = ""
    while not reader.at_end and reader.peek() != "}":
        text += reader.take()
    if reader.at_end:
        raise _WrongError(reader.since(start), f"'{letter}{{' without its '}}'")
    span = reader.since(at)
    reader.take()
    found = []
    for each in text.split(","):
        match = _NAMED.match(each)
        if match is None:
            raise _WrongError(span, f"expected NAME=number, found '{each}'", hint)
        found.append((int(match["number"]), match["name"]))
    return tuple(found)


def _check_bare_item(reader: _Reader, written: _Written, letter: str, what: str, hint: str) -> None:
    """
    Raise ``_WrongError`` unless ``letter`` is preceded by ``*`` and no other option.

    ``what`` is the verb of the message, such as "prints". ``hint`` is the correct form.
    """
    if not written.is_item:
        raise _WrongError(reader.since(written.start), f"'{letter}' {what} an item", hint)
    if reader.position - written.first > len("*h"):
        raise _WrongError(reader.since(written.start), f"'%*{letter}' takes no width, precision or size")


def _skip(reader: _Reader, start: int) -> Skip:
    digits = reader.digits()
    if not digits:
        raise _WrongError(reader.since(start), "'%+' needs the number of bytes to skip", "'%+4' skips 4 bytes")
    if len(digits) > len(str(BYTES_MAX)) or not 0 < int(digits) <= BYTES_MAX:
        raise _WrongError(reader.since(start), f"expected 1 to {BYTES_MAX} bytes to skip, found {digits}")
    return Skip(int(digits))


def _width(reader: _Reader, start: int) -> Width:
    flags = ""
    while (flag := reader.peek()) and flag in "-0+ #'":
        at = reader.position
        flags += reader.take()
        if flag == "'":
            raise _WrongError(reader.since(at), 'unknown flag "\'"', "flags are '-', '0', '+', '#' and a blank")
    at = reader.position
    width = Width(
        to_left="-" in flags,
        with_zeros="0" in flags,
        plus="+" if "+" in flags else " " if " " in flags else "",
        has_prefix="#" in flags,
    )
    if digits := reader.digits():
        if len(digits) > len(str(WIDTH_MAX)) or int(digits) > WIDTH_MAX:
            raise _WrongError(reader.since(at), f"expected a width of at most {WIDTH_MAX}, found {digits}")
        return replace(width, columns=int(digits))
    if width.to_left or width.with_zeros:
        raise _WrongError(reader.since(start), "a flag needs a width", "'%-8d', '%08x'")
    return width


def _precision(reader: _Reader, start: int) -> int | None:
    if not reader.takes("."):
        return None
    at = reader.position - 1
    digits = reader.digits()
    if not digits:
        raise _WrongError(reader.since(start), "'.' needs a precision", "'%.8x', '%.16s'")
    if len(digits) > len(str(BYTES_MAX)) or int(digits) > BYTES_MAX:
        raise _WrongError(reader.since(at), f"expected a precision of at most {BYTES_MAX}, found {digits}")
    return int(digits)


def _size(reader: _Reader, *, is_item: bool) -> tuple[int | None, bool]:
    """
    Consume the letter of a size before a conversion; return the size in bytes and True.

    The size is None for the letter of a word. Without a letter, return None and False.
    """
    letter, after = reader.peek(), reader.peek(1)
    if not letter or letter not in _SIZES:
        return None, False
    begins_names = after + reader.peek(2) in ("E{", "U{")
    if letter == "d" and not begins_names and (not after or after not in _AFTER_SIZE or (after == "h" and not is_item)):
        return None, False
    reader.take()
    return _SIZES[letter], True


def _header_value(reader: _Reader, start: int, width: Width, precision: int | None) -> HeaderValue:
    reader.take()
    at = reader.position
    name = ""
    while not reader.at_end and reader.peek() != "}":
        name += reader.take()
    if reader.at_end:
        raise _WrongError(reader.since(start), "'%{' without its '}'")
    span = reader.since(at) if name else reader.since(start)
    reader.take()
    if name not in HEADER_ITEMS:
        hint = did_you_mean(name, HEADER_ITEMS) or f"header items are {', '.join(HEADER_ITEMS)}"
        raise _WrongError(span, f"there is no header item '{name}'", hint)
    if flag := _flag_of_numbers(width):
        raise _WrongError(reader.since(start), f"flag '{flag}' is for numbers")
    if precision is not None and name != "name":
        raise _WrongError(reader.since(start), "a precision is for data and for the process name", "'%.4{name}'")
    return HeaderValue(name, width, precision)


def _unknown(reader: _Reader, start: int) -> _WrongError:
    """
    Return the error for an invalid letter of a conversion, and consume the letter.

    ``start`` is the position of the percent sign.
    """
    letter = reader.peek()
    if not letter:
        hint = "'%%' prints a percent sign" if reader.position - start == 1 else None
        return _WrongError(reader.since(start), "a place-holder without its conversion at the end of the text", hint)
    hint = _FROM_C.get(letter, f"conversions are {' '.join(_CONVERSIONS)} r; '%%' prints a percent sign")
    span = reader.here(start)
    reader.take()
    return _WrongError(span, f"unknown conversion '{letter}'", hint)
