"""
The shared object of a live patch: what it contains, why it is refused, and its bytes at an address.

The object is relocated here, not by the dynamic linker of the process, so it must not need what only that linker can
provide.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import near_names
from dprobes.engines.ptrace.patching.exception_tables import TABLES, has_end
from dprobes.errors import TargetError
from dprobes.target.elf.dynamic_relocations import GLOB_DAT, JUMP_SLOT, STT_GNU_IFUNC, dynamic_relocations
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import NoReturn

    from dprobes.target.elf.dynamic_relocations import Relocation
    from dprobes.target.elf.elf_headers import LoadSegment

__all__ = ["ORIGINAL", "PatchObject", "Piece"]

ORIGINAL = "orig_"
"""Prefix of the name by which the object calls the function that it replaces."""

BUILD_ID_SECTION = ".dprobes.build-id"
"""Section with the build-id, in hex, of the module that the object was made for."""

_SIZE_MAX = 256 << 20
"""Maximum size of an object's memory in bytes."""

_BUILD_ID_MAX = 256

_NONE, _64, _RELATIVE, _IRELATIVE = 0, 1, 8, 37
_THREAD_LOCAL = frozenset((16, 17, 18, 36))  # DTPMOD64, DTPOFF64, TPOFF64, TLSDESC
_STT_TLS, _STB_WEAK = 6, 2
_SHN_ABS = 0xFFF1  # of symbols whose value is no address in the file
_PF_X, _PF_W = 1, 2

_DT_INIT, _DT_FINI, _DT_TEXTREL, _DT_FLAGS, _DT_RELR = 12, 13, 22, 30, 36
_DT_ARRAYS = (27, 28, 33)  # sizes of the arrays of constructors, destructors, and early constructors
_DF_TEXTREL = 4

_EXCEPTIONS = ("__cxa_throw", "__gxx_personality_v0", "_Unwind_Resume", "rust_eh_personality")
_EXCEPTION_TABLE = ".gcc_except_table"
_HOW_TO_END = 'link it with "$(g++ -print-file-name=crtendS.o)" as the last file, or compile it -fno-exceptions'


class Piece(NamedTuple):
    """A range of an object's pages, at an offset from the object's start, with the ``PROT_*`` bits of mprotect(2)."""

    offset: int
    size: int
    protection: int


class PatchObject:
    """A shared object with functions that replace others; made by ``read``."""

    def __init__(self, elf: ElfFile, relocations: tuple[Relocation, ...]) -> None:
        self._elf = elf
        self._relocations = relocations
        self._segments = tuple(segment for segment in elf.load_segments if segment.memsz)
        self._start = min(segment.vaddr for segment in self._segments) & -PAGE_SIZE
        end = max(segment.vaddr + segment.memsz for segment in self._segments)
        self.size = -(self._start - end) + PAGE_SIZE - 1 & -PAGE_SIZE
        """Size in bytes of the memory that the object needs, in whole pages."""

    @classmethod
    def read(cls, path: Path) -> PatchObject:
        """Read a shared object; raise ``TargetError`` if it needs what only the dynamic linker can provide."""
        elf = ElfFile.open(path)
        if elf.machine != "x86_64" or elf.type != "dyn" or not elf.load_segments or elf.interpreter is not None:
            raise TargetError(
                f"'{path}' is not a shared object for x86-64", hint="make it with gcc -shared -fPIC -nostartfiles"
            )
        _refuse_dynamic(elf)
        _refuse_segments(elf)
        relocations = tuple(dynamic_relocations(elf))
        for relocation in relocations:
            _refuse_relocation(elf, relocation)
        found = cls(elf, relocations)
        if found.exception_tables is not None and not has_end(elf):
            _refuse(elf, "throws or handles exceptions, and its tables have no end mark", _HOW_TO_END)
        return found

    @property
    def exception_tables(self) -> int | None:
        """The offset of the call frame information, if exceptions may pass through the object's code; else None."""
        names = {each.symbol.name for each in self._relocations if each.symbol is not None}
        if self._elf.section(_EXCEPTION_TABLE) is None and names.isdisjoint(_EXCEPTIONS):
            return None
        section = self._elf.section(TABLES)
        return 0 if section is None else section.address - self._start

    @property
    def path(self) -> Path:
        """The path of the object's file."""
        return self._elf.path

    @property
    def names(self) -> list[str]:
        """The names of other files' symbols that the object uses, each once."""
        undefined = (each.symbol for each in self._relocations if each.symbol is not None and not each.symbol.section)
        return list(dict.fromkeys(symbol.name for symbol in undefined))

    def is_weak(self, name: str) -> bool:
        """Return whether all uses of another file's symbol are weak: it may be missing, and is 0 then."""
        used = [each.symbol for each in self._relocations if each.symbol is not None and each.symbol.name == name]
        return all(symbol.binding == _STB_WEAK for symbol in used)

    @property
    def wanted_build_id(self) -> str | None:
        """The build-id of the module that the object was made for, in hex; None if the object names none."""
        section = self._elf.section(BUILD_ID_SECTION)
        if section is None:
            return None
        data = bytes(self._elf.bytes_at(section.offset, min(section.size, _BUILD_ID_MAX), BUILD_ID_SECTION))
        return data.partition(b"\0")[0].decode("ascii", "replace").strip().lower()

    def function(self, name: str) -> int:
        """Return the offset of a function from the object's start; raise ``TargetError`` if there is none."""
        from dprobes.target.elf.symbol_table import elf_symbols

        tables = elf_symbols(self._elf)
        found = [symbol for table in tables for symbol in table.find(name)]
        for symbol in found:
            if symbol.kind == "ifunc":
                self._refuse_chosen()
            if symbol.kind == "func":
                return symbol.address - self._start
        if found:
            raise TargetError(f"'{name}' in '{self.path}' is not a function")
        known = {symbol.name for t in tables for _, _, i in t.code() if (symbol := t.symbol(i)).kind == "func"}
        near = near_names(name, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else None
        raise TargetError(f"'{self.path}' has no function '{name}'", hint=hint)

    def pieces(self) -> list[Piece]:
        """Return the pages of each segment with their protection, by ascending offset."""
        found = []
        for segment in sorted(self._segments):
            start, end = _pages_of(segment)
            # PF_X, PF_W and PF_R are 1, 2 and 4, and PROT_READ, PROT_WRITE and PROT_EXEC are 1, 2 and 4.
            protection = 1 | segment.flags & _PF_W | (4 if segment.flags & _PF_X else 0)
            found.append(Piece(start - self._start, end - start, protection))
        return found

    def image(self, base: int, address_of: Callable[[str], int]) -> bytes:
        """
        Return the bytes of the object's memory at the address ``base``, relocated.

        ``address_of`` returns the address of another file's symbol by its name.
        """
        image = bytearray(self.size)
        bias = base - self._start
        for segment in self._segments:
            data = self._elf.bytes_at(segment.offset, segment.filesz, "a segment")
            image[segment.vaddr - self._start : segment.vaddr - self._start + len(data)] = data
        for place, kind, symbol, addend in self._relocations:
            if kind == _NONE:
                continue
            value = bias
            if symbol is not None:
                if not symbol.section:
                    value = address_of(symbol.name)
                else:
                    value = symbol.value + (0 if symbol.section == _SHN_ABS else bias)
            if kind in (_64, _RELATIVE):
                value += addend
            word = (value & (1 << 64) - 1).to_bytes(8, "little")
            image[place - self._start : place - self._start + 8] = word
        return bytes(image)

    def _refuse_chosen(self) -> NoReturn:
        _refuse(self._elf, "has a function that is chosen at run time (IFUNC)", "give the one to be used a plain name")


def _pages_of(segment: LoadSegment) -> tuple[int, int]:
    end = segment.vaddr + segment.memsz
    return segment.vaddr & -PAGE_SIZE, end + PAGE_SIZE - 1 & -PAGE_SIZE


def _refuse(elf: ElfFile, reason: str, hint: str | None = None) -> NoReturn:
    """Raise ``TargetError`` for an object that cannot be loaded; ``reason`` is a clause with the subject "it"."""
    raise TargetError(f"'{elf.path}' {reason}", hint=hint)


def _refuse_dynamic(elf: ElfFile) -> None:
    values = elf.dynamic.values
    if _DT_INIT in values or _DT_FINI in values or any(values.get(size) for size in _DT_ARRAYS):
        _refuse(
            elf, "has constructors or destructors, which are not run",
            "link it with -nostartfiles, and initialize variables with constants",
        )  # fmt: skip
    if _DT_TEXTREL in values or values.get(_DT_FLAGS, 0) & _DF_TEXTREL:
        _refuse(elf, "has relocations in its code", "compile it with -fPIC")
    if _DT_RELR in values:
        _refuse(elf, "has packed relocations (DT_RELR)", "link it with -z nopack-relative-relocs")


def _refuse_segments(elf: ElfFile) -> None:
    segments = sorted(segment for segment in elf.load_segments if segment.memsz)
    if not segments:
        _refuse(elf, "has no memory: all its segments are empty")
    for segment in elf.load_segments:
        if segment.filesz > segment.memsz:
            elf.malformed(f"a segment has {segment.filesz} bytes in the file and only {segment.memsz} in memory")
    if any(segment.flags & _PF_W and segment.flags & _PF_X for segment in segments):
        _refuse(elf, "has memory that is both writable and executable")
    pages = [_pages_of(segment) for segment in segments]
    if any(before[1] > after[0] for before, after in pairwise(pages)):
        _refuse(elf, "has segments that share a page", "link it with -z separate-code")
    size = pages[-1][1] - pages[0][0]
    if size > _SIZE_MAX:
        _refuse(elf, f"needs {size} bytes of memory, more than the {_SIZE_MAX} that a patch may have")


def _refuse_relocation(elf: ElfFile, relocation: Relocation) -> None:
    place, kind, symbol, _ = relocation
    if kind in _THREAD_LOCAL or (symbol is not None and symbol.kind == _STT_TLS):
        name = f" '{symbol.name}'" if symbol is not None and symbol.name else ""
        _refuse(elf, f"has or uses a thread-local variable{name}, which needs the dynamic linker")
    if kind == _IRELATIVE or (symbol is not None and symbol.section and symbol.kind == STT_GNU_IFUNC):
        _refuse(elf, "has a function that is chosen at run time (IFUNC)", "give the one to be used a plain name")
    if kind not in (_NONE, _64, GLOB_DAT, JUMP_SLOT, _RELATIVE):
        _refuse(elf, f"has a relocation of kind {kind}, which is not supported", "compile it with -fPIC")
    segments = (segment for segment in elf.load_segments if segment.vaddr <= place)
    if kind != _NONE and not any(
        place + 8 <= segment.vaddr + segment.memsz and not segment.flags & _PF_X for segment in segments
    ):
        elf.malformed("a relocation lies outside of its data")
