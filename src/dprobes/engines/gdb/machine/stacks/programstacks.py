"""
Call stacks of programs in a machine, by the unwind tables of files on this machine.

Tables in a program's memory are seldom there: nothing reads them before an exception is thrown. A file of this machine
takes their place where it is the one that is mapped: it has the name, and the build-id in memory is its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.mappedmodule import MappedModule
from dprobes.errors import TargetError
from dprobes.rpn.isa import StackEnd
from dprobes.target.elf.file import ElfFile
from dprobes.target.modules import find_module
from dprobes.target.unwind.fileframes import FileFrames, MovedFrames
from dprobes.target.unwind.stackwalk import COLUMNS, walk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.machine.addressspaces import AddressSpaces

__all__ = ["ProgramStacks"]

_UNSAID = (StackEnd.OUTERMOST, StackEnd.LIMIT)
_ARCHITECTURE = "x86_64"


class _KnownFile:
    """A file of this machine, and whether it is what is mapped."""

    def __init__(self, spaces: AddressSpaces, elf: ElfFile, name: str) -> None:
        self.module = MappedModule(spaces, elf, name)
        self._frames = FileFrames(elf)
        self._moved: dict[int, MovedFrames] = {}

    def at(self, bias: int) -> MovedFrames:
        """Return its tables for where it is mapped."""
        if bias not in self._moved:
            self._moved[bias] = MovedFrames(self._frames, bias)
        return self._moved[bias]


class ProgramStacks:
    """
    Walk up stacks of programs, in the address space ``space``; ``names`` are the stub's of registers by our index.

    ``files`` are those that are known besides what is found here by name.
    """

    word_size = 8
    byte_order: Literal["little"] = "little"

    def __init__(
        self,
        spaces: AddressSpaces,
        architecture: Architecture,
        names: Mapping[int, str],
        files: tuple[ElfFile, ...] = (),
    ) -> None:
        self._spaces = spaces
        self._columns = COLUMNS[_ARCHITECTURE]
        columns = {number: architecture.register(name) for number, name in enumerate(self._columns.names) if name}
        self._names = {number: names[each.index] for number, each in columns.items() if each and each.index in names}
        self._files: dict[bytes, _KnownFile | None] = {
            os.fsencode(each.path.name): _KnownFile(spaces, each, each.path.name) for each in files
        }
        self._space = 0

    def stack(self, registers: Mapping[str, int], space: int, frames: int) -> list[int]:
        """Return up to so many addresses of the call stack of a program, as ``Context.user_stack`` has them."""
        self._space = space
        values = {number: registers[name] for number, name in self._names.items() if name in registers}
        found = walk(self, self._columns, values, frames)
        return [*found.addresses] if found.end in _UNSAID else [*found.addresses, found.end]

    def read(self, address: int, n: int) -> bytes:
        """Return bytes of memory; raise ``TargetError`` if they are not all there."""
        data = self._spaces.read(self._space, address, n)
        if len(data) < n:
            raise TargetError(f"{n} bytes at {address:#x} cannot be read")
        return data

    def table_at(self, address: int) -> MovedFrames | None:
        """Return the unwind table of the file that is mapped at an address; None if that is not known here."""
        mapped = self._spaces.file_at(self._space, address)
        if mapped is None:
            return None
        if mapped.name not in self._files:
            self._files[mapped.name] = self._found(os.fsdecode(mapped.name))
        known = self._files[mapped.name]
        bias = None if known is None else known.module.bias_in(mapped, 0)
        if known is None or bias is None or not known.module.is_verified(mapped):
            return None
        return known.at(bias)

    def _found(self, name: str) -> _KnownFile | None:
        try:
            path = find_module(name, architecture=_ARCHITECTURE)
            return None if path is None else _KnownFile(self._spaces, ElfFile.open(path), name)
        except TargetError:
            return None
