"""
Where debug information may refer to a text: the units whose bytes hold the text itself, or its offset.

Linkers let a text that others end with share the bytes of one of these. Which one that is nobody says: GNU ld takes the
first one, if all are sorted from their ends. If nothing refers to that, any of them may be it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.dwarf.numbers import At, Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.dwarf.debugfile import DebugFile
    from dprobes.dwarf.entries import Entry
    from dprobes.dwarf.sections import SectionBytes
    from dprobes.dwarf.units import Unit

__all__ = ["places_in", "strings_with", "units_with"]

_STRINGS_MAX = 256
"""Strings of a file that are looked for as one; linkers write none twice."""
_TAILS_MAX = 1 << 16
_PLACES_MAX = 1 << 16
"""Places of a name that are looked at in one section."""

_TEXT_MAX = 1 << 14
"""Bytes of a text that is compared with another one."""

_TEXT_FORMS = frozenset((Form.STRP, Form.STRP_SUP, Form.GNU_STRP_ALT))
_CHECKED = 16
"""Places that are looked at until one is found that refers to a text; a number may be the same by chance."""


def units_with(file: DebugFile, raw: bytes) -> Iterator[tuple[Unit, Sequence[int] | None]]:
    """
    Give the units whose bytes may have a name, and where, as they are found: whoever has enough does not search on.

    A unit may come several times, with other places; without places all of it may have the name.
    """
    whole, tails = _text_offsets(file.section(".debug_str"), raw)
    yield from _units_referring(file, whole, tails)
    if file.has_alternate:
        yield from _units_referring(file, *_text_offsets(file.alternate.section(".debug_str"), raw))
    if (whole or tails) and file.section(".debug_str_offsets").size:
        yield from ((unit, None) for unit in file.units() if _has_indexed_texts(unit))
    if (whole or tails) and file.section(".debug_types").size:
        yield from ((unit, None) for unit in file.type_units())
    # Short names, and those that are used once, are in the entries. All of units with numbered strings was searched.
    own = _places(file.section(".debug_info"), raw + b"\0")
    yield from _units_of(file, own, skip_indexed=bool(whole or tails))


def places_in(file: DebugFile, unit: Unit, raw: bytes) -> Sequence[int] | None:
    """Return where the bytes of one unit of a file may refer to a name; None if its bytes do not say."""
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
    """Return the strings of debug information that begin with some bytes, and ends of strings that do."""
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
    """Give the units with one of the offsets ``whole``, or else of the ``tails``, the most probable one first."""
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
    """Return whether the entry with some bytes of a unit refers to a text at an offset."""
    entry: Entry | None = unit.root
    while entry is not None:
        if any(form in _TEXT_FORMS and value == offset for form, value in entry.attributes.values()):
            return True
        entry = next((child for child in entry.children() if child.offset <= place < child.following()), None)
    return False


def _units_of(
    file: DebugFile, places_of_file: Iterable[int], *, skip_indexed: bool = True
) -> Iterator[tuple[Unit, Sequence[int]]]:
    """Give the units of places, and these; ``skip_indexed`` leaves those with numbered strings out."""
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
    """Return where a text is in a section by itself, or else at the end of longer ones, as GNU ld would share it."""
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
    """Give the offsets of bytes in a section."""
    position = section.start - 1
    for _ in range(limit):
        position = section.data.find(needle, position + 1, section.end)
        if position < 0:
            return
        yield position - section.start


def _places_of_any(section: SectionBytes, needles: Sequence[bytes]) -> Iterator[int]:
    """Give the offsets of one of several bytes in a section, in one pass."""
    pattern = re.compile(b"(?=" + b"|".join(map(re.escape, needles)) + b")", re.DOTALL)  # noqa: TID251 - made of data
    found = pattern.finditer(section.data, section.start, section.end)
    for match, _ in zip(found, range(_PLACES_MAX), strict=False):
        yield match.start() - section.start
