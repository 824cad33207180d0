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
    from dprobes.formatters.templates import Template
    from dprobes.record.layout import ByteOrder

__all__ = ["fixed_layout"]

_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}
_NO_NUMBERS = (Conversion.STRING, Conversion.DUMP, Conversion.REST)


def fixed_layout(template: Template, word_size: int, byte_order: ByteOrder) -> struct.Struct | None:
    """Return the structure of a template's data, whose values are those of its fields; None if it has no fixed one."""
    codes = "<" if byte_order == "little" else ">"
    for part in data_parts(template):
        match part:
            case Skip(count):
                codes += f"{count}x"
            case Placeholder(conversion=conversion, is_item=False) if conversion not in _NO_NUMBERS:
                code = _CODES[part.size or word_size]
                codes += code if conversion.is_signed else code.upper()
            case _:
                return None
    return struct.Struct(codes)
