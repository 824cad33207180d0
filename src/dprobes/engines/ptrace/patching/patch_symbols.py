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
import stat
import struct
import time
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.dynamic_relocations import GLOB_DAT, JUMP_SLOT, dynamic_relocations
from dprobes.target.elf.file_contents import READ_LIMIT
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.module_lookup import held_files, matches, root_of, suggestion
from dprobes.target.other_users import foreign_owner
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import PAGE_SIZE, Mapping, mappings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.foreign_users import ForeignUsers
    from dprobes.target.elf.dynamic_relocations import Relocation
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.module_symbols import Symbol

__all__ = ["FileLimitError", "ForeignFiles", "MappedModule", "ProcessModules", "ProcessSymbols", "function_named"]

_FILES_MAX = 4096
_SIZES_MAX = 512 << 20
"""Maximum sum of the sizes in bytes of a process's files that are read; large files of root are mapped instead."""
_RELOCATIONS_MAX = 1 << 21
"""Maximum number of relocations of a process's files that are searched. The largest libraries have a million."""
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


class FileLimitError(TargetError):
    """Error for a file of another user that is not read now, because too many of the user's files were read."""


class ForeignFiles:
    """Limits on the files of other users that are read for patches of many processes."""

    def __init__(self, users: ForeignUsers) -> None:
        self._users = users
        self._accepted: set[tuple[int, int, int]] = set()

    def check(self, path: str, status: os.stat_result, owner: str) -> None:
        """Charge a file to its owner, once for all processes that map it; raise ``FileLimitError`` at the limit."""
        identity = status.st_dev, status.st_ino, status.st_ctime_ns
        if identity not in self._accepted:
            if not self._users.may_have_file(owner):
                raise FileLimitError(f"'{path}' is not read: too many files of {owner} were read just now")
            self._accepted.add(identity)

    def note_reading(self, owner: str, seconds: float) -> None:
        """Charge the seconds spent on reading a file to its owner."""
        self._users.note_reading(owner, seconds)


class ProcessModules:
    """
    The ELF files of which a process has mapped code, in the order of the dynamic linker's list, the program first.

    A file is read when the iteration reaches it, and then kept; files that cannot be read are omitted. Files that are
    not in the list follow at the end. ``read`` reads the memory of the process. ``foreign`` limits the files of other
    users; without it, only the sum of all sizes is limited.

    Raise ``TargetError`` if the process does not exist, may not be inspected, or has no file that can be read. The
    iteration raises ``TargetError``, too, if a limit is reached.
    """

    def __init__(self, pid: int, read: Callable[[int, int], bytes], foreign: ForeignFiles | None = None) -> None:
        self._pid = pid
        self._foreign = foreign
        self._read_size = 0
        self._loaded: dict[tuple[int, int], MappedModule | None] = {}
        mappings = mappings_of(pid)
        first: dict[tuple[int, int], Mapping] = {}
        for mapping in mappings:
            if mapping.is_file and mapping.executable and len(first) < _FILES_MAX:
                first.setdefault((mapping.device, mapping.inode), mapping)
        try:
            program = os.stat(f"/proc/{pid}/exe").st_ino
        except OSError:
            program = 0
        self._files = sorted(first.values(), key=lambda each: each.inode != program)
        found = next(iter(self), None)
        if found is None:
            raise TargetError(f"process {pid} executes no file that can be read")
        self.program = found
        """The program that the process executes."""
        starts = [mapping.start for mapping in mappings]
        listed: dict[tuple[int, int], int] = {}
        for number, address in enumerate(_dynamic_sections(found, read)):
            index = bisect_right(starts, address) - 1
            if index >= 0 and address < mappings[index].end:
                listed.setdefault((mappings[index].device, mappings[index].inode), number)
        self._files.sort(
            key=lambda each: (each.inode != found.inode, listed.get((each.device, each.inode), len(listed)))
        )

    def __iter__(self) -> Iterator[MappedModule]:
        """Iterate over the modules; read each that was not read before."""
        for mapping in self._files:
            if (module := self._module_of(mapping)) is not None:
                yield module

    def named(self, name: str) -> MappedModule | None:
        """Return the module that a name denotes; None without one. Other modules are read only for their SONAME."""
        root = root_of(self._pid)
        for mapping in self._files:
            is_named = matches(name, root + mapping.path, None) or matches(name, mapping.path, None)
            if is_named and (module := self._module_of(mapping)) is not None:
                return module
        return next((each for each in self if each.elf.soname == name), None) if _is_library(name) else None

    def _module_of(self, mapping: Mapping) -> MappedModule | None:
        key = mapping.device, mapping.inode
        if key not in self._loaded:
            self._loaded[key] = self._load(mapping)
        return self._loaded[key]

    def _load(self, mapping: Mapping) -> MappedModule | None:
        for path in (Path(root_of(self._pid) + mapping.path), *held_files(mapping, self._pid)):
            try:
                status = path.stat()
            except OSError:
                continue
            if status.st_ino != mapping.inode or not stat.S_ISREG(status.st_mode):
                continue
            owner = foreign_owner(status)
            self._check(mapping.path, status, owner)
            began = time.monotonic()
            try:
                module = Module.load(Path(mapping.path), reached=path)
            except (OSError, TargetError):
                continue
            finally:
                if self._foreign is not None and owner is not None:
                    self._foreign.note_reading(owner, time.monotonic() - began)
            for segment in module.elf.load_segments:
                if segment.executable and segment.offset & -PAGE_SIZE == mapping.offset:
                    bias = mapping.start - (segment.vaddr & -PAGE_SIZE)
                    return MappedModule(mapping.path, module, bias, mapping.inode)
        return None

    def _check(self, path: str, status: os.stat_result, owner: str | None) -> None:
        """Raise ``TargetError`` if a file may not be read: too many of its owner, or too large with the others."""
        if owner is not None and self._foreign is not None:
            self._foreign.check(path, status, owner)
        if owner is None and status.st_size > READ_LIMIT:
            return  # it is mapped, not read
        self._read_size += status.st_size
        if self._read_size > _SIZES_MAX:
            raise TargetError(
                f"process {self._pid} maps code of files with more than the {_SIZES_MAX >> 20} MiB that are read: "
                f"'{path}' is not read",
                hint="libraries are read until all symbols that the patch uses are found",
            )


# The list of the dynamic linker for debuggers (glibc's elf/link.h), in the program's dynamic section. 64-bit words:
#
#     dynamic section   tag | value   of DT_DEBUG: the address of r_debug
#     r_debug           version | r_map | ...
#     link_map          l_addr | l_name | l_ld | l_next | l_prev


def _dynamic_sections(program: MappedModule, read: Callable[[int, int], bytes]) -> Iterator[int]:
    """Iterate over the addresses of dynamic sections in the dynamic linker's list; over none without a linker."""
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
            _, _, dynamic, at = _LINK_MAP.unpack(read(at, _LINK_MAP.size))
            yield dynamic


def _is_library(name: str) -> bool:
    return name.endswith(".so") or ".so." in name


class ProcessSymbols:
    """
    The symbols of a process, as a function of the module ``patched`` would use them.

    ``read`` reads the memory of the process.
    """

    def __init__(
        self, pid: int, modules: ProcessModules, patched: MappedModule, read: Callable[[int, int], bytes]
    ) -> None:
        self._pid = pid
        self._modules = modules
        self._patched = patched
        self._read = read
        self._relocations = 0
        """Number of relocations that were searched."""

    def address_of(self, name: str) -> int | None:
        """
        Return the address of a symbol in the process; None if no module has it.

        Raise ``TargetError`` if the name is ambiguous, or its address is unknown.
        """
        found = self._patched.module.symbols.lookup(name)
        is_local = bool(found) and found[0].binding == "local"
        program = self._modules.program
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
        for relocation in self._searched(module):
            if relocation.kind == _IRELATIVE and relocation.addend == symbol.address:
                yield module, relocation.place
        for each in self._modules:
            for relocation in self._searched(each):
                named = relocation.symbol is not None and relocation.symbol.name == symbol.name
                if named and relocation.kind in (GLOB_DAT, JUMP_SLOT):
                    yield each, relocation.place

    def _searched(self, module: MappedModule) -> Iterator[Relocation]:
        """Iterate over the relocations of a module, of a malformed one not over all; ``TargetError`` at the limit."""
        found = dynamic_relocations(module.elf)
        while True:
            try:
                relocation = next(found, None)
            except TargetError:
                return
            if relocation is None:
                return
            if self._relocations == _RELOCATIONS_MAX:
                raise TargetError(
                    f"process {self._pid} maps files with more than {_RELOCATIONS_MAX} relocations, in which the "
                    "addresses of functions that are chosen at run time (IFUNC) are searched",
                    hint="do not call such functions, as of libc's memcpy and strlen, in the patch",
                )
            self._relocations += 1
            yield relocation


def function_named(text: str, modules: ProcessModules, pid: int) -> tuple[MappedModule, str]:
    """
    Return the module and the name that ``[MODULE:]FUNCTION`` means; ``file.c:name`` is a name.

    Without a module, the program comes first, then the libraries that export the name.
    """
    before, colon, name = text.partition(":")
    if colon and not name.startswith(":"):
        if (found := modules.named(before)) is not None:
            return found, name
        if ":" in name or _is_library(before):
            raise TargetError(f"process {pid} has no code of a module '{before}'", hint=suggestion(before, pid=pid))
    if modules.program.module.symbols.lookup(text):
        return modules.program, text
    return next((each for each in modules if each.exported(text) is not None), modules.program), text
