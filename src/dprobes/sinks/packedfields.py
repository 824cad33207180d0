"""
Where packed records have the fields of a template: numbers at places that are known, and strings of one size.

Records of a shape have one size, so that a string among them mostly has one size too: that is seen by its length, which
is the same in all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.formatters.templates.extraction import data_parts
from dprobes.formatters.templates.model import Conversion, Placeholder, Skip
from dprobes.lazynamedtuple import NamedTuple
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, Token

if TYPE_CHECKING:
    from dprobes.formatters.templates.model import Template
    from dprobes.record.packed import PackedRecords

__all__ = ["FieldPlace", "field_places", "strings_at"]


_NO_NUMBERS = (Conversion.STRING, Conversion.DUMP, Conversion.REST)


class FieldPlace(NamedTuple):
    """Say where in the data of all records a field is."""

    start: int
    size: int
    is_signed: bool = False
    is_text: bool = False


def field_places(packed: PackedRecords, template: Template, word_size: int) -> tuple[list[FieldPlace], int] | None:
    """
    Return where the fields of a template are in packed records, and how much of their data it takes.

    None if the places are not the same in all records, or a template takes something else than strings and numbers.
    """
    places, at = [], 0
    for part in data_parts(template):
        match part:
            case Skip(count):
                at += count
            case Placeholder(conversion=Conversion.STRING, is_item=True):
                size = _item_size(packed, at)
                if size is None:
                    return None
                places.append(FieldPlace(at + ITEM_PREFIX_SIZE, size, is_text=True))
                at += ITEM_PREFIX_SIZE + size
            case Placeholder(conversion=conversion, is_item=False) if conversion not in _NO_NUMBERS:
                size = part.size or word_size
                places.append(FieldPlace(at, size, conversion.is_signed))
                at += size
            case _:
                return None
    return places, at


def _item_size(packed: PackedRecords, at: int) -> int | None:
    """Return the length that all strings at a place of the data have; None if they are not alike, or no items."""
    first = packed.shape.data + at
    if not packed.is_constant(first, ITEM_PREFIX_SIZE) or first + ITEM_PREFIX_SIZE > packed.row_size:
        return None
    token, length = packed.first[first], packed.first[first + 1 : first + ITEM_PREFIX_SIZE]
    size = int.from_bytes(length, packed.shape.byte_order)
    return size if token == Token.STRING and first + ITEM_PREFIX_SIZE + size <= packed.row_size else None


def strings_at(packed: PackedRecords, start: int, size: int) -> list[str] | str:
    """Return the strings at a place of the data, or the one that all have in common."""
    first = packed.shape.data + start
    if packed.is_constant(first, size):
        return _string(packed.first[first : first + size])
    values = bytes(packed.raw(first, size))
    found = [values[at : at + size] for at in range(0, len(values), size)]
    known = {data: _string(data) for data in set(found)}
    return [known[data] for data in found]


def _string(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")
