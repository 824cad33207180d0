"""
The unwind table of one module in a process's memory, found by its program headers as the C library finds it.

::

    .eh_frame_hdr      u8 version 1 | u8 encodings of: the pointer, the count, the table | pointer to .eh_frame
                       | u32 count | rows of s32 start, s32 description, both from the header on, sorted

Only the encodings that linkers write are read. Rules: Linux Standard Base 5.0, "Exception Frames"; elf(5).
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.unwind.framebytes import POINTER_SIZES
from dprobes.target.unwind.frameentries import read_description
from dprobes.target.unwind.framerules import rows_of

if TYPE_CHECKING:
    from dprobes.target.unwind.frameentries import CommonEntry, FrameImage
    from dprobes.target.unwind.framerules import Row

__all__ = ["CodeRules", "MemoryFrameTable"]

_PT_LOAD, _PT_GNU_EH_FRAME = 1, 0x6474E550
_HEADERS_MAX = 64
_ROWS_MAX = 1 << 22
"""Functions of a table; the largest programs have a million."""

_UDATA4, _DATAREL_SDATA4 = 0x03, 0x3B
_KEPT_MAX = 1 << 16
"""Rows of functions that are kept, all together."""


class CodeRules(NamedTuple):
    """The rules of the code of one function; ``starts`` are those of its ``rows``."""

    start: int
    end: int
    common: CommonEntry
    starts: list[int]
    rows: list[Row]

    def row_at(self, address: int) -> Row | None:
        """Return the row that holds at an address; None before the first one."""
        number = bisect_right(self.starts, address) - 1
        return self.rows[number] if number >= 0 else None


class MemoryFrameTable:
    """
    Find the rules for addresses of a module that is in memory; all addresses are run-time ones.

    ``numbers`` are pairs of a function's start and its description, both from ``origin`` on, sorted.
    """

    def __init__(self, image: FrameImage, origin: int, numbers: array[int]) -> None:
        self._image = image
        self._origin = origin
        self._mask = (1 << 8 * image.word_size) - 1
        self._numbers = numbers
        self._rules: dict[int, CodeRules | None] = {}
        self._kept = 0
        self._answers: dict[int, CodeRules | None] = {}
        """By address: stacks have the same ones again and again, and to search takes half of the time for a frame."""

    @classmethod
    def at(cls, image: FrameImage, base: int) -> MemoryFrameTable | None:
        """Return the table of the module whose ELF header lies at an address; None if it has none of the usual form."""
        try:
            header = _table_address(image, base)
            return None if header is None else cls(image, *_parse(image, header))
        except (TargetError, struct.error, ValueError):
            return None

    def rules_at(self, address: int) -> CodeRules | None:
        """Return the rules of the function that covers an address; None if there is none; ValueError if unreadable."""
        if address not in self._answers:
            if len(self._answers) >= _KEPT_MAX:
                self._answers.clear()
            self._answers[address] = self._search(address)
        return self._answers[address]

    def _search(self, address: int) -> CodeRules | None:
        numbers, distance = self._numbers, address - self._origin
        number = bisect_right(range(len(numbers) // 2), distance, key=lambda row: numbers[2 * row]) - 1
        if number < 0:
            return None
        if number not in self._rules:
            if self._kept >= _KEPT_MAX:
                self._rules.clear()
                self._kept = 0
            read = self._rules[number] = self._read((self._origin + numbers[2 * number + 1]) & self._mask)
            self._kept += 1 if read is None else len(read.rows)
        rules = self._rules[number]
        if rules is None:
            raise ValueError("an unwind table that cannot be understood")
        return rules if rules.start <= address < rules.end else None

    def _read(self, description: int) -> CodeRules | None:
        try:
            found = read_description(self._image, description)
            rows = rows_of(found, self._image.word_size)
        except (TargetError, struct.error, IndexError, ValueError):
            return None
        return CodeRules(found.start, found.end, found.common, [row.start for row in rows], rows)


def _table_address(image: FrameImage, base: int) -> int | None:
    """Return the address of ``.eh_frame_hdr``."""
    order = "<" if image.byte_order == "little" else ">"
    wide = image.word_size == 8
    header = image.read(base, 64 if wide else 52)
    if header[:4] != b"\x7fELF":
        return None
    # Elf64_Ehdr: e_phoff at 32, e_phentsize and e_phnum at 54; Elf32_Ehdr: at 28 and 42
    (offset,) = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", header, 32 if wide else 28)
    size, count = struct.unpack_from(f"{order}HH", header, 54 if wide else 42)
    # Elf64_Phdr: type, flags, offset, vaddr; Elf32_Phdr: type, offset, vaddr
    row = struct.Struct(f"{order}IIQQ" if wide else f"{order}III")
    if size < row.size or count > _HEADERS_MAX:
        return None
    table = image.read(base + offset, size * count)
    bias = found = None
    for start in range(0, size * count, size):
        values = row.unpack_from(table, start)
        kind, place, address = values[0], values[-2], values[-1]
        if kind == _PT_LOAD and bias is None:
            # The segment with the header comes first; the header is the first byte of the file.
            bias = base - (address - place)
        elif kind == _PT_GNU_EH_FRAME:
            found = address
    if bias is None or found is None:
        return None
    return int(bias + found) & ((1 << 8 * image.word_size) - 1)


def _parse(image: FrameImage, address: int) -> tuple[int, array[int]]:
    version, pointer, count_encoding, table_encoding = image.read(address, 4)
    pointer_size = POINTER_SIZES.get(pointer & 0x0F, image.word_size)
    if version != 1 or count_encoding != _UDATA4 or table_encoding != _DATAREL_SDATA4:
        raise ValueError("a table of another form")
    count = int.from_bytes(image.read(address + 4 + pointer_size, 4), image.byte_order)
    if count > _ROWS_MAX:
        raise ValueError("a table that is too large")
    numbers = array("i", image.read(address + 8 + pointer_size, 8 * count))
    if sys.byteorder != image.byte_order:
        numbers.byteswap()
    return address, numbers
