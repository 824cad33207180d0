"""
Where the first of a module's own code is executed in a process, when it is mapped and relocated, and where the last.

A program starts at its entry. A library's initialisation functions are called, once it is relocated, before any other
code of it (System V ABI, "Initialization and Termination Functions"), but for IFUNC resolvers and libraries that depend
on each other.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile

__all__ = ["first_executed", "last_executed"]

_DT_INIT, _DT_INIT_ARRAY, _DT_INIT_ARRAYSZ = 12, 25, 27
_DT_FINI, _DT_FINI_ARRAY, _DT_FINI_ARRAYSZ = 13, 26, 28
_DT_RELA, _DT_RELASZ = 7, 8
_RELATIVE, _ABSOLUTE = 8, 1
"""
R_X86_64_RELATIVE, whose addend is the address, and R_X86_64_64, which adds that of a symbol. i386 has addresses in
place, where they can be read.
"""
_DT_SYMTAB = 6
_SYMBOL = struct.Struct("=IBBHQQ")
"""Elf64_Sym: u32 name, u8 info, u8 other, u16 section, u64 value, u64 size."""


def first_executed(elf: ElfFile) -> tuple[int, ...]:
    """Return the link addresses of the instructions of which one is executed first; none if that is not known."""
    values = elf.dynamic.values
    found = {elf.entry: None, values.get(_DT_INIT, 0): None}
    array = values.get(_DT_INIT_ARRAY, 0)
    if array and values.get(_DT_INIT_ARRAYSZ, 0) >= elf.word_size:
        found[_pointer(elf, array)] = None
    return tuple(address for address in found if address and elf.code_range(address) is not None)


def last_executed(elf: ElfFile) -> tuple[int, ...]:
    """Return the link address of the last function that is called before a library is unmapped; none if not known."""
    if elf.soname is None and elf.entry:
        return ()  # a program stays until its process ends
    values = elf.dynamic.values
    address = values.get(_DT_FINI, 0)
    array = values.get(_DT_FINI_ARRAY, 0)
    if not address and array and values.get(_DT_FINI_ARRAYSZ, 0) >= elf.word_size:
        address = _pointer(elf, array)  # they are called in reverse order, and before the other one
    return (address,) if address and elf.code_range(address) is not None else ()


def _pointer(elf: ElfFile, place: int) -> int:
    """Return the link address that is loaded at a place, relocated or not; 0 if that cannot be told."""
    try:
        value = int.from_bytes(elf.read(place, elf.word_size), elf.byte_order)
    except TargetError:
        return 0
    return value or (_relocated(elf, place) if elf.word_size == 8 else 0)


def _relocated(elf: ElfFile, place: int) -> int:
    values = elf.dynamic.values
    table, size = values.get(_DT_RELA, 0), values.get(_DT_RELASZ, 0)
    entry = struct.Struct(f"{elf.struct_prefix}QQq")
    try:
        data = elf.read(table, size - size % entry.size) if table else b""
        for offset, info, addend in entry.iter_unpack(data):
            if offset == place and info & 0xFFFF_FFFF == _RELATIVE:
                return int(addend)
            if offset == place and info & 0xFFFF_FFFF == _ABSOLUTE:
                symbol = elf.read(values.get(_DT_SYMTAB, 0) + _SYMBOL.size * (info >> 32), _SYMBOL.size)
                return int.from_bytes(symbol[8:16], elf.byte_order) + int(addend)
    except TargetError:
        pass
    return 0
