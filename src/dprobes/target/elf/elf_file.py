"""
Structure of an ELF file: its kind, its load segments, and the mapping of link addresses to file offsets.

``elf_headers`` reads headers, segments, sections and notes; ``symbol_table`` reads symbols. If bytes are malformed,
only ``TargetError`` is raised. Rules: System V ABI (gABI), chapters 4 and 5.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from dprobes.errors import TargetError
from dprobes.target.elf.file_contents import file_contents

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from dprobes.arch import ByteOrder
    from dprobes.target.elf.elf_headers import Headers, LoadSegment, Section
    from dprobes.target.elf.file_contents import Contents

__all__ = ["CODE_PREFIX", "Dynamic", "ElfFile", "FrameTable", "module_identity"]

_ROWS_MAX = 1 << 22
"""Maximum number of functions in a table. The largest programs have a million."""

_PCREL_SDATA4 = 0x1B


class Image(Protocol):
    """The interface of an ELF file that the unwind table uses."""

    data: Contents
    word_size: int
    byte_order: ByteOrder
    struct_prefix: str
    type: str
    sections: tuple[Section, ...]

    def read(self, link_address: int, n: int) -> bytes:
        """Return the bytes at a link address; raise ``TargetError`` if they are not in the file."""

    def bytes_at(self, offset: int, size: int, what: str) -> bytes:
        """
        Return the bytes at a file offset.

        Raise ``TargetError`` if they are not in the file; ``what`` is their name in the message.
        """

    def code_range(self, link_address: int) -> tuple[int, int] | None:
        """Return start and end of the executable segment that contains a link address, or None if there is none."""


@dataclass(frozen=True, slots=True)
class FrameTable:
    """
    Sorted link addresses at which functions start, and the link address of each function's frame description.

    The search table of ``.eh_frame_hdr`` has them; no other list of functions is kept by strip. Programs linked with
    ``-static`` have no search table, so ``.eh_frame`` itself is read. A table in a form that linkers do not write
    counts as missing, because the table is optional everywhere. Rules: Linux Standard Base 5.0, "Exception Frames".
    """

    starts: tuple[int, ...] = ()
    descriptions: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, elf: Image, header: tuple[int, int] | None) -> FrameTable:
        """
        Return the table of a file. ``header`` is the link address and size of ``.eh_frame_hdr``.

        Return an empty table if its format is not that of linkers.
        """
        try:
            if header is None:
                return cls._walk(elf)
            from dprobes.target.unwind.exception_frames import search_table

            address, mask = header[0], (1 << 8 * elf.word_size) - 1
            numbers = search_table(elf, address)
        except (TargetError, struct.error, ValueError):
            return cls()
        return cls._sorted((address + a & mask, address + b & mask) for a, b in zip(*[iter(numbers)] * 2, strict=True))

    @classmethod
    def _sorted(cls, rows: Iterable[tuple[int, int]]) -> FrameTable:
        in_order = sorted(rows)
        return cls(tuple(start for start, _ in in_order), tuple(description for _, description in in_order))

    @classmethod
    def _walk(cls, elf: Image) -> FrameTable:
        section = next((s for s in elf.sections if s.name == ".eh_frame" and s.in_file and s.address), None)
        if section is None or elf.type == "rel":
            return cls()
        data = elf.bytes_at(section.offset, section.size, "the unwind table")
        rows: list[tuple[int, int]] = []
        prefix, position = elf.struct_prefix, 0
        encodings: dict[int, int | None] = {}
        while position + 16 <= len(data) and len(rows) < _ROWS_MAX:
            length, kind, begin = struct.unpack_from(f"{prefix}IIi", data, position)
            if length in (0, 0xFFFFFFFF):
                break
            if kind == 0:
                encodings[position] = _pointer_encoding(data[position + 8 : position + 4 + length], elf)
            elif encodings.get(position + 4 - kind) == _PCREL_SDATA4:
                rows.append((section.address + position + 8 + begin, section.address + position))
            position += 4 + length
        return cls._sorted(rows)

    def covering(self, elf: Image, link_address: int) -> int | None:
        """Return the start of the function whose frame description covers a link address, or None if none does."""
        i = bisect_right(self.starts, link_address) - 1
        code = elf.code_range(link_address)
        if i < 0 or code is None or self.starts[i] < code[0]:
            return None
        start = self.starts[i]
        length = self._length(elf, i)
        return start if length is None or link_address < start + length else None

    def extent(self, elf: Image, link_address: int) -> tuple[int, int] | None:
        """Return start and end of the code whose frame description covers a link address, or None if unknown."""
        i = bisect_right(self.starts, link_address) - 1
        length = self._length(elf, i) if i >= 0 else None
        if length is None or link_address >= self.starts[i] + length:
            return None
        return self.starts[i], self.starts[i] + length

    def description_of(self, elf: Image, link_address: int) -> int | None:
        """Return the link address of the frame description that covers a link address, or None if none does."""
        if self.extent(elf, link_address) is None:
            return None
        return self.descriptions[bisect_right(self.starts, link_address) - 1]

    def _length(self, elf: Image, index: int) -> int | None:
        """Return a function's length in bytes, or None if pointers have an unusual encoding (not pcrel, sdata4)."""
        description = self.descriptions[index]
        try:
            begin, length = struct.unpack(f"{elf.struct_prefix}iI", elf.read(description + 8, 8))
        except TargetError:
            return None
        return int(length) if description + 8 + begin == self.starts[index] else None


def _pointer_encoding(entry: bytes, elf: Image) -> int | None:
    """
    Return the encoding of addresses in a common entry, or None if it is malformed.

    ``entry`` begins at the version of the common entry.
    """
    from dprobes.target.elf.byte_reader import ByteReader
    from dprobes.target.unwind.exception_frames import common_entry

    try:
        return common_entry(ByteReader(entry, elf.byte_order), elf.word_size).encoding
    except (ValueError, IndexError):
        return None


READ_MAX = 512 << 20
"""Maximum size in bytes of a table that is read. The symbol tables of the largest programs have half of it."""

_NAME_MAX = 4096  # bytes of a path: PATH_MAX
_DYNAMIC_MAX = 1 << 20
"""Maximum size in bytes of a dynamic section: 65 536 entries, where the largest programs have some hundreds."""
_NEEDED_MAX = 4096

_DT_NEEDED, _DT_SONAME, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 14, 5, 15, 29


class Dynamic(NamedTuple):
    """
    Dynamic section: the last value of each tag, and the names of ``DT_NEEDED`` and ``DT_SONAME``.

    ``run_path`` has the directories of ``DT_RUNPATH``, or else of ``DT_RPATH``, as they are written.
    """

    values: dict[int, int]
    needed: tuple[str, ...]
    soname: str | None
    run_path: tuple[str, ...] = ()

    @property
    def is_run_path_first(self) -> bool:
        """True if ``run_path`` is searched before LD_LIBRARY_PATH, as for ``DT_RPATH``."""
        return _DT_RUNPATH not in self.values


class ElfFile:
    """
    ELF file, created by ``open``.

    ``word_size`` is 4 or 8 bytes. ``machine`` is ``x86_64``, ``i386``, ``s390``, ``s390x``, ``ppc``, ``ppc64``,
    ``aarch64``, ``riscv64``, or ``em_`` and the number. ``type`` is ``exec``, ``dyn``, ``rel`` or ``core``.
    ``build_id`` is in hex.

    A *link address* is an address in the file's own headers and symbols; adding the load bias gives the run-time
    address. A relocatable file (``rel``) has no addresses yet: its link addresses are equal to file offsets.
    """

    def __init__(self, path: Path, data: Contents, headers: Headers) -> None:
        self.path = path
        self.data = data
        self.word_size = headers.word_size
        self.byte_order: ByteOrder = headers.byte_order
        self.machine = headers.machine
        self.type = headers.type
        self.entry = headers.entry
        self.build_id = headers.build_id
        self.sections: tuple[Section, ...] = headers.sections
        self.load_segments: tuple[LoadSegment, ...] = headers.load_segments
        self.struct_prefix = "<" if headers.byte_order == "little" else ">"
        self._headers = headers
        self.interpreter = self._interpreter()
        self.dynamic = self._dynamic()

    @classmethod
    def open(cls, path: str | os.PathLike[str], reached: Path | None = None) -> ElfFile:
        """
        Read an ELF file; raise ``TargetError`` if it is malformed or cannot be read.

        ``reached`` is the path to open if ``path`` no longer leads to the file. Errors contain ``path``.
        """
        path = Path(path)
        return cls.of_bytes(path, file_contents(reached or path, "an ELF file", path))

    @classmethod
    def of_bytes(cls, path: Path, data: Contents) -> ElfFile:
        """Parse the ELF file with the bytes ``data``; ``path`` is its name in errors."""
        from dprobes.target.elf.elf_headers import parse_headers

        return cls(path, data, parse_headers(path, data))

    def placed_as(self, other: ElfFile) -> ElfFile:
        """Return this debug file with the section addresses of ``other``, the object file that it describes."""
        addresses: dict[str, list[int]] = {}
        for section in reversed(other.sections):
            addresses.setdefault(section.name, []).append(section.address)
        sections = tuple(
            each.at(addresses[each.name].pop()) if addresses.get(each.name) else each for each in self.sections
        )
        return ElfFile(self.path, self.data, self._headers._replace(sections=sections))

    def __repr__(self) -> str:
        return f"ElfFile({str(self.path)!r})"

    @property
    def is_pie_or_shared(self) -> bool:
        """True if the file can be loaded at any address: a position-independent program or a shared library."""
        return self.type == "dyn"

    @property
    def soname(self) -> str | None:
        """The ``DT_SONAME`` of a shared library, or None if it has none."""
        return self.dynamic.soname

    @property
    def needed(self) -> tuple[str, ...]:
        """The ``DT_NEEDED`` names of the libraries that the file is linked with."""
        return self.dynamic.needed

    @property
    def is_debug_only(self) -> bool:
        """True for a separate debug file, without the code and data that it describes."""
        return self._headers.is_debug_only

    @property
    def dynamic_range(self) -> tuple[int, int] | None:
        """The link address of the dynamic section and its size in bytes, or None if the file has none."""
        if self._headers.dynamic is None:
            return None
        offset, size = self._headers.dynamic
        address = self.link_address(offset)
        return None if address is None else (address, min(size, _DYNAMIC_MAX))

    def section(self, name: str) -> Section | None:
        """Return the first section with a name that has bytes in the file, or None if there is none."""
        return next((each for each in self.sections if each.name == name and each.in_file), None)

    def file_offset(self, link_address: int) -> int | None:
        """Return the file offset of the byte at a link address, or None if the file does not contain it (bss)."""
        for start, end, offset, _ in self._loaded:
            if start <= link_address < end:
                return link_address - start + offset
        return None

    def link_address(self, file_offset: int) -> int | None:
        """
        Return the link address of the byte at a file offset, or None if it is not loaded.

        If it is loaded twice, prefer an executable segment.
        """
        found = None
        for start, end, offset, is_executable in self._loaded:
            if 0 <= file_offset - offset < end - start:
                address = file_offset - offset + start
                if is_executable:
                    return address
                found = address if found is None else found
        return found

    def is_executable_offset(self, file_offset: int) -> bool:
        """Return whether the byte at ``file_offset`` is loaded as code."""
        return any(code and 0 <= file_offset - offset < end - start for start, end, offset, code in self._loaded)

    def code_end(self, file_offset: int) -> int | None:
        """Return the file offset at which the code segment with ``file_offset`` ends, or None if there is none."""
        for start, end, offset, is_executable in self._loaded:
            if is_executable and 0 <= file_offset - offset < end - start:
                return offset + end - start
        return None

    @cached_property
    def _loaded(self) -> tuple[tuple[int, int, int, bool], ...]:
        """Link addresses of start and end, file offset, and executability of the bytes of segments in the file."""
        return tuple((s.vaddr, s.vaddr + s.filesz, s.offset, s.executable) for s in self.load_segments)

    @cached_property
    def _code_ranges(self) -> tuple[tuple[int, int], ...]:
        """Start and end of the executable sections, and then of the executable segments."""
        sections = [(s.address, s.address + s.size) for s in self.sections if s.executable]
        return (*sections, *((s.vaddr, s.vaddr + s.memsz) for s in self.load_segments if s.executable))

    def code_range(self, link_address: int) -> tuple[int, int] | None:
        """Return start and end of the executable section, or without one segment, that contains ``link_address``."""
        for code in self._code_ranges:
            if code[0] <= link_address < code[1]:
                return code
        return None

    def read(self, link_address: int, n: int) -> bytes:
        """
        Return the ``n`` bytes that are loaded at ``link_address``, zeros for bss.

        Raise ``TargetError`` if they are not in one load segment.
        """
        for segment in self.load_segments:
            start = link_address - segment.vaddr
            if start >= 0 and start + n <= segment.memsz:
                if n > READ_MAX:
                    self.malformed(
                        f"{n} bytes at address 0x{link_address:x} are more than the {READ_MAX} that are read"
                    )
                in_file = max(0, min(n, segment.filesz - start))
                data = self.data[segment.offset + start : segment.offset + start + in_file]
                return data + bytes(n - len(data))
        raise TargetError(f"'{self.path}' has no {n} bytes at address 0x{link_address:x}")

    def bytes_at(self, offset: int, size: int, what: str) -> bytes:
        """
        Return ``size`` bytes of the file at ``offset``.

        Raise ``TargetError`` if the file is shorter; ``what`` is the name of the bytes in the message.
        """
        if offset < 0 or size < 0 or offset + size > len(self.data):
            self.malformed(f"{what} lies outside the file")
        if size > READ_MAX:
            self.malformed(f"{what} has {size} bytes, more than the {READ_MAX} that are read")
        return self.data[offset : offset + size]

    def string_at(self, offset: int, end: int) -> str:
        """
        Return the NUL-terminated string at a file offset.

        The result is empty if it does not end before ``end``, or is too long.
        """
        end = min(end, offset + _NAME_MAX)
        stop = self.data.find(b"\0", offset, end) if 0 <= offset < end else -1
        return self.data[offset:stop].decode("utf-8", "surrogateescape") if stop >= 0 else ""

    def malformed(self, detail: str) -> NoReturn:
        """Raise ``TargetError`` for a malformed ELF file. ``detail`` is the end of the message."""
        raise TargetError(f"'{self.path}' is a malformed ELF file: {detail}")

    @cached_property
    def frames(self) -> FrameTable:
        """The starts of functions from the unwind table, which stripped files have, too."""
        return FrameTable.of(self, self._headers.eh_frame_header)

    def _interpreter(self) -> str | None:
        if self._headers.interpreter is None or self.is_debug_only:
            return None
        offset, size = self._headers.interpreter
        if size > _NAME_MAX:
            self.malformed(f"the interpreter's name has {size} bytes, more than the {_NAME_MAX} that a path can have")
        return self.bytes_at(offset, size, "the interpreter's name").rstrip(b"\0").decode("utf-8", "surrogateescape")

    def _dynamic(self) -> Dynamic:
        if self._headers.dynamic is None or self.is_debug_only:
            return Dynamic({}, (), None)
        offset, size = self._headers.dynamic
        if size > _DYNAMIC_MAX:
            self.malformed(f"the dynamic section has {size} bytes, more than the {_DYNAMIC_MAX} that are read")
        word = "Q" if self.word_size == 8 else "I"
        entry = struct.Struct(f"{self.struct_prefix}2{word}")
        data = self.bytes_at(offset, size - size % entry.size, "the dynamic section")
        values: dict[int, int] = {}
        needed: list[int] = []
        for tag, value in entry.iter_unpack(data):
            if tag == 0:
                break
            values[tag] = value
            if tag == _DT_NEEDED and len(needed) < _NEEDED_MAX:
                needed.append(value)
        strings = self.file_offset(values.get(_DT_STRTAB, -1))
        if strings is None:
            return Dynamic(values, (), None)
        names = tuple(filter(None, (self.string_at(strings + n, len(self.data)) for n in needed)))
        soname = self.string_at(strings + values[_DT_SONAME], len(self.data)) if _DT_SONAME in values else None
        run_path = values.get(_DT_RUNPATH, values.get(_DT_RPATH))
        directories = self.string_at(strings + run_path, len(self.data)) if run_path is not None else None
        return Dynamic(values, names, soname or None, tuple(directories.split(":")) if directories else ())


CODE_PREFIX = "code-"
"""Prefix of an identity that is not a build-id."""

_HEADER_SIZES = {4: 52, 8: 64}
"""Sizes in bytes of the ELF header by word size. The header may be in a code segment, and strip changes it."""

_DIGEST_SIZE = 20


def module_identity(elf: ElfFile) -> str:
    """
    Return an identity that a module shares only with its stripped copy, not with other builds.

    It is the build-id in hex. For a file without a build-id, it is CODE_PREFIX and a hash of the code.
    """
    if elf.build_id:
        return elf.build_id
    import hashlib

    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for segment in elf.load_segments:
        if segment.executable:
            start = max(segment.offset, _HEADER_SIZES[elf.word_size])
            digest.update(segment.vaddr.to_bytes(8, "little") + segment.filesz.to_bytes(8, "little"))
            digest.update(elf.data[start : segment.offset + segment.filesz])
    return CODE_PREFIX + digest.hexdigest()
