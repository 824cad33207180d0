"""
Headers of an ELF file, read and checked once, so that all other code can rely on them.

The file may come from any user. So each table is first checked to be in the file, and not larger than in real files. No
library is used, because its import would take a sixth of the start of a run. Rules: System V ABI, chapters 4 and 5; the
build-id note: ``ld --build-id``.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dprobes.arch import ByteOrder
    from dprobes.target.elf.file_contents import Contents

__all__ = [
    "SHT_DYNSYM",
    "SHT_SYMTAB",
    "Headers",
    "LoadSegment",
    "Section",
    "build_id_among",
    "notes_in",
    "parse_headers",
    "symbol_layout",
    "symbol_rows",
]

SHT_SYMTAB, SHT_DYNSYM = 2, 11
_SHT_NOTE, _SHT_NOBITS = 7, 8
_SHF_ALLOC, _SHF_EXECINSTR = 2, 4
_PF_X = 1
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_NOTE, _PT_GNU_EH_FRAME = 1, 2, 3, 4, 0x6474E550

_MACHINES = {3: "i386", 20: "ppc", 21: "ppc64", 22: "s390", 62: "x86_64", 183: "aarch64", 243: "riscv32"}
_WIDE = {"s390": "s390x", "riscv32": "riscv64"}
"""Names for 64-bit words of machines that have one number for both word sizes."""
_TYPES = {1: "rel", 2: "exec", 3: "dyn", 4: "core"}
_HEADER_SIZES = {4: (52, 32, 40), 8: (64, 56, 64)}  # file, program and section header by word size
_SHN_XINDEX = 0xFFFF

_PROGRAM_HEADERS_MAX = 1 << 16
"""Maximum size in bytes of program headers, as in the kernel (``load_elf_phdrs``, except for ELF_MIN_ALIGN)."""
_SECTIONS_MAX = 1 << 17
"""
Maximum number of section headers.

Linked files have hundreds, object files with a section for each function tens of thousands.
"""
_SECTION_NAME_MAX = 1024  # bytes
_NOTES_MAX = 1 << 16
"""Maximum number of notes that are searched for the build-id."""
_OVERLAP_SIZE = 1 << 20
_PAGE = 4096
_NT_GNU_BUILD_ID = 3

# Elf32_Sym: st_name, value, size, info, other, shndx; Elf64_Sym: st_name, info, other, shndx, value, size
_SYMBOL = {4: "IIIBBH", 8: "IBBHQQ"}
# Elf32_Shdr, Elf64_Shdr: sh_name, type, flags, addr, offset, size, link, info, addralign, entsize
_SECTION = {4: "IIIIIIIIII", 8: "IIQQQQIIQQ"}
# Elf32_Phdr: p_type, offset, vaddr, paddr, filesz, memsz, flags, align; in Elf64_Phdr the flags come second
_SEGMENT = {4: "IIIIIIII", 8: "IIQQQQQQ"}


class LoadSegment(NamedTuple):
    """
    Loaded segment: ``filesz`` bytes of the file from ``offset`` on at the address ``vaddr``.

    Zeros follow up to the size ``memsz``.
    """

    vaddr: int
    memsz: int
    offset: int
    filesz: int
    flags: int

    @property
    def executable(self) -> bool:
        """True if the segment is executable."""
        return bool(self.flags & _PF_X)


class Section(NamedTuple):
    """
    Section header; ``type`` and ``flags`` are the ABI's numbers, ``size`` is in bytes.

    ``link`` and ``info`` depend on the type: for relocations they are the symbol table, and the section to relocate.
    """

    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int
    alignment: int = 1
    info: int = 0

    @property
    def executable(self) -> bool:
        """True if the section is loaded as code."""
        return self.flags & (_SHF_ALLOC | _SHF_EXECINSTR) == _SHF_ALLOC | _SHF_EXECINSTR

    @property
    def in_file(self) -> bool:
        """True if the section has bytes in the file."""
        return self.type not in (0, _SHT_NOBITS)

    def at(self, address: int) -> Section:
        """Return a copy of the section header with another address."""
        return self._replace(address=address)


class Headers(NamedTuple):
    """
    Headers of a file.

    Pairs are a file offset and a size in bytes, except ``eh_frame_header``, which is a link address and a size.
    """

    word_size: int
    byte_order: ByteOrder
    machine: str
    type: str
    entry: int
    sections: tuple[Section, ...]
    load_segments: tuple[LoadSegment, ...]
    is_debug_only: bool
    build_id: str | None
    interpreter: tuple[int, int] | None
    dynamic: tuple[int, int] | None
    eh_frame_header: tuple[int, int] | None


def parse_headers(path: Path, data: Contents) -> Headers:
    """Parse the headers of an ELF file with the bytes ``data``. ``path`` is its name in errors."""
    word_size, byte_order = _check_ident(path, data)
    try:
        return _Parser(path, data, word_size, byte_order).parse()
    except TargetError:
        raise
    except (struct.error, IndexError, OverflowError) as e:
        raise TargetError(f"'{path}' is a malformed ELF file: {type(e).__name__} while reading its headers") from e


def _check_ident(path: Path, data: Contents) -> tuple[int, ByteOrder]:
    if not data:
        raise TargetError(f"'{path}' is empty, expected an ELF file")
    if data[:4] != b"\x7fELF"[: len(data)]:
        hint = "it is a script: probe the program that runs it" if data[:2] == b"#!" else None
        raise TargetError(f"'{path}' is not an ELF file", hint=hint)
    if len(data) < 16:
        raise TargetError(f"'{path}' is truncated: {len(data)} bytes of the 16 that identify an ELF file")
    if data[4] not in (1, 2):
        raise TargetError(f"'{path}' has ELF class {data[4]}, expected 1 (32-bit) or 2 (64-bit)")
    if data[5] not in (1, 2):
        raise TargetError(f"'{path}' has ELF data encoding {data[5]}, expected 1 (little-endian) or 2 (big-endian)")
    word_size = 4 * data[4]
    if len(data) < _HEADER_SIZES[word_size][0]:
        raise TargetError(
            f"'{path}' is truncated: {len(data)} bytes of the {_HEADER_SIZES[word_size][0]} of its header"
        )
    return word_size, "little" if data[5] == 1 else "big"


class _Segment(NamedTuple):
    """The fields of a program header that are used."""

    type: int
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int


class _Parser:
    """Parser of a file's headers. ``parse_headers`` converts its exceptions for malformed bytes."""

    def __init__(self, path: Path, data: Contents, word_size: int, byte_order: ByteOrder) -> None:
        self._path = path
        self._data = data
        self._word_size = word_size
        self._byte_order = byte_order
        self._order = "<" if byte_order == "little" else ">"

    def parse(self) -> Headers:
        """Return all headers; raise ``TargetError`` if they are malformed or of an unexpected type."""
        number = self._number(16, 2)
        kind = _TYPES.get(number)
        if kind is None:
            raise TargetError(f"'{self._path}' has ELF type {number}, expected a program, library or object file")
        program_headers, section_headers = self._tables()
        sections = self._sections(*section_headers)
        loaded = [s for s in sections if s.flags & _SHF_ALLOC and s.type != _SHT_NOTE]
        debug_only = kind != "rel" and bool(loaded) and not any(s.in_file for s in loaded)
        segments = self._segments(*program_headers)
        places = {h.type: (h.offset, h.filesz) for h in reversed(segments)}
        frames = next(((h.vaddr, h.memsz) for h in segments if h.type == _PT_GNU_EH_FRAME), None)
        notes = [(s.offset, s.size) for s in sections if s.type == _SHT_NOTE]
        if not notes and not debug_only:
            notes = [(h.offset, h.filesz) for h in segments if h.type == _PT_NOTE]
        if kind == "rel":
            sections, load = self._place_relocatable(sections)
        else:
            load = tuple(
                LoadSegment(h.vaddr, h.memsz, h.offset, h.filesz, h.flags) for h in segments if h.type == _PT_LOAD
            )
        self._check_loaded(load, in_file=not debug_only)
        return Headers(
            word_size=self._word_size,
            byte_order=self._byte_order,
            machine=self._machine(),
            type=kind,
            entry=self._number(24, self._word_size),
            sections=sections,
            load_segments=load,
            is_debug_only=debug_only,
            build_id=self._build_id(notes),
            interpreter=places.get(_PT_INTERP),
            dynamic=places.get(_PT_DYNAMIC),
            eh_frame_header=None if debug_only else frames,
        )

    def _malformed(self, detail: str) -> TargetError:
        return TargetError(f"'{self._path}' is a malformed ELF file: {detail}")

    def _number(self, offset: int, size: int) -> int:
        return int.from_bytes(self._data[offset : offset + size], self._byte_order)

    def _machine(self) -> str:
        number = self._number(18, 2)
        name = _MACHINES.get(number, f"em_{number}")
        return _WIDE.get(name, name) if self._word_size == 8 else name

    def _tables(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return offset and number of the program headers and of the section headers, which are in the file."""
        word = self._word_size
        tables = 24 + word  # e_phoff follows e_entry
        phoff, shoff = self._number(tables, word), self._number(tables + word, word)
        sizes = tables + 2 * word + 6  # past e_flags and e_ehsize
        phentsize, phnum, shentsize, shnum = (self._number(sizes + 2 * i, 2) for i in range(4))
        _, program, section = _HEADER_SIZES[word]
        if shoff and shentsize == section and shoff + section <= len(self._data):
            # Counts that do not fit in 16 bits are in the first section header: sh_size and sh_info.
            shnum = shnum or self._number(shoff + (20 if word == 4 else 32), word)
            phnum = self._number(shoff + (28 if word == 4 else 44), 4) if phnum == 0xFFFF else phnum
        for name, offset, size, count, expected in (
            ("program", phoff, phentsize, phnum, program),
            ("section", shoff, shentsize, shnum, section),
        ):
            if not offset or not count:
                continue
            if size != expected:
                raise self._malformed(f"{name} headers of {size} bytes, expected {expected}")
            if count * size > {"program": _PROGRAM_HEADERS_MAX, "section": _SECTIONS_MAX * section}[name]:
                raise self._malformed(f"{count} {name} headers are more than are read")
            if offset + count * size > len(self._data):
                raise TargetError(
                    f"'{self._path}' is truncated: its {name} headers end at byte {offset + count * size} "
                    f"of {len(self._data)}"
                )
        return (phoff, phnum if phoff else 0), (shoff, shnum if shoff else 0)

    def _segments(self, offset: int, count: int) -> list[_Segment]:
        layout = struct.Struct(self._order + _SEGMENT[self._word_size])
        rows = layout.iter_unpack(self._data[offset : offset + count * layout.size])
        if self._word_size == 4:
            return [_Segment(r[0], r[6], r[1], r[2], r[4], r[5]) for r in rows]
        return [_Segment(r[0], r[1], r[2], r[3], r[5], r[6]) for r in rows]

    def _sections(self, offset: int, count: int) -> tuple[Section, ...]:
        layout = struct.Struct(self._order + _SECTION[self._word_size])
        rows = list(layout.iter_unpack(self._data[offset : offset + count * layout.size]))
        if not rows:
            return ()
        names = self._number(_HEADER_SIZES[self._word_size][0] - 2, 2)  # e_shstrndx is the last field
        if names == _SHN_XINDEX:
            names = rows[0][6]
        start = rows[names][4] if names else -1
        found = []
        for name, kind, flags, address, place, size, link, info, alignment, entry_size in rows:
            text = self._string(start + name) if names else ""
            found.append(Section(text, kind, flags, address, place, size, link, entry_size, alignment, info))
        return tuple(found)

    def _string(self, offset: int) -> str:
        end = self._data.find(b"\0", offset, max(0, offset) + _SECTION_NAME_MAX)
        return self._data[offset:end].decode(errors="replace") if end >= 0 else ""

    def _check_loaded(self, segments: tuple[LoadSegment, ...], *, in_file: bool) -> None:
        # Segments may share a page or so; if each were the whole file, all work would be repeated for each.
        if in_file and sum(segment.filesz for segment in segments) > 2 * len(self._data) + _OVERLAP_SIZE:
            raise self._malformed("its segments hold more than the file")
        for segment in segments:
            end = segment.offset + segment.filesz
            if in_file and end > len(self._data):
                raise TargetError(f"'{self._path}' is truncated: a segment ends at byte {end} of {len(self._data)}")
            if segment.vaddr + max(segment.memsz, segment.filesz) > 1 << 8 * self._word_size:
                size = max(segment.memsz, segment.filesz)
                raise self._malformed(f"a segment at address 0x{segment.vaddr:x} has no room for its 0x{size:x} bytes")

    def _place_relocatable(self, sections: tuple[Section, ...]) -> tuple[tuple[Section, ...], tuple[LoadSegment, ...]]:
        """
        Return the sections of an object file, which all start at 0, with addresses, and segments made of them.

        The address of a section is its file offset. A section without bytes in the file gets pages after the file's
        end, each after an empty page.
        """
        placed = []
        behind = len(self._data)
        for section in sections:
            if not section.flags & _SHF_ALLOC:
                placed.append(section)
            elif section.in_file:
                placed.append(section.at(section.offset))
            else:
                behind = (behind + 2 * _PAGE - 1) // _PAGE * _PAGE
                placed.append(section.at(behind))
                behind += section.size
        load = tuple(
            LoadSegment(s.offset, s.size, s.offset, s.size, _PF_X if s.executable else 0)
            for s in placed
            if s.flags & _SHF_ALLOC and s.in_file
        )
        return tuple(placed), load

    def _build_id(self, holders: list[tuple[int, int]]) -> str | None:
        """Return the build-id in the notes in some ranges of the file, or None if there is none."""
        notes = (note for start, size in holders for note in notes_in(self._data[start : start + size], self._order))
        return build_id_among(islice(notes, _NOTES_MAX))


Note = tuple[int, bytes, bytes]
"""Type, owner and description of a note."""


def notes_in(data: bytes, prefix: str) -> Iterator[Note]:
    """
    Iterate over the notes in some bytes; stop at an incomplete note.

    ::

        u32 size of the owner | u32 size of the description | u32 type | owner | description     padded to four bytes
    """
    head = struct.Struct(f"{prefix}III")
    place = 0
    while place + head.size <= len(data):
        owner_size, size, kind = head.unpack_from(data, place)
        owner = place + head.size
        start = owner + (owner_size + 3 & ~3)
        if start + size > len(data):
            return
        yield kind, data[owner : owner + owner_size], data[start : start + size]
        place = start + size + 3 & ~3


def build_id_among(notes: Iterable[Note]) -> str | None:
    """Return the first build-id among notes, in hex, or None if there is none."""
    found = (data for kind, owner, data in notes if kind == _NT_GNU_BUILD_ID and owner == b"GNU\0")
    return next((data.hex() for data in found), None)


Symbol = tuple[int, int, int, int, int, int]
"""Name offset, info, other, section, value and size of a symbol."""


def symbol_layout(prefix: str, word_size: int) -> struct.Struct:
    """Return the layout of a symbol. In 32-bit files, the fields have another order than in ``symbol_rows``."""
    return struct.Struct(prefix + _SYMBOL[word_size])


def symbol_rows(table: bytes | memoryview, prefix: str, word_size: int) -> Iterator[Symbol]:
    """
    Iterate over the entries of a symbol table in the bytes ``table``.

    ``prefix`` is the byte order as a character of ``struct``; ``word_size`` is 4 or 8 bytes.
    """
    layout = symbol_layout(prefix, word_size)
    rows = layout.iter_unpack(table[: len(table) - len(table) % layout.size])
    if word_size == 8:
        return rows
    return ((name, info, other, section, value, size) for name, value, size, info, other, section in rows)
