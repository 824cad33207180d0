"""
Where functions start, from the binary-search table of ``.eh_frame_hdr``: the one map of functions that strip leaves.

Only the encodings that linkers write are read; anything else counts as no table, since it is a help and never needed.
Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF pointer encodings.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.target.elf import ElfFile

__all__ = ["FrameTable"]

_UDATA4, _DATAREL_SDATA4 = 0x03, 0x3B
_POINTER_SIZES = {0x00: 0, 0x01: -1, 0x02: 2, 0x03: 4, 0x04: 8, 0x09: -1, 0x0A: 2, 0x0B: 4, 0x0C: 8}


@dataclass(frozen=True, slots=True)
class FrameTable:
    """Hold the sorted link addresses at which functions start, and of each the address of its frame description."""

    starts: tuple[int, ...] = ()
    descriptions: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, elf: ElfFile, header: tuple[int, int] | None) -> FrameTable:
        """Return the table of ``elf`` whose header is at the given link address and size; empty if unusable."""
        if header is None:
            return cls()
        address, size = header
        try:
            return cls._parse(elf, address, min(size, len(elf.data)))
        except (TargetError, struct.error):
            return cls()

    @classmethod
    def _parse(cls, elf: ElfFile, address: int, size: int) -> FrameTable:
        data = elf.read(address, size)
        version, pointer, count_encoding, table_encoding = struct.unpack_from("4B", data)
        pointer_size = _POINTER_SIZES.get(pointer & 0x0F, -1) or elf.word_size
        if version != 1 or count_encoding != _UDATA4 or table_encoding != _DATAREL_SDATA4 or pointer_size < 0:
            return cls()
        prefix = elf.struct_prefix
        (count,) = struct.unpack_from(f"{prefix}I", data, 4 + pointer_size)
        table = data[8 + pointer_size : 8 + pointer_size + 8 * count]
        if len(table) != 8 * count:
            return cls()
        mask = (1 << 8 * elf.word_size) - 1
        pairs = struct.iter_unpack(f"{prefix}2i", table)
        rows = sorted(((address + start) & mask, (address + description) & mask) for start, description in pairs)
        return cls(tuple(start for start, _ in rows), tuple(description for _, description in rows))

    def covering(self, elf: ElfFile, link_address: int) -> int | None:
        """Return the start of the function whose frame description covers ``link_address``, if one does."""
        i = bisect_right(self.starts, link_address) - 1
        code = elf.code_range(link_address)
        if i < 0 or code is None or self.starts[i] < code[0]:
            return None
        start = self.starts[i]
        length = self._length(elf, i)
        return start if length is None or link_address < start + length else None

    def _length(self, elf: ElfFile, index: int) -> int | None:
        """Return a function's length in bytes, for the encoding that compilers use (pcrel, sdata4), else None."""
        description = self.descriptions[index]
        try:
            begin, length = struct.unpack(f"{elf.struct_prefix}iI", elf.read(description + 8, 8))
        except TargetError:
            return None
        return int(length) if description + 8 + begin == self.starts[index] else None
