"""
Files of the running kernel and its modules, from the distribution's packages and debug packages.

A file is used only if its build ID is equal to that of the running kernel or loaded module.
"""

from __future__ import annotations

import os
import shutil
import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import near_names
from dprobes.errors import TargetError, reason_of
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.elf_headers import build_id_among, notes_in
from dprobes.target.elf.file_contents import file_contents
from dprobes.target.elf.relocations import targets_in
from dprobes.target.elf.symbol_sources import DEBUG_DIRECTORY, debug_path, find_debug_file
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.module_symbols import SymbolTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.elf.elf_headers import Section

__all__ = [
    "KERNEL_NOTES",
    "FileText",
    "KernelFiles",
    "alternatives",
    "build_id_in",
    "build_id_of_notes",
    "described_kernel",
    "described_module",
    "find_module_file",
    "is_patched_form",
    "kernel_of_build",
    "module_files",
    "module_name",
    "open_module_file",
    "open_packed",
    "running_build_id",
    "source_files",
    "sources_in_kernel",
    "sources_in_module",
]

KERNEL_NOTES = Path("/sys/kernel/notes")
_MODULE_NOTES = "/sys/module/{}/notes/.note.gnu.build-id"


def running_build_id(module: str) -> str:
    """
    Return the build-id of a loaded module in hex, or of the kernel if ``module`` is empty.

    Raise ``TargetError`` if there is none.
    """
    return build_id_of_notes(Path(_MODULE_NOTES.format(module)) if module else KERNEL_NOTES)


def build_id_of_notes(path: Path) -> str:
    """Return the build-id in hex from a file of notes; raise ``TargetError`` if it has none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TargetError(f"the build-id cannot be read: {path}: {reason_of(error)}") from error
    if (found := build_id_in(data)) is None:
        raise TargetError(f"there is no build-id in {path}")
    return found


def build_id_in(notes: bytes) -> str | None:
    """Return the build-id in hex from the bytes of notes, or None if there is none."""
    return build_id_among(notes_in(notes, "<"))


# Files of the kernel as distributions install them: compressed, and the image in its own wrapper. An image for x86
# (bzImage) is code that unpacks the kernel, with the kernel as its payload::
#
#     0x1F1  u8   setup_sects: number of sectors of 512 bytes before the code, after the first
#     0x202  "HdrS"
#     0x248  u32  payload_offset, counted from the code
#     0x24C  u32  payload_length, with the four bytes after all but gzip that are the size of the kernel
#
# Rules: Documentation/arch/x86/boot.rst; cmd_lz4_with_size and its like in scripts/Makefile.lib.


_ELF = b"\x7fELF"
_GZIP, _XZ, _LZMA, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x5d\x00\x00", b"BZh"
_ZSTD = b"\x28\xb5\x2f\xfd"
_TOOLS = {b"\x02\x21\x4c\x18": "lz4", _ZSTD: "zstd"}
"""Programs that unpack formats that the standard library lacks, by the first bytes. They unpack with ``-dc``."""

_SETUP_SECTORS, _MAGIC, _PAYLOAD = 0x1F1, 0x202, 0x248
_SECTOR = 512
_SIZE = 4  # bytes after the payload

_SIZE_MAX = 512 << 20
"""Maximum size in bytes of an unpacked image or module. The largest, with debug information, have half of it."""

_GZIP_WINDOW = 31  # zlib: any window, with the header of gzip


def open_packed(path: Path) -> ElfFile:
    """Return the ELF file in a kernel's image or a module's file; raise ``TargetError`` if it cannot be unpacked."""
    data = bytes(file_contents(path, "a file of the kernel")[:])
    if data[_MAGIC : _MAGIC + 4] == b"HdrS":
        start = ((data[_SETUP_SECTORS] or 4) + 1) * _SECTOR
        offset, length = struct.unpack_from("<II", data, _PAYLOAD)
        data = data[start + offset : start + offset + length]
        if not data.startswith((_GZIP, _ELF)):
            data = data[:-_SIZE]
    return ElfFile.of_bytes(path, _unpacked(path, data))


def _unpacked(path: Path, data: bytes) -> bytes:
    """
    Return data unpacked by the standard library, or else by a program.

    Bytes after the compressed data are ignored.
    """
    import bz2
    import lzma
    import zlib

    if data.startswith(_ELF):
        return data
    try:
        if data.startswith(_GZIP):
            return zlib.decompressobj(_GZIP_WINDOW).decompress(data, _SIZE_MAX)
        if data.startswith((_XZ, _LZMA)):
            return lzma.LZMADecompressor().decompress(data, _SIZE_MAX)
        if data.startswith(_BZIP2):
            return bz2.BZ2Decompressor().decompress(data, _SIZE_MAX)
    except (zlib.error, lzma.LZMAError, OSError) as error:
        raise TargetError(f"'{path}' cannot be unpacked: {error}") from error
    if data.startswith(_ZSTD) and (unpacked := _by_package(data)) is not None:
        return unpacked
    tool = next((tool for magic, tool in _TOOLS.items() if data.startswith(magic)), None)
    if tool is None:
        raise TargetError(f"'{path}' is compressed in a way that is not known here: it begins with {data[:4].hex()}")
    return _unpacked_by(tool, path, data)


def _by_package(data: bytes) -> bytes | None:
    """Unpack data with the package zstandard, which 'dprobes[zstd]' installs, or return None without it."""
    try:
        import zstandard
    except ImportError:
        return None
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data) or None
    except zstandard.ZstdError:
        return None  # the program reports the error


def _unpacked_by(tool: str, path: Path, data: bytes) -> bytes:
    import subprocess

    if shutil.which(tool) is None:
        raise TargetError(f"'{path}' is compressed with {tool}, which is not installed")
    try:
        done = subprocess.run([tool, "-dc"], input=data, capture_output=True, check=False)
    except OSError as error:
        raise TargetError(f"'{path}' cannot be unpacked: {tool}: {reason_of(error)}") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise TargetError(f"'{path}' cannot be unpacked: {tool} ended with {done.returncode}: {' '.join(said[-1:])}")
    return done.stdout


# depmod(8) lists the files of modules in ``modules.dep``, those built into the kernel in ``modules.builtin``.
_MODULES = Path("/lib/modules")


def module_name(name: str) -> str:
    """Return the kernel's name of a module: ``snd-pcm.ko`` is ``snd_pcm``."""
    stem = Path(name).name.partition(".ko")[0]
    return stem.replace("-", "_")


def find_module_file(name: str, release: str | None = None, root: Path = _MODULES) -> Path:
    """
    Return the file of a module, by its name or by a path, for a release of the kernel.

    By default that is the running one. Raise ``TargetError`` with the searched directory if there is none.
    """
    if "/" in name:
        return Path(name)
    module = module_name(name)
    directory = root / (release or os.uname().release)
    listed = dict(_listed(directory))
    if module in listed:
        return directory / listed[module]
    if module in (module_name(line) for line in _lines(directory / "modules.builtin")):
        raise TargetError(
            f"'{module}' is a part of the kernel, not a module that is loaded",
            hint="write 'name = vmlinux' and 'modtype = kernel'",
        )
    near = near_names(module, listed, 2)
    raise TargetError(
        f"there is no module '{module}': it is not loaded, and {directory} has no file of it",
        hint=f"did you mean {' or '.join(repr(each) for each in near)}?"
        if near
        else 'load it, or name its file by a path: name = "/PATH/NAME.ko"',
    )


def _listed(directory: Path) -> Iterator[tuple[str, str]]:
    """Iterate over the names of modules and their paths in a directory, from depmod's list, or else by a search."""
    lines = _lines(directory / "modules.dep")
    for line in lines:
        path = line.partition(":")[0]
        yield module_name(path), path
    if not lines:
        for found in sorted(directory.rglob("*.ko*")):
            path = str(found.relative_to(directory))
            yield module_name(path), path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def open_module_file(path: Path) -> ElfFile:
    """Open and unpack the file of a kernel module; raise ``TargetError`` if it is another file."""
    elf = ElfFile.of_bytes(path, _unpacked(path, bytes(file_contents(path, "a module of the kernel"))))
    if elf.type != "rel" or not any(section.name == ".gnu.linkonce.this_module" for section in elf.sections):
        raise TargetError(
            f"'{path}' is not a module of the kernel", hint="modules are relocatable ELF files whose names end in '.ko'"
        )
    return elf


_START = "_text"
_SECTIONS = "/sys/module/{}/sections"
_ALLOC = 2  # SHF_ALLOC


def described_kernel(
    named: Path | None = None, directory: Path = DEBUG_DIRECTORY, notes: Path = KERNEL_NOTES
) -> ElfFile | None:
    """
    Return the running kernel's ``vmlinux``, or the file that the user names, or None if there is none.

    ``directory`` is the directory of debug packages.
    """
    try:
        if named is not None:
            return ElfFile.open(named)
        wanted = build_id_of_notes(notes)
    except TargetError:
        return None
    return kernel_of_build(wanted, directory, _places(directory))


def kernel_of_build(build_id: str, directory: Path = DEBUG_DIRECTORY, others: Iterable[Path] = ()) -> ElfFile | None:
    """Return the file of the kernel with a build-id, from a debug package or among ``others``, or None."""
    for path in (debug_path(build_id, directory), *others):
        try:
            elf = ElfFile.open(path)
        except TargetError:
            continue
        if elf.build_id == build_id:
            return elf
    return None


def _places(directory: Path) -> Iterator[Path]:
    release = os.uname().release
    yield directory / "boot" / f"vmlinux-{release}"  # Debian, Ubuntu
    for above in ("lib", "usr/lib"):
        yield directory / above / "modules" / release / "vmlinux"  # Fedora, SUSE
    yield Path("/lib/modules") / release / "build" / "vmlinux"  # Arch, and kernels built here


def described_module(name: str, named: Path | None = None) -> ElfFile | None:
    """
    Return the file of a module, or the file that the user names, or None if there is none.

    If the module is loaded, only a file of the same build counts.
    """
    try:
        elf = open_module_file(named or find_module_file(name))
    except TargetError:
        return None
    if named is not None:
        return elf
    try:
        running = running_build_id(module_name(name))
    except TargetError:
        return elf  # it is not loaded
    return elf if elf.build_id == running else None


def source_files(elf: ElfFile, name: str, place_of: Callable[[Section], int | None]) -> dict[int, str]:
    """
    Return the source file names (STT_FILE) of the local symbols called ``name``, by the symbols' run-time addresses.

    ``place_of`` returns the run-time address of a section, None if it is not loaded.
    """
    found = {}
    for file, symbol in SymbolTable(elf_symbols(elf), code_range=elf.code_range).in_files(name):
        for section in elf.sections:
            if section.flags & _ALLOC and section.address <= symbol.address < section.address + section.size:
                if (place := place_of(section)) is not None:
                    found[place + symbol.address - section.address] = file
                break
    return found


def sources_in_kernel(elf: ElfFile | None, name: str, start: int) -> dict[int, str]:
    """
    Return the source file names of a kernel's static symbols called ``name``, by run-time address.

    ``start`` is the run-time address of ``_text``. The result is empty if ``elf`` is None.
    """
    linked = SymbolTable(elf_symbols(elf), code_range=elf.code_range).lookup(_START) if elf is not None else []
    if elf is None or not linked:
        return {}
    return source_files(elf, name, lambda section: section.address + start - linked[0].address)


def sources_in_module(name: str, module: str, sections: str = _SECTIONS) -> dict[int, str]:
    """
    Return the source file names of a loaded module's static symbols called ``name``, by run-time address.

    The result is empty if the module's file is not installed.
    """
    elf = described_module(module)
    if elf is None:
        return {}

    def place_of(section: Section) -> int | None:
        try:
            return int(Path(sections.format(module), section.name).read_text(), 16)
        except (OSError, ValueError):
            return None  # sections that are used only while the module is loaded are freed

    return source_files(elf, name, place_of) or (
        source_files(debug, name, place_of) if (debug := find_debug_file(elf)) is not None else {}
    )


# The text of the running kernel from its files, where its memory is not readable.
# The kernel patches its code when it starts, and later. *Alternatives*, sites that are replaced as a whole, are listed
# in a section of the file. All other patched instructions are recognised by their form. They are calls and jumps (of
# ftrace, static calls, jump labels, thunks against speculation), the ``nop`` in place of one, ``endbr64``, and ``lock``
# prefixes.
# The places are those of Linux 5.11 to 6.18: ``apply_alternatives``, ``apply_retpolines``, ``apply_returns``,
# ``apply_seal_endbr``, ``apply_paravirt``, and ``alternatives_smp_unlock`` in arch/x86/kernel/alternative.c, ftrace.c,
# static_call.c and jump_label.c beside it.


_ALTERNATIVES = ".altinstructions"
_REPLACEMENTS = ".altinstr_replacement"

# struct alt_instr: s32 instr_offset, repl_offset, relative to their own addresses; flags; u8 instrlen, replacementlen
#   12 bytes with u16 cpuid, in v5.11 to v6.2; 14 bytes with u32 ft_flags since commit 5d1dd961e743 ("x86/alternatives:
#   Add alt_instr.flags") (in v6.3)
_SIZES = (12, 14)
_LENGTH_BEFORE_END = 2

_SHORT_NOP = b"\x66\x90"
"""Two-byte ``nop``, which is decoded as ``xchg ax, ax``."""

_PREFIXES = b"\x2e\x3e\xf0"
"""Prefixes that the kernel patches: ``cs`` pads calls, and ``lock`` becomes ``ds`` on a machine with one processor."""


def is_patched_form(instruction: DecodedInstruction) -> bool:
    """Return whether the kernel patches some of the instructions with this opcode, such as calls and long nops."""
    raw = instruction.raw
    if raw[:1] == b"\xf0" or raw == _SHORT_NOP or instruction.mnemonic in ("nop", "endbr64", "call", "jmp"):
        return True
    bare = raw.lstrip(_PREFIXES)
    # A conditional jump to a thunk, with a displacement of four bytes.
    return bare[:1] == b"\x0f" and bare[1:2] != b"" and 0x80 <= bare[1] <= 0x8F


def alternatives(elf: ElfFile) -> list[tuple[int, int]] | None:
    """
    Return the sites of alternatives, sorted, as (address in the file, length in bytes).

    Return None if the section has an unknown format.
    """
    section = elf.section(_ALTERNATIVES)
    if section is None:
        return []
    data = elf.bytes_at(section.offset, section.size, _ALTERNATIVES)
    linked = _relocated(elf, section) if elf.type == "rel" else None
    for size in _SIZES:
        if len(data) % size == 0 and _fits(elf, section, data, size, linked):
            starts = range(0, len(data), size)
            lengths = data[size - _LENGTH_BEFORE_END :: size]
            sites = (_target(section, data, start, linked) for start in starts)
            return sorted(set(zip(sites, lengths, strict=True)))
    return None


def _target(section: Section, data: bytes, position: int, linked: dict[int, int] | None) -> int:
    """Return the address to which the offset at a position of the section refers, or -1 if there is none."""
    if linked is not None:
        return linked.get(position, -1)
    (offset,) = struct.unpack_from("<i", data, position)
    return section.address + position + int(offset)


def _fits(elf: ElfFile, section: Section, data: bytes, size: int, linked: dict[int, int] | None) -> bool:
    """Return whether all entries, if they have this size, refer to code and to replacements."""
    code = [s for s in elf.sections if s.executable and s.name != _REPLACEMENTS]
    others = [s for s in elf.sections if s.name == _REPLACEMENTS]
    for start in range(0, len(data), size):
        site = _target(section, data, start, linked)
        if not any(s.address <= site < s.address + s.size for s in code):
            return False
        replacement = _target(section, data, start + 4, linked)
        # An entry without replacement may point after the last one.
        if others and not any(s.address <= replacement <= s.address + s.size for s in others):
            return False
    return True


def _relocated(elf: ElfFile, section: Section) -> dict[int, int]:
    """Return the addresses that the relocations of a section in an object file refer to, by position in the section."""
    index, sections = elf.sections.index(section), elf.sections
    found = targets_in(elf, section.name)
    return {
        place: sections[number].address + where
        for place, number, where in found
        if 0 < number < len(sections) and number != index
    }


_TEXT = ".text"
_ALTERNATIVE_MAX = 255  # bytes: instrlen is an u8


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """Paths of the running kernel's files, and of its description in sysfs: ``notes``, and ``loaded`` modules."""

    images: tuple[Path, ...]
    modules: Path
    notes: Path = Path("/sys/kernel/notes")
    loaded: Path = Path("/sys/module")

    @classmethod
    def of_release(cls, release: str) -> KernelFiles:
        """Return the paths where distributions install the files of a release (``uname -r``)."""
        modules = Path("/lib/modules") / release
        images = (Path("/boot") / f"vmlinuz-{release}", modules / "vmlinuz", modules / "build" / "vmlinux")
        return cls(images, modules)


class _Piece(NamedTuple):
    """A section: its run-time address, its size in bytes, and its offset in the file."""

    address: int
    size: int
    offset: int


class _Code(NamedTuple):
    """
    Code of one file. ``problem`` is None, or a clause with the reason why the code cannot be used.

    ``patched`` has addresses and lengths of alternatives; if it is None, all code may be patched. ``shift`` is the
    offset in bytes of the running kernel's image from its link addresses.
    """

    elf: ElfFile | None = None
    pieces: tuple[_Piece, ...] = ()
    patched: list[tuple[int, int]] | None = None
    problem: str | None = None
    shift: int | None = None


class FileText:
    """
    Kernel's code, read from its files.

    ``memory_problem`` is a clause with the reason why memory is not read. ``text_address`` returns the address of
    ``_text``. ``modules`` has name, address and size of each loaded module.
    """

    def __init__(
        self,
        memory_problem: str,
        files: KernelFiles,
        text_address: Callable[[], int],
        modules: Callable[[], Iterable[tuple[str, int, int]]],
    ) -> None:
        self._memory_problem = memory_problem
        self._files = files
        self._text_address = text_address
        self._modules = modules
        self._codes: dict[str, _Code] = {}

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes at an address, or no bytes if no file has them."""
        code = self._code_at(address)
        for piece in code.pieces:
            start = address - piece.address
            if 0 <= start < piece.size and code.elf is not None:
                return code.elf.bytes_at(piece.offset + start, min(size, piece.size - start), _TEXT)
        return b""

    def problem_at(self, address: int) -> str | None:
        """Return a clause with the reason why an address cannot be read, or None if it can."""
        code = self._code_at(address)
        if code.problem is not None:
            return f"{self._memory_problem}, and {code.problem}"
        return None if self.read(address, 1) else f"{self._memory_problem}, and the address is in no file"

    def origin_of(self, address: int) -> str:
        """Return the path of the file from which code at an address is read, or "" if no file has it."""
        code = self._code_at(address)
        return str(code.elf.path) if code.elf is not None else ""

    def is_patched(self, instruction: DecodedInstruction) -> bool:
        """Return whether the kernel may have patched an instruction that was read here."""
        patched = self._code_at(instruction.address).patched
        if patched is None or is_patched_form(instruction):
            return True
        start, end = instruction.address, instruction.address + instruction.length
        index = bisect_right(patched, (end, 0))
        while index > 0 and patched[index - 1][0] > start - _ALTERNATIVE_MAX:
            index -= 1
            site, length = patched[index]
            if site < end and start < site + length:
                return True
        return False

    @property
    def shift(self) -> int | None:
        """Offset in bytes of the running kernel from its link addresses (KASLR), or None if unknown."""
        return self._code_of("").shift

    def _code_at(self, address: int) -> _Code:
        inside = (name for name, start, size in self._modules() if start <= address < start + size)
        return self._code_of(next(inside, ""))

    def _code_of(self, name: str) -> _Code:
        if name not in self._codes:
            try:
                self._codes[name] = self._module(name) if name else self._kernel()
            except TargetError as error:
                self._codes[name] = _Code(problem=error.message)
        return self._codes[name]

    def _kernel(self) -> _Code:
        wanted = build_id_of_notes(self._files.notes)
        elf = _first_of(self._files.images, wanted, "the running kernel")
        section = elf.section(_TEXT)
        if section is None:
            raise TargetError(f"'{elf.path}' has no section {_TEXT}")
        shift = self._text_address() - section.address
        pieces = tuple(_Piece(s.address + shift, s.size, s.offset) for s in elf.sections if s.executable and s.in_file)
        patched = alternatives(elf)
        running = None if patched is None else [(site + shift, length) for site, length in patched]
        return _Code(elf, pieces, running, shift=shift)

    def _module(self, name: str) -> _Code:
        own = self._files.loaded / name
        wanted = build_id_of_notes(own / "notes" / ".note.gnu.build-id")
        elf = _first_of(module_files(self._files.modules, name), wanted, f"the module '{name}' that is loaded")
        pieces = []
        for section in elf.sections:
            if section.executable and section.in_file:
                try:
                    address = int((own / "sections" / section.name).read_text(), 16)
                except (OSError, ValueError):
                    continue  # the section was freed, as those that are used only while the module is loaded
                pieces.append(_Piece(address, section.size, section.offset))
        sites = alternatives(elf)
        if sites is None:
            return _Code(elf, tuple(pieces))
        moved = (
            (piece.address + site - piece.offset, length)
            for site, length in sites
            for piece in pieces
            if piece.offset <= site < piece.offset + piece.size
        )
        return _Code(elf, tuple(pieces), sorted(moved))


def _first_of(paths: tuple[Path, ...], build_id: str, what: str) -> ElfFile:
    """
    Return the first file with a build-id.

    If there is none, raise ``TargetError`` with the problem of the last existing file.
    """
    reason = f"there is no file of {what}" + (f" ({paths[0]})" if paths else "")
    for path in paths:
        if not path.exists():
            continue
        try:
            elf = open_packed(path)
        except TargetError as error:
            reason = error.message
            continue
        if elf.build_id == build_id:
            return elf
        reason = f"'{path}' is not that of {what}: its build-id is {elf.build_id}, not {build_id}"
    raise TargetError(reason)


def module_files(directory: Path, name: str) -> tuple[Path, ...]:
    """Return the files below a directory whose names fit a module."""
    return tuple(
        Path(place, found)
        for place, _, names in os.walk(directory)
        for found in sorted(names)
        if ".ko" in found and found.partition(".ko")[0].replace("-", "_") == name
    )
