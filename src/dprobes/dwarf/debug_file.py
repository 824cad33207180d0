"""
File with debug information: its sections, its units, and its supplementary file (dwz).

Units are found by their headers, without reading all entries. If bytes are malformed, only ``TargetError`` is raised.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from dprobes.dwarf.address_lists import covers
from dprobes.dwarf.debug_entries import UNREADABLE, Unit, unit_end
from dprobes.dwarf.dwarf_numbers import At, UnitKind
from dprobes.dwarf.entry_shapes import read_shapes
from dprobes.errors import TargetError
from dprobes.target.elf.byte_reader import text_at
from dprobes.target.elf.debug_sections import has_debug_information, joined_source, section_bytes, section_source
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_sources import DEBUG_DIRECTORY, debug_path, find_debug_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.dwarf.debug_entries import Entry
    from dprobes.dwarf.entry_shapes import FormSizes, Shapes
    from dprobes.target.elf.debug_sections import Package, PackagedPart, SectionBytes, SectionSource

__all__ = ["NOT_THERE", "DebugFile", "debug_file_of", "find_alternate_file", "number_of", "split_files"]

# The unit that covers an address (``.debug_aranges``; DWARF 5, 6.1.2):
#     length | u16 version (2) | offset of the unit | u8 address size | u8 segment size | padding to two addresses
#     (address, size)*; 0 0 ends


_LONG = 0xFFFFFFFF
_VERSION = 2


def _tables(section: SectionBytes, prefix: str) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over the tables of ``.debug_aranges``: offset of the unit, address size, start and end of the rows."""
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
    """Return the offsets of the units that have a table in ``.debug_aranges``."""
    return {unit for unit, _, rows, end in _tables(section, prefix) if rows < end}


def unit_covering(section: SectionBytes, prefix: str, address: int) -> int | None:
    """Return the offset of the unit that covers a link address, or None if the section does not list it."""
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


# Split debug information: files of the compiler for each unit (``-gsplit-dwarf``; DWARF 5, 7.3.2).
# The program has a *skeleton* of the unit, with its addresses, lines and the name of the file; both have the same
# dwo_id. DWARF 4 has that in GNU's forms.


NOT_THERE = "put the .dwo files or their .dwp package where the program is, or compile it without -gsplit-dwarf"
"""Hint for split debug information that is missing or of another build."""


def number_of(unit: Unit) -> int | None:
    """Return the dwo_id that a skeleton unit and its split unit share, or None if the unit has none."""
    if unit.sizes.version >= 5:
        return unit.signature if unit.kind in (UnitKind.SKELETON, UnitKind.SPLIT_COMPILE) else None
    number = unit.root.number(At.GNU_DWO_ID)
    return None if number is None else number & (1 << 64) - 1


def split_files(program: ElfFile, name: str, directory: str) -> Iterator[ElfFile]:
    """Iterate over the existing .dwo files ``name``: in the compilation ``directory``, and beside the program."""
    path = Path(directory) / name
    for candidate in (path, Path(os.path.realpath(program.path)).parent / path.name):
        try:
            yield ElfFile.open(candidate)
        except TargetError:
            continue


# The file of entries that the debug files of a package share (dwz): ``.gnu_debugaltlink`` has its path, NUL and its
# build-id. The path is absolute in Debian's files, elsewhere relative to the file that has it.


def find_alternate_file(elf: ElfFile, directory: Path | None = None) -> ElfFile:
    """
    Return the supplementary file (dwz) of a file; raise ``TargetError`` if no file has the build ID in the link.

    ``directory`` is the directory of installed debug files, or None for the default.
    """
    section = section_bytes(elf, ".gnu_debugaltlink")
    link = bytes(section.data[section.start : section.end])
    name, separator, identity = link.partition(b"\0")
    if not separator or not name or not identity:
        raise TargetError(f"'{elf.path}' has malformed debug information: it does not say what it shares entries with")
    build_id = identity.hex()
    path = Path(os.fsdecode(name))
    for candidate in _candidates(elf, path, build_id, directory or DEBUG_DIRECTORY):
        try:
            found = ElfFile.open(candidate)
        except TargetError:
            continue
        if found.build_id == build_id and has_debug_information(found):
            return found
    raise TargetError(
        f"'{elf.path}' shares debug information with '{path}', which is not there",
        hint="install the package of debug information again",
    )


def _candidates(elf: ElfFile, path: Path, build_id: str, directory: Path) -> Iterator[Path]:
    if path.is_absolute():
        yield path
    else:
        yield Path(os.path.realpath(elf.path)).parent / path
    yield debug_path(build_id, directory)
    yield directory / ".dwz" / path.name


Read = TypeVar("Read")

_UNITS_MAX = 1 << 18
"""Maximum number of units of a file. A kernel has some thousands, a browser some tens of thousands."""

_READ_FIRST = 1 << 14
"""Number of bytes of a section after an offset that suffice for most reads at that offset."""

_OF_PROGRAM = frozenset(
    (".debug_addr", ".debug_ranges", ".debug_line", ".debug_line_str", ".debug_aranges", ".gnu_debugaltlink")
)
"""Sections of a split unit that are in the program, not in its own file."""


def debug_file_of(module: ElfFile, directory: Path | None = None) -> DebugFile | None:
    """
    Return the debug information in a module or in its separate debug file, or None if there is none.

    ``directory`` is the directory of separate files.
    """
    if has_debug_information(module):
        return DebugFile(module, directory)
    found = find_debug_file(module, directory or DEBUG_DIRECTORY)
    return DebugFile(found, directory) if found is not None and has_debug_information(found) else None


class DebugFile:
    """
    Debug information in one file.

    A file with split debug information has a ``program``; its sections have other names, or are the program's. In a
    package, ``part`` is the part of one unit.
    """

    def __init__(
        self,
        elf: ElfFile,
        directory: Path | None = None,
        program: DebugFile | None = None,
        part: PackagedPart | None = None,
    ) -> None:
        self.elf = elf
        self._part = part
        self.order = elf.byte_order
        self._directory = directory
        self._program = program
        self._sections: dict[str, SectionSource] = {}
        self._shapes: dict[tuple[int, FormSizes], Shapes] = {}
        self._units: dict[tuple[bool, int], Unit] = {}
        self._split: dict[int, Unit] = {}
        self._packaged_types: dict[int, Unit | None] = {}
        self._starts: list[int] = [0]
        """Section offsets of the units whose headers were read so far, and of the unit after them."""

    def malformed(self, detail: str) -> NoReturn:
        """Raise ``TargetError`` for malformed debug information. ``detail`` is the end of the message."""
        raise TargetError(
            f"'{self.elf.path}' has malformed debug information: {detail}",
            hint="declare what the program needs: then nothing is read of it",
        )

    def section(self, name: str) -> SectionBytes:
        """Return a section, decompressed, or an empty one if it is missing."""
        source = self._source(name)
        return source.until(source.size)

    def read_at(self, name: str, offset: int, read: Callable[[SectionBytes], Read]) -> Read:
        """
        Return the result of ``read`` at an offset of a section, decompressing little more than necessary.

        ``read`` gets the beginning of the section, and raises an exception of UNREADABLE if that is too short.
        """
        source, size = self._source(name), _READ_FIRST
        while True:
            section = source.until(offset + size)
            try:
                return read(section)
            except UNREADABLE:
                if section.is_whole:
                    raise
            size *= 2

    def _source(self, name: str) -> SectionSource:
        if self._program is not None and name in _OF_PROGRAM:
            return self._program._source(name)  # noqa: SLF001 - of the same class
        found = self._sections.get(name)
        if found is None:
            if self._program is None:
                found = section_source(self.elf, name)
            elif self._part is None:
                found = joined_source(self.elf, f"{name}.dwo")
            else:
                found = self._part.source(f"{name}.dwo")
            self._sections[name] = found
        return found

    @property
    def has_alternate(self) -> bool:
        """True if the file refers to a supplementary file (dwz)."""
        return self.section(".gnu_debugaltlink").size > 0

    @cached_property
    def alternate(self) -> DebugFile:
        """File with the entries that several files share (dwz); raise ``TargetError`` if it is missing."""
        return DebugFile(find_alternate_file(self.elf, self._directory), self._directory)

    def all_files(self) -> Iterator[DebugFile]:
        """Iterate over this file, the shared file (dwz), and the files of split units."""
        yield self
        if self.has_alternate:
            yield self.alternate
        for unit in self.units():
            whole = self.whole_unit(unit)
            if whole is not unit and isinstance(whole.file, DebugFile):
                yield whole.file
        if self._split and self.package is not None:
            yield from self._files_of_types

    @cached_property
    def _files_of_types(self) -> Sequence[DebugFile]:
        """The parts of the package with its type units, one ``DebugFile`` each."""
        package = self.package
        return (
            ()
            if package is None
            else [DebugFile(package.elf, program=self, part=each) for each in package.types.values()]
        )

    def whole_unit(self, unit: Unit) -> Unit:
        """Return the split unit of a skeleton unit (``-gsplit-dwarf``), or the unit itself if it is no skeleton."""
        if not unit.is_skeleton:
            return unit
        if unit.offset not in self._split:
            self._split[unit.offset] = self._open_split(unit)
        return self._split[unit.offset]

    @cached_property
    def package(self) -> Package | None:
        """The package with the split debug information of the file's units, None if there is none."""
        from dprobes.target.elf.debug_sections import find_package

        return find_package(self.elf)

    def _open_split(self, skeleton: Unit) -> Unit:

        name = skeleton.root.text(At.DWO_NAME) or skeleton.root.text(At.GNU_DWO_NAME)
        number = number_of(skeleton)
        if not name or number is None:
            self.malformed(f"the unit at {skeleton.offset:#x} does not say in which file it is")
        package = self.package
        part = None if package is None else package.units.get(number)
        if part is not None:
            files = iter((DebugFile(part.package.elf, program=self, part=part),))
        else:
            found = split_files(self.elf, name, skeleton.root.text(At.COMP_DIR) or "/")
            files = (DebugFile(elf, program=self) for elf in found)
        for file in files:
            for unit in file.units():
                if number_of(unit) == number:
                    unit.skeleton, unit.kind = skeleton, UnitKind.SPLIT_COMPILE
                    return unit
        message = f"'{self.elf.path}' has debug information in '{name}', which is not there, or of another build"
        raise TargetError(message, hint=NOT_THERE)

    # Units

    def units(self) -> Iterator[Unit]:
        """Iterate over all units of ``.debug_info`` in order."""
        offset = 0
        size = self._source(".debug_info").size
        number = 0
        while offset < size:
            yield self.unit_at(offset)
            number += 1
            offset = self._start_of(number)

    def _start_of(self, number: int) -> int:
        """Return the offset of the unit with this number, counted from 0, or the section's end after the last unit."""
        size, starts = self._source(".debug_info").size, self._starts
        while len(starts) <= number and starts[-1] < size:
            self._pass(starts)
        return starts[number] if number < len(starts) else size

    def _pass(self, starts: list[int]) -> None:
        start = starts[-1]
        try:
            starts.append(self.read_at(".debug_info", start, lambda section: unit_end(section, start, self.order)))
        except UNREADABLE:
            self.malformed(f"the unit at {starts[-1]:#x} cannot be understood")
        if len(starts) > _UNITS_MAX:
            self.malformed(f"there are more than {_UNITS_MAX} units")

    def unit_at(self, offset: int, *, is_types: bool = False) -> Unit:
        """Return the unit that begins at an offset of ``.debug_info``, or ``.debug_types``."""
        found = self._units.get((is_types, offset))
        if found is None:
            name = ".debug_types" if is_types else ".debug_info"
            try:
                found = self.read_at(name, offset, lambda section: Unit(self, section, offset, is_types=is_types))
            except UNREADABLE:
                self.malformed(f"the unit at {offset:#x} cannot be understood")
            self._units[is_types, offset] = found
        return found

    def unit_of(self, offset: int) -> Unit:
        """Return the unit that contains an offset of ``.debug_info``."""
        starts = self._starts
        if not 0 <= offset < self._source(".debug_info").size:
            self.malformed(f"there is no entry at {offset:#x}")
        while starts[-1] <= offset:
            self._pass(starts)
        return self.unit_at(starts[bisect_right(starts, offset) - 1])

    def entry_at(self, offset: int) -> Entry:
        """Return the entry at an offset of ``.debug_info``."""
        return self.unit_of(offset).entry(offset)

    def unit_covering(self, address: int) -> Unit | None:
        """Return the unit of the code or data at a link address, or None if no unit covers it."""
        aranges = self.section(".debug_aranges")
        try:
            found = unit_covering(aranges, self.elf.struct_prefix, address)
        except UNREADABLE:
            self.malformed("its table of address ranges cannot be understood")
        if found is not None:
            return self.unit_at(found)
        listed = units_listed(aranges, self.elf.struct_prefix)
        for unit in self.units():  # compilers may leave the table out
            if unit.offset not in listed and unit.kind in (UnitKind.COMPILE, UnitKind.SKELETON):
                root = unit.root
                if (root.has(At.LOW_PC) or root.has(At.RANGES)) and covers(root, address):
                    return unit
        return None

    def type_of_signature(self, signature: int) -> Entry:
        """Return the entry of the type whose type unit has this 64-bit signature (DW_FORM_ref_sig8)."""
        unit = self._type_units.get(signature) or self._packaged_type(signature)
        if unit is None:
            self.malformed(f"there is no type with the signature {signature:#x}")
        return unit.entry(unit.offset + unit.type_offset)

    def _packaged_type(self, signature: int) -> Unit | None:
        if self._part is None:
            return None
        found = self._packaged_types.get(signature)
        if found is None and (part := self._part.package.types.get(signature)) is not None:
            file = DebugFile(self.elf, program=self._program, part=part)
            found = self._packaged_types[signature] = file._type_units.get(signature)
        return found

    def type_units(self) -> Iterator[Unit]:
        """Iterate over all units of ``.debug_types``, where DWARF 4 has types with signatures."""
        section, offset = self.section(".debug_types"), 0
        while offset < section.size:
            unit = self.unit_at(offset, is_types=True)
            yield unit
            offset = unit.end

    @cached_property
    def _type_units(self) -> Mapping[int, Unit]:
        units = chain(self.units(), self.type_units())
        kinds = (UnitKind.TYPE, UnitKind.SPLIT_TYPE)
        return {u.signature: u for u in units if u.signature is not None and u.kind in kinds}

    # Interface for units and entries

    def shapes_at(self, offset: int, sizes: FormSizes) -> Shapes:
        """
        Return the abbreviation declarations at an offset of ``.debug_abbrev``.

        ``sizes`` are the sizes of forms in the unit.
        """
        key = (offset, sizes)
        if key not in self._shapes:
            try:
                self._shapes[key] = self.read_at(".debug_abbrev", offset, lambda s: read_shapes(s, offset, sizes))
            except UNREADABLE:
                self.malformed(f"the shapes of entries at {offset:#x} cannot be understood")
        return self._shapes[key]

    def text_at(self, name: str, offset: int) -> str:
        """Return the string at an offset of a section."""
        section = self.section(name)
        try:
            return text_at(section.data, section.start + offset, section.end)[0]
        except UNREADABLE:
            self.malformed(f"there is no text at {offset:#x} of {name}")

    def indexed_text(self, unit: Unit, index: int) -> str:
        """Return a unit's string by its index in ``.debug_str_offsets``."""
        size = unit.sizes.offset
        base = unit.base(At.STR_OFFSETS_BASE)
        if base is None:
            # Without a base, as in split debug information, it is after the header of the only table.
            base = 2 * size if unit.sizes.version >= 5 else 0
        return self.text_at(".debug_str", self._number(".debug_str_offsets", base + index * size, size))

    def indexed_address(self, unit: Unit, index: int) -> int:
        """Return a unit's link address by its index in ``.debug_addr``."""
        base = unit.base(At.ADDR_BASE, At.GNU_ADDR_BASE)
        if base is None:
            self.malformed(f"the unit at {unit.offset:#x} has no addresses by their numbers")
        return self._number(".debug_addr", base + index * unit.sizes.address, unit.sizes.address)

    def _number(self, name: str, offset: int, size: int) -> int:
        section = self.section(name)
        if not 0 <= offset <= section.size - size:
            self.malformed(f"there is nothing at {offset:#x} of {name}")
        return int.from_bytes(section.data[section.start + offset : section.start + offset + size], self.order)
