"""
The short way for the common template, whose place-holders are all numbers of fixed size.

Its data is one structure, and its text one format string of Python, whose conversions are C's. What does not fit
exactly goes the long way, ``reading`` and ``rendering``, which says the same; a test compares them.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.escapes import escaped
from dprobes.formatters.templates.model import Conversion, Placeholder, Skip, Text
from dprobes.formatters.templates.values import AMOUNT, readable_number
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.formatters.templates.model import Template
    from dprobes.record.layout import ByteOrder

__all__ = ["Compiled", "compiled_of"]

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_NUMBERS = {
    Conversion.SIGNED: "d",
    Conversion.UNSIGNED: "d",
    Conversion.HEXADECIMAL: "x",
    Conversion.OCTAL: "o",
    Conversion.VALUE: "s",
}


class Compiled(NamedTuple):
    """
    Hold the structure of a record's data, and the format string that takes its values.

    ``readable`` are the values that it takes as ``readable_number``, each with its size in bytes.
    """

    layout: struct.Struct
    form: str
    readable: tuple[tuple[int, int], ...]

    def text_of(self, data: bytes, start: int) -> str:
        """Return the text of what begins at ``start``, and is as long as the structure."""
        values = self.layout.unpack_from(data, start)
        if not self.readable or max(values) < AMOUNT:  # as most are
            return self.form % values
        shown: list[int | str] = [*values]
        for at, size in self.readable:
            shown[at] = readable_number(values[at], size)
        return self.form % tuple(shown)


@lru_cache(maxsize=4096)
def compiled_of(template: Template, word_size: int, byte_order: ByteOrder) -> Compiled | None:
    """Return the short way for a template, None if there is none."""
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
    return Compiled(struct.Struct(codes), "\n".join(lines), tuple(readable))


def _literal(text: str) -> str:
    return escaped(text, "\n\t").replace("%", "%%")


def _conversion(part: Placeholder) -> str | None:
    """Return Python's conversion for a number, None if it has none that does the same."""
    width = part.width
    if part.conversion is Conversion.POINTER and not width.columns:
        return "0x%x"
    letter = _NUMBERS.get(part.conversion)
    if letter is None or part.precision == 0 or width.has_prefix:  # of which C and Python make different things
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
