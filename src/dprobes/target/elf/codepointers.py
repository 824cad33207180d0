"""
Addresses in the data of a file that lead into its code: what relocations write, and what stands there already.

Only x86-64. A word that is an address by chance is given as well: what is asked is where control may come to.
Rules: System V ABI, AMD64 supplement, "Relocation"; relative relocations as bitmaps (RELR): gABI, "Relocation".
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.target.elf.file import ElfFile

__all__ = ["code_pointers", "restartable_sections", "written_words"]

_DT_RELA, _DT_RELASZ, _DT_RELR = 7, 8, 36
_RELATIVE, _IRELATIVE = 8, 37
"""R_X86_64_RELATIVE and R_X86_64_IRELATIVE: the addend is a link address."""
_RELA = struct.Struct("<QQq")

_RSEQ = "__rseq_cs"
_RSEQ_DESCRIPTION = struct.Struct("<IIQQQ")
"""``struct rseq_cs`` of include/uapi/linux/rseq.h: version, flags, start, length, where it goes on after an abort."""


def written_words(elf: ElfFile) -> Iterator[tuple[int, int]]:
    """Give the places that relocations of the loader write link addresses to, and these."""
    values = elf.dynamic.values
    table, size = values.get(_DT_RELA, 0), values.get(_DT_RELASZ, 0)
    try:
        data = elf.read(table, size - size % _RELA.size) if table else b""
    except TargetError:
        return
    for place, info, addend in _RELA.iter_unpack(data):
        if info in (_RELATIVE, _IRELATIVE):
            yield place, addend


def code_pointers(elf: ElfFile) -> set[int]:
    """Return the link addresses of code that words of the data are."""
    ranges = [(s.vaddr, s.vaddr + s.filesz) for s in elf.load_segments if s.executable]
    found = {value for _, value in written_words(elf)}
    if not elf.is_pie_or_shared or _DT_RELR in elf.dynamic.values:  # words that stand in the file as they are
        for segment in elf.load_segments:
            if not segment.executable:
                start = segment.offset + (-segment.vaddr & 7)
                size = max(0, segment.offset + segment.filesz - start) & ~7
                data = memoryview(elf.data[start : start + size]).cast("Q")
                found.update(data)
    return {value for value in found if any(start <= value < end for start, end in ranges)}


def restartable_sections(elf: ElfFile) -> list[tuple[int, int, int]]:
    """
    Return start and end of the restartable sequences (rseq) of a file, and where they go on after an abort.

    A thread that is interrupted in one goes on at the third address, but only if it is interrupted between the others.
    """
    section = next((s for s in elf.sections if s.name == _RSEQ and s.in_file and s.address), None)
    if section is None:
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
