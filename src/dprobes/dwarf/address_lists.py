"""
Address lists: the ranges that an entry covers, and the expressions for a variable's location in each range.

::

    DWARF 4   .debug_ranges     (word begin, word end)*
              .debug_loc        (word begin, word end, u16 size, expression)*
                                both words 0 at the end; begin of all ones: end is a new base
              .debug_loc.dwo    (u8 kind | operands | u16 size, expression)*; kind 0 ends; GNU's, for split units
    DWARF 5   .debug_rnglists   (u8 kind | operands)*; kind 0 ends
              .debug_loclists   (u8 kind | operands | size, expression)*; kind 0 ends; it has one kind more, the 5

Rules: DWARF 5, 2.6.2, 2.17, 7.25 and 7.29; DWARF 4, 2.6.2 and 2.17.3.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.debug_entries import UNREADABLE
from dprobes.dwarf.dwarf_numbers import At
from dprobes.target.elf.byte_reader import unsigned_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.dwarf.debug_entries import Entry, Unit
    from dprobes.target.elf.debug_sections import SectionBytes
    from dprobes.target.elf.file_contents import FileBytes

__all__ = ["AddressRange", "ListedBounds", "bounds_at", "covers", "listed_expressions", "old_bounds_at", "ranges_of"]

_RANGES_MAX = 1 << 16
_ENTRIES_MAX = 1 << 14
_ELSEWHERE = -1
"""Mark for the begin of a default location, which applies at all other addresses."""

AddressRange = tuple[int, int]
"""Range of link addresses: the first one, and the end (excluded)."""


class ListedBounds(NamedTuple):
    """
    Bounds of a list entry. ``position`` is the offset in the section after the part that was read.

    The entry covers the link addresses from ``begin`` to ``end`` (excluded). If ``begin`` is None, the entry only sets
    ``base``, the base address of the following entries.
    """

    begin: int | None
    end: int
    base: int
    position: int


def old_bounds_at(unit: Unit, data: FileBytes, position: int, base: int) -> ListedBounds | None:
    """
    Return the bounds of the list entry at ``position``, in the format of DWARF 4, or None at the end of the list.

    ``base`` is the base address from there on.
    """
    size, order = unit.sizes.address, unit.sizes.order
    begin = int.from_bytes(data[position : position + size], order)
    end = int.from_bytes(data[position + size : position + 2 * size], order)
    position += 2 * size
    if begin == (1 << 8 * size) - 1:
        return ListedBounds(None, 0, end, position)
    return ListedBounds(base + begin, base + end, base, position) if begin or end else None


def bounds_at(unit: Unit, data: FileBytes, position: int, kind: int, base: int) -> ListedBounds:
    """
    Return the bounds of a list entry in the format of DWARF 5.

    ``position`` is after the entry's ``kind`` (DW_RLE_*), and ``base`` is the base address from there on. Raise
    ValueError for an unknown kind.
    """
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


def ranges_of(entry: Entry) -> Sequence[AddressRange]:
    """
    Return the nonempty ranges of link addresses that an entry covers.

    Raise ``TargetError`` if its list is malformed.
    """
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
    """Return whether the ranges of an entry, such as a function's or a block's, contain a link address."""
    return any(start <= address < end for start, end in ranges_of(entry))


def _listed(entry: Entry) -> Sequence[AddressRange]:
    unit = entry.unit
    is_old = unit.sizes.version < 5
    try:
        place = entry.offset_in_section(At.RANGES)
        if is_old and place is not None and unit.is_split:  # in the section of the program
            place += unit.base(At.GNU_RANGES_BASE) or 0
        if not is_old and place is None and (index := entry.index_in_lists(At.RANGES)) is not None:
            place = list_offset(unit, ".debug_rnglists", At.RNGLISTS_BASE, index)
        if place is None:
            return ()
        section = unit.file.section(".debug_ranges" if is_old else ".debug_rnglists")
        found = _entries(unit, section, place, _old_bounds if is_old else _range_bounds)
        ranges = ((begin, end) for begin, end, _ in found if begin is not None and begin < end)
        return list(islice(ranges, _RANGES_MAX))
    except UNREADABLE:
        unit.file.malformed(f"the ranges of the entry at {entry.offset:#x} cannot be understood")


def list_offset(unit: Unit, name: str, attribute: int, index: int) -> int:
    """
    Return the offset in its section of a unit's list with an index.

    ``attribute`` is the attribute with the base of the unit's lists. Raise ValueError if the unit has no such lists,
    and IndexError if the index is beyond the section.
    """
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


class ListedExpression(NamedTuple):
    """
    An entry of a location list: the DWARF expression for addresses from ``start`` to ``end`` (excluded).

    ``start`` is None for the expression of all other addresses.
    """

    start: int | None
    end: int
    expression: bytes


def listed_expressions(entry: Entry, attribute: int) -> Sequence[ListedExpression] | None:
    """
    Return the location list that an attribute refers to, None for other attributes.

    Raise ``TargetError`` if the list is malformed.
    """
    unit = entry.unit
    place = entry.offset_in_section(attribute)
    try:
        if place is None and (index := entry.index_in_lists(attribute)) is not None:
            place = list_offset(unit, ".debug_loclists", At.LOCLISTS_BASE, index)
        if place is None:
            return None
        if unit.sizes.version >= 5:
            name, bounds_of, size_of = ".debug_loclists", _location_bounds, _long_size
        else:
            name, bounds_of, size_of = ".debug_loc", _split_bounds if unit.is_split else _old_bounds, _short_size

        def read(section: SectionBytes) -> Sequence[ListedExpression]:
            return list(islice(_entries(unit, section, place, bounds_of, size_of), _ENTRIES_MAX))

        return unit.file.read_at(name, place, read)
    except UNREADABLE:
        unit.file.malformed(f"the locations of the entry at {entry.offset:#x} cannot be understood")


def _entries(
    unit: Unit,
    section: SectionBytes,
    place: int,
    bounds_of: Callable[[Unit, SectionBytes, int, int], ListedBounds | None],
    size_of: Callable[[Unit, FileBytes, int], tuple[int, int]] | None = None,
) -> Iterator[ListedExpression]:
    """
    Iterate over the entries of a DWARF range list or location list.

    ``bounds_of`` reads the bounds of an entry, and returns None at the end of the list. For a location list,
    ``size_of`` reads the size of the expression after them.
    """
    data, position, base = section.data, section.start + place, unit.low_pc
    while True:
        if position >= section.end:
            raise IndexError("a list outside of its section")
        bounds = bounds_of(unit, section, position, base)
        if bounds is None:
            return
        begin, end, base, position = bounds
        if begin is None:
            continue
        expression = b""
        if size_of is not None:
            size, position = size_of(unit, data, position)
            expression = bytes(data[position : position + size])
            position += size
            if len(expression) < size:
                raise IndexError("an expression outside of its section")
        yield ListedExpression(None if begin == _ELSEWHERE else begin, end, expression)


def _short_size(unit: Unit, data: FileBytes, position: int) -> tuple[int, int]:
    return int.from_bytes(data[position : position + 2], unit.sizes.order), position + 2


def _long_size(unit: Unit, data: FileBytes, position: int) -> tuple[int, int]:  # noqa: ARG001 - as the other one
    return unsigned_at(data, position)


def _old_bounds(unit: Unit, section: SectionBytes, position: int, base: int) -> ListedBounds | None:
    if position + 2 * unit.sizes.address > section.end:
        raise IndexError("a list outside of its section")
    return old_bounds_at(unit, section.data, position, base)


def _range_bounds(unit: Unit, section: SectionBytes, position: int, base: int) -> ListedBounds | None:
    kind = section.data[position]
    return bounds_at(unit, section.data, position + 1, kind, base) if kind else None


def _location_bounds(unit: Unit, section: SectionBytes, position: int, base: int) -> ListedBounds | None:
    data, kind = section.data, section.data[position]
    match kind:
        case 0:  # end_of_list
            return None
        case 5:  # default_location
            return ListedBounds(_ELSEWHERE, 0, base, position + 1)
        case 9:  # GNU_view_pair: which of several states of one instruction
            _, position = unsigned_at(data, position + 1)
            return ListedBounds(None, 0, base, unsigned_at(data, position)[1])
    return bounds_at(unit, data, position + 1, kind if kind < 5 else kind - 1, base)


def _split_bounds(unit: Unit, section: SectionBytes, position: int, base: int) -> ListedBounds | None:
    data, kind, order = section.data, section.data[position], unit.sizes.order
    position += 1
    match kind:
        case 0:  # end of list
            return None
        case 1 | 2:  # base address selection, start and end
            return bounds_at(unit, data, position, kind, base)
        case 3:  # start and length
            index, position = unsigned_at(data, position)
            begin = unit.file.indexed_address(unit, index)
            length = int.from_bytes(data[position : position + 4], order)
            return ListedBounds(begin, begin + length, base, position + 4)
        case 4:  # pair of offsets
            begin, end = (int.from_bytes(data[at : at + 4], order) for at in (position, position + 4))
            return ListedBounds(base + begin, base + end, base, position + 8)
        case _:
            raise ValueError(f"a location of kind {kind}")
