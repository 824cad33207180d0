"""
Addresses of symbols in a running process, for an object that the dynamic linker does not load.

Names are searched as a function of the patched module would use them: in this module with its static symbols, in the
program with its static symbols, and in the tables of exported symbols of the libraries, in the order of the dynamic
linker's list, in which preloaded libraries precede the others. The program comes before the module for exported names,
because the program's copy of a variable (R_X86_64_COPY), or its own definition of a function, is what all libraries
use.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.dynamic_relocations import GLOB_DAT, JUMP_SLOT, dynamic_relocations
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.module_lookup import held_files, matches, root_of, suggestion
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import PAGE_SIZE, Mapping, mappings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.module_symbols import Symbol

__all__ = ["MappedModule", "ProcessSymbols", "function_named", "mapped_modules"]

_FILES_MAX = 4096
_IRELATIVE = 37
_DT_DEBUG = 21
_ENTRY, _LINK_MAP = struct.Struct("<QQ"), struct.Struct("<QQQQ")


class MappedModule(NamedTuple):
    """A module that a process has mapped ``bias`` bytes above its link addresses; ``name`` is its path there."""

    name: str
    module: Module
    bias: int
    inode: int

    @property
    def elf(self) -> ElfFile:
        """The module's file."""
        return self.module.elf

    def exported(self, name: str) -> Symbol | None:
        """Return a symbol that the module exports, of the default version if there is one; None without one."""
        found = [symbol for table in elf_symbols(self.elf) if not table.complete for symbol in table.find(name)]
        found = [symbol for symbol in found if symbol.binding != "local"]
        return min(found, key=lambda symbol: not symbol.default_version, default=None)

    def contains(self, address: int) -> bool:
        """Return whether an address of the process is in the module's code."""
        return self.elf.is_executable_offset(self.elf.file_offset(address - self.bias) or -1)


def mapped_modules(pid: int, read: Callable[[int, int], bytes]) -> list[MappedModule]:
    """
    Return the ELF files of which a process has mapped code, in the order of the dynamic linker's list.

    The program is the first one. Files that are not in the list follow at the end; files that cannot be read are
    omitted. ``read`` reads the memory of the process. Raise ``TargetError`` if the process does not exist, or may not
    be inspected.
    """
    first: dict[tuple[int, int], Mapping] = {}
    for mapping in mappings_of(pid):
        if mapping.is_file and mapping.executable and len(first) < _FILES_MAX:
            first.setdefault((mapping.device, mapping.inode), mapping)
    found = [made for mapping in first.values() if (made := _module_of(mapping, pid)) is not None]
    try:
        program = os.stat(f"/proc/{pid}/exe").st_ino
    except OSError:
        program = 0
    found.sort(key=lambda each: each.inode != program)
    listed = {bias: number for number, bias in enumerate(_listed_biases(found[0], read))} if found else {}
    return [*found[:1], *sorted(found[1:], key=lambda each: listed.get(each.bias, len(listed)))]


def _module_of(mapping: Mapping, pid: int) -> MappedModule | None:
    for path in (Path(root_of(pid) + mapping.path), *held_files(mapping, pid)):
        with contextlib.suppress(OSError, TargetError):
            if path.stat().st_ino != mapping.inode:
                continue
            module = Module.load(Path(mapping.path), reached=path)
            for segment in module.elf.load_segments:
                if segment.executable and segment.offset & -PAGE_SIZE == mapping.offset:
                    return MappedModule(
                        mapping.path, module, mapping.start - (segment.vaddr & -PAGE_SIZE), mapping.inode
                    )
    return None


# The list of the dynamic linker for debuggers (glibc's elf/link.h), in the program's dynamic section. 64-bit words:
#
#     dynamic section   tag | value   of DT_DEBUG: the address of r_debug
#     r_debug           version | r_map | ...
#     link_map          l_addr | l_name | l_ld | l_next | l_prev


def _listed_biases(program: MappedModule, read: Callable[[int, int], bytes]) -> Iterator[int]:
    """Iterate over the load biases (``l_addr``) in the dynamic linker's list; over none without a dynamic linker."""
    place = program.elf.dynamic_range
    if place is None:
        return
    with contextlib.suppress(OSError, struct.error):
        entries = read(program.bias + place[0], place[1] & -_ENTRY.size)
        debug = next((value for tag, value in _ENTRY.iter_unpack(entries) if tag == _DT_DEBUG), 0)
        _, at = _ENTRY.unpack(read(debug, _ENTRY.size))
        for _ in range(_FILES_MAX):
            if not at:
                return
            bias, _, _, at = _LINK_MAP.unpack(read(at, _LINK_MAP.size))
            yield bias


class ProcessSymbols:
    """
    The symbols of a process, as a function of the module ``patched`` would use them.

    ``read`` reads the memory of the process.
    """

    def __init__(
        self, pid: int, modules: Sequence[MappedModule], patched: MappedModule, read: Callable[[int, int], bytes]
    ) -> None:
        self._pid = pid
        self._modules = modules
        self._patched = patched
        self._read = read

    def address_of(self, name: str) -> int | None:
        """
        Return the address of a symbol in the process; None if no module has it.

        Raise ``TargetError`` if the name is ambiguous, or its address is unknown.
        """
        found = self._patched.module.symbols.lookup(name)
        is_local = bool(found) and found[0].binding == "local"
        program = self._modules[0]
        if not is_local and (symbol := program.exported(name)) is not None:
            return self._value(program, symbol)
        if found:
            return self._value(self._patched, found[0], is_only=len(found) == 1)
        found = program.module.symbols.lookup(name)
        if found:
            return self._value(program, found[0], is_only=len(found) == 1)
        for each in self._modules:
            if (symbol := each.exported(name)) is not None:
                return self._value(each, symbol)
        return None

    def _value(self, module: MappedModule, symbol: Symbol, *, is_only: bool = True) -> int:
        if symbol.kind == "ifunc":
            return self._chosen(module, symbol)
        if symbol.kind == "tls":
            raise TargetError(f"'{symbol.name}' in '{module.name}' is thread-local: each thread has its own address")
        if not is_only:
            files = [file for file, _ in module.module.symbols.in_files(symbol.name)]
            raise TargetError(
                f"'{symbol.name}' is the name of several symbols of '{module.name}'",
                hint=f'declare one with its source file: __asm__("\\"{files[0]}:{symbol.name}\\"")' if files else None,
            )
        return module.bias + symbol.address

    def _chosen(self, module: MappedModule, symbol: Symbol) -> int:
        """Return the address of the function that an IFUNC has chosen, from a slot that the linker has filled."""
        for each, place in self._slots(module, symbol):
            with contextlib.suppress(OSError):
                value = int.from_bytes(self._read(each.bias + place, 8), "little")
                if module.contains(value):
                    return value
        raise TargetError(
            f"'{symbol.name}' in '{module.name}' is chosen at run time (IFUNC), and process {self._pid} has not "
            "called it yet, so its address is unknown",
            hint="call another function, or one of the functions that it can choose, in the patch",
        )

    def _slots(self, module: MappedModule, symbol: Symbol) -> Iterator[tuple[MappedModule, int]]:
        """Iterate over the modules, and the link addresses of their slots for the function that an IFUNC chooses."""
        for relocation in dynamic_relocations(module.elf):
            if relocation.kind == _IRELATIVE and relocation.addend == symbol.address:
                yield module, relocation.place
        for each in self._modules:
            with contextlib.suppress(TargetError):
                for relocation in dynamic_relocations(each.elf):
                    named = relocation.symbol is not None and relocation.symbol.name == symbol.name
                    if named and relocation.kind in (GLOB_DAT, JUMP_SLOT):
                        yield each, relocation.place


def function_named(text: str, modules: Sequence[MappedModule], pid: int) -> tuple[MappedModule, str]:
    """
    Return the module and the name that ``[MODULE:]FUNCTION`` means; ``file.c:name`` is a name.

    Without a module, the program comes first, then the libraries that export the name.
    """
    before, colon, name = text.partition(":")
    if colon and not name.startswith(":"):
        root = root_of(pid)
        for each in modules:
            if matches(before, root + each.name, each.elf.soname) or matches(before, each.name, None):
                return each, name
        if ":" in name or before.endswith(".so") or ".so." in before:
            raise TargetError(f"process {pid} has no code of a module '{before}'", hint=suggestion(before, pid=pid))
    if modules[0].module.symbols.lookup(text):
        return modules[0], text
    return next((each for each in modules if each.exported(text) is not None), modules[0]), text
