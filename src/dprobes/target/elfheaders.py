"""
The headers of an ELF file, read through pyelftools and checked once, so that everything after can rely on them.

pyelftools trusts what it reads; here every table is first shown to lie in the file, and whatever it still raises
becomes ``TargetError``. Rules: System V ABI chapters 4 and 5; the build-id note: ``ld --build-id``.
"""

from __future__ import annotations

import io
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.target.contents import Contents

__all__ = ["SHT_DYNSYM", "SHT_SYMTAB", "Headers", "LoadSegment", "Section", "parse_headers"]

SHT_SYMTAB, SHT_DYNSYM = 2, 11
_SHT_NOTE, _SHT_NOBITS = 7, 8
_SHF_ALLOC, _SHF_EXECINSTR = 2, 4
_PF_X = 1
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_NOTE, _PT_GNU_EH_FRAME = 1, 2, 3, 4, 0x6474E550

_MACHINES = {3: "i386", 20: "ppc", 21: "ppc64", 22: "s390", 62: "x86_64", 183: "aarch64"}
_TYPES = {1: "rel", 2: "exec", 3: "dyn", 4: "core"}
_HEADER_SIZES = {4: (52, 32, 40), 8: (64, 56, 64)}  # file, program and section header by word size


@dataclass(frozen=True, slots=True)
class LoadSegment:
    """Say that ``filesz`` bytes at file offset ``offset`` are loaded at ``vaddr``, followed by zeros to ``memsz``."""

    vaddr: int
    memsz: int
    offset: int
    filesz: int
    flags: int

    @property
    def executable(self) -> bool:
        """Whether the segment holds code."""
        return bool(self.flags & _PF_X)


@dataclass(frozen=True, slots=True)
class Section:
    """Hold one section header; ``type`` and ``flags`` are the ABI's numbers, ``size`` is in bytes."""

    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int

    @property
    def executable(self) -> bool:
        """Whether the section is loaded as code."""
        return self.flags & (_SHF_ALLOC | _SHF_EXECINSTR) == _SHF_ALLOC | _SHF_EXECINSTR

    @property
    def in_file(self) -> bool:
        """Whether the section has bytes in the file."""
        return self.type not in (0, _SHT_NOBITS)


@dataclass(frozen=True, slots=True)
class Headers:
    """Hold what the headers say; pairs are file offset and size, except ``eh_frame_header``: a link address."""

    word_size: int
    byte_order: Literal["little", "big"]
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
    """Return the headers of the ELF file with the bytes ``data``; ``path`` names it in errors."""
    word_size, byte_order = _check_ident(path, data)
    try:
        return _Parser(path, data, word_size, byte_order).parse()
    except TargetError:
        raise
    except Exception as e:
        # pyelftools lets through whatever its helpers meet: ELFError, construct's errors, KeyError, OverflowError, …
        raise TargetError(f"'{path}' is a malformed ELF file: {type(e).__name__} while reading its headers") from e


def _check_ident(path: Path, data: Contents) -> tuple[int, Literal["little", "big"]]:
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


class _Parser:
    """Walk one file's headers; every method may raise anything, ``parse_headers`` sorts it out."""

    def __init__(self, path: Path, data: Contents, word_size: int, byte_order: Literal["little", "big"]) -> None:
        from elftools.elf.elffile import ELFFile

        self._path = path
        self._data = data
        self._word_size = word_size
        self._byte_order = byte_order
        self._check_tables()
        if isinstance(data, mmap.mmap):
            data.seek(0)
        self._elf: Any = ELFFile(io.BytesIO(data) if isinstance(data, bytes) else cast("Any", data))

    def parse(self) -> Headers:
        """Return everything."""
        header = self._elf.header
        number = self._number(16, 2)
        kind = _TYPES.get(number)
        if kind is None:
            raise TargetError(f"'{self._path}' has ELF type {number}, expected a program, library or object file")
        parsed = list(self._elf.iter_sections())
        sections = tuple(self._section(s) for s in parsed)
        loaded = [s for s in sections if s.flags & _SHF_ALLOC and s.type != _SHT_NOTE]
        debug_only = kind != "rel" and bool(loaded) and not any(s.in_file for s in loaded)
        segments = [s.header for s in self._elf.iter_segments()]
        places = {_segment_type(h): (h.p_offset, h.p_filesz) for h in reversed(segments)}
        frames = next(((h.p_vaddr, h.p_memsz) for h in segments if _segment_type(h) == _PT_GNU_EH_FRAME), None)
        if kind == "rel":
            sections, load = self._place_relocatable(sections)
        else:
            load = tuple(
                LoadSegment(h.p_vaddr, h.p_memsz, h.p_offset, h.p_filesz, h.p_flags)
                for h in segments
                if _segment_type(h) == _PT_LOAD
            )
        self._check_loaded(load, in_file=not debug_only)
        return Headers(
            word_size=self._word_size,
            byte_order=self._byte_order,
            machine=self._machine(),
            type=kind,
            entry=header.e_entry,
            sections=sections,
            load_segments=load,
            is_debug_only=debug_only,
            build_id=self._build_id(parsed, debug_only),
            interpreter=places.get(_PT_INTERP),
            dynamic=places.get(_PT_DYNAMIC),
            eh_frame_header=None if debug_only else frames,
        )

    def _number(self, offset: int, size: int) -> int:
        return int.from_bytes(self._data[offset : offset + size], self._byte_order)

    def _machine(self) -> str:
        number = self._number(18, 2)
        name = _MACHINES.get(number, f"em_{number}")
        return "s390x" if name == "s390" and self._word_size == 8 else name

    def _check_tables(self) -> None:
        """Show that both header tables lie in the file, before pyelftools believes their sizes."""
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
                raise TargetError(
                    f"'{self._path}' is a malformed ELF file: {name} headers of {size} bytes, expected {expected}"
                )
            if offset + count * size > len(self._data):
                raise TargetError(
                    f"'{self._path}' is truncated: its {name} headers end at byte {offset + count * size} "
                    f"of {len(self._data)}"
                )

    def _check_loaded(self, segments: tuple[LoadSegment, ...], *, in_file: bool) -> None:
        for segment in segments:
            end = segment.offset + segment.filesz
            if in_file and end > len(self._data):
                raise TargetError(f"'{self._path}' is truncated: a segment ends at byte {end} of {len(self._data)}")
            if segment.vaddr + max(segment.memsz, segment.filesz) > 1 << 8 * self._word_size:
                raise TargetError(
                    f"'{self._path}' is a malformed ELF file: a segment at address 0x{segment.vaddr:x} has no room "
                    f"for its 0x{max(segment.memsz, segment.filesz):x} bytes"
                )

    def _section(self, section: Any) -> Section:
        h = section.header
        kind = h.sh_type
        if not isinstance(kind, int):
            from elftools.elf.enums import ENUM_SH_TYPE_BASE

            kind = int(ENUM_SH_TYPE_BASE.get(kind, -1))
        return Section(section.name, kind, h.sh_flags, h.sh_addr, h.sh_offset, h.sh_size, h.sh_link, h.sh_entsize)

    def _place_relocatable(self, sections: tuple[Section, ...]) -> tuple[tuple[Section, ...], tuple[LoadSegment, ...]]:
        """Give the sections of an object file, which all start at 0, their file offsets as addresses."""
        placed = tuple(
            Section(s.name, s.type, s.flags, s.offset, s.offset, s.size, s.link, s.entry_size)
            if s.flags & _SHF_ALLOC and s.in_file
            else s
            for s in sections
        )
        load = tuple(
            LoadSegment(s.offset, s.size, s.offset, s.size, _PF_X if s.executable else 0)
            for s in placed
            if s.flags & _SHF_ALLOC and s.in_file
        )
        return placed, load

    def _build_id(self, sections: list[Any], debug_only: bool) -> str | None:
        holders = [s for s in sections if s.header.sh_type == "SHT_NOTE"]
        if not holders and not debug_only:
            holders = [s for s in self._elf.iter_segments() if s.header.p_type == "PT_NOTE"]
        for holder in holders:
            for note in holder.iter_notes():
                if note.n_type == "NT_GNU_BUILD_ID" and note.n_name == "GNU":
                    return str(note.n_desc)
        return None


def _segment_type(header: Any) -> int:
    kind = header.p_type
    if isinstance(kind, int):
        return kind
    from elftools.elf.enums import ENUM_P_TYPE_BASE

    return int(ENUM_P_TYPE_BASE.get(kind, -1))
