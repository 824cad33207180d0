"""
Fields of records of various sizes that stand one behind the other, as those with strings do: columns without decoding.

A template is walked part by part, each part for all records at once. Records in which it finds something else than
strings and numbers (a fault in the place of a string, data that ends early) are looked at one by one.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dprobes.formatters.templates.data_extraction import data_parts
from dprobes.formatters.templates.template_model import Conversion, Placeholder, Skip
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder
    from dprobes.record.packed_records import PackedRecords

__all__ = ["FieldPlace", "RaggedData", "field_places", "fixed_layout", "fixed_places", "steps_of", "strings_at"]

# The data of many records at once, where a template takes nothing but numbers of known sizes.
#
# Such a template is one structure, so a column is made without looking at each record in Python. What it gives is what
# ``decode_fields`` gives.


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


# Where packed records have the fields of a template: numbers at places that are known, and strings of one size.
#
# Records of a shape have one size, so that a string among them mostly has one size too: that is seen by its length,
# which is the same in all rows.


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


class _Step(NamedTuple):
    """
    What a part of a template takes: so many bytes (``size``), a string item, or a string up to its NUL.

    ``field`` is the number of the field that it gives, None if it gives none.
    """

    kind: str
    size: int = 0
    field: int | None = None
    is_signed: bool = False


def steps_of(template: Template, word_size: int) -> list[_Step] | None:
    """Return how a template is walked; None if it takes something else than strings and numbers."""
    steps, field = [], 0
    for part in data_parts(template):
        match part:
            case Skip(count):
                steps.append(_Step("number", count))
                continue
            case Placeholder(conversion=Conversion.STRING, is_item=True):
                steps.append(_Step("item", 0, field))
            case Placeholder(conversion=Conversion.STRING, precision=None):
                steps.append(_Step("text", 0, field))
            case Placeholder(conversion=Conversion.STRING | Conversion.DUMP | Conversion.REST):
                return None
            case Placeholder(is_item=False):
                steps.append(_Step("number", part.size or word_size, field, part.conversion.is_signed))
            case _:
                return None
        field += 1
    return steps


class RaggedRows(Protocol):
    """Hold records whose data may be of various layouts."""

    byte_order: ByteOrder

    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return bytes, and where in them the data of each record starts and ends."""


class RaggedData:
    """
    The data of records that are no table; ``find`` looks at a field of a single one.

    ``starts`` and ``ends`` say where in ``body`` the data of each record is.
    """

    def __init__(self, rows: RaggedRows, find: Callable[[int], Any]) -> None:
        self._find = find
        self._order: ByteOrder = rows.byte_order
        self.body, self.starts, self.ends = rows.data_bounds()

    def numbers(self, at: int, size: int, wanted: Sequence[int]) -> list[int | None]:
        """Return the unsigned numbers so many bytes behind the start of the data, None where it ends before."""
        read, body = self._reader(size, is_signed=False), self.body
        places = [(self.starts[row] + at, self.ends[row]) for row in wanted]
        return [read(body, place)[0] if place + size <= end else None for place, end in places]

    def of_template(self, steps: Sequence[_Step], field: int, wanted: Sequence[int], *, is_whole: bool) -> list[Any]:
        """
        Return a field of the records ``wanted``, whose template takes these steps.

        With ``is_whole`` it must take all of the data.
        """
        rows: Sequence[int] = wanted
        positions = [self.starts[row] for row in wanted]
        places: list[int] = []
        target = next(step for step in steps if step.field == field)
        odd: set[int] = set()
        for step in steps:
            if step.kind == "item":
                rows, positions, places = self._with_items(rows, positions, places, odd)
            if step is target:
                places = positions
            positions = self._behind(step, positions)
            rows, positions, places = self._within(rows, positions, places, odd)
            if step is target and not is_whole:
                break
        if is_whole:
            wrong = [n for n, row in enumerate(rows) if positions[n] != self.ends[row]]
            rows, positions, places = _without(wrong, rows, positions, places, odd)
        values = self._values(target, places)
        if not odd:
            return values
        by_row = dict(zip(rows, values, strict=True))
        return [self._find(row) if row in odd else by_row[row] for row in wanted]

    def fields(self, steps: Sequence[_Step], wanted: Sequence[int]) -> list[list[Any]] | None:
        """Return all fields of records, whose template takes these steps; None if it leaves some of their data."""
        positions = [self.starts[row] for row in wanted]
        ends = [self.ends[row] for row in wanted]
        found, body = [], self.body
        for step in steps:
            if step.kind == "item" and any(
                p + ITEM_PREFIX_SIZE > end or body[p] != Token.STRING for p, end in zip(positions, ends, strict=True)
            ):
                return None
            behind = self._behind(step, positions)
            if any(map(operator.gt, behind, ends)):
                return None
            if step.field is not None:
                found.append(self._values(step, positions))
            positions = behind
        return found if positions == ends else None

    def _with_items(
        self, rows: Sequence[int], positions: list[int], places: list[int], odd: set[int]
    ) -> tuple[Sequence[int], list[int], list[int]]:
        """Leave out records in which no string item follows."""
        body, token = self.body, Token.STRING
        wrong = [n for n, p in enumerate(positions) if p + ITEM_PREFIX_SIZE > self.ends[rows[n]] or body[p] != token]
        return _without(wrong, rows, positions, places, odd)

    def _within(
        self, rows: Sequence[int], positions: list[int], places: list[int], odd: set[int]
    ) -> tuple[Sequence[int], list[int], list[int]]:
        """Leave out records that end before."""
        ends = self.ends
        wrong = [n for n, (row, p) in enumerate(zip(rows, positions, strict=True)) if p > ends[row]]
        return _without(wrong, rows, positions, places, odd)

    def _behind(self, step: _Step, positions: list[int]) -> list[int]:
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

    def _values(self, step: _Step, places: list[int]) -> list[Any]:
        body = self.body
        if step.kind == "number":
            read = self._reader(step.size, is_signed=step.is_signed)
            return [read(body, p)[0] for p in places]
        if step.kind == "item":
            ends = self._behind(step, places)
            found = [body[p + ITEM_PREFIX_SIZE : end] for p, end in zip(places, ends, strict=True)]
        else:
            found = [body[p : body.index(0, p)] for p in places]
        known = {data: data.partition(b"\0")[0].decode("utf-8", "backslashreplace") for data in set(found)}
        return [known[data] for data in found]

    def _reader(self, size: int, *, is_signed: bool) -> Callable[[bytes, int], tuple[int, ...]]:
        code = _CODES[size] if is_signed else _CODES[size].upper()
        return struct.Struct(("<" if self._order == "little" else ">") + code).unpack_from


def _without(
    wrong: list[int], rows: Sequence[int], positions: list[int], places: list[int], odd: set[int]
) -> tuple[Sequence[int], list[int], list[int]]:
    """Leave out some records, which are ``odd``."""
    if not wrong:
        return rows, positions, places
    odd.update(rows[n] for n in wrong)
    out = set(wrong)
    left = [n for n in range(len(rows)) if n not in out]
    return [rows[n] for n in left], [positions[n] for n in left], [places[n] for n in left] if places else places
