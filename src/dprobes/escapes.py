r"""
Text that comes from elsewhere, made harmless to lines and terminals: the one place that knows how.

Names of files, symbols, sections, processes and programs, and whatever a file or another process says, may hold any
character: a line end forges a line of ours, an escape sequence controls the terminal, a bidirectional override turns
text around. What cannot be printed is written as an escape of Python's and C's::

    \n \t \r \0     these characters
    \x1b            another control character, or a byte that is no UTF-8
    \u202e          any other character, by its code
    \U000e0001

A text without such characters stays as it is, so what is escaped may be escaped again. The backslash is no such
character: ``\x1b`` in a result may be four characters that stood there.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import json
__all__ = ["as_unicode", "cut_text", "escaped", "escaped_lines", "json_text", "replaced"]

CUT = "…"
"""The mark at the end of a text that was cut."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}

_CHARACTER_MAX, _FOLLOWING, _FIRST_OF_SEVERAL = 4, 0x80, 0xC0
"""Bytes of the longest character in UTF-8, and from where on bytes follow others, or are followed."""

_BYTES = range(0xDC80, 0xDD00)
"""What the error handler ``surrogateescape`` makes of bytes that are no UTF-8."""


def cut_text(data: bytes, size: int) -> bytes:
    """Return the first ``size`` bytes of a text, without a part of a character, and a mark that there was more."""
    kept = data[:size]
    start = max(0, size - _CHARACTER_MAX)
    for place in range(len(kept) - 1, start - 1, -1):
        if kept[place] >= _FIRST_OF_SEVERAL:  # the first byte of a character, whose others may be cut off
            wanted = next(n for n, first in ((4, 0xF0), (3, 0xE0), (2, _FIRST_OF_SEVERAL)) if kept[place] >= first)
            return (kept if place + wanted <= size else kept[:place]) + CUT.encode()
        if kept[place] < _FOLLOWING:
            break
    return kept + CUT.encode()


def escaped(text: str, keep: str = "", *, blanks: bool = False) -> str:
    """
    Return text with escapes for all that would disturb a line or a terminal, but for the characters of ``keep``.

    With ``blanks`` a blank is escaped as well, where blanks separate what stands on a line.
    """
    if text.isprintable() and not (blanks and " " in text):
        return text
    return "".join(c if (c.isprintable() and not (blanks and c == " ")) or c in keep else _escape(c) for c in text)


def escaped_lines(text: str) -> str:
    """Return the same for text of several lines of ours, whose line ends and tabs stay."""
    return escaped(text, "\n\t")


def replaced(text: str) -> str:
    """Return text, tabs included, with a replacement character for each that cannot be printed; it keeps its length."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_unicode(text: str) -> str:
    r"""Return text whose bytes that are no UTF-8 are ``\xff``; all else is left to who writes it, as JSON does."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON: on one line without ``indent``, and with JSON's escapes for what cannot be printed."""
    text = _encoder(indent).encode(value)
    if text.isprintable():
        return text
    return _UNPRINTABLE_IN_JSON.sub(_json_escape, text)


@functools.cache
def _encoder(indent: int | None) -> json.JSONEncoder:
    # Making one for each record takes longer than the record.
    import json

    return json.JSONEncoder(ensure_ascii=False, indent=indent)


_UNPRINTABLE_IN_JSON = re.compile(r"[^\n -~]")
"""All but ASCII, and but the line ends that stand between values: those in strings are escaped already."""


def _json_escape(match: re.Match[str]) -> str:
    import json

    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]


def _escape(character: str) -> str:
    if (named := _NAMED.get(character)) is not None:
        return named
    code = ord(character)
    if code in _BYTES:
        return f"\\x{code - _BYTES.start + 0x80:02x}"
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
