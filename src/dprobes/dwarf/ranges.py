"""
Which addresses an entry covers: one range, or a list (DWARF 5, 2.17 and 7.25; DWARF 4, 2.17.3).

::

    .debug_ranges     (word begin, word end)*; begin of all ones: end is the new base; 0 0 ends
    .debug_rnglists   (u8 kind | operands)*; kind 0 ends
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.addresslists import bounds_at, old_bounds_at
from dprobes.dwarf.entries import UNREADABLE
from dprobes.dwarf.numbers import At

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dwarf.entries import Entry, EntryUnit

__all__ = ["AddressRange", "covers", "list_offset", "ranges_of"]

AddressRange = tuple[int, int]
"""First address, and the one behind the last."""

_RANGES_MAX = 1 << 16


def ranges_of(entry: Entry) -> Sequence[AddressRange]:
    """Return the ranges of link addresses that an entry covers, no empty ones; raise ``TargetError`` if unreadable."""
    if entry.has(At.RANGES):
        return _listed(entry)
    low = entry.address(At.LOW_PC) if entry.has(At.LOW_PC) else None
    if low is None:
        return ()
    high = entry.number(At.HIGH_PC)  # counted from the first address
    end = low + high if high is not None else entry.address(At.HIGH_PC)
    if end is None:
        return ((low, low + 1),) if not entry.has(At.HIGH_PC) else ()
    return ((low, end),) if low < end else ()


def covers(entry: Entry, address: int) -> bool:
    """Return whether an entry covers a link address."""
    return any(start <= address < end for start, end in ranges_of(entry))


def _listed(entry: Entry) -> Sequence[AddressRange]:
    unit = entry.unit
    try:
        if unit.sizes.version < 5:
            place = entry.offset_in_section(At.RANGES)
            if place is not None and unit.is_split:  # in the section of the program
                place += unit.base(At.GNU_RANGES_BASE) or 0
            return _old_list(unit, place)
        place = entry.offset_in_section(At.RANGES)
        if place is None and (index := entry.index_in_lists(At.RANGES)) is not None:
            place = list_offset(unit, ".debug_rnglists", At.RNGLISTS_BASE, index)
        return _new_list(unit, place)
    except UNREADABLE:
        unit.file.malformed(f"the ranges of the entry at {entry.offset:#x} cannot be understood")


def list_offset(unit: EntryUnit, name: str, attribute: int, index: int) -> int:
    """Return where a list of a unit begins in its section, by its number; ``attribute`` is that of the first one."""
    base = unit.base(attribute)
    size = unit.sizes.offset
    if base is None:
        base = (12 if size == 4 else 20) if unit.is_split else None
    if base is None:
        raise ValueError("a list by its number, in a unit that has none")
    section = unit.file.section(name)
    place = section.start + base + index * size
    if place + size > section.end:
        raise IndexError("a list outside of its section")
    return base + int.from_bytes(section.data[place : place + size], unit.sizes.order)


def _old_list(unit: EntryUnit, place: int | None) -> Sequence[AddressRange]:
    if place is None:
        return ()
    section, size = unit.file.section(".debug_ranges"), unit.sizes.address
    position, base = section.start + place, unit.low_pc
    found: list[AddressRange] = []
    while len(found) < _RANGES_MAX:
        if position + 2 * size > section.end:
            raise IndexError("a list outside of its section")
        bounds = old_bounds_at(unit, section.data, position, base)
        if bounds is None:
            break
        begin, end, base, position = bounds
        if begin is not None and begin < end:
            found.append((begin, end))
    return found


def _new_list(unit: EntryUnit, place: int | None) -> Sequence[AddressRange]:
    if place is None:
        return ()
    section = unit.file.section(".debug_rnglists")
    data, position, base = section.data, section.start + place, unit.low_pc
    found: list[AddressRange] = []
    while len(found) < _RANGES_MAX:
        if position >= section.end:
            raise IndexError("a list outside of its section")
        kind = data[position]
        if not kind:  # end_of_list
            break
        begin, end, base, position = bounds_at(unit, data, position + 1, kind, base)
        if begin is not None and begin < end:
            found.append((begin, end))
    return found
