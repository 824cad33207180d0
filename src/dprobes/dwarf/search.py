"""
Entries by the address or the name of what they are about.

A unit is searched only if it covers the address, or its bytes contain the name, or a reference to it, where an entry
that is wanted may have it: no index is made.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from dprobes.dwarf.entryheads import plausible_places
from dprobes.dwarf.numbers import At, Form, Tag
from dprobes.dwarf.ranges import covers
from dprobes.dwarf.textplaces import places_in, units_with
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dprobes.dwarf.debugfile import DebugFile
    from dprobes.dwarf.entries import Entry, EntryUnit
    from dprobes.dwarf.units import Unit

__all__ = [
    "Scope",
    "Scoped",
    "definitions_of",
    "entries_named",
    "found_in",
    "found_named",
    "function_at",
    "imported_units",
    "is_c",
    "scopes_of",
    "type_units_of",
]

_SPACES = frozenset((Tag.NAMESPACE, Tag.MODULE))
_CLASSES = frozenset((Tag.CLASS_TYPE, Tag.STRUCTURE_TYPE, Tag.UNION_TYPE))
_C_LANGUAGES = frozenset((0x01, 0x02, 0x0C, 0x1D, 0x2C))
"""C89, C, C99, C11 and C17, in which names of types are not in others."""

_DEPTH_MAX = 32
_IMPORTS_MAX = 1 << 12
_REFERENCES_MAX = 1 << 10


class Scope(NamedTuple):
    """
    A namespace, a class or an enumeration that others are named in; the name is empty if it has none.

    The scope around one that ``is_open`` has its names, too: a namespace that is ``inline`` or has no name, an
    enumeration of C.
    """

    name: str
    is_open: bool


class Scoped(NamedTuple):
    """An entry, and the scopes that it is in, the outermost first."""

    entry: Entry
    scopes: tuple[Scope, ...]


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
    found = found_named(file, name, tags, declarations=declarations, c_declarations=c_declarations)
    return (each.entry for each in found)


def found_named(
    file: DebugFile, name: str, tags: Collection[int], *, declarations: bool = True, c_declarations: bool = True
) -> Iterator[Scoped]:
    """Iterate over the entries of ``entries_named``, with their scopes."""
    raw = name.encode("utf-8", "surrogateescape")
    if not raw or b"\0" in raw:
        return
    for unit, places in units_with(file, raw):
        counts = declarations and (c_declarations or not is_c(unit))
        yield from _in_unit(unit, places, name, tags, declarations=counts)


def found_in(file: DebugFile, unit: Unit, name: str, tags: Collection[int]) -> Iterator[Scoped]:
    """Iterate over the entries of one unit that ``found_named`` would find."""
    raw = name.encode("utf-8", "surrogateescape")
    if raw and b"\0" not in raw:
        yield from _in_unit(unit, places_in(file, unit, raw), name, tags, declarations=True)


def _in_unit(
    unit: Unit, places: Sequence[int] | None, name: str, tags: Collection[int], *, declarations: bool
) -> Iterator[Scoped]:
    if places is not None:
        places = plausible_places(unit, places, tags, declarations=declarations)
        if not places:
            return
    yield from _Search(name, frozenset(tags), places, is_c=is_c(unit)).in_entry(unit.root, ())


class _Search:
    """A search for a name in a unit; ``places`` are where its bytes may refer to it, None if they do not say."""

    def __init__(self, name: str, tags: Collection[int], places: Sequence[int] | None, *, is_c: bool) -> None:
        self._name = name
        self._tags = tags
        self._places = places
        self._spaces = _SPACES if is_c else _SPACES | _CLASSES
        if Tag.ENUMERATOR in self._tags:
            self._spaces |= {Tag.ENUMERATION_TYPE}

    def in_entry(self, parent: Entry, scopes: tuple[Scope, ...]) -> Iterator[Scoped]:
        """Give what is found among the entries in one."""
        if len(scopes) > _DEPTH_MAX:
            return
        for entry in parent.children():
            tag = entry.tag
            if tag not in self._tags and tag not in self._spaces:
                continue
            if not self._may_have(entry):
                continue
            around = scopes
            if not scopes and (declared := entry.reference(At.SPECIFICATION)) is not None:
                around = scopes_of(declared)  # a type that has a unit of its own
            if tag in self._tags and entry.has(At.NAME) and entry.text(At.NAME) == self._name:
                yield Scoped(entry, around)
            if tag in self._spaces and entry.has_children:
                yield from self.in_entry(entry, (*around, _scope(entry)))

    def _may_have(self, entry: Entry) -> bool:
        """Return whether a place is in an entry, or in the entries in it."""
        if self._places is None:
            return True
        number = bisect_left(self._places, entry.offset)
        return number < len(self._places) and self._places[number] < entry.following()


def _scope(entry: Entry) -> Scope:
    name = entry.name or ""
    if not name and entry.has(At.SIGNATURE) and (whole := entry.reference(At.SIGNATURE)) is not None:
        name = whole.name or ""  # clang leaves the name to the type's own unit
    if entry.tag == Tag.ENUMERATION_TYPE:
        return Scope(name, not entry.flag(At.ENUM_CLASS))
    return Scope(name, not name or entry.flag(At.EXPORT_SYMBOLS))


def scopes_of(entry: Entry) -> tuple[Scope, ...]:
    """Return the namespaces and classes that an entry is in, the outermost first."""
    found: list[Scope] = []
    around = entry.unit.root
    for _ in range(_DEPTH_MAX):
        inner = next((each for each in around.children() if each.offset <= entry.offset < each.following()), None)
        if inner is None or inner.offset == entry.offset:
            break
        if inner.tag in _SPACES | _CLASSES:
            found.append(_scope(inner))
        around = inner
    return tuple(found)


def definitions_of(file: DebugFile, entry: Entry) -> Iterator[Entry]:
    """Give the entries of other units that complete one, which is their origin: of what a linker has joined (LTO)."""
    section = file.section(".debug_info")
    needle = entry.offset.to_bytes(entry.unit.sizes.offset, file.order)
    place = section.data.find(needle, section.start, section.end)
    for _ in range(_REFERENCES_MAX):
        if place < 0:
            return
        offset = place - section.start
        unit = file.unit_of(offset)
        inner: Entry | None = unit.root
        while inner is not None:
            if inner.tag == entry.tag and inner.reference(At.ABSTRACT_ORIGIN) == entry:
                yield inner
            inner = next((each for each in inner.children() if each.offset <= offset < each.following()), None)
        place = section.data.find(needle, place + 1, section.end)


def imported_units(unit: EntryUnit) -> Sequence[EntryUnit]:
    """Return a unit, and those whose entries belong to it as well: what it shares with others (dwz), or was joined."""
    found = [unit]
    for each in found:
        if len(found) > _IMPORTS_MAX:
            break
        for child in each.root.children():
            imported = child.reference(At.IMPORT) if child.tag == Tag.IMPORTED_UNIT else None
            if imported is not None and all(imported.unit is not known for known in found):
                found.append(imported.unit)
    return found


def type_units_of(unit: EntryUnit) -> Sequence[EntryUnit]:
    """Return the units of the types that entries of a unit refer to, and those that these refer to."""
    found: dict[int, EntryUnit] = {}
    waiting = [unit]
    while waiting and len(found) < _IMPORTS_MAX:
        each = waiting.pop()
        for signature in _signatures_in(each.root):
            if signature not in found:
                found[signature] = each.file.type_of_signature(signature).unit
                waiting.append(found[signature])
    return list(found.values())


def _signatures_in(parent: Entry) -> Iterator[int]:
    """Iterate over the signatures of types that an entry and its children refer to."""
    waiting = [parent]
    while waiting:
        entry = waiting.pop()
        yield from (v for form, v in entry.attributes.values() if form == Form.REF_SIG8 and isinstance(v, int))
        waiting += entry.children()


def is_c(unit: EntryUnit) -> bool:
    """Return whether a unit is made of C: no function of it is declared apart from its definition."""
    return unit.root.number(At.LANGUAGE) in _C_LANGUAGES
