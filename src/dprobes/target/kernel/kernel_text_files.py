"""
The text of the running kernel as its files have it, where it does not show its memory.

The image in ``/boot`` and the files of modules are what the kernel was built as. A file counts only if its build-id is
that of what runs. Where its code is patched at run time, nothing is known (``kernel_text_files.py``).
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.relocations import targets_in
from dprobes.target.kernel.kernel_files import build_id_of_notes, open_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.elf_headers import Section

__all__ = ["FileText", "KernelFiles", "alternatives", "is_patched_form", "module_files"]

# Which instructions of the kernel's files are not those that run: the kernel patches its code when it starts, and
# later.
#
# Sites that are replaced as a whole by others, *alternatives*, are listed in a section of the file. All else that is
# patched is known by its form: calls and jumps (of ftrace, static calls, jump labels, thunks against speculation), what
# stands where there is none of them (``nop``), ``endbr64``, ``lock`` prefixes. The places are those of Linux 5.11 to
# 6.18: ``apply_alternatives``, ``apply_retpolines``, ``apply_returns``, ``apply_seal_endbr``, ``apply_paravirt``, and
# ``alternatives_smp_unlock`` in arch/x86/kernel/alternative.c, ftrace.c, static_call.c and jump_label.c beside it.


_ALTERNATIVES = ".altinstructions"
_REPLACEMENTS = ".altinstr_replacement"

# struct alt_instr: s32 instr_offset, repl_offset, each counted from itself; flags; u8 instrlen, replacementlen
#   12 bytes with u16 cpuid, in v5.11 to v6.2; 14 bytes with u32 ft_flags since commit 5d1dd961e743 ("x86/alternatives:
#   Add alt_instr.flags") (in v6.3)
_SIZES = (12, 14)
_LENGTH_BEFORE_END = 2

_SHORT_NOP = b"\x66\x90"
"""Decoded as ``xchg ax, ax``."""

_PREFIXES = b"\x2e\x3e\xf0"
"""Those that are patched: ``cs`` pads calls, ``lock`` becomes ``ds`` on one processor."""


def is_patched_form(instruction: DecodedInstruction) -> bool:
    """Return whether the kernel patches some instructions of this form, wherever they stand."""
    raw = instruction.raw
    if raw[:1] == b"\xf0" or raw == _SHORT_NOP or instruction.mnemonic in ("nop", "endbr64", "call", "jmp"):
        return True
    bare = raw.lstrip(_PREFIXES)
    # A conditional jump to a thunk, with a displacement of four bytes.
    return bare[:1] == b"\x0f" and bare[1:2] != b"" and 0x80 <= bare[1] <= 0x8F


def alternatives(elf: ElfFile) -> list[tuple[int, int]] | None:
    """
    Return the sites of alternatives, their addresses as in the file and their lengths, sorted.

    None if the section is not of a form that is known.
    """
    section = next((section for section in elf.sections if section.name == _ALTERNATIVES), None)
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
    """Return the address that the offset at a position of the section means; -1 if none."""
    if linked is not None:
        return linked.get(position, -1)
    (offset,) = struct.unpack_from("<i", data, position)
    return section.address + position + int(offset)


def _fits(elf: ElfFile, section: Section, data: bytes, size: int, linked: dict[int, int] | None) -> bool:
    """Return whether all entries, if they have this size, lead to code and to replacements."""
    code = [s for s in elf.sections if s.executable and s.name != _REPLACEMENTS]
    others = [s for s in elf.sections if s.name == _REPLACEMENTS]
    for start in range(0, len(data), size):
        site = _target(section, data, start, linked)
        if not any(s.address <= site < s.address + s.size for s in code):
            return False
        replacement = _target(section, data, start + 4, linked)
        # An entry without replacement may point behind the last one.
        if others and not any(s.address <= replacement <= s.address + s.size for s in others):
            return False
    return True


def _relocated(elf: ElfFile, section: Section) -> dict[int, int]:
    """Return what the relocations of a section in an object file lead to, by their position in it."""
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
    """Where the files of the running kernel are, and where it shows what it is: ``notes``, and ``loaded`` modules."""

    images: tuple[Path, ...]
    modules: Path
    notes: Path = Path("/sys/kernel/notes")
    loaded: Path = Path("/sys/module")

    @classmethod
    def of_release(cls, release: str) -> KernelFiles:
        """Return the places where distributions install the files of a release (``uname -r``)."""
        modules = Path("/lib/modules") / release
        images = (Path("/boot") / f"vmlinuz-{release}", modules / "vmlinuz", modules / "build" / "vmlinux")
        return cls(images, modules)


class _Piece(NamedTuple):
    """A section: where it runs, its size, and where it is in the file."""

    address: int
    size: int
    offset: int


class _Code(NamedTuple):
    """
    The code of one file; ``problem`` says as a clause why there is none.

    ``patched`` are addresses and lengths of alternatives, None if all code may be one. ``shift`` is what an address
    of the kernel's image is less than where that runs.
    """

    elf: ElfFile | None = None
    pieces: tuple[_Piece, ...] = ()
    patched: list[tuple[int, int]] | None = None
    problem: str | None = None
    shift: int | None = None


class FileText:
    """
    The kernel's text by its files; ``memory_problem`` is the clause that says why memory is not read.

    ``text_address`` gives where ``_text`` is, ``modules`` name, address and size of those that are loaded.
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
        """Return up to ``size`` bytes from an address on; none if they are in no file."""
        code = self._code_at(address)
        for piece in code.pieces:
            start = address - piece.address
            if 0 <= start < piece.size and code.elf is not None:
                return code.elf.bytes_at(piece.offset + start, min(size, piece.size - start), _TEXT)
        return b""

    def problem_at(self, address: int) -> str | None:
        """Return as a clause why what is at an address cannot be read, None if it can."""
        code = self._code_at(address)
        if code.problem is not None:
            return f"{self._memory_problem}, and {code.problem}"
        return None if self.read(address, 1) else f"{self._memory_problem}, and the address is in no file"

    def origin_of(self, address: int) -> str:
        """Return what was read: a file that is not the kernel's memory."""
        code = self._code_at(address)
        return str(code.elf.path) if code.elf is not None else ""

    def is_patched(self, instruction: DecodedInstruction) -> bool:
        """Return whether another instruction may run in the place of one that was read here."""
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
        """How many bytes the kernel runs above where it was linked for (KASLR); None where that is not known."""
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
        start = next((section.address for section in elf.sections if section.name == _TEXT), None)
        if start is None:
            raise TargetError(f"'{elf.path}' has no section {_TEXT}")
        shift = self._text_address() - start
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
                    continue  # it is gone, as what ran only when the module was loaded is
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
    """Return the first file with a build-id; raise ``TargetError`` with the reason against the last one there is."""
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
    """Return the files below a directory that may be those of a module, by their names."""
    return tuple(
        Path(place, found)
        for place, _, names in os.walk(directory)
        for found in sorted(names)
        if ".ko" in found and found.partition(".ko")[0].replace("-", "_") == name
    )
