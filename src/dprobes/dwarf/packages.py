"""
Packages of debug information: what compilers have put aside for all units of a program, in one file (``dwp``).

::

    .debug_cu_index, .debug_tu_index
        DWARF 5: u16 5, u16 0 | GNU, for DWARF 4: u32 2
        u32 columns | u32 units | u32 slots
        slots times u64 signature | slots times u32 row, 0: none
        columns times u32 section | units times columns times u32 offset | as many u32 size

A row says which part of each section is of one unit (DWARF 5, 7.3.5; https://gcc.gnu.org/wiki/DebugFissionDWP).
"""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.dwarf.sections import NO_SECTION, SectionBytes, present, section_bytes
from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.dwarf.sections import SectionSource

__all__ = ["Package", "PackagedPart", "find_package"]

_SECTIONS = {
    2: {
        1: ".debug_info.dwo",
        2: ".debug_types.dwo",
        3: ".debug_abbrev.dwo",
        4: ".debug_line.dwo",
        5: ".debug_loc.dwo",
        6: ".debug_str_offsets.dwo",
    },
    5: {
        1: ".debug_info.dwo",
        3: ".debug_abbrev.dwo",
        4: ".debug_line.dwo",
        5: ".debug_loclists.dwo",
        6: ".debug_str_offsets.dwo",
        8: ".debug_rnglists.dwo",
    },
}
"""The sections of columns, by the version of the index."""

_WHOLE = ".debug_str.dwo"
"""The section that all units have in common."""

_HEADER = 16
_COLUMNS_MAX = 16
_ROWS_MAX = 1 << 18

_Row = dict[str, tuple[int, int]]
"""Offset and size of a unit's part of each section."""


def find_package(program: ElfFile) -> Package | None:
    """Return the package of a program or of its separate debug file, which is beside it; None if there is none."""
    path = Path(program.path)
    for beside in (path, path.with_suffix("")) if path.suffix == ".debug" else (path,):
        try:
            return Package(ElfFile.open(beside.with_name(f"{beside.name}.dwp")))
        except TargetError:
            continue
    return None


class Package:
    """A package; nothing but ``TargetError`` comes out, whatever its bytes are."""

    def __init__(self, elf: ElfFile) -> None:
        self.elf = elf
        self._sections: dict[str, SectionBytes] = {}

    def unit(self, signature: int) -> PackagedPart | None:
        """Return the part of a unit by the number that its skeleton has; None if it is not there."""
        return self._part(self._units, signature)

    def type_unit(self, signature: int) -> PackagedPart | None:
        """Return the part of a type that has a unit of its own; None if it is not there."""
        return self._part(self._types, signature)

    def types(self) -> Iterator[PackagedPart]:
        """Give the parts of all types that have units of their own."""
        return (PackagedPart(self, row) for row in self._types.values())

    def _part(self, rows: Mapping[int, _Row], signature: int) -> PackagedPart | None:
        row = rows.get(signature)
        return None if row is None else PackagedPart(self, row)

    @cached_property
    def _units(self) -> Mapping[int, _Row]:
        return self._rows(".debug_cu_index")

    @cached_property
    def _types(self) -> Mapping[int, _Row]:
        return self._rows(".debug_tu_index")

    def section(self, name: str) -> SectionBytes:
        """Return a whole section."""
        if name not in self._sections:
            self._sections[name] = section_bytes(self.elf, name)
        return self._sections[name]

    def _rows(self, name: str) -> Mapping[int, _Row]:
        section = self.section(name)
        if not section.size:
            return {}
        data = bytes(section.data[section.start : section.end])
        try:
            return self._rows_of(data)
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
    """What one unit has in a package."""

    def __init__(self, package: Package, row: Mapping[str, tuple[int, int]]) -> None:
        self.package = package
        self._row = row

    def source(self, name: str) -> SectionSource:
        """Return what gives the unit's part of a section; an empty one if it has none."""
        return present(self._section(name))

    def _section(self, name: str) -> SectionBytes:
        whole = self.package.section(name)
        if name == _WHOLE:
            return whole
        if name not in self._row:
            return NO_SECTION
        offset, size = self._row[name]
        if offset + size > whole.size:
            self.package.elf.malformed(f"a unit lies outside of section '{name}'")
        return SectionBytes(whole.data, whole.start + offset, whole.start + offset + size)
