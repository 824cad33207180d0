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
    from dprobes.dwarf.sections import SectionBytes

__all__ = ["unit_covering", "units_listed"]

_VERSION = 2
_LONG = 0xFFFFFFFF


def _tables(section: SectionBytes, prefix: str) -> list[tuple[int, int, int, int]]:
    """Return of each table the offset of its unit, and address size, begin and end of its rows."""
    order = "little" if prefix == "<" else "big"
    found = []
    position = section.start
    data = section.data
    while position + 12 <= section.end:
        length = int.from_bytes(data[position : position + 4], order)  # type: ignore[arg-type] # little or big
        head, size = (12, 8) if length == _LONG else (4, 4)
        if size == 8:
            length = int.from_bytes(data[position + 4 : position + 12], order)  # type: ignore[arg-type]
        start, end = position, position + head + length
        if length < 8 or end > section.end:
            break
        position += head
        version = int.from_bytes(data[position : position + 2], order)  # type: ignore[arg-type]
        unit = int.from_bytes(data[position + 2 : position + 2 + size], order)  # type: ignore[arg-type]
        address_size, segment_size = data[position + 2 + size], data[position + 3 + size]
        rows = position + 4 + size
        rows += -(rows - start) % (2 * address_size) if address_size else 0
        if version == _VERSION and address_size in (4, 8) and not segment_size:
            found.append((unit, address_size, rows, end))
        position = end
    return found


def units_listed(section: SectionBytes, prefix: str) -> set[int]:
    """Return the offsets of the units that the section knows the addresses of."""
    return {unit for unit, _, rows, end in _tables(section, prefix) if rows < end}


def unit_covering(section: SectionBytes, prefix: str, address: int) -> int | None:
    """Return the offset of the unit that covers a link address; None if the section does not say."""
    for unit, size, rows, end in _tables(section, prefix):
        layout = struct.Struct(f"{prefix}2{'Q' if size == 8 else 'I'}")
        usable = (end - rows) // layout.size * layout.size
        if usable <= 0:
            continue
        for begin, length in layout.iter_unpack(section.data[rows : rows + usable]):
            if begin <= address < begin + length:
                return unit
    return None
