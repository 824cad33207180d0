"""
Function descriptors: in the older calling convention of 64-bit PowerPC (ELFv1) a function's symbol is not its code.

The symbol, and the entry of a program, are the address of three words in the section ``.opd``: the address of the code,
that of the function's table of addresses (TOC), and one for other languages. Source: 64-bit PowerPC ELF ABI Supplement
1.9, section 3.2.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile

__all__ = ["FunctionDescriptors"]

_SECTION = ".opd"
_WORD = 8


class FunctionDescriptors(NamedTuple):
    """The descriptors of a file: the section's bytes, which are at a link address."""

    address: int
    data: bytes

    @classmethod
    def of(cls, elf: ElfFile) -> FunctionDescriptors | None:
        """Return those of a file, None if it has none."""
        if elf.machine != "ppc64" or elf.byte_order != "big" or elf.type == "rel" or elf.is_debug_only:
            return None
        section = next((each for each in elf.sections if each.name == _SECTION and each.in_file), None)
        if section is None:
            return None
        return cls(section.address, bytes(elf.bytes_at(section.offset, section.size, "the function descriptors")))

    def code_of(self, address: int) -> int:
        """Return the address of a function's code; an address that is not that of a descriptor stays."""
        at = address - self.address
        if 0 <= at <= len(self.data) - _WORD and at % _WORD == 0:
            return int.from_bytes(self.data[at : at + _WORD], "big")
        return address
