"""
The module of a program in the processes of a machine: who has mapped it, and how far above its link addresses.

A machine's files cannot be asked for. A file is the module if it has its name, and the module's build-id where that has
it; of memory that nobody has looked at yet that is not known, and the instructions decide when they are executed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.machine.addressspaces import AddressSpaces, MappedFile
    from dprobes.target.elf.file import ElfFile

__all__ = ["MappedModule", "ModulePlace"]

_PAGE = 4096
_NAME_MAX = 255


class ModulePlace(NamedTuple):
    """Where the module is: in which address space, that of a process, and how far above its link addresses."""

    space: int
    pid: int
    bias: int


class MappedModule:
    """The module whose file on this machine is ``elf``, and that a program calls ``name``, in ``spaces``."""

    def __init__(self, spaces: AddressSpaces, elf: ElfFile, name: str) -> None:
        self._spaces, self._elf = spaces, elf
        called = {elf.path.name, elf.path.resolve().name, os.path.basename(name), elf.soname or ""}
        self._names = {os.fsencode(each)[:_NAME_MAX] for each in called if each}
        self._code = [segment for segment in elf.load_segments if segment.executable]
        build_id = bytes.fromhex(elf.build_id or "")
        self._build_id, self._build_id_place = build_id, bytes(elf.data[: _PAGE * 4]).find(build_id) if build_id else -1
        self._verdicts: dict[tuple[int, bytes], bool] = {}
        """Whether files, by inode and name, are the module, where their build-id could be read."""
        self.others: set[int] = set()
        """Processes that map a file of the name which is another build."""

    @property
    def code_start(self) -> int:
        """The first link address of code."""
        return self._code[0].vaddr if self._code else 0

    def __iter__(self) -> Iterator[ModulePlace]:
        """Iterate over where it is mapped now; an address space that several processes share comes once."""
        seen: set[int] = set()
        for space, pid in self._spaces:
            if space not in seen:
                seen.add(space)
                for mapped in self._spaces.code_files(space):
                    if (bias := self.bias_in(mapped, pid)) is not None:
                        yield ModulePlace(space, pid, bias)

    def bias_in(self, mapped: MappedFile | None, pid: int) -> int | None:
        """Return how far the module is above its link addresses, None if a mapping is not of its code."""
        if mapped is None or not mapped.is_code or mapped.name not in self._names:
            return None
        for segment in self._code:
            first = segment.offset // _PAGE * _PAGE
            if first <= mapped.offset < segment.offset + segment.filesz:
                bias = mapped.start - (segment.vaddr // _PAGE * _PAGE + mapped.offset - first)
                return bias if self._is_build(mapped, bias, pid) else None
        return None

    def _is_build(self, mapped: MappedFile, bias: int, pid: int) -> bool:
        """Return whether a file of the module's name is the module, as far as that is known."""
        key = mapped.inode, mapped.name
        address = None if self._build_id_place < 0 else self._elf.link_address(self._build_id_place)
        if key not in self._verdicts and address is not None:
            found = self._spaces.read(mapped.space, bias + address, len(self._build_id))
            if len(found) == len(self._build_id):
                self._verdicts[key] = found == self._build_id
        is_build = self._verdicts.get(key, True)
        if not is_build:
            self.others.add(pid)
        return is_build

    def is_verified(self, mapped: MappedFile) -> bool:
        """Return whether a file that has been looked at has the module's build-id, and not its name alone."""
        return self._verdicts.get((mapped.inode, mapped.name), False)

    def is_at(self, space: int, bias: int, address: int | None = None) -> bool:
        """Return whether it is mapped so far above its link addresses; ``address`` is one of its code."""
        mapped = self._spaces.file_at(space, bias + self.code_start if address is None else address)
        return self.bias_in(mapped, 0) == bias
