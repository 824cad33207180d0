"""
Entries by the address or the name of what they are about.

A unit is searched only if it covers the address, or its bytes contain the name, or a reference to it, where an entry
that is wanted may have it: no index is made.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from dprobes.dwarf.entryheads import plausible_places
from dprobes.dwarf.numbers import At, Tag
from dprobes.dwarf.ranges import covers
from dprobes.dwarf.textplaces import places_in, units_with

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dprobes.dwarf.debugfile import DebugFile
    from dprobes.dwarf.entries import Entry, EntryUnit
    from dprobes.dwarf.units import Unit

__all__ = ["entries_in", "entries_named", "function_at", "is_c"]

_SPACES = frozenset((Tag.NAMESPACE, Tag.MODULE))
_CLASSES = frozenset((Tag.CLASS_TYPE, Tag.STRUCTURE_TYPE, Tag.UNION_TYPE))
_C_LANGUAGES = frozenset((0x01, 0x02, 0x0C, 0x1D, 0x2C))
"""C89, C, C99, C11 and C17, in which names of types are not in others."""

_DEPTH_MAX = 32


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


def entries_named(
    file: DebugFile, name: str, tags: Collection[int], *, declarations: bool = True, c_declarations: bool = True
) -> Iterator[Entry]:
    """
    Give the entries with one of the ``tags`` whose own name is ``name``, outside of functions.

    Each file is searched on its own: the entries that it shares with others are in its ``alternate``. Without
    ``declarations`` most entries that only declare something are left out, without ``c_declarations`` those of C: a
    declaration in C++ may be all that has the name of a definition.
    """
    raw = name.encode("utf-8", "surrogateescape")
    if not raw or b"\0" in raw:
        return
    for unit, places in units_with(file, raw):
        counts = declarations and (c_declarations or not is_c(unit))
        yield from _in_unit(unit, places, name, tags, declarations=counts)


def entries_in(file: DebugFile, unit: Unit, name: str, tags: Collection[int]) -> Iterator[Entry]:
    """Give the entries of one unit of a file that ``entries_named`` would find."""
    raw = name.encode("utf-8", "surrogateescape")
    if raw and b"\0" not in raw:
        yield from _in_unit(unit, places_in(file, unit, raw), name, tags, declarations=True)


def _in_unit(
    unit: Unit, places: Sequence[int] | None, name: str, tags: Collection[int], *, declarations: bool
) -> Iterator[Entry]:
    if places is not None:
        places = plausible_places(unit, places, tags, declarations=declarations)
        if not places:
            return
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
