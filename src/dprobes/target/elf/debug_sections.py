"""
The sections of a file with debug information, decompressed.

::

    SHF_COMPRESSED   u32 kind (1: zlib, 2: zstd) | [u32 in 64-bit files] | word size | word alignment | data
    .zdebug_*        "ZLIB" | u64 size, big-endian | data

Rules: System V ABI, "Section Compression"; GNU as, ``--compress-debug-sections=zlib-gnu``. A section that is not
compressed is not copied: the bytes of its file are used in place. A section compressed by zlib is decompressed from its
beginning as far as it is read, which is often a small part. Object files, such as modules of the kernel, have
relocations for addresses and for references between sections (``target.elf.relocations``).
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.target.elf.elf_headers import Section
    from dprobes.target.elf.file_contents import FileBytes

__all__ = [
    "NO_SECTION",
    "Package",
    "PackagedPart",
    "SectionBytes",
    "SectionSource",
    "find_package",
    "has_debug_information",
    "joined_source",
    "section_bytes",
    "section_source",
]

_ALLOCATED, _COMPRESSED = 2, 0x800
_ZLIB, _ZSTD = 1, 2

_INFLATED_MAX = 1 << 30
"""Maximum size in bytes of a decompressed section, which is ten times the size in a large library."""

_FRAMES_MAX = 256 << 20
"""Maximum size in bytes of a decompressed unwind table: reading one for a call stack delays the records."""

_RATIO_MAX = 200
"""Maximum ratio of decompressed to compressed size: real sections stay below 20."""


_STEP = 1 << 16
"""Minimum number of bytes that are decompressed at once."""


class SectionBytes(NamedTuple):
    """Contents of a debug section, or of its beginning: the bytes from ``start`` to ``end`` (excluded) of ``data``."""

    data: FileBytes
    start: int
    end: int
    is_whole: bool = True

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.end - self.start


NO_SECTION = SectionBytes(b"", 0, 0)
"""An empty section, for one that a file lacks."""


class SectionSource(Protocol):
    """The bytes of a section, read on demand."""

    @property
    def size(self) -> int:
        """Size of the whole section in bytes."""

    def until(self, end: int) -> SectionBytes:
        """
        Return at least the first ``end`` bytes, or the whole section.

        Raise ``TargetError`` if they cannot be decompressed.
        """


class _Present(NamedTuple):
    """A section that is available as a whole."""

    section: SectionBytes

    @property
    def size(self) -> int:
        return self.section.size

    def until(self, end: int) -> SectionBytes:  # noqa: ARG002 - there are all
        return self.section


class _Inflated:
    """
    A section compressed by zlib, in a file from ``place`` on, of ``size`` bytes when decompressed.

    While only its beginning is decompressed, that is in an anonymous mapping of the whole size. Later the section is a
    ``bytes`` object, which is searched much faster.
    """

    def __init__(self, elf: ElfFile, section: Section, place: int, size: int) -> None:
        import zlib

        _check_size(elf, section, size)
        self.size = size
        self._elf = elf
        self._name = section.name
        self._machine = zlib.decompressobj()
        self._rest = bytes(elf.data[place : section.offset + section.size])
        self._beginning: mmap.mmap | None = None
        self._known = 0
        self._whole: SectionBytes | None = None

    def until(self, end: int) -> SectionBytes:
        if self._whole is not None:
            return self._whole
        if end >= self.size:
            known = b"" if self._beginning is None else self._beginning[: self._known]
            data = known + self._next(self.size - self._known)
            self._whole = SectionBytes(data, 0, self.size)
            return self._whole
        if self._beginning is None:
            self._beginning = mmap.mmap(-1, self.size)
        if self._known < end:
            part = self._next(min(max(end - self._known, _STEP), self.size - self._known))
            self._beginning[self._known : self._known + len(part)] = part
            self._known += len(part)
        return SectionBytes(self._beginning, 0, self._known, self._known == self.size)

    def _next(self, size: int) -> bytes:
        """Decompress and return the next ``size`` bytes of the section."""
        import zlib

        parts: list[bytes] = []
        while size > 0:
            part = b""
            with contextlib.suppress(zlib.error):
                part = self._machine.decompress(self._rest, size)
            if not part:
                self._elf.malformed(f"section '{self._name}' cannot be decompressed")
            parts.append(part)
            size -= len(part)
            self._rest = self._machine.unconsumed_tail
        return b"".join(parts)


def has_debug_information(elf: ElfFile) -> bool:
    """Return whether a file has entries of debug information."""
    return _section(elf, ".debug_info") is not None


def section_bytes(elf: ElfFile, name: str) -> SectionBytes:
    """Return a section of a file, an empty one if there is none. Raise ``TargetError`` if it cannot be decompressed."""
    source = section_source(elf, name)
    return source.until(source.size)


def section_source(elf: ElfFile, name: str) -> SectionSource:
    """
    Return the source of a section of a file, an empty one if there is none.

    Raise ``TargetError`` if its format is not supported.
    """
    if elf.type == "rel":
        return joined_source(elf, name)
    section = _section(elf, name)
    return _Present(NO_SECTION) if section is None else _source_of(elf, section)


def joined_source(elf: ElfFile, name: str) -> SectionSource:
    """Return a source of all sections of a name, concatenated: compilers write one for each type."""
    from dprobes.target.elf.relocations import has_relocations

    numbers = _numbers_of(elf, name)
    if not numbers:
        return _Present(NO_SECTION)
    if len(numbers) > 1 or has_relocations(elf, numbers[0]):
        return _Joined(elf, name, numbers)
    return _source_of(elf, elf.sections[numbers[0]])


def _numbers_of(elf: ElfFile, name: str) -> list[int]:
    names = _names(name)
    return [number for number, each in enumerate(elf.sections) if each.name in names and each.in_file]


class _Joined:
    """Sections of one name in an object file, concatenated, with their relocations applied."""

    def __init__(self, elf: ElfFile, name: str, numbers: Sequence[int]) -> None:
        self._elf = elf
        self._parts = [(number, _source_of(elf, elf.sections[number])) for number in numbers]
        self.size = sum(part.size for _, part in self._parts)
        self._whole: SectionBytes | None = None
        if self.size > _INFLATED_MAX:
            elf.malformed(f"there are too many sections '{name}'")

    def until(self, end: int) -> SectionBytes:  # noqa: ARG002 - relocations are of the whole
        if self._whole is None:
            data = b"".join(self._contents(number, part) for number, part in self._parts)
            self._whole = SectionBytes(data, 0, len(data))
        return self._whole

    def _contents(self, number: int, part: SectionSource) -> bytes:
        from dprobes.target.elf.relocations import has_relocations, relocated

        found = part.until(part.size)
        data = bytes(found.data[found.start : found.end])
        return relocated(self._elf, number, data, self._base) if has_relocations(self._elf, number) else data

    def _base(self, number: int) -> int:
        """Return the address of a section in memory, or its offset among the sections of the same name."""
        section = self._elf.sections[number]
        if section.flags & _ALLOCATED:
            return section.address
        parts = _numbers_of(self._elf, section.name.replace(".zdebug", ".debug", 1))
        return sum(_source_of(self._elf, self._elf.sections[each]).size for each in parts if each < number)


def _source_of(elf: ElfFile, section: Section) -> SectionSource:
    data = elf.data
    start, end = section.offset, section.offset + section.size
    if end > len(data) or not hasattr(data, "find"):
        elf.malformed(f"section '{section.name}' lies outside the file")
    if section.flags & _COMPRESSED:
        return _decompressed(elf, section)
    if section.name.startswith(".zdebug"):
        head = bytes(data[start : start + 12])
        if head[:4] != b"ZLIB" or len(head) < 12:
            elf.malformed(f"section '{section.name}' does not begin as a compressed one")
        return _Inflated(elf, section, start + 12, int.from_bytes(head[4:], "big"))
    return _Present(SectionBytes(data, start, end))  # type: ignore[arg-type] # known pieces are no debug information


def _section(elf: ElfFile, name: str) -> Section | None:
    return next((each for each in elf.sections if each.name in _names(name) and each.in_file), None)


def _names(name: str) -> tuple[str, str]:
    return (name, name.replace(".debug", ".zdebug", 1))


def _decompressed(elf: ElfFile, section: Section) -> SectionSource:
    header = struct.Struct(f"{elf.struct_prefix}I4xQQ" if elf.word_size == 8 else f"{elf.struct_prefix}III")
    if section.size < header.size:
        elf.malformed(f"section '{section.name}' is too short to be compressed")
    kind, size, _ = header.unpack(elf.data[section.offset : section.offset + header.size])
    place = section.offset + header.size
    if kind == _ZLIB:
        return _Inflated(elf, section, place, size)
    if kind != _ZSTD:
        raise TargetError(f"section '{section.name}' of '{elf.path}' is compressed in a way that is not known ({kind})")
    _check_size(elf, section, size)
    plain = _unpacked(elf, section, bytes(elf.data[place : section.offset + section.size]), size)
    return _Present(SectionBytes(plain, 0, len(plain)))


def _check_size(elf: ElfFile, section: Section, size: int) -> None:
    most = _FRAMES_MAX if section.name.endswith("_frame") else _INFLATED_MAX
    if size > min(most, _RATIO_MAX * section.size):
        elf.malformed(f"section '{section.name}' says that its {section.size} bytes become {size}")


def _unpacked(elf: ElfFile, section: Section, data: bytes, size: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise TargetError(
            f"section '{section.name}' of '{elf.path}' is compressed with zstd",
            hint="pip install 'dprobes[zstd]'",
        ) from None
    try:
        found = zstandard.ZstdDecompressor().decompressobj().decompress(data)[:size]
    except zstandard.ZstdError:
        found = b""
    if len(found) != size:
        elf.malformed(f"section '{section.name}' cannot be decompressed")
    return found


# Packages: the split debug information of all units of a program, in one file (``dwp``). A row of an index locates the
# part of each section that belongs to one unit (DWARF 5, 7.3.5; https://gcc.gnu.org/wiki/DebugFissionDWP)::
#
#     .debug_cu_index, .debug_tu_index
#         DWARF 5: u16 5, u16 0 | GNU, for DWARF 4: u32 2
#         u32 columns | u32 units | u32 slots
#         slots times u64 signature | slots times u32 row, 0: none
#         columns times u32 section | units times columns times u32 offset | as many u32 size


_SECTIONS = {
    2: {
        1: ".debug_info.dwo", 2: ".debug_types.dwo", 3: ".debug_abbrev.dwo", 4: ".debug_line.dwo", 5: ".debug_loc.dwo",
        6: ".debug_str_offsets.dwo",
    },
    5: {
        1: ".debug_info.dwo", 3: ".debug_abbrev.dwo", 4: ".debug_line.dwo", 5: ".debug_loclists.dwo",
        6: ".debug_str_offsets.dwo", 8: ".debug_rnglists.dwo",
    },
}  # fmt: skip
"""Sections by column number, for each version of the index."""

_WHOLE = ".debug_str.dwo"
"""Section that all units share."""

_HEADER = 16
_COLUMNS_MAX = 16
_ROWS_MAX = 1 << 18

_Row = dict[str, tuple[int, int]]
"""Offset and size of a unit's part of each section."""


def find_package(program: ElfFile) -> Package | None:
    """Return the .dwp package in the directory of a program or its separate debug file, or None if there is none."""
    path = Path(program.path)
    for beside in (path, path.with_suffix("")) if path.suffix == ".debug" else (path,):
        try:
            return Package(ElfFile.open(beside.with_name(f"{beside.name}.dwp")))
        except TargetError:
            continue
    return None


class Package:
    """Debug package (.dwp). If its bytes are malformed, only ``TargetError`` is raised."""

    def __init__(self, elf: ElfFile) -> None:
        self.elf = elf
        self._sections: dict[str, SectionBytes] = {}

    @cached_property
    def units(self) -> Mapping[int, PackagedPart]:
        """The parts of units, by the dwo_id of their skeletons."""
        return self._parts(".debug_cu_index")

    @cached_property
    def types(self) -> Mapping[int, PackagedPart]:
        """The parts of type units, by their signatures."""
        return self._parts(".debug_tu_index")

    def section(self, name: str) -> SectionBytes:
        """Return a whole section of the package, of all units."""
        if name not in self._sections:
            self._sections[name] = section_bytes(self.elf, name)
        return self._sections[name]

    def _parts(self, name: str) -> Mapping[int, PackagedPart]:
        section = self.section(name)
        if not section.size:
            return {}
        data = bytes(section.data[section.start : section.end])
        try:
            return {signature: PackagedPart(self, row) for signature, row in self._rows_of(data).items()}
        except (struct.error, IndexError, ValueError, KeyError):
            self.elf.malformed(f"its index '{name}' cannot be understood")

    def _rows_of(self, data: bytes) -> Mapping[int, _Row]:
        prefix = self.elf.struct_prefix
        whole, columns, count, slots = struct.unpack_from(f"{prefix}4I", data)
        (short,) = struct.unpack_from(f"{prefix}H", data)
        known = _SECTIONS[whole if whole in _SECTIONS else short]
        if columns > _COLUMNS_MAX or count > slots or slots > _ROWS_MAX:
            raise ValueError("too many columns or rows")
        signatures = struct.unpack_from(f"{prefix}{slots}Q", data, _HEADER)
        numbers = struct.unpack_from(f"{prefix}{slots}I", data, _HEADER + 8 * slots)
        table = _HEADER + 12 * slots
        words = struct.unpack_from(f"{prefix}{columns * (2 * count + 1)}I", data, table)
        names = [known.get(number) for number in words[:columns]]
        found: dict[int, _Row] = {}
        for signature, number in zip(signatures, numbers, strict=True):
            if not number:
                continue
            if number > count:
                raise ValueError("a row that is not there")
            offsets = words[columns * number : columns * (number + 1)]
            sizes = words[columns * (number + count) : columns * (number + count + 1)]
            parts = zip(names, offsets, sizes, strict=True)
            found[signature] = {name: (offset, size) for name, offset, size in parts if name is not None}
        return found


class PackagedPart:
    """The contribution of one split unit to the sections of a .dwp package."""

    def __init__(self, package: Package, row: Mapping[str, tuple[int, int]]) -> None:
        self.package = package
        self._row = row

    def source(self, name: str) -> SectionSource:
        """Return the source of the unit's part of a section, which is empty if the unit has none."""
        whole = self.package.section(name)
        if name == _WHOLE:
            return _Present(whole)
        if name not in self._row:
            return _Present(NO_SECTION)
        offset, size = self._row[name]
        if offset + size > whole.size:
            self.package.elf.malformed(f"a unit lies outside of section '{name}'")
        return _Present(SectionBytes(whole.data, whole.start + offset, whole.start + offset + size))
