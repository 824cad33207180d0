"""
Lists of locations: which expression says where a variable is, at which instructions (DWARF 5, 2.6.2 and 7.29).

::

    .debug_loc        (word begin, word end, u16 size, expression)*; begin of all ones: end is the new base; 0 0 ends
    .debug_loc.dwo    (u8 kind | operands | u16 size, expression)*; kind 0 ends; GNU's, for DWARF 4
    .debug_loclists   (u8 kind | operands | size, expression)*; kind 0 ends
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.addresslists import bounds_at, old_bounds_at
from dprobes.dwarf.bytenumbers import unsigned_at
from dprobes.dwarf.entries import UNREADABLE
from dprobes.dwarf.numbers import At
from dprobes.dwarf.ranges import list_offset
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dwarf.entries import Entry, EntryUnit
    from dprobes.dwarf.sections import SectionBytes

__all__ = ["ListedExpression", "listed_expressions"]

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
            return unit.file.read_at(".debug_loclists", place, lambda section: _new_list(unit, section, place))
        read = _split_list if unit.is_split else _old_list
        return unit.file.read_at(".debug_loc", place, lambda section: read(unit, section, place))
    except UNREADABLE:
        unit.file.malformed(f"the locations of the entry at {entry.offset:#x} cannot be understood")


def _old_list(unit: EntryUnit, section: SectionBytes, place: int) -> Sequence[ListedExpression]:
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


def _new_list(unit: EntryUnit, section: SectionBytes, place: int) -> Sequence[ListedExpression]:
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
