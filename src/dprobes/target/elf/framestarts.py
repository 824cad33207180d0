"""
Where functions start, from the binary-search table of ``.eh_frame_hdr``: the one map of functions that strip leaves.

Programs linked with ``-static`` have no such table; for them ``.eh_frame`` itself is read.

Only the encodings that linkers write are read; anything else counts as no table, since it is a help and never needed.
Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF pointer encodings.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.target.elf.contents import Contents
    from dprobes.target.elf.headers import Section

__all__ = ["FrameTable"]

_ROWS_MAX = 1 << 22
"""Functions of a table; the largest programs have a million."""

_UDATA4, _DATAREL_SDATA4 = 0x03, 0x3B
_PCREL_SDATA4 = 0x1B
_POINTER_SIZES = {0x00: 0, 0x01: -1, 0x02: 2, 0x03: 4, 0x04: 8, 0x09: -1, 0x0A: 2, 0x0B: 4, 0x0C: 8}


class Image(Protocol):
    """An ELF file, as far as its unwind table is read."""

    data: Contents
    word_size: int
    struct_prefix: str
    type: str
    sections: tuple[Section, ...]

    def read(self, link_address: int, n: int) -> bytes:
        """Return the bytes at a link address; raise ``TargetError`` if the file does not hold them."""

    def bytes_at(self, offset: int, size: int, what: str) -> bytes:
        """Return the bytes at a file offset; raise ``TargetError`` if they are not ``what`` they should be."""

    def code_range(self, link_address: int) -> tuple[int, int] | None:
        """Return start and end of the executable segment around a link address."""


@dataclass(frozen=True, slots=True)
class FrameTable:
    """Hold the sorted link addresses at which functions start, and of each the address of its frame description."""

    starts: tuple[int, ...] = ()
    descriptions: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, elf: Image, header: tuple[int, int] | None) -> FrameTable:
        """Return the table of ``elf`` whose header is at the given link address and size; empty if unusable."""
        try:
            if header is None:
                return cls._walk(elf)
            address, size = header
            return cls._parse(elf, address, min(size, len(elf.data)))
        except (TargetError, struct.error):
            return cls()

    @classmethod
    def _parse(cls, elf: Image, address: int, size: int) -> FrameTable:
        data = elf.read(address, size)
        version, pointer, count_encoding, table_encoding = struct.unpack_from("4B", data)
        pointer_size = _POINTER_SIZES.get(pointer & 0x0F, -1) or elf.word_size
        if version != 1 or count_encoding != _UDATA4 or table_encoding != _DATAREL_SDATA4 or pointer_size < 0:
            return cls()
        prefix = elf.struct_prefix
        (count,) = struct.unpack_from(f"{prefix}I", data, 4 + pointer_size)
        if count > _ROWS_MAX:
            return cls()
        table = data[8 + pointer_size : 8 + pointer_size + 8 * count]
        if len(table) != 8 * count:
            return cls()
        mask = (1 << 8 * elf.word_size) - 1
        pairs = struct.iter_unpack(f"{prefix}2i", table)
        rows = sorted(((address + start) & mask, (address + description) & mask) for start, description in pairs)
        return cls(tuple(start for start, _ in rows), tuple(description for _, description in rows))

    @classmethod
    def _walk(cls, elf: Image) -> FrameTable:
        section = next((s for s in elf.sections if s.name == ".eh_frame" and s.in_file and s.address), None)
        if section is None or elf.type == "rel":
            return cls()
        data = elf.bytes_at(section.offset, section.size, "the unwind table")
        rows: list[tuple[int, int]] = []
        prefix, position = elf.struct_prefix, 0
        encodings: dict[int, int | None] = {}
        while position + 16 <= len(data) and len(rows) < _ROWS_MAX:
            length, kind, begin = struct.unpack_from(f"{prefix}IIi", data, position)
            if length in (0, 0xFFFFFFFF):
                break
            if kind == 0:
                encodings[position] = _pointer_encoding(data, position + 8)
            elif encodings.get(position + 4 - kind) == _PCREL_SDATA4:
                rows.append((section.address + position + 8 + begin, section.address + position))
            position += 4 + length
        rows.sort()
        return cls(tuple(start for start, _ in rows), tuple(description for _, description in rows))

    def covering(self, elf: Image, link_address: int) -> int | None:
        """Return the start of the function whose frame description covers ``link_address``, if one does."""
        i = bisect_right(self.starts, link_address) - 1
        code = elf.code_range(link_address)
        if i < 0 or code is None or self.starts[i] < code[0]:
            return None
        start = self.starts[i]
        length = self._length(elf, i)
        return start if length is None or link_address < start + length else None

    def extent(self, elf: Image, link_address: int) -> tuple[int, int] | None:
        """Return start and end of the code whose frame description covers ``link_address``, if both are known."""
        i = bisect_right(self.starts, link_address) - 1
        length = self._length(elf, i) if i >= 0 else None
        if length is None or link_address >= self.starts[i] + length:
            return None
        return self.starts[i], self.starts[i] + length

    def description_of(self, elf: Image, link_address: int) -> int | None:
        """Return the link address of the frame description that covers ``link_address``."""
        if self.extent(elf, link_address) is None:
            return None
        return self.descriptions[bisect_right(self.starts, link_address) - 1]

    def _length(self, elf: Image, index: int) -> int | None:
        """Return a function's length in bytes, for the encoding that compilers use (pcrel, sdata4), else None."""
        description = self.descriptions[index]
        try:
            begin, length = struct.unpack(f"{elf.struct_prefix}iI", elf.read(description + 8, 8))
        except TargetError:
            return None
        return int(length) if description + 8 + begin == self.starts[index] else None


def _pointer_encoding(data: bytes, position: int) -> int | None:
    """Return how the frame descriptions of a common entry, which begins at its version, encode addresses."""
    end = data.find(b"\0", position + 1)
    augmentation = data[position + 1 : end]
    if end < 0 or augmentation[:1] != b"z" or len(data) < end + 16:
        return None
    position = end + 1
    for _ in range(4):  # code and data alignment, the return address's column, the length of what follows
        while data[position] & 0x80:
            position += 1
        position += 1
    for letter in augmentation[1:].decode("latin-1"):
        if letter == "R":
            return data[position]
        if letter == "P":
            size = _POINTER_SIZES.get(data[position] & 0x0F, -1)
            if size <= 0:
                return None
            position += size
        position += letter in "LP"
    return None
