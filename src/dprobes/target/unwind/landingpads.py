"""
Where exceptions are caught: the landing pads that the tables in ``.gcc_except_table`` name, a table for each function.

::

    encoding, start of the landing pads    (0xff: they count from the function's start)
    encoding, ULEB128 size of the types    (0xff: none)
    encoding, ULEB128 size of what follows
        start, length, landing pad | ULEB128 action     for each range of calls; a landing pad of 0 is none

An unwinder enters the code there: that is a branch that no instruction shows. Bytes that are not as they should be
count as no table. Rules: Itanium C++ ABI, "Exception Handling Tables" (``parse_lsda_header`` of libsupc++).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.unwind.framebytes import FrameBytes
from dprobes.target.unwind.frameentries import read_description

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.unwind.frameentries import FrameDescription

__all__ = ["landing_pads"]

_OMITTED, _ULEB128 = 0xFF, 0x01
_UNREADABLE = (TargetError, struct.error, IndexError, ValueError)


def landing_pads(elf: ElfFile) -> set[int]:
    """Return the link addresses of all landing pads of a file."""
    if elf.sections and not any(section.name == ".gcc_except_table" for section in elf.sections):
        return set()
    found: set[int] = set()
    segments: dict[int, bytes] = {}
    for description in elf.frames.descriptions:
        try:
            function = read_description(elf, description)
            if function.landing_table:
                found.update(_landing_pads(elf, function, segments))
        except _UNREADABLE:
            continue
    return found


def _landing_pads(elf: ElfFile, function: FrameDescription, segments: dict[int, bytes]) -> list[int]:
    data = _bytes_from(elf, function.landing_table, segments)
    base, encoding = function.start, data.number(1)
    if encoding != _OMITTED:
        base = data.pointer(encoding, elf.word_size)
    if data.number(1) != _OMITTED:
        data.unsigned()
    encoding = data.number(1)
    end = data.unsigned() + data.position
    found = []
    while data.position < end:
        _, _, pad = (_number(data, encoding, elf.word_size) for _ in range(3))
        data.unsigned()
        if pad:
            found.append(base + pad)
    return found


def _bytes_from(elf: ElfFile, address: int, segments: dict[int, bytes]) -> FrameBytes:
    """Return the bytes from an address to the end of its segment, each of which is read once."""
    segment = next((s for s in elf.load_segments if 0 <= address - s.vaddr < s.filesz), None)
    if segment is None:
        raise TargetError(f"'{elf.path}' has no table at address 0x{address:x}")
    if segment.vaddr not in segments:
        segments[segment.vaddr] = elf.read(segment.vaddr, segment.filesz)
    data = FrameBytes(segments[segment.vaddr], elf.struct_prefix, segment.vaddr)
    data.skip(address - segment.vaddr)
    return data


def _number(data: FrameBytes, encoding: int, word_size: int) -> int:
    return data.unsigned() if encoding == _ULEB128 else data.pointer(encoding & 0x0F, word_size)
