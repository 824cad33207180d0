"""
Search for entries by address or name, and for inlined calls, which the compiler replaced by the function's code.

For an address, only the unit that covers it is searched. For a name, a unit is searched only if its bytes contain the
name, or a reference to it, at a position that fits a requested entry. No index is built.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.address_lists import covers, ranges_of
from dprobes.dwarf.debug_entries import UNREADABLE
from dprobes.dwarf.dwarf_numbers import At, Form, Tag

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from dprobes.dwarf.debug_entries import Entry, Unit
    from dprobes.dwarf.debug_file import DebugFile
    from dprobes.dwarf.entry_shapes import EntryShape, FormSizes
    from dprobes.target.elf.debug_sections import SectionBytes

__all__ = [
    "InlinedCall",
    "Scoped",
    "definitions_of",
    "entries_named",
    "found_in",
    "found_named",
    "function_at",
    "imported_units",
    "inlined_calls_in",
    "inlined_calls_of",
    "is_c",
    "may_have",
    "plausible_places",
    "references_to",
    "scopes_of",
    "strings_with",
    "type_units_of",
    "units_with",
]


def plausible_places(unit: Unit, places: Sequence[int], tags: Collection[int], *, declarations: bool) -> Sequence[int]:
    """
    Return those of ``places`` that may be the name, or a reference to the name, of an entry with one of the ``tags``.

    The bytes before a place are compared with the codes of abbreviations, so no entries need to be read. If
    ``declarations`` is False, entries that only declare something do not count.
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
    """Return whether entries of this shape are declarations, or variables of functions without a fixed location."""
    if shape.has(At.DECLARATION):
        return True
    if shape.tag != Tag.VARIABLE or shape.has(At.CONST_VALUE) or shape.has(At.SPECIFICATION):
        return False
    return all(each.form not in _FIXED_PLACES for each in shape.attributes if each.attribute == At.LOCATION)


def _shapes_with(unit: Unit, tags: Collection[int]) -> list[tuple[int, EntryShape]]:
    try:
        return list(unit.shapes.with_tags(tags))
    except UNREADABLE:
        unit.file.malformed("the shapes of entries cannot be understood")


_FIXED_PLACES = frozenset((Form.EXPRLOC, Form.BLOCK, Form.BLOCK1, Form.BLOCK2, Form.BLOCK4))
"""Forms of a location that is the same at all instructions, as for a variable outside of functions."""

_LONGEST = 64
"""Maximum number of bytes before a name that are compared."""


def _begins(before: bytes, heads: Iterable[tuple[int, set[bytes]]]) -> bool:
    """
    Return whether the bytes ``before`` a name may be the start of an entry with a suitable abbreviation code.

    ``heads`` are (distance, codes): the possible codes, encoded, and their distance in bytes from the name.
    """
    for distance, codes in heads:
        if distance > _LONGEST or any(before[-distance:].startswith(code) for code in codes):
            return True
    return False


def _distance(shape: EntryShape, sizes: FormSizes) -> int | None:
    """Return the size in bytes of the attributes before the name in entries of this shape, or None if it varies."""
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
    """Return a number encoded as unsigned LEB128."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_STRINGS_MAX = 256
"""Maximum number of equal strings of a file that are searched. Linkers write each string once."""
_TAILS_MAX = 1 << 16
_PLACES_MAX = 1 << 16
"""Maximum number of places of a name that are searched in one section."""

_TEXT_MAX = 1 << 14
"""Maximum number of bytes of a string that are compared with another one."""

_TEXT_FORMS = frozenset((Form.STRP, Form.STRP_SUP, Form.GNU_STRP_ALT))
_CHECKED = 16
"""Maximum number of places to check for a reference to a string. A number may match by chance."""


def units_with(file: DebugFile, raw: bytes) -> Iterator[tuple[Unit, Sequence[int] | None]]:
    """
    Iterate lazily over the units whose bytes may have a name, each with the places of the name.

    A unit may occur several times, with different places. If the places are None, the name may be anywhere in the unit.

    Linkers store a string that is the tail of longer strings in the bytes of one of these. GNU ld uses the first one in
    the order of their reversed text. If no entry refers to that one, all longer strings are tried.
    """
    whole, tails = _text_offsets(file.section(".debug_str"), raw)
    yield from _units_referring(file, whole, tails)
    if file.has_alternate:
        yield from _units_referring(file, *_text_offsets(file.alternate.section(".debug_str"), raw))
    if (whole or tails) and file.section(".debug_str_offsets").size:
        yield from ((unit, None) for unit in file.units() if _has_indexed_texts(unit))
    if (whole or tails) and file.section(".debug_types").size:
        yield from ((unit, None) for unit in file.type_units())
    # Short names, and those that are used once, are in the entries. Units with indexed strings were all searched above.
    own = _places(file.section(".debug_info"), raw + b"\0")
    yield from _units_of(file, own, skip_indexed=bool(whole or tails))


def places_in(file: DebugFile, unit: Unit, raw: bytes) -> Sequence[int] | None:
    """Return the offsets at which a unit may have a name or a reference to it, or None if they are unknown."""
    if _has_indexed_texts(unit):
        return None
    own, strings = unit.section, [file.section(".debug_str")]
    if file.has_alternate:
        strings.append(file.alternate.section(".debug_str"))
    needles = [raw + b"\0"]
    for whole, tails in (_text_offsets(each, raw) for each in strings):
        needles += (_packed(file, offset) for offset in (whole or tails))
    part = own._replace(start=own.start + unit.offset, end=own.start + unit.end)
    return sorted({unit.offset + place for needle in needles for place in _places(part, needle)})


def strings_with(file: DebugFile, beginning: bytes) -> set[bytes]:
    """
    Return the strings of the debug information that begin with ``beginning``.

    The result may include the tail of a longer string that contains ``beginning``.
    """
    sections = [file.section(".debug_str"), file.section(".debug_info"), file.section(".debug_types")]
    if file.has_alternate:
        sections.append(file.alternate.section(".debug_str"))
    found = set()
    for section in sections:
        for place in _places(section, beginning):
            start = section.start + place
            end = section.data.find(b"\0", start, min(section.end, start + _TEXT_MAX))
            if end >= 0:
                found.add(bytes(section.data[start:end]))
    return found


def _units_referring(
    file: DebugFile, whole: Sequence[int], tails: Sequence[int]
) -> Iterator[tuple[Unit, Sequence[int]]]:
    """
    Iterate over the units that refer to a string at one of the offsets ``whole``, or else ``tails``, with the places.

    The likeliest units come first.
    """
    section = file.section(".debug_info")
    for offset in whole:
        yield from _units_of(file, _places(section, _packed(file, offset)))
    if whole or not tails:
        return
    is_used, checked = False, 0
    for unit, places in _units_of(file, _places(section, _packed(file, tails[0]))):
        for place in places:
            if is_used or checked >= _CHECKED:
                break
            checked += 1
            is_used = _refers(unit, place, tails[0])
        yield unit, places
    if not is_used and len(tails) > 1:
        needles = [_packed(file, offset) for offset in tails[1 : _STRINGS_MAX + 1]]
        yield from _units_of(file, _places_of_any(section, needles))


def _refers(unit: Unit, place: int, offset: int) -> bool:
    """Return whether an entry around ``place`` of a unit has a string attribute with the string offset ``offset``."""
    entry: Entry | None = unit.root
    while entry is not None:
        if any(form in _TEXT_FORMS and value == offset for form, value in entry.attributes.values()):
            return True
        entry = entry_around(entry, place)
    return False


def entry_around(parent: Entry, place: int) -> Entry | None:
    """Return the child of ``parent`` that contains the offset ``place``, also in its descendants, or None."""
    return next((child for child in parent.children() if child.offset <= place < child.following()), None)


def may_have(places: Sequence[int] | None, entry: Entry) -> bool:
    """
    Return True if an entry or its descendants contain one of ``places``, at which a name may be.

    If ``places`` is None, they are unknown, and the result is True.
    """
    if places is None:
        return True
    number = bisect_left(places, entry.offset)
    return number < len(places) and places[number] < entry.following()


def references_to(file: DebugFile, entry: Entry) -> Iterator[int]:
    """Iterate over the offsets in a file at which an entry may refer to this one by its offset in the section."""
    needle = entry.offset.to_bytes(entry.unit.sizes.offset, file.order)
    return _places(file.section(".debug_info"), needle, sys.maxsize)


def _units_of(
    file: DebugFile, places_of_file: Iterable[int], *, skip_indexed: bool = True
) -> Iterator[tuple[Unit, Sequence[int]]]:
    """
    Iterate over the units of a file that contain some of the offsets ``places_of_file``, each with these offsets.

    ``skip_indexed`` omits units whose strings are found by an index.
    """
    unit: Unit | None = None
    places: list[int] = []
    for place in places_of_file:
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


def _text_offsets(section: SectionBytes, raw: bytes) -> tuple[Sequence[int], Sequence[int]]:
    """
    Return the offsets of a whole string in a section, and of tails of longer strings in GNU ld's order.

    The tails are searched only if there is no whole string.
    """
    whole = [place + 1 for place in _places(section, b"\0" + raw + b"\0", _STRINGS_MAX)]
    data, start = section.data, section.start
    if data[start : start + len(raw) + 1] == raw + b"\0":
        whole.append(0)
    if whole:
        return whole, ()
    tails = []
    for place in _places(section, raw + b"\0", _TAILS_MAX):
        before = data.rfind(b"\0", start, start + place) + 1 or start
        tails.append((data[before : start + place][::-1], place))
    return (), [place for _, place in sorted(tails)]


def _places(section: SectionBytes, needle: bytes, limit: int = _PLACES_MAX) -> Iterator[int]:
    """Iterate over up to ``limit`` offsets of the bytes ``needle`` in a section."""
    position = section.start - 1
    for _ in range(limit):
        position = section.data.find(needle, position + 1, section.end)
        if position < 0:
            return
        yield position - section.start


def _places_of_any(section: SectionBytes, needles: Sequence[bytes]) -> Iterator[int]:
    """Iterate over the offsets in a section at which one of the byte strings ``needles`` occurs."""
    pattern = re.compile(b"(?=" + b"|".join(map(re.escape, needles)) + b")", re.DOTALL)
    found = pattern.finditer(section.data, section.start, section.end)
    for match, _ in zip(found, range(_PLACES_MAX), strict=False):
        yield match.start() - section.start


_SPACES = frozenset((Tag.NAMESPACE, Tag.MODULE))
_CLASSES = frozenset((Tag.CLASS_TYPE, Tag.STRUCTURE_TYPE, Tag.UNION_TYPE))
_C_LANGUAGES = frozenset((0x01, 0x02, 0x0C, 0x1D, 0x2C))
"""C89, C, C99, C11 and C17, in which names of types are not nested."""

_DEPTH_MAX = 32
_IMPORTS_MAX = 1 << 12
_REFERENCES_MAX = 1 << 10


class Scope(NamedTuple):
    """
    Namespace, class or enumeration that contains names. Its own name may be empty.

    If ``is_open`` is True, its names belong to the surrounding scope, too. This is so for a namespace that is
    ``inline`` or has no name, and for an enumeration of C.
    """

    name: str
    is_open: bool


class Scoped(NamedTuple):
    """An entry, and the scopes around it, the outermost first."""

    entry: Entry
    scopes: tuple[Scope, ...]


def function_at(file: DebugFile, address: int) -> Entry | None:
    """
    Return the entry (``SUBPROGRAM``) of the function that covers a link address, or None if there is none.

    Of nested functions, return the innermost. Separate parts of a function belong to it.
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
    Iterate over the entries with one of the ``tags`` whose own name is ``name``, outside of functions.

    Each file is searched separately: the entries that it shares with others are in its ``alternate``. If
    ``declarations`` is False, most entries that only declare something are left out; if ``c_declarations`` is False,
    only those of C. In C++, a declaration may be the only entry with the name of a definition.
    """
    found = found_named(file, name, tags, declarations=declarations, c_declarations=c_declarations)
    return (each.entry for each in found)


def found_named(
    file: DebugFile, name: str, tags: Collection[int], *, declarations: bool = True, c_declarations: bool = True
) -> Iterator[Scoped]:
    """Iterate over the entries that ``entries_named`` finds with the same arguments, each with its scopes."""
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
    """
    Search for the entries with a name in a unit.

    ``places`` has the offsets at which the name, or a reference to it, may be, or is None if they are unknown.
    """

    def __init__(self, name: str, tags: Collection[int], places: Sequence[int] | None, *, is_c: bool) -> None:
        self._name = name
        self._tags = tags
        self._places = places
        self._spaces = _SPACES if is_c else _SPACES | _CLASSES
        if Tag.ENUMERATOR in self._tags:
            self._spaces |= {Tag.ENUMERATION_TYPE}

    def in_entry(self, parent: Entry, scopes: tuple[Scope, ...]) -> Iterator[Scoped]:
        """Iterate over the matches among the descendants of ``parent``. ``scopes`` ends with ``parent`` itself."""
        if len(scopes) > _DEPTH_MAX:
            return
        for entry in parent.children():
            tag = entry.tag
            if tag not in self._tags and tag not in self._spaces:
                continue
            if not may_have(self._places, entry):
                continue
            around = scopes
            if not scopes and (declared := entry.reference(At.SPECIFICATION)) is not None:
                around = scopes_of(declared)  # a type that has its own unit
            if tag in self._tags and entry.has(At.NAME) and entry.text(At.NAME) == self._name:
                yield Scoped(entry, around)
            if tag in self._spaces and entry.has_children:
                yield from self.in_entry(entry, (*around, _scope(entry)))


def _scope(entry: Entry) -> Scope:
    name = entry.name or ""
    if not name and entry.has(At.SIGNATURE) and (whole := entry.reference(At.SIGNATURE)) is not None:
        name = whole.name or ""  # clang leaves the name to the type's own unit
    if entry.tag == Tag.ENUMERATION_TYPE:
        return Scope(name, not entry.flag(At.ENUM_CLASS))
    return Scope(name, not name or entry.flag(At.EXPORT_SYMBOLS))


def scopes_of(entry: Entry) -> tuple[Scope, ...]:
    """Return the namespaces and classes around an entry, the outermost first."""
    found: list[Scope] = []
    around = entry.unit.root
    for _ in range(_DEPTH_MAX):
        inner = entry_around(around, entry.offset)
        if inner is None or inner.offset == entry.offset:
            break
        if inner.tag in _SPACES | _CLASSES:
            found.append(_scope(inner))
        around = inner
    return tuple(found)


def definitions_of(file: DebugFile, entry: Entry) -> Iterator[Entry]:
    """
    Iterate over the entries of other units that complete an entry, which is their origin.

    Link-time optimization (LTO) makes such entries.
    """
    for offset in islice(references_to(file, entry), _REFERENCES_MAX):
        inner: Entry | None = file.unit_of(offset).root
        while inner is not None:
            if inner.tag == entry.tag and inner.reference(At.ABSTRACT_ORIGIN) == entry:
                yield inner
            inner = entry_around(inner, offset)


def imported_units(unit: Unit) -> Sequence[Unit]:
    """Return a unit and the units that it imports: shared entries (dwz), or units of link-time optimization."""
    found = [unit]
    for each in found:
        if len(found) > _IMPORTS_MAX:
            break
        for child in each.root.children():
            imported = child.reference(At.IMPORT) if child.tag == Tag.IMPORTED_UNIT else None
            if imported is not None and all(imported.unit is not known for known in found):
                found.append(imported.unit)
    return found


def type_units_of(unit: Unit) -> Sequence[Unit]:
    """Return the type units that entries of a unit refer to, directly or through others."""
    found: dict[int, Unit] = {}
    waiting = [unit]
    while waiting and len(found) < _IMPORTS_MAX:
        each = waiting.pop()
        for signature in _signatures_in(each.root):
            if signature not in found:
                found[signature] = each.file.type_of_signature(signature).unit
                waiting.append(found[signature])
    return list(found.values())


def _signatures_in(parent: Entry) -> Iterator[int]:
    """Iterate over the signatures of types that an entry and its descendants refer to."""
    waiting = [parent]
    while waiting:
        entry = waiting.pop()
        yield from (v for form, v in entry.attributes.values() if form == Form.REF_SIG8 and isinstance(v, int))
        waiting += entry.children()


def is_c(unit: Unit) -> bool:
    """Return True if a unit's language is C, in which a definition needs no separate declaration."""
    return unit.root.number(At.LANGUAGE) in _C_LANGUAGES


_CALLS_DEPTH_MAX = 128
"""Maximum depth of nested calls and blocks."""


class InlinedCall(NamedTuple):
    """
    A call that was inlined: ``entry`` is its DW_TAG_inlined_subroutine, ``function`` the function that contains it.

    ``depth`` is the number of inlined calls around it.
    """

    entry: Entry
    function: Entry
    depth: int

    @property
    def name(self) -> str:
        """Name of the called function, preferably that of its symbol."""
        return self.entry.linker_name or self.entry.name or "?"

    @property
    def first_address(self) -> int | None:
        """The link address of the first executed instruction of its code, or None if it has no code."""
        ranges = ranges_of(self.entry)
        if not ranges:
            return None
        if self.entry.has(At.ENTRY_PC):
            address = self.entry.address(At.ENTRY_PC)
            if address is None and (distance := self.entry.number(At.ENTRY_PC)) is not None:
                address = ranges[0][0] + distance
            if address is not None:
                return address
        return ranges[0][0]


def inlined_calls_in(function: Entry) -> Iterator[InlinedCall]:
    """Iterate over the calls that were inlined into a function, each before those nested in it."""
    yield from _calls_in(function, function, 0, 0)


def _calls_in(parent: Entry, function: Entry, depth: int, level: int) -> Iterator[InlinedCall]:
    if level > _CALLS_DEPTH_MAX:
        function.unit.file.malformed(f"the calls in the entry at {function.offset:#x} do not end")
    for entry in parent.children():
        if entry.tag == Tag.INLINED_SUBROUTINE:
            yield InlinedCall(entry, function, depth)
            yield from _calls_in(entry, function, depth + 1, level + 1)
        elif entry.tag == Tag.LEXICAL_BLOCK:
            yield from _calls_in(entry, function, depth, level + 1)


def inlined_calls_of(file: DebugFile, name: str) -> Iterator[InlinedCall]:
    """
    Iterate over all inlined calls of a function, in all units; ``name`` is the function's name in the source.

    In other units, only entries that may contain a reference to the function are searched.
    """
    alternate = file.alternate if file.has_alternate else None
    for holder in file.all_files():
        user = file if holder is alternate else holder  # calls of a function in the shared file are in this one
        found = (
            each
            for each in entries_named(holder, name, (Tag.SUBPROGRAM,), c_declarations=False)
            if not _is_elsewhere(each)
        )
        for abstract in {entry.origin: None for entry in found}:
            for unit, places in _references(user, holder, abstract):
                yield from _CallSearch(abstract, places).calls_in(unit.root, None, 0, 0)


def _is_elsewhere(function: Entry) -> bool:
    """Return whether a C unit only declares a function, so that a search for its inlined calls there is omitted."""
    return function.has(At.DECLARATION) and is_c(function.unit)


class _CallSearch:
    """
    Search for the inlined calls of a function in a unit.

    ``places`` has the offsets at which a reference to the function may be, or is None if they are unknown.
    """

    def __init__(self, abstract: Entry, places: Sequence[int] | None) -> None:
        self._abstract = abstract
        self._places = places

    def calls_in(self, parent: Entry, function: Entry | None, depth: int, level: int) -> Iterator[InlinedCall]:
        """
        Iterate over the calls in an entry.

        ``depth`` is the number of inlined calls around it, ``level`` its depth in the tree.
        """
        if level > _CALLS_DEPTH_MAX:
            parent.unit.file.malformed(f"the contents of the entry at {parent.offset:#x} does not end")
        for entry in parent.children():
            if not entry.has_children and entry.tag != Tag.INLINED_SUBROUTINE:
                continue
            if not may_have(self._places, entry):
                continue
            is_call = entry.tag == Tag.INLINED_SUBROUTINE and function is not None
            if is_call and entry.origin == self._abstract:
                assert function is not None
                yield InlinedCall(entry, function, depth)
            inner = entry if entry.tag == Tag.SUBPROGRAM else function
            yield from self.calls_in(entry, inner, depth + is_call, level + 1)


def _references(file: DebugFile, holder: DebugFile, entry: Entry) -> Iterator[tuple[Unit, Sequence[int] | None]]:
    """Iterate over the units of a file that may refer to an entry of that file or its alternate, with the places."""
    own = entry.unit.offset if holder is file else None
    if own is not None:
        yield entry.unit, None  # by offsets in the unit, which dwz writes in as few bytes as possible
    by_unit: dict[int, list[int]] = {}
    for place in references_to(file, entry):
        unit = file.unit_of(place)
        if unit.offset != own:
            by_unit.setdefault(unit.offset, []).append(place)
    for offset, places in by_unit.items():
        yield file.unit_at(offset), places
