"""
Which instructions of the kernel's files are not those that run: the kernel patches its code when it starts, and later.

Sites that are replaced as a whole by others, *alternatives*, are listed in a section of the file. All else that is
patched is known by its form: calls and jumps (of ftrace, static calls, jump labels, thunks against speculation), what
stands where there is none of them (``nop``), ``endbr64``, ``lock`` prefixes. The places are those of Linux 5.11 to
6.18: ``apply_alternatives``, ``apply_retpolines``, ``apply_returns``, ``apply_seal_endbr``, ``apply_paravirt``, and
``alternatives_smp_unlock`` in arch/x86/kernel/alternative.c, ftrace.c, static_call.c and jump_label.c beside it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.elf.headers import Section

__all__ = ["alternatives", "is_patched_form"]

_ALTERNATIVES = ".altinstructions"
_REPLACEMENTS = ".altinstr_replacement"

# struct alt_instr: s32 instr_offset, repl_offset, each counted from itself; flags; u8 instrlen, replacementlen
#   12 bytes with u16 cpuid, in v5.11 to v6.2; 14 bytes with u32 ft_flags since commit 5d1dd961e743 ("x86/alternatives:
#   Add alt_instr.flags") (in v6.3)
_SIZES = (12, 14)
_LENGTH_BEFORE_END = 2

# Elf64_Rela: r_offset, r_info (symbol, type), r_addend; Elf64_Sym: name, info, other, shndx, value, size
_RELA = struct.Struct("<QQq")
_SYMBOL = struct.Struct("<IBBHQQ")

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
            sites = zip(_sites(section, data, size, linked), starts, strict=True)
            return sorted({(site, data[start + size - _LENGTH_BEFORE_END]) for site, start in sites})
    return None


def _sites(section: Section, data: bytes, size: int, linked: dict[int, int] | None) -> Iterator[int]:
    for start in range(0, len(data), size):
        yield _target(section, data, start, linked)


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
    index = elf.sections.index(section)
    found: dict[int, int] = {}
    for relocations in elf.sections:
        if relocations.type != 4 or relocations.name != f".rela{section.name}":  # SHT_RELA
            continue
        symbols = elf.sections[relocations.link]
        rows = elf.bytes_at(relocations.offset, relocations.size // _RELA.size * _RELA.size, relocations.name)
        table = elf.bytes_at(symbols.offset, symbols.size, symbols.name)
        for position, info, addend in _RELA.iter_unpack(rows):
            _, _, _, shndx, value, _ = _SYMBOL.unpack_from(table, (info >> 32) * _SYMBOL.size)
            if 0 < shndx < len(elf.sections) and shndx != index:
                found[position] = elf.sections[shndx].address + value + addend
    return found
