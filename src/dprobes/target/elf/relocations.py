"""
Relocation of sections of object files, such as kernel modules, as a linker does it.

Only the kinds in debug information are supported: addresses, offsets in other sections, and offsets of thread-local
variables. A section has the address that ``ElfFile`` assigns to it.

::

    REL     word place | word info
    RELA    word place | word info | word addend       info: symbol << 32 | kind, in 32-bit files symbol << 8 | kind

Rules: System V ABI chapter 4, "Relocation", and the supplements of the processors.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.elf_headers import SHT_SYMTAB, symbol_layout, symbol_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.elf_headers import Section

__all__ = ["code_pointers", "has_relocations", "relocated", "restartable_sections", "targets_in", "written_words"]

_RELA, _REL = 4, 9
_THREAD = 6  # STT_TLS: a symbol whose value is an offset in the thread-local storage
_ABSOLUTE, _RESERVED = 0xFFF1, 0xFF00

_SIZES = {
    "x86_64": {0: 0, 1: 8, 10: 4, 11: 4, 17: 8, 21: 4},  # NONE, 64, 32, 32S, DTPOFF64, DTPOFF32
    "i386": {0: 0, 1: 4, 32: 4},  # NONE, 32, TLS_LDO_32
    "aarch64": {0: 0, 256: 0, 257: 8, 258: 4, 1029: 8},  # NONE, NONE, ABS64, ABS32, TLS_DTPREL
    "ppc": {0: 0, 1: 4, 24: 4, 78: 4},  # NONE, ADDR32, UADDR32, DTPREL32
    "ppc64": {0: 0, 1: 4, 38: 8, 43: 8, 78: 8},  # NONE, ADDR32, ADDR64, UADDR64, DTPREL64
    "s390": {0: 0, 4: 4, 52: 4},  # NONE, 32, TLS_LDO32
    "s390x": {0: 0, 4: 4, 22: 8, 53: 8},  # NONE, 32, 64, TLS_LDO64
}
"""Size in bytes of the field for each kind of relocation, by machine. The value is the symbol's plus the addend."""


class _Field(NamedTuple):
    """The field of relocations of one symbol and kind: ``size`` bytes, for ``value`` plus the addend."""

    value: int
    size: int


def has_relocations(elf: ElfFile, number: int) -> bool:
    """Return whether section ``number`` of a file has relocations."""
    return next(_tables(elf, number), None) is not None


def _tables(elf: ElfFile, number: int) -> Iterator[Section]:
    return (each for each in elf.sections if each.type in (_RELA, _REL) and each.info == number and each.size)


def relocated(elf: ElfFile, number: int, data: bytes, base: Callable[[int], int]) -> bytes:
    """
    Return the contents ``data`` of section ``number`` with its relocations applied.

    ``base`` returns the address of a section by its number. Raise ``TargetError`` if a relocation cannot be applied.
    """
    name = elf.sections[number].name
    sizes = _SIZES.get(elf.machine)
    if sizes is None:
        elf.malformed(f"section '{name}' has relocations for {elf.machine}, which are not known")
    found = bytearray(data)
    for table in _tables(elf, number):
        _apply(_Relocations(elf, table, name, sizes, base), found)
    return bytes(found)


class _Relocations:
    """The relocations of one table, for the section called ``name``."""

    def __init__(
        self, elf: ElfFile, table: Section, name: str, sizes: dict[int, int], base: Callable[[int], int]
    ) -> None:
        self.name = name
        self.elf = elf
        self.word_size = elf.word_size
        self.has_addends = table.type == _RELA
        self._sizes = sizes
        self._base = base
        prefix, word = elf.struct_prefix, "Q" if self.word_size == 8 else "I"
        self._row = struct.Struct(f"{prefix}2{word}{word.lower() if self.has_addends else ''}")
        self._table = elf.bytes_at(table.offset, table.size // self._row.size * self._row.size, "a relocation table")
        if not 0 < table.link < len(elf.sections):
            elf.malformed(f"the relocations of section '{name}' have no symbols")
        symbols = elf.sections[table.link]
        self._symbols = elf.bytes_at(symbols.offset, symbols.size, "a symbol table") if symbols.in_file else b""

    def __len__(self) -> int:
        return len(self._table) // self._row.size

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the entries of the table: r_offset, r_info, and r_addend if it has one."""
        return self._row.iter_unpack(self._table)

    def field(self, info: int) -> _Field:
        """Return the field that a relocation with this r_info changes: its size, and the value of its symbol."""
        index, kind = (info >> 32, info & 0xFFFFFFFF) if self.word_size == 8 else (info >> 8, info & 0xFF)
        size = self._sizes.get(kind)
        if size is None:
            self.elf.malformed(f"section '{self.name}' has a relocation of kind {kind}, which is not known")
        symbol_size = symbol_layout(self.elf.struct_prefix, self.word_size).size
        if not 0 <= index < len(self._symbols) // symbol_size:
            self.elf.malformed(f"section '{self.name}' has a relocation with symbol {index}, which is not there")
        row = self._symbols[index * symbol_size : (index + 1) * symbol_size]
        _, form, _, section, value, _ = next(symbol_rows(row, self.elf.struct_prefix, self.word_size))
        if section == _ABSOLUTE or (section and form & 15 == _THREAD):
            return _Field(value, size)
        if section == 0 or section >= _RESERVED:
            return _Field(0, size)  # in another file, or without an address yet
        if section >= len(self.elf.sections):
            self.elf.malformed(f"symbol {index} is in section {section}, which is not there")
        return _Field(value + self._base(section), size)


def _apply(relocations: _Relocations, data: bytearray) -> None:
    elf, has_addends = relocations.elf, relocations.has_addends
    if len(relocations) > len(data):
        elf.malformed(f"section '{relocations.name}' has more relocations than bytes")
    writers = {size: struct.Struct(elf.struct_prefix + letter) for size, letter in ((4, "I"), (8, "Q"))}
    masks = {size: (1 << 8 * size) - 1 for size in (0, *writers)}
    fields: dict[int, _Field] = {}
    addend = 0
    for row in relocations.rows():
        place, info = row[0], row[1]
        field = fields.get(info)
        if field is None:
            field = fields[info] = relocations.field(info)
        value, size = field
        if not size:
            continue
        if place > len(data) - size:
            elf.malformed(f"a relocation of section '{relocations.name}' lies outside of it")
        writer = writers[size]
        addend = row[2] if has_addends else writer.unpack_from(data, place)[0]
        writer.pack_into(data, place, value + addend & masks[size])


def targets_in(elf: ElfFile, name: str) -> Iterator[tuple[int, int, int]]:
    """
    Iterate over a section's relocations: offset in the section, number of the symbol's section, offset in that section.

    The file must have 64-bit words.
    """
    table = elf.section(f".rela{name}")
    names = next((each for each in elf.sections if each.type == SHT_SYMTAB), None)
    if table is None or names is None:
        return
    symbols = list(symbol_rows(elf.bytes_at(names.offset, names.size, names.name), elf.struct_prefix, 8))
    size = table.size - table.size % _POINTER_RELA.size
    for place, info, addend in _POINTER_RELA.iter_unpack(elf.bytes_at(table.offset, size, table.name)):
        if info >> 32 < len(symbols):
            _, _, _, section, value, _ = symbols[info >> 32]
            yield place, section, value + addend


# Addresses of code in the data of a file: those that relocations write, and those that are in the file already.
# Only for x86-64. A word that is an address by chance is included, because the search is for all possible targets.
# Rules: System V ABI, AMD64 supplement, "Relocation"; relative relocations as bitmaps (RELR): gABI, "Relocation".


_DT_RELA, _DT_RELASZ, _DT_RELR = 7, 8, 36
_RELATIVE, _IRELATIVE = 8, 37
"""R_X86_64_RELATIVE and R_X86_64_IRELATIVE: the addend is a link address."""
_POINTER_RELA = struct.Struct("<QQq")

_RSEQ = "__rseq_cs"
_RSEQ_DESCRIPTION = struct.Struct("<IIQQQ")
"""``struct rseq_cs`` of include/uapi/linux/rseq.h: version, flags, start, length, address after an abort."""


def written_words(elf: ElfFile) -> Iterator[tuple[int, int]]:
    """
    Iterate over (place, target) of the dynamic loader's relocations that write addresses.

    Place and target are link addresses. Only x86-64 is supported.
    """
    values = elf.dynamic.values
    table, size = values.get(_DT_RELA, 0), values.get(_DT_RELASZ, 0)
    try:
        data = elf.read(table, size - size % _POINTER_RELA.size) if table else b""
    except TargetError:
        return
    for place, info, addend in _POINTER_RELA.iter_unpack(data):
        if info in (_RELATIVE, _IRELATIVE):
            yield place, addend


def code_pointers(elf: ElfFile) -> set[int]:
    """Return the link addresses of code that occur as words in the data of a file."""
    ranges = [(s.vaddr, s.vaddr + s.filesz) for s in elf.load_segments if s.executable]
    found = {value for _, value in written_words(elf)}
    if not elf.is_pie_or_shared or _DT_RELR in elf.dynamic.values:  # words that are in the file unrelocated
        for segment in elf.load_segments:
            if not segment.executable:
                start = segment.offset + (-segment.vaddr & 7)
                size = max(0, segment.offset + segment.filesz - start) & ~7
                data = memoryview(elf.data[start : start + size]).cast("Q")
                found.update(data)
    return {value for value in found if any(start <= value < end for start, end in ranges)}


def restartable_sections(elf: ElfFile) -> list[tuple[int, int, int]]:
    """
    Return start and end of the restartable sequences (rseq) of a file, and the address after an abort.

    A thread that is interrupted between the first two addresses continues at the third.
    """
    section = elf.section(_RSEQ)
    if section is None or not section.address:
        return []
    data = elf.bytes_at(section.offset, section.size - section.size % _RSEQ_DESCRIPTION.size, "the table of sequences")
    written = dict(written_words(elf))
    found = []
    for position, row in enumerate(_RSEQ_DESCRIPTION.iter_unpack(data)):
        place = section.address + position * _RSEQ_DESCRIPTION.size
        start, abort = written.get(place + 8, row[2]), written.get(place + 24, row[4])
        if row[3]:
            found.append((start, start + row[3], abort))
    return found
