"""
Relocations that the dynamic linker applies to files for x86-64, with the symbols that they name.

::

    RELA    word place | word symbol << 32 | kind | word addend
    SYM     u32 name | u8 binding << 4 | type | u8 other | u16 section | word value | word size

Rules: System V ABI chapter 5, and the AMD64 supplement, "Relocation".
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["GLOB_DAT", "JUMP_SLOT", "STT_GNU_IFUNC", "DynamicSymbol", "Relocation", "dynamic_relocations"]

GLOB_DAT, JUMP_SLOT = 6, 7
"""Kinds of relocations that write the address of the symbol: of data or of a function, and of a called function."""

STT_GNU_IFUNC = 10
"""Type of a symbol whose value is the address of a function that chooses the function."""

_RELA, _SYM = struct.Struct("<QQq"), struct.Struct("<IBBHQQ")
_RELOCATIONS_MAX = 1 << 20
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23


class DynamicSymbol(NamedTuple):
    """A symbol that a relocation of a file names; ``section`` is 0 if it is defined in another file."""

    name: str
    kind: int
    binding: int
    section: int
    value: int


class Relocation(NamedTuple):
    """A relocation of the word at the link address ``place``; ``symbol`` is None if it names none."""

    place: int
    kind: int
    symbol: DynamicSymbol | None
    addend: int


def dynamic_relocations(elf: ElfFile) -> Iterator[Relocation]:
    """Iterate over the relocations that the dynamic linker applies to an x86-64 file, packed ones excluded."""
    values = elf.dynamic.values
    for table, size in ((_DT_RELA, _DT_RELASZ), (_DT_JMPREL, _DT_PLTRELSZ)):
        count = values.get(size, 0) // _RELA.size if table in values else 0
        if count > _RELOCATIONS_MAX:
            elf.malformed(f"a table of {count} relocations is larger than the {_RELOCATIONS_MAX} that are read")
        rows = elf.read(values[table], count * _RELA.size) if count else b""
        for place, info, addend in _RELA.iter_unpack(rows):
            yield Relocation(place, info & 0xFFFFFFFF, _symbol(elf, info >> 32), addend)


def _symbol(elf: ElfFile, index: int) -> DynamicSymbol | None:
    values = elf.dynamic.values
    if not index or _DT_SYMTAB not in values:
        return None
    name, info, _, section, value, _ = _SYM.unpack(elf.read(values[_DT_SYMTAB] + index * _SYM.size, _SYM.size))
    strings = elf.file_offset(values.get(_DT_STRTAB, -1))
    if strings is None:
        elf.malformed("its symbols have no names")
    return DynamicSymbol(elf.string_at(strings + name, len(elf.data)), info & 15, info >> 4, section, value)
