"""
Storage profiles: reads and writes of the fields of a structure by functions, and their output.

An access that touches several fields counts for each of them. Bytes between fields are *holes* of the layout, as in
pahole; accesses to them count as well, since a copy of the whole structure reads them. A *cache line* has 64 bytes.
The structures of an array are one structure here: an offset counts from the start of the element.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from dprobes.cli.console import counted
from dprobes.dpc.types.c_types import Array, Record, size_of
from dprobes.escapes import json_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.dpc.types.c_types import CType

__all__ = [
    "TEXT_HEADER",
    "Field",
    "Layout",
    "StorageProfile",
    "UnseenCode",
    "json_lines",
    "layout_of",
    "map_lines",
    "text_rows",
]

CACHE_LINE = 64

HOLE = "(hole)"

_DEPTH_MAX = 16
_FIELDS_MAX = 4096
"""Maximum number of fields of a layout; larger structures have their inner structures as single fields."""


class Field(NamedTuple):
    """Field of a layout: ``size`` bytes at ``offset``; fields of unions and bit fields may overlap. A hole is one."""

    offset: int
    size: int
    name: str

    @property
    def is_hole(self) -> bool:
        """True for bytes that belong to no field."""
        return self.name == HOLE


class Layout(NamedTuple):
    """
    Layout of a structure of ``size`` bytes: its fields and holes by ascending offset.

    ``whole`` is the size of the range in bytes, which has ``whole / size`` such structures.
    """

    name: str
    size: int
    whole: int
    fields: tuple[Field, ...]

    def fields_at(self, offset: int, size: int) -> Iterator[Field]:
        """Iterate over the fields that an access to ``size`` bytes at an offset of the range touches, each once."""
        seen = set[Field]()
        first, last = max(0, offset), min(self.whole, offset + size)
        at = first
        while at < last:
            base = at - at % self.size
            end = min(last, base + self.size)
            for each in self._touched(at - base, end - base):
                if each not in seen:
                    seen.add(each)
                    yield each
            at = end

    def _touched(self, first: int, last: int) -> Iterator[Field]:
        stop = bisect_right(self.fields, last - 1, key=lambda each: each.offset)
        for each in self.fields[:stop]:
            if each.offset + each.size > first:
                yield each


def layout_of(type_: CType, name: str) -> Layout:
    """Return the layout of a type, the elements of an array being its structures."""
    whole = size_of(type_) or 0
    element: CType = type_
    while isinstance(element, Array):
        element = element.element
    size = size_of(element) or 0
    if not isinstance(element, Record) or not size:
        return Layout(name, max(1, size), whole, (Field(0, max(1, size), name),))
    fields = sorted(_fields_of(element, 0, "", 0))[:_FIELDS_MAX]
    return Layout(name, size, whole, tuple(_with_holes(fields, size)))


def _fields_of(record: Record, start: int, prefix: str, depth: int) -> Iterator[Field]:
    for member in record.members or ():
        offset, name = start + member.offset, f"{prefix}{member.name}"
        inner, suffix = member.type, ""
        if isinstance(inner, Record) and depth < _DEPTH_MAX and inner.members:
            yield from _fields_of(inner, offset, f"{name}." if member.name else prefix, depth + 1)
            continue
        while isinstance(inner, Array):
            suffix += f"[{'' if inner.count is None else inner.count}]"
            inner = inner.element
        size = size_of(member.type) or 0
        if member.bits is not None:
            first, last = member.shift // 8, (member.shift + member.bits - 1) // 8
            offset, size = offset + first, last - first + 1
        if size and name:
            yield Field(offset, size, name + suffix)


def _with_holes(fields: Sequence[Field], size: int) -> Iterator[Field]:
    end = 0
    for each in fields:
        if each.offset > end:
            yield Field(end, each.offset - end, HOLE)
        yield each
        end = max(end, each.offset + each.size)
    if end < size:
        yield Field(end, size - end, HOLE)


class UnseenCode(NamedTuple):
    """Number of instructions whose accesses are not counted, and their description, a noun phrase."""

    instructions: int
    what: str

    @property
    def text(self) -> str:
        """The number and the noun phrase, whose first noun is "instructions", in the singular for 1."""
        what = self.what
        if self.instructions == 1:
            what = what.replace("instructions", "instruction", 1).replace(" that access ", " that accesses ", 1)
        return f"{self.instructions} {what}"


class StorageProfile(NamedTuple):
    """
    Reads and writes of a layout's fields, by field and function.

    ``places`` is the number of instructions that are checked; ``unseen`` are instructions that are not.
    """

    layout: Layout
    module: str
    counts: dict[tuple[Field, str], tuple[int, int]]
    places: int
    unseen: tuple[UnseenCode, ...]

    def of_field(self, field: Field) -> tuple[int, int]:
        """Return the reads and the writes of a field by all functions."""
        mine = [counts for (each, _), counts in self.counts.items() if each == field]
        return sum(reads for reads, _ in mine), sum(writes for _, writes in mine)

    def functions_of(self, field: Field) -> list[tuple[str, int, int]]:
        """Return the functions that access a field, with reads and writes, the one with most accesses first."""
        found = [(name, *counts) for (each, name), counts in self.counts.items() if each == field]
        return sorted(found, key=lambda each: (-each[1] - each[2], each[0]))


TEXT_HEADER = ("offset", "size", "field", "function", "reads", "writes")


def text_rows(profile: StorageProfile) -> Iterator[tuple[str, ...]]:
    """Iterate over the rows of the table, without its header: each field, then each function that accesses it."""
    for field in profile.layout.fields:
        functions = profile.functions_of(field)
        place = str(field.offset), str(field.size), field.name
        if len(functions) == 1:
            name, reads, writes = functions[0]
            yield *place, name, str(reads), str(writes)
            continue
        reads, writes = profile.of_field(field)
        yield *place, "", str(reads), str(writes)
        for name, *counts in functions:
            yield "", "", "", name, *map(str, counts)


def json_lines(profile: StorageProfile) -> Iterator[str]:
    """Iterate over the lines of JSON: an object for each field, function that accesses it, and kind of unseen code."""
    layout = profile.layout
    for field in layout.fields:
        reads, writes = profile.of_field(field)
        yield json_text(
            {
                "structure": layout.name,
                "field": None if field.is_hole else field.name,
                "offset": field.offset,
                "size": field.size,
                "cache_line": field.offset // CACHE_LINE,
                "reads": reads,
                "writes": writes,
            }
        )
        for name, *counts in profile.functions_of(field):
            yield json_text(
                {
                    "structure": layout.name,
                    "field": None if field.is_hole else field.name,
                    "offset": field.offset,
                    "function": name,
                    "reads": counts[0],
                    "writes": counts[1],
                }
            )
    for unseen in profile.unseen:
        yield json_text({"module": profile.module, "unseen": unseen.what, "instructions": unseen.instructions})


_BAR = 30


def map_lines(profile: StorageProfile) -> Iterator[str]:
    """
    Iterate over the lines of the heat map: the layout by cache lines, with a bar for the accesses to each field.

    The bar of the field with most accesses has ``_BAR`` characters, ``r`` for reads, ``W`` for writes.
    """
    layout = profile.layout
    sums = {field: profile.of_field(field) for field in layout.fields}
    most = max((reads + writes for reads, writes in sums.values()), default=0)
    width = max((len(field.name) for field in layout.fields), default=0)
    line = -1
    for field in layout.fields:
        if field.offset // CACHE_LINE > line:
            line = field.offset // CACHE_LINE
            last = min(layout.size, (line + 1) * CACHE_LINE) - 1
            yield f"cache line {line}: bytes {line * CACHE_LINE} to {last}"
        reads, writes = sums[field]
        bar = _bar(reads, writes, most)
        crosses = (field.offset + field.size - 1) // CACHE_LINE > line
        place = f"{field.offset:>6} {field.size:>5}{'+' if crosses else ' '} {field.name:<{width}}"
        counts = f" {counted(reads, 'read')}, {counted(writes, 'write')}" if reads or writes else ""
        yield f"{place}  {bar:<{_BAR}}{counts}".rstrip()
    holes = [field for field in layout.fields if field.is_hole]
    lines = counted(-(-layout.size // CACHE_LINE), "cache line")
    missing = f"{counted(len(holes), 'hole')} of {counted(sum(hole.size for hole in holes), 'byte')}"
    yield f"{counted(layout.size, 'byte')}, {lines} ({len(_lines_with(sums))} accessed), {missing}"


def _bar(reads: int, writes: int, most: int) -> str:
    """Return the bar of a field; that of ``most`` accesses has the full length, and a single access one sign."""
    both = reads + writes
    if not both:
        return ""
    length = -(-both * _BAR // most)
    written = round(writes * length / both)
    return (length - written) * "r" + written * "W"


def _lines_with(sums: dict[Field, tuple[int, int]]) -> set[int]:
    """Return the numbers of the cache lines with a field that was accessed."""
    return {
        line
        for field, counts in sums.items()
        if any(counts)
        for line in range(field.offset // CACHE_LINE, (field.offset + field.size - 1) // CACHE_LINE + 1)
    }
