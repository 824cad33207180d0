r"""
Escapes for text from other sources, which make it harmless to lines and terminals.

Names of files, symbols, sections, processes and programs, and any text from a file or another process, may contain any
character: a line end forges a line of output, an escape sequence controls the terminal, a bidirectional override
reorders text. Unprintable characters are written as escapes of Python and C::

    \n \t \r \0     these characters
    \x1b            another control character, or a byte that is not valid UTF-8
    \u202e          any other character, by its code
    \U000e0001

A text without such characters is unchanged, so escaping twice is harmless. The backslash is not escaped: ``\x1b`` in a
result may have been these four characters.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import json
__all__ = ["as_unicode", "cut_text", "escaped", "escaped_lines", "json_text", "replaced"]

CUT = "…"
"""The mark at the end of a truncated text."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}

_CHARACTER_MAX, _FOLLOWING, _FIRST_OF_SEVERAL = 4, 0x80, 0xC0
"""Constants of UTF-8: maximum bytes of a character, lowest continuation byte, lowest first byte of several."""

_BYTES = range(0xDC80, 0xDD00)
"""The code points that the error handler ``surrogateescape`` uses for invalid bytes."""


def cut_text(data: bytes, size: int) -> bytes:
    """
    Return at most ``size`` bytes of UTF-8 text, without an incomplete character.

    Truncated text ends with ``CUT``.
    """
    kept = data[:size]
    start = max(0, size - _CHARACTER_MAX)
    for place in range(len(kept) - 1, start - 1, -1):
        if kept[place] >= _FIRST_OF_SEVERAL:  # the first byte of a character that may be incomplete
            wanted = next(n for n, first in ((4, 0xF0), (3, 0xE0), (2, _FIRST_OF_SEVERAL)) if kept[place] >= first)
            return (kept if place + wanted <= size else kept[:place]) + CUT.encode()
        if kept[place] < _FOLLOWING:
            break
    return kept + CUT.encode()


def escaped(text: str, keep: str = "", *, blanks: bool = False) -> str:
    """
    Return text in which all unprintable characters are escaped, except those in ``keep``.

    With ``blanks`` a blank is escaped as well, for lines whose parts are separated by blanks.
    """
    if text.isprintable() and not (blanks and " " in text):
        return text
    return "".join(c if (c.isprintable() and not (blanks and c == " ")) or c in keep else _escape(c) for c in text)


def escaped_lines(text: str) -> str:
    """Return text of several lines with all unprintable characters escaped except line ends and tabs."""
    return escaped(text, "\n\t")


def replaced(text: str) -> str:
    """Return text of the same length, in which U+FFFD replaces each unprintable character except tabs."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_unicode(text: str) -> str:
    r"""Return text whose invalid UTF-8 bytes are written as ``\xff``; other escapes are left to the caller's format."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON, on one line without ``indent``, with JSON's escapes for unprintable characters."""
    text = _encoder(indent).encode(value)
    if text.isprintable():
        return text
    return _UNPRINTABLE_IN_JSON.sub(_json_escape, text)


@functools.cache
def _encoder(indent: int | None) -> json.JSONEncoder:
    # Creating an encoder for each record takes longer than encoding it.
    import json

    return json.JSONEncoder(ensure_ascii=False, indent=indent)


_UNPRINTABLE_IN_JSON = re.compile(r"[^\n -~]")
"""Characters that JSON text must not contain unescaped; line ends may separate values."""


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
