"""Malicious ELF files, which would make their readers use much time or memory."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SYMTAB, DYNSYM, GNU_HASH = 2, 11, 0x6FFFFFF6

_SECTION_SIZE = 64
_SYMBOL = struct.Struct("<IBBHQQ")


def claim(source: Path, target: Path, kind: int, size: int) -> None:
    """Write a copy of an ELF file whose first section of type ``kind`` is a hole of ``size`` bytes."""
    data = bytearray(source.read_bytes())
    place, start = section(data, kind), _page_behind(data)
    struct.pack_into("<QQ", data, place + 24, start, size)
    target.write_bytes(data)
    os.truncate(target, start + size)


def add_symbols(source: Path, target: Path, count: int) -> None:
    """Write a copy of an ELF file whose symbol table has ``count`` functions at the same address."""
    data = bytearray(source.read_bytes())
    place, start = section(data, SYMTAB), _page_behind(data)
    struct.pack_into("<QQ", data, place + 24, start, _SYMBOL.size * count)
    entry = _SYMBOL.pack(1, 0x12, 0, 9, struct.unpack_from("<Q", data, 24)[0], 16)
    target.write_bytes(bytes(data) + bytes(start - len(data)) + entry * count)


def section(data: bytes | bytearray, kind: int) -> int:
    """Return the offset of the section header of the first section of type ``kind``."""
    (first,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    places = [int(first) + _SECTION_SIZE * number for number in range(count)]
    return next(place for place in places if struct.unpack_from("<I", data, place + 4)[0] == kind)


def _page_behind(data: bytes | bytearray) -> int:
    return len(data) + 4095 & ~4095
