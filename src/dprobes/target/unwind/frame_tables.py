"""
Rules for call frames by the address of code, from the memory of a process or from files.

Files have tables that are not in the memory of a process, or cannot be found there. ``.eh_frame`` of static programs
has no search table. Compilers write ``.debug_frame`` if exceptions are off, as for Go; it may be in a separate debug
file.

::

    .debug_frame    common entry   u32 length | u32 0xffffffff | version, augmentation, … as in .eh_frame
                    description    u32 length | u32 place of the common entry | address, size | instructions

Rules: DWARF 5, 6.4.1.
"""

from __future__ import annotations

import contextlib
import struct
from bisect import bisect_right
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.target.elf.byte_reader import ByteReader
from dprobes.target.elf.debug_sections import section_bytes
from dprobes.target.elf.symbol_sources import find_debug_file
from dprobes.target.process_maps import PAGE_SIZE
from dprobes.target.unwind.exception_frames import (
    DEBUG_COMMON,
    read_description,
    rows_of,
    search_table,
)

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from dprobes.arch import ByteOrder
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.process_maps import Mapping
    from dprobes.target.unwind.exception_frames import CommonEntry, FrameDescription, FrameImage, Row

__all__ = [
    "CodeRules",
    "FileFrames",
    "FrameRules",
    "LateFrames",
    "MemoryFrameTable",
    "MovedFrames",
    "bias_of",
    "code_rules",
    "completed",
    "landing_pads",
    "moved_to",
]

# The unwind table of a module in a process's memory, found by its program headers as the C library does; elf(5).


_PT_LOAD, _PT_GNU_EH_FRAME = 1, 0x6474E550
_HEADERS_MAX = 64
_KEPT_MAX = 1 << 16
"""Maximum number of kept rows, of all functions together."""


class CodeRules(NamedTuple):
    """Rules of the code of one function. ``starts`` has the addresses from which its ``rows`` apply."""

    start: int
    end: int
    common: CommonEntry
    starts: list[int]
    rows: list[Row]

    def row_at(self, address: int) -> Row | None:
        """Return the row that applies at an address, or None before the first row."""
        number = bisect_right(self.starts, address) - 1
        return self.rows[number] if number >= 0 else None


class MemoryFrameTable:
    """
    Rules for the code of a module in memory; all addresses are run-time addresses.

    ``numbers`` has sorted pairs of a function's start and its description, both relative to ``origin``.
    """

    def __init__(self, image: FrameImage, origin: int, numbers: array[int]) -> None:
        self._image = image
        self._origin = origin
        self._mask = (1 << 8 * image.word_size) - 1
        self._numbers = numbers
        self._rules: dict[int, CodeRules | None] = {}
        self._kept = 0
        self._answers: dict[int, CodeRules | None] = {}
        """Results by address: stacks repeat addresses, and the search takes half of the time for a frame."""

    @classmethod
    def at(cls, image: FrameImage, base: int) -> MemoryFrameTable | None:
        """
        Return the table of the module whose ELF header is at ``base`` in memory.

        Return None if it has no ``.eh_frame_hdr``, or a table in a format that linkers do not write.
        """
        try:
            header = _table_address(image, base)
            return None if header is None else cls(image, header, search_table(image, header))
        except (TargetError, struct.error, ValueError):
            return None

    def rules_at(self, address: int) -> CodeRules | None:
        """
        Return the rules of the function that covers an address, or None if there is none.

        Raise ValueError if the table is malformed.
        """
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
            read = code_rules(self._image, (self._origin + numbers[2 * number + 1]) & self._mask)
            self._rules[number] = read
            self._kept += 1 if read is None else len(read.rows)
        rules = self._rules[number]
        if rules is None:
            raise ValueError("an unwind table that cannot be understood")
        return rules if rules.start <= address < rules.end else None


def code_rules(image: FrameImage, place: int, *, is_debug: bool = False) -> CodeRules | None:
    """
    Return the rules of a frame description, or None if it is unreadable.

    ``place`` is an address or, with ``is_debug``, an offset in ``.debug_frame``.
    """
    try:
        found = read_description(image, place, is_debug=is_debug)
        rows = rows_of(found, image.word_size)
    except (TargetError, struct.error, IndexError, ValueError):
        return None
    return CodeRules(found.start, found.end, found.common, [row.start for row in rows], rows)


def _table_address(image: FrameImage, base: int) -> int | None:
    """Return the address of ``.eh_frame_hdr``, or None if there is none, or the headers have another format."""
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


_ENTRIES_MAX = 1 << 18
"""Maximum number of functions of a file. A Go program has some tens of thousands."""

_FILES_KEPT_MAX = 4096


class FrameRules(Protocol):
    """The rules for the code of a module."""

    def rules_at(self, address: int) -> CodeRules | None:
        """
        Return the rules of the function that covers an address, or None if there is none.

        Raise ValueError if the table is malformed.
        """


class _SectionImage(NamedTuple):
    """The bytes of a section as memory that begins at 0."""

    data: bytes
    word_size: int
    byte_order: ByteOrder

    def read(self, address: int, n: int, /) -> bytes:
        """Return ``n`` bytes at an offset of the section; raise ``TargetError`` if some are missing."""
        found = self.data[address : address + n] if address >= 0 else b""
        if len(found) < n:
            raise TargetError(f"{n} bytes at {address:#x} are not in the section")
        return found


class FileFrames:
    """Unwind tables of one file, by link addresses. They are read at the first lookup."""

    def __init__(self, elf: ElfFile) -> None:
        self.elf = elf
        self._rules: OrderedDict[tuple[bool, int], CodeRules | None] = OrderedDict()

    def rules_at(self, address: int) -> CodeRules | None:
        """Return the rules of the function that covers a link address. None and errors are as in ``FrameRules``."""
        frames = self.elf.frames
        number = bisect_right(frames.starts, address) - 1
        if number >= 0:
            found = self._read(frames.descriptions[number], is_debug=False)
            if found is not None and found.start <= address < found.end:
                return found
        starts, places = self._debug_index
        number = bisect_right(starts, address) - 1
        if number < 0:
            return None
        found = self._read(places[number], is_debug=True)
        if found is None:
            raise ValueError("an unwind table that cannot be understood")
        return found if found.start <= address < found.end else None

    def _read(self, place: int, *, is_debug: bool) -> CodeRules | None:
        key = (is_debug, place)
        if key not in self._rules:
            while len(self._rules) >= _FILES_KEPT_MAX:
                self._rules.popitem(last=False)
            self._rules[key] = code_rules(self._debug if is_debug else self.elf, place, is_debug=is_debug)
        return self._rules[key]

    @cached_property
    def _debug(self) -> _SectionImage:
        """The section ``.debug_frame`` of the file or of its debug file. It is empty if there is none."""
        for elf in (self.elf, find_debug_file(self.elf)):
            with contextlib.suppress(TargetError):  # the file is damaged
                if elf is not None and (section := section_bytes(elf, ".debug_frame")).size:
                    data = bytes(section.data[section.start : section.end])
                    return _SectionImage(data, elf.word_size, elf.byte_order)
        return _SectionImage(b"", self.elf.word_size, self.elf.byte_order)

    @cached_property
    def _debug_index(self) -> tuple[list[int], list[int]]:
        """The sorted starts of functions, and the offsets of their descriptions in the section."""
        image, position = self._debug, 0
        found: list[tuple[int, int]] = []
        head = struct.Struct(f"{self.elf.struct_prefix}II")
        while position + head.size <= len(image.data) and len(found) < _ENTRIES_MAX:
            length, kind = head.unpack_from(image.data, position)
            if not 4 <= length <= len(image.data) - position:
                break
            if kind != DEBUG_COMMON:
                # The address is first, and has no encoding here.
                start = image.data[position + 8 : position + 8 + image.word_size]
                found.append((int.from_bytes(start, image.byte_order), position))
            position += 4 + length
        found.sort()
        return [start for start, _ in found], [place for _, place in found]


class MovedFrames:
    """The tables of a file that a process has mapped: addresses are the file's plus ``bias``."""

    def __init__(self, frames: FileFrames, bias: int) -> None:
        self._frames = frames
        self._bias = bias
        self._moved: dict[int, CodeRules] = {}

    def rules_at(self, address: int) -> CodeRules | None:
        """Return the rules of the function that covers a run-time address. None and errors are as in ``FrameRules``."""
        found = self._frames.rules_at(address - self._bias)
        if found is None or not self._bias:
            return found
        if found.start not in self._moved:
            if len(self._moved) >= _FILES_KEPT_MAX:
                self._moved.clear()
            rows = [row._replace(start=row.start + self._bias) for row in found.rows]
            self._moved[found.start] = CodeRules(
                found.start + self._bias, found.end + self._bias, found.common, [row.start for row in rows], rows
            )
        return self._moved[found.start]


class LateFrames:
    """Unwind rules of a file, which ``make`` reads at the first lookup."""

    def __init__(self, make: Callable[[], FrameRules | None]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> FrameRules | None:
        return self._make()

    def rules_at(self, address: int) -> CodeRules | None:
        """Return the rules of the function that covers an address. None and errors are as in ``FrameRules``."""
        return None if self._made is None else self._made.rules_at(address)


class _Completed(NamedTuple):
    """The unwind rules of a module from memory, and from its file for addresses that the former lack."""

    first: FrameRules
    second: FrameRules

    def rules_at(self, address: int) -> CodeRules | None:
        found = self.first.rules_at(address)
        return self.second.rules_at(address) if found is None else found


def completed(first: FrameRules | None, second: FrameRules | None) -> FrameRules | None:
    """Return a table that uses ``second`` for addresses that ``first`` lacks, or None if both are None."""
    return _Completed(first, second) if first is not None and second is not None else first or second


def moved_to(frames: FileFrames, mapping: Mapping, word_size: int, byte_order: ByteOrder) -> MovedFrames | None:
    """
    Return a file's tables at the addresses of a mapping.

    Return None if the file is for another processor, or the mapping has no code.
    """
    elf = frames.elf
    if elf.word_size != word_size or elf.byte_order != byte_order:
        return None
    bias = bias_of(elf, mapping)
    return None if bias is None else MovedFrames(frames, bias)


def bias_of(elf: ElfFile, mapping: Mapping) -> int | None:
    """Return a mapping's run-time addresses minus the file's link addresses, or None if it maps no code of the file."""
    for segment in elf.load_segments:
        first = segment.offset & -PAGE_SIZE
        if segment.executable and first <= mapping.offset < segment.offset + segment.filesz:
            return mapping.start - mapping.offset + segment.offset - segment.vaddr
    return None


# Landing pads of exceptions, in the tables of ``.gcc_except_table``, one for each function::
#
#     encoding, start of the landing pads    (0xff: they count from the function's start)
#     encoding, ULEB128 size of the types    (0xff: none)
#     encoding, ULEB128 size of what follows
#         start, length, landing pad | ULEB128 action     for each range of calls; a landing pad of 0 is none
#
# An unwinder enters the code at a landing pad: a branch that no instruction shows. A malformed table counts as missing.
# Rules: Itanium C++ ABI, "Exception Handling Tables" (``parse_lsda_header`` of libsupc++).


_PAD_OMITTED, _ULEB128 = 0xFF, 0x01


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
        except (TargetError, struct.error, IndexError, ValueError):
            continue
    return found


def _landing_pads(elf: ElfFile, function: FrameDescription, segments: dict[int, bytes]) -> list[int]:
    data = _bytes_from(elf, function.landing_table, segments)
    base, encoding = function.start, data.number(1)
    if encoding != _PAD_OMITTED:
        base = data.pointer(encoding, elf.word_size)
    if data.number(1) != _PAD_OMITTED:
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


def _bytes_from(elf: ElfFile, address: int, segments: dict[int, bytes]) -> ByteReader:
    """Return the bytes from an address to the end of its segment. ``segments`` caches the bytes of segments."""
    segment = next((s for s in elf.load_segments if 0 <= address - s.vaddr < s.filesz), None)
    if segment is None:
        raise TargetError(f"'{elf.path}' has no table at address 0x{address:x}")
    if segment.vaddr not in segments:
        segments[segment.vaddr] = elf.read(segment.vaddr, segment.filesz)
    data = ByteReader(segments[segment.vaddr], elf.byte_order, segment.vaddr)
    data.skip(address - segment.vaddr)
    return data


def _number(data: ByteReader, encoding: int, word_size: int) -> int:
    return data.unsigned() if encoding == _ULEB128 else data.pointer(encoding & 0x0F, word_size)
