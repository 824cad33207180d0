"""
The data of many records at once, where a template takes nothing but numbers of known sizes.

Such a template is one structure, so a column is made without looking at each record in Python. What it gives is what
``decode_fields`` gives.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.formatters.templates.extraction import data_parts
from dprobes.formatters.templates.model import Conversion, Placeholder, Skip

if TYPE_CHECKING:
    from dprobes.formatters.templates.model import Template
    from dprobes.record.layout import ByteOrder

__all__ = ["fixed_layout", "fixed_places"]

_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}
_NO_NUMBERS = (Conversion.STRING, Conversion.DUMP, Conversion.REST)


def fixed_layout(template: Template, word_size: int, byte_order: ByteOrder) -> struct.Struct | None:
    """Return the structure of a template's data, whose values are those of its fields; None if it has no fixed one."""
    places = fixed_places(template, word_size)
    if places is None:
        return None
    codes, end = "<" if byte_order == "little" else ">", 0
    for start, size, is_signed in places:
        code = _CODES[size]
        codes += f"{start - end}x{code if is_signed else code.upper()}"
        end = start + size
    behind = sum(part.count for part in _last_skips(template))
    return struct.Struct(f"{codes}{behind}x")


def fixed_places(template: Template, word_size: int) -> list[tuple[int, int, bool]] | None:
    """Return where in the data each field is, its size, and whether it is signed; None if that is not fixed."""
    places, at = [], 0
    for part in data_parts(template):
        match part:
            case Skip(count):
                at += count
            case Placeholder(conversion=conversion, is_item=False) if conversion not in _NO_NUMBERS:
                size = part.size or word_size
                places.append((at, size, conversion.is_signed))
                at += size
            case _:
                return None
    return places


def _last_skips(template: Template) -> list[Skip]:
    """Return what is skipped behind the last field."""
    parts = [*data_parts(template)]
    skips: list[Skip] = []
    while parts and isinstance(part := parts.pop(), Skip):
        skips.append(part)
    return skips
