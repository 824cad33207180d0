"""
From where to where what a list describes is so: what lists of ranges and of locations have in common.

::

    DWARF 4   address | address, both 0 at the end; the first one is all ones where the second one is a new base
    DWARF 5   u8 kind | what the kind says; location lists have one kind more between those here, the 5

Rules: DWARF 5, 7.25 and 7.29; DWARF 4, 2.6.2 and 2.17.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.bytenumbers import unsigned_at
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.dwarf.entries import EntryUnit
    from dprobes.target.elf.contents import FileBytes

__all__ = ["ListedBounds", "bounds_at", "old_bounds_at"]


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
