"""
Entries by the address or the name of what they are about.

A unit is searched only if it covers the address, or its bytes contain the name, or a reference to it: no index is made.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from dprobes.dwarf.numbers import At, Tag
from dprobes.dwarf.ranges import covers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dprobes.dwarf.debugfile import DebugFile
    from dprobes.dwarf.entries import Entry, EntryUnit
    from dprobes.dwarf.sections import SectionBytes
    from dprobes.dwarf.units import Unit

__all__ = ["entries_named", "function_at", "is_c"]

_SPACES = frozenset((Tag.NAMESPACE, Tag.MODULE))
_CLASSES = frozenset((Tag.CLASS_TYPE, Tag.STRUCTURE_TYPE, Tag.UNION_TYPE))
_C_LANGUAGES = frozenset((0x01, 0x02, 0x0C, 0x1D, 0x2C))
"""C89, C, C99, C11 and C17, in which names of types are not in others."""

_DEPTH_MAX = 32
_TEXTS_MAX = 256
_PLACES_MAX = 1 << 16
"""Places of a name that are looked at in one section."""


def function_at(file: DebugFile, address: int) -> Entry | None:
    """
    Return the function that covers a link address: an entry ``SUBPROGRAM`` with code; None if there is none.

    Of functions in functions it is the inner one. Parts of a function that are apart belong to it.
    """
    unit = file.unit_covering(address)
    return None if unit is None else _function_in(file.whole_unit(unit).root, address, 0)


def _function_in(parent: Entry, address: int, depth: int) -> Entry | None:
    if depth > _DEPTH_MAX:
        return None
    for entry in parent.children():
        tag = entry.tag
        if tag == Tag.SUBPROGRAM:
            if (entry.has(At.LOW_PC) or entry.has(At.RANGES)) and covers(entry, address):
                inner = _function_in(entry, address, depth + 1) if _has_functions(entry) else None
                return inner if inner is not None else entry
        elif tag in _SPACES or (tag in _CLASSES and parent.tag in _SPACES):
            found = _function_in(entry, address, depth + 1)
            if found is not None:
                return found
    return None


def _has_functions(entry: Entry) -> bool:
    return any(child.tag == Tag.SUBPROGRAM for child in entry.children())


def entries_named(file: DebugFile, name: str, tags: Collection[int]) -> Iterator[Entry]:
    """
    Give the entries with one of the ``tags`` whose own name is ``name``, outside of functions.

    Each file is searched on its own: the entries that it shares with others are in its ``alternate``.
    """
    raw = name.encode("utf-8", "surrogateescape")
    if not raw or b"\0" in raw:
        return
    for unit, places in _units_with(file, raw):
        yield from _Search(name, frozenset(tags), places, is_c=is_c(unit)).in_entry(unit.root, 0)


class _Search:
    """A search for a name in a unit; ``places`` are where its bytes may refer to it, None if they do not say."""

    def __init__(self, name: str, tags: Collection[int], places: Sequence[int] | None, *, is_c: bool) -> None:
        self._name = name
        self._tags = tags
        self._places = places
        self._spaces = _SPACES if is_c else _SPACES | _CLASSES
        if Tag.ENUMERATOR in self._tags:
            self._spaces |= {Tag.ENUMERATION_TYPE}

    def in_entry(self, parent: Entry, depth: int) -> Iterator[Entry]:
        """Give what is found among the entries in one."""
        if depth > _DEPTH_MAX:
            return
        for entry in parent.children():
            tag = entry.tag
            if tag in self._tags and entry.has(At.NAME) and self._may_have(entry) and entry.text(At.NAME) == self._name:
                yield entry
            if tag in self._spaces and entry.has_children and self._may_have(entry):
                yield from self.in_entry(entry, depth + 1)

    def _may_have(self, entry: Entry) -> bool:
        """Return whether a place is in an entry, or in the entries in it."""
        if self._places is None:
            return True
        number = bisect_left(self._places, entry.offset)
        return number < len(self._places) and self._places[number] < entry.following()


def is_c(unit: EntryUnit) -> bool:
    """Return whether a unit is made of C: no function of it is declared apart from its definition."""
    return unit.root.number(At.LANGUAGE) in _C_LANGUAGES


def _units_with(file: DebugFile, raw: bytes) -> Iterator[tuple[Unit, Sequence[int] | None]]:
    """
    Give the units whose bytes may have a name, and where, as they are found: whoever has enough does not search on.

    A unit may come several times, with other places.
    """
    offsets = _text_offsets(file.section(".debug_str"), raw)
    for offset in offsets:
        yield from _units_at(file, _packed(file, offset))
    if file.has_alternate:
        for offset in _text_offsets(file.alternate.section(".debug_str"), raw):
            yield from _units_at(file, _packed(file, offset))
    if offsets and file.section(".debug_str_offsets").size:
        yield from ((unit, None) for unit in file.units() if _has_indexed_texts(unit))
    if offsets and file.section(".debug_types").size:
        yield from ((unit, None) for unit in file.type_units())
    # Short names, and those that are used once, are in the entries. All of units with numbered strings was searched.
    yield from _units_at(file, raw + b"\0", skip_indexed=bool(offsets))


def _units_at(file: DebugFile, needle: bytes, *, skip_indexed: bool = True) -> Iterator[tuple[Unit, Sequence[int]]]:
    """Give the units that have some bytes, and where; ``skip_indexed`` leaves those with numbered strings out."""
    unit: Unit | None = None
    places: list[int] = []
    for place in _places(file.section(".debug_info"), needle):
        if unit is not None and place >= unit.end:
            yield unit, places
            unit, places = None, []
        if unit is None:
            unit = file.unit_of(place)
            if skip_indexed and _has_indexed_texts(unit):
                unit = None
                continue
        places.append(place)
    if unit is not None:
        yield unit, places


def _has_indexed_texts(unit: Unit) -> bool:
    return unit.is_split or unit.root.has(At.STR_OFFSETS_BASE)


def _packed(file: DebugFile, offset: int) -> bytes:
    return offset.to_bytes(4, file.order) if offset >> 32 == 0 else offset.to_bytes(8, file.order)


def _text_offsets(section: SectionBytes, raw: bytes) -> Sequence[int]:
    """Return where a text is in a section: by itself, or else at the end of longer ones, for linkers share tails."""
    whole = [place + 1 for place in _places(section, b"\0" + raw + b"\0", _TEXTS_MAX)]
    if section.data[section.start : section.start + len(raw) + 1] == raw + b"\0":
        whole.append(0)
    return whole or list(_places(section, raw + b"\0", _TEXTS_MAX))


def _places(section: SectionBytes, needle: bytes, limit: int = _PLACES_MAX) -> Iterator[int]:
    """Give the offsets of bytes in a section."""
    position = section.start - 1
    for _ in range(limit):
        position = section.data.find(needle, position + 1, section.end)
        if position < 0:
            return
        yield position - section.start
