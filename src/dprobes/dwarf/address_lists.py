"""
Lists of locations: which expression says where a variable is, at which instructions (DWARF 5, 2.6.2 and 7.29).

::

    .debug_loc        (word begin, word end, u16 size, expression)*; begin of all ones: end is the new base; 0 0 ends
    .debug_loc.dwo    (u8 kind | operands | u16 size, expression)*; kind 0 ends; GNU's, for DWARF 4
    .debug_loclists   (u8 kind | operands | size, expression)*; kind 0 ends
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.debug_entries import UNREADABLE
from dprobes.dwarf.dwarf_numbers import At
from dprobes.target.elf.byte_reader import unsigned_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dwarf.debug_entries import Entry, EntryUnit
    from dprobes.dwarf.debug_sections import SectionBytes
    from dprobes.target.elf.file_contents import FileBytes

__all__ = ["AddressRange", "ListedBounds", "bounds_at", "covers", "listed_expressions", "old_bounds_at", "ranges_of"]

# From where to where what a list describes is so: what lists of ranges and of locations have in common.
#
# ::
#
#     DWARF 4   address | address, both 0 at the end; the first one is all ones where the second one is a new base
#     DWARF 5   u8 kind | what the kind says; location lists have one kind more between those here, the 5
#
# Rules: DWARF 5, 7.25 and 7.29; DWARF 4, 2.6.2 and 2.17.3.


class ListedBounds(NamedTuple):
    """
    What an entry of a list says; ``position`` is behind it.

    It is about the addresses from ``begin`` to ``end``; None if it says only from which ``base`` others count.
    """

    begin: int | None
    end: int
    base: int
    position: int


def old_bounds_at(unit: EntryUnit, data: FileBytes, position: int, base: int) -> ListedBounds | None:
    """Return what an entry of DWARF 4 says; None at the end of the list."""
    size, order = unit.sizes.address, unit.sizes.order
    begin = int.from_bytes(data[position : position + size], order)
    end = int.from_bytes(data[position + size : position + 2 * size], order)
    position += 2 * size
    if begin == (1 << 8 * size) - 1:
        return ListedBounds(None, 0, end, position)
    return ListedBounds(base + begin, base + end, base, position) if begin or end else None


def bounds_at(unit: EntryUnit, data: FileBytes, position: int, kind: int, base: int) -> ListedBounds:
    """Return what an entry of DWARF 5 says, of some kind of range lists; ValueError for an unknown one."""
    size, order, file = unit.sizes.address, unit.sizes.order, unit.file
    match kind:
        case 1:  # base_addressx
            index, position = unsigned_at(data, position)
            return ListedBounds(None, 0, file.indexed_address(unit, index), position)
        case 2 | 3:  # startx_endx, startx_length
            index, position = unsigned_at(data, position)
            second, position = unsigned_at(data, position)
            begin = file.indexed_address(unit, index)
            end = begin + second if kind == 3 else file.indexed_address(unit, second)
        case 4:  # offset_pair
            begin, position = unsigned_at(data, position)
            end, position = unsigned_at(data, position)
            begin, end = base + begin, base + end
        case 5:  # base_address
            return ListedBounds(None, 0, int.from_bytes(data[position : position + size], order), position + size)
        case 6:  # start_end
            begin = int.from_bytes(data[position : position + size], order)
            end = int.from_bytes(data[position + size : position + 2 * size], order)
            position += 2 * size
        case 7:  # start_length
            begin = int.from_bytes(data[position : position + size], order)
            length, position = unsigned_at(data, position + size)
            end = begin + length
        case _:
            raise ValueError(f"an entry of kind {kind}")
    return ListedBounds(begin, end, base, position)


# Which addresses an entry covers: one range, or a list (DWARF 5, 2.17 and 7.25; DWARF 4, 2.17.3).
#
# ::
#
#     .debug_ranges     (word begin, word end)*; begin of all ones: end is the new base; 0 0 ends
#     .debug_rnglists   (u8 kind | operands)*; kind 0 ends


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
            return _old_ranges(unit, place)
        place = entry.offset_in_section(At.RANGES)
        if place is None and (index := entry.index_in_lists(At.RANGES)) is not None:
            place = list_offset(unit, ".debug_rnglists", At.RNGLISTS_BASE, index)
        return _new_ranges(unit, place)
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


def _old_ranges(unit: EntryUnit, place: int | None) -> Sequence[AddressRange]:
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


def _new_ranges(unit: EntryUnit, place: int | None) -> Sequence[AddressRange]:
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


_ENTRIES_MAX = 1 << 14


class ListedExpression(NamedTuple):
    """An expression that holds at the link addresses from ``start`` to ``end`` (excluded); None: elsewhere."""

    start: int | None
    end: int
    expression: bytes


def listed_expressions(entry: Entry, attribute: int) -> Sequence[ListedExpression] | None:
    """Return the list that an attribute refers to; None if it refers to none; raise ``TargetError`` if unreadable."""
    unit = entry.unit
    place = entry.offset_in_section(attribute)
    try:
        if place is None and (index := entry.index_in_lists(attribute)) is not None:
            place = list_offset(unit, ".debug_loclists", At.LOCLISTS_BASE, index)
        if place is None:
            return None
        if unit.sizes.version >= 5:
            return unit.file.read_at(".debug_loclists", place, lambda section: _new_locations(unit, section, place))
        read = _split_list if unit.is_split else _old_locations
        return unit.file.read_at(".debug_loc", place, lambda section: read(unit, section, place))
    except UNREADABLE:
        unit.file.malformed(f"the locations of the entry at {entry.offset:#x} cannot be understood")


def _old_locations(unit: EntryUnit, section: SectionBytes, place: int) -> Sequence[ListedExpression]:
    size, order = unit.sizes.address, unit.sizes.order
    data, position, base = section.data, section.start + place, unit.low_pc
    found: list[ListedExpression] = []
    while len(found) < _ENTRIES_MAX:
        if position + 2 * size > section.end:
            raise IndexError("a list outside of its section")
        bounds = old_bounds_at(unit, data, position, base)
        if bounds is None:
            break
        begin, end, base, position = bounds
        if begin is not None:
            length = int.from_bytes(data[position : position + 2], order)
            position += 2
            found.append(ListedExpression(begin, end, _block(data[position : position + length], length)))
            position += length
    return found


def _split_list(unit: EntryUnit, section: SectionBytes, place: int) -> Sequence[ListedExpression]:
    order, file = unit.sizes.order, unit.file
    data, position, base = section.data, section.start + place, unit.low_pc
    found: list[ListedExpression] = []
    while len(found) < _ENTRIES_MAX:
        if position >= section.end:
            raise IndexError("a list outside of its section")
        kind = data[position]
        position += 1
        match kind:
            case 0:  # end of list
                break
            case 1:  # base address selection
                index, position = unsigned_at(data, position)
                base = file.indexed_address(unit, index)
                continue
            case 2:  # start and end
                index, position = unsigned_at(data, position)
                second, position = unsigned_at(data, position)
                begin, end = file.indexed_address(unit, index), file.indexed_address(unit, second)
            case 3:  # start and length
                index, position = unsigned_at(data, position)
                begin = file.indexed_address(unit, index)
                end = begin + int.from_bytes(data[position : position + 4], order)
                position += 4
            case 4:  # pair of offsets
                begin = base + int.from_bytes(data[position : position + 4], order)
                end = base + int.from_bytes(data[position + 4 : position + 8], order)
                position += 8
            case _:
                raise ValueError(f"a location of kind {kind}")
        length = int.from_bytes(data[position : position + 2], order)
        position += 2
        found.append(ListedExpression(begin, end, _block(data[position : position + length], length)))
        position += length
    return found


def _new_locations(unit: EntryUnit, section: SectionBytes, place: int) -> Sequence[ListedExpression]:
    data, position, base = section.data, section.start + place, unit.low_pc
    found: list[ListedExpression] = []
    while len(found) < _ENTRIES_MAX:
        if position >= section.end:
            raise IndexError("a list outside of its section")
        kind = data[position]
        position += 1
        begin: int | None = None
        end = 0
        match kind:
            case 0:  # end_of_list
                break
            case 5:  # default_location
                pass
            case 9:  # GNU_view_pair: which of several states of one instruction
                _, position = unsigned_at(data, position)
                _, position = unsigned_at(data, position)
                continue
            case _:
                begin, end, base, position = bounds_at(unit, data, position, kind if kind < 5 else kind - 1, base)
                if begin is None:
                    continue
        length, position = unsigned_at(data, position)
        found.append(ListedExpression(begin, end, _block(data[position : position + length], length)))
        position += length
    return found


def _block(data: bytes, length: int) -> bytes:
    if len(data) < length:
        raise IndexError("an expression outside of its section")
    return bytes(data)
