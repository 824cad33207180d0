"""
The fields of many records at once, by the parts of a template: columns without decoding each record.

A template of numbers of known sizes, and strings that all have one length, has its fields at the same offsets in all
records. Any other template of only strings and numbers is walked part by part, each part for all records at once.
Records with other contents (a fault in the place of a string, data that end early) are decoded one by one. The result
is the same as that of ``decode_fields``.
"""

from __future__ import annotations

import struct
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.escapes import cut_text
from dprobes.formatters.templates.data_extraction import data_parts
from dprobes.formatters.templates.template_model import Conversion, Placeholder, Skip
from dprobes.record.record_rows import mapped
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder
    from dprobes.record.record_rows import PackedRows, Rows

__all__ = ["FieldPlace", "RaggedData", "field_places", "fixed_layout", "fixed_places", "steps_of", "strings_at"]

_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


class Step(NamedTuple):
    """
    Data of a part of a template.

    ``kind`` is ``number`` (an integer of ``size`` bytes, or skipped bytes if ``field`` is None), ``item`` (a string
    item), or ``text`` (a string up to its NUL). ``field`` is the index of the resulting field. An item is truncated
    after ``cut`` bytes, unless that is None.
    """

    kind: str
    size: int = 0
    field: int | None = None
    is_signed: bool = False
    cut: int | None = None


def steps_of(template: Template, word_size: int) -> list[Step] | None:
    """
    Return how to walk through the data of a template's records: the strings and numbers in their order.

    Return None if the template has other parts.
    """
    steps, field = [], 0
    for part in data_parts(template):
        match part:
            case Skip(count):
                steps.append(Step("number", count))
                continue
            case Placeholder(conversion=Conversion.STRING, is_item=True):
                steps.append(Step("item", 0, field, cut=part.precision if part.marks_cut else None))
            case Placeholder(conversion=Conversion.STRING, precision=None):
                steps.append(Step("text", 0, field))
            case Placeholder(conversion=Conversion.STRING | Conversion.DUMP | Conversion.REST):
                return None
            case Placeholder(is_item=False):
                steps.append(Step("number", part.size or word_size, field, part.conversion.is_signed))
            case _:
                return None
        field += 1
    return steps


# Fields at the same offset in all records


class FieldPlace(NamedTuple):
    """The offset of a field in the data of all records; a string is truncated after ``cut`` bytes."""

    start: int
    size: int
    is_signed: bool = False
    is_text: bool = False
    cut: int | None = None


Places = tuple[list[FieldPlace], int]
"""The places of the fields of a template, and the size of their data."""


def fixed_places(template: Template, word_size: int) -> Places | None:
    """Return the places of the fields of a template in any data, or None if they are not fixed."""
    return _places(template, word_size, lambda _: None)


def field_places(packed: PackedRows, template: Template, word_size: int) -> Places | None:
    """Return the places of the fields of a template in packed records, or None if they differ between records."""
    return _places(template, word_size, lambda at: _item_size(packed, at))


def _places(template: Template, word_size: int, item_size: Callable[[int], int | None]) -> Places | None:
    steps = steps_of(template, word_size)
    if steps is None:
        return None
    places, at = [], 0
    for step in steps:
        match step.kind:
            case "number":
                if step.field is not None:
                    places.append(FieldPlace(at, step.size, step.is_signed))
                at += step.size
            case "item" if (size := item_size(at)) is not None:
                places.append(FieldPlace(at + ITEM_PREFIX_SIZE, size, is_text=True, cut=step.cut))
                at += ITEM_PREFIX_SIZE + size
            case _:
                return None
    return places, at


def fixed_layout(template: Template, word_size: int, byte_order: ByteOrder) -> struct.Struct | None:
    """Return the ``struct`` that unpacks a template's data into its fields, or None if offsets or sizes vary."""
    found = fixed_places(template, word_size)
    if found is None:
        return None
    codes, end = "<" if byte_order == "little" else ">", 0
    for start, size, is_signed, *_ in found[0]:
        code = _CODES[size]
        codes += f"{start - end}x{code if is_signed else code.upper()}"
        end = start + size
    return struct.Struct(f"{codes}{found[1] - end}x")


def _item_size(packed: PackedRows, at: int) -> int | None:
    """
    Return the length in bytes of the strings at an offset of the data.

    Return None if it varies between records, or if they are not string items.
    """
    first = packed.shape.data + at
    if not packed.is_constant(first, ITEM_PREFIX_SIZE) or first + ITEM_PREFIX_SIZE > packed.row_size:
        return None
    token, length = packed.first[first], packed.first[first + 1 : first + ITEM_PREFIX_SIZE]
    size = int.from_bytes(length, packed.shape.byte_order)
    return size if token == Token.STRING and first + ITEM_PREFIX_SIZE + size <= packed.row_size else None


def strings_at(packed: PackedRows, place: FieldPlace) -> list[str] | str:
    """Return the strings at a place of the data, or the string that all records share."""
    first, size = packed.shape.data + place.start, place.size
    if packed.is_constant(first, size):
        return _string(packed.first[first : first + size], place.cut)
    values = bytes(packed.raw(first, size))
    return mapped([values[at : at + size] for at in range(0, len(values), size)], lambda data: _string(data, place.cut))


def _string(data: bytes, cut: int | None) -> str:
    text = data.partition(b"\0")[0]
    if cut is not None and len(text) > cut:
        text = cut_text(text, cut)
    return text.decode("utf-8", "backslashreplace")


# Fields at an individual offset in each record


class RaggedData:
    """
    Data of records whose fields are at various offsets.

    ``starts`` and ``ends`` are the offsets of each record's data in ``body``.
    """

    def __init__(self, rows: Rows) -> None:
        self._order: ByteOrder = rows.shape.byte_order
        self.body, self.starts, self.ends = rows.data_bounds()

    def numbers(self, at: int, size: int, wanted: Sequence[int]) -> list[int | None]:
        """Return the unsigned numbers at offset ``at`` of the data, or None for data that are too short."""
        read, body = self._reader(size, is_signed=False), self.body
        places = [(self.starts[row] + at, self.ends[row]) for row in wanted]
        return [read(body, place)[0] if place + size <= end else None for place, end in places]

    def of_template(
        self, steps: Sequence[Step], field: int, wanted: Sequence[int], find: Callable[[int], Any], *, is_whole: bool
    ) -> list[Any]:
        """
        Return the values of one field in the records ``wanted``, whose template has these steps.

        ``find`` decodes the field of a record with other contents. With ``is_whole``, it also decodes records with more
        data.
        """
        number = next(n for n, step in enumerate(steps) if step.field == field)
        walked = steps if is_whole else steps[: number + 1]
        rows, places = self._walk(walked, wanted, is_whole=is_whole)
        values = self._values(steps[number], places[number])
        if len(rows) == len(wanted):
            return values
        by_row = dict(zip(rows, values, strict=True))
        return [by_row[row] if row in by_row else find(row) for row in wanted]

    def fields(self, steps: Sequence[Step], wanted: Sequence[int]) -> list[list[Any]] | None:
        """
        Return the values of all fields in the records ``wanted``, whose template has these steps.

        Return None if a record has other contents.
        """
        rows, places = self._walk(steps, wanted, is_whole=True)
        if len(rows) < len(wanted):
            return None
        return [self._values(step, at) for step, at in zip(steps, places, strict=True) if step.field is not None]

    def _walk(
        self, steps: Sequence[Step], wanted: Sequence[int], *, is_whole: bool
    ) -> tuple[Sequence[int], list[list[int]]]:
        """
        Return the numbers of the records in which all steps find their data, and the offset of each step in them.

        With ``is_whole`` the data of these records must end after the last step. ``wanted`` are the records to examine.
        """
        body, token = self.body, Token.STRING
        places = [[self.starts[row] for row in wanted]]
        rows, ends = wanted, [self.ends[row] for row in wanted]

        def leave_only(is_right: list[bool]) -> None:
            nonlocal rows, ends, places
            if not all(is_right):
                rows, ends = list(compress(rows, is_right)), list(compress(ends, is_right))
                places = [list(compress(each, is_right)) for each in places]

        for step in steps:
            if step.kind == "item":
                here = zip(places[-1], ends, strict=True)
                leave_only([at + ITEM_PREFIX_SIZE <= end and body[at] == token for at, end in here])
            places.append(self._after(step, places[-1]))
            leave_only([at <= end for at, end in zip(places[-1], ends, strict=True)])
        if is_whole:
            leave_only([at == end for at, end in zip(places[-1], ends, strict=True)])
        return rows, places[:-1]

    def _after(self, step: Step, positions: list[int]) -> list[int]:
        body = self.body
        match step.kind:
            case "number":
                size = step.size
                return [p + size for p in positions]
            case "item" if self._order == "little":
                return [p + ITEM_PREFIX_SIZE + (body[p + 1] | body[p + 2] << 8) for p in positions]
            case "item":
                return [p + ITEM_PREFIX_SIZE + (body[p + 2] | body[p + 1] << 8) for p in positions]
        find, beyond = body.find, len(body) + 1
        ends = [find(0, p) for p in positions]
        return [end + 1 if end >= 0 else beyond for end in ends]

    def _values(self, step: Step, places: list[int]) -> list[Any]:
        body = self.body
        if step.kind == "number":
            read = self._reader(step.size, is_signed=step.is_signed)
            return [read(body, p)[0] for p in places]
        if step.kind == "item":
            ends = self._after(step, places)
            found = [body[p + ITEM_PREFIX_SIZE : end] for p, end in zip(places, ends, strict=True)]
        else:
            found = [body[p : body.index(0, p)] for p in places]
        return mapped(found, lambda data: _string(data, step.cut))

    def _reader(self, size: int, *, is_signed: bool) -> Callable[[bytes, int], tuple[int, ...]]:
        code = _CODES[size] if is_signed else _CODES[size].upper()
        return struct.Struct(("<" if self._order == "little" else ">") + code).unpack_from
