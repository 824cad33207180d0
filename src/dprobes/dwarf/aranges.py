"""
Which unit covers an address (``.debug_aranges``; DWARF 5, 6.1.2).

::

    length | u16 version (2) | offset of the unit | u8 address size | u8 segment size | padding to two addresses
    (address, size)*; 0 0 ends
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.dwarf.sections import SectionBytes

__all__ = ["unit_covering", "units_listed"]

_VERSION = 2
_LONG = 0xFFFFFFFF


def _tables(section: SectionBytes, prefix: str) -> Iterator[tuple[int, int, int, int]]:
    """Give of each table the offset of its unit, and address size, begin and end of its rows."""
    short, long = struct.Struct(f"{prefix}IHIBB"), struct.Struct(f"{prefix}4xQHQBB")
    data, start = section.data, section.start
    while start + short.size <= section.end:
        layout, head = short, 4
        length, version, unit, address_size, segment_size = short.unpack_from(data, start)
        if length == _LONG:
            layout, head = long, 12
            if start + long.size > section.end:
                break
            length, version, unit, address_size, segment_size = long.unpack_from(data, start)
        end = start + head + length
        if length < 8 or end > section.end:
            break
        rows = layout.size
        rows += -rows % (2 * address_size) if address_size else 0
        if version == _VERSION and address_size in (4, 8) and not segment_size:
            yield unit, address_size, start + rows, end
        start = end


def units_listed(section: SectionBytes, prefix: str) -> set[int]:
    """Return the offsets of the units that the section knows the addresses of."""
    return {unit for unit, _, rows, end in _tables(section, prefix) if rows < end}


def unit_covering(section: SectionBytes, prefix: str, address: int) -> int | None:
    """Return the offset of the unit that covers a link address; None if the section does not say."""
    layouts = {4: struct.Struct(f"{prefix}2I"), 8: struct.Struct(f"{prefix}2Q")}
    for unit, size, rows, end in _tables(section, prefix):
        layout = layouts[size]
        usable = (end - rows) // layout.size * layout.size
        if usable <= 0:
            continue
        for begin, length in layout.iter_unpack(section.data[rows : rows + usable]):
            if begin <= address < begin + length:
                return unit
    return None
