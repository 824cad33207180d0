"""
Which bytes in front of a name may be the beginning of an entry that is wanted.

So a number that is there by chance, or an entry of another kind, is known without reading all that is before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.entries import UNREADABLE
from dprobes.dwarf.numbers import At, Form, Tag

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dprobes.dwarf.abbreviations import EntryShape, FormSizes
    from dprobes.dwarf.entries import EntryUnit

__all__ = ["plausible_places"]


def plausible_places(
    unit: EntryUnit, places: Sequence[int], tags: Collection[int], *, declarations: bool
) -> Sequence[int]:
    """
    Return those places of a name in a unit where an entry with one of the ``tags`` may have it.

    Without ``declarations`` entries that only declare something do not count.
    """
    heads: dict[int, set[bytes]] = {}
    for code, shape in _shapes_with(unit, tags):
        if (not declarations and _only_declares(shape)) or not shape.has(At.NAME):
            continue
        distance = _distance(shape, unit.sizes)
        if distance is None:
            return places
        head = _unsigned(code)
        heads.setdefault(distance + len(head), set()).add(head)
    data, start = unit.section.data, unit.section.start
    return [place for place in places if _begins(data[start + unit.offset : start + place][-_LONGEST:], heads.items())]


def _only_declares(shape: EntryShape) -> bool:
    """Return whether entries declare something; variables of functions, too, whose place changes or that have none."""
    if shape.has(At.DECLARATION):
        return True
    if shape.tag != Tag.VARIABLE or shape.has(At.CONST_VALUE) or shape.has(At.SPECIFICATION):
        return False
    return all(each.form not in _FIXED_PLACES for each in shape.attributes if each.attribute == At.LOCATION)


def _shapes_with(unit: EntryUnit, tags: Collection[int]) -> list[tuple[int, EntryShape]]:
    try:
        return list(unit.shapes.with_tags(tags))
    except UNREADABLE:
        unit.file.malformed("the shapes of entries cannot be understood")


_FIXED_PLACES = frozenset((Form.EXPRLOC, Form.BLOCK, Form.BLOCK1, Form.BLOCK2, Form.BLOCK4))
"""Forms of a location that is the same at all instructions, as that of a variable outside of functions is."""

_LONGEST = 64
"""Bytes before a name that are looked at."""


def _begins(before: bytes, heads: Iterable[tuple[int, set[bytes]]]) -> bool:
    """Return whether what is before a name ends with one of the ``heads``, so many bytes before it."""
    for distance, codes in heads:
        if distance > _LONGEST or any(before[-distance:].startswith(code) for code in codes):
            return True
    return False


def _distance(shape: EntryShape, sizes: FormSizes) -> int | None:
    """Return how many bytes of attributes are before the name; None if they are not always as many."""
    distance = 0
    for attribute, form, _ in shape.attributes:
        if attribute == At.NAME:
            return distance
        size = sizes.of(form)
        if size is None:
            return None
        distance += size
    return None


def _unsigned(number: int) -> bytes:
    """Return a number as LEB128."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
