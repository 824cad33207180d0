"""Memory of a process for the stack walk: bytes, and the unwind tables of the mapped modules."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_lookup import root_of
from dprobes.target.other_users import foreign_owner
from dprobes.target.process_maps import PAGE_SIZE
from dprobes.target.unwind.frame_tables import (
    FileFrames,
    LateFrames,
    MemoryFrameTable,
    MovedFrames,
    bias_of,
    completed,
    moved_to,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import ByteOrder
    from dprobes.target.process_images import ProcessImage
    from dprobes.target.process_maps import Mapping
    from dprobes.target.unwind.frame_tables import FrameRules

__all__ = ["FileSpace", "MappedFiles", "ProcessSpace"]

_OWN_AREAS = ("[vdso]",)

_ANSWERS_MAX = 1 << 14
"""Maximum number of code addresses whose tables are remembered."""


class ProcessSpace:
    """
    Address space of a process. ``read_memory`` raises ``TargetError`` for unmapped memory.

    Tables are read from memory and not from files. So they match the executed code, also for deleted files, for files
    that differ in this mount namespace, and for the ``[vdso]``.

    Call ``forget`` when mappings may have changed. The mappings are read again if an address is outside of the known
    ones. ``open_file`` returns the tables of a mapped file, or None if the file is not accessible; they are used for
    addresses that no table in memory covers.
    """

    byte_order: ByteOrder = sys.byteorder

    def __init__(
        self,
        word_size: Literal[4, 8],
        read_memory: Callable[[int, int], bytes],
        read_mappings: Callable[[], Sequence[Mapping]],
        open_file: Callable[[Mapping], FileFrames | None] | None = None,
    ) -> None:
        self.word_size = word_size
        self.read = read_memory
        self._read_mappings = read_mappings
        self._open_file = open_file
        self._mappings: Sequence[Mapping] = ()
        self._starts: list[int] = []
        self._tables: dict[tuple[int, int, int], FrameRules | None] = {}
        self._answers: dict[int, FrameRules | None] = {}

    def forget(self) -> None:
        """Forget the mappings. A table is kept if the same file is mapped at the same address again."""
        self._mappings = ()
        self._starts = []
        self._answers.clear()

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that contains an address, or None if there is none."""
        table = self._answers.get(address)
        if table is None and (table := self._search(address)) is not None:
            if len(self._answers) >= _ANSWERS_MAX:
                self._answers.clear()
            self._answers[address] = table
        return table

    def _search(self, address: int) -> FrameRules | None:
        mapping = self._mapping_at(address)
        if mapping is None:
            self._look()
            mapping = self._mapping_at(address)
        if mapping is None or not (mapping.is_file or mapping.path in _OWN_AREAS):
            return None
        base = self._base_of(mapping)
        if base is None:
            return None
        key = (base, mapping.device, mapping.inode)
        if key not in self._tables:
            table = MemoryFrameTable.at(self, base)
            self._tables[key] = completed(table, LateFrames(partial(self._file_table, mapping)))
        return self._tables[key]

    def _file_table(self, mapping: Mapping) -> FrameRules | None:
        """
        Return the table of the mapped file, for functions that the table in memory lacks.

        Return None if there is none.
        """
        frames = self._open_file(mapping) if self._open_file is not None and mapping.is_file else None
        return None if frames is None else moved_to(frames, mapping, self.word_size, self.byte_order)

    def is_of_file(self, address: int) -> bool:
        """Return whether a known mapping at an address is of a file, or of the ``[vdso]``."""
        mapping = self._mapping_at(address)
        return mapping is not None and (mapping.is_file or mapping.path in _OWN_AREAS)

    @property
    def is_known(self) -> bool:
        """True if the mappings could be read. Those of a zombie process cannot."""
        return bool(self._mappings)

    def is_alive(self) -> bool:
        """Return whether the process still has its memory: its first known mapping is readable, or none is known."""
        try:
            return not self._mappings or bool(self.read(self._mappings[0].start, 1))
        except TargetError:
            return False

    def _look(self) -> None:
        self._mappings = self._read_mappings()
        self._starts = [mapping.start for mapping in self._mappings]
        self._answers.clear()
        there = {(mapping.start, mapping.device, mapping.inode) for mapping in self._mappings}
        self._tables = {key: table for key, table in self._tables.items() if key in there}

    def _mapping_at(self, address: int) -> Mapping | None:
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address >= self._mappings[number].end:
            return None
        return self._mappings[number]

    def _base_of(self, mapping: Mapping) -> int | None:
        """Return the address at which the first byte of a mapping's file is mapped, or None if it is not mapped."""
        for each in reversed(self._mappings[: bisect_right(self._starts, mapping.start)]):
            if (each.device, each.inode, each.path) == (
                mapping.device,
                mapping.inode,
                mapping.path,
            ) and not each.offset:
                return each.start
        return None


_FILES_MAX = 64
"""Maximum number of files that are kept open."""

_SIZE_MAX, _FOREIGN_MAX = 1 << 30, 64 << 20
"""Maximum size in bytes of a file that is read, and of a file that another user owns."""


class MappedFiles:
    """A cache of the files that processes have, or had, mapped, with their unwind tables."""

    def __init__(self) -> None:
        self._frames: WeakKeyDictionary[ElfFile, FileFrames] = WeakKeyDictionary()
        self._files: OrderedDict[tuple[int, int, str], ElfFile | None] = OrderedDict()

    def frames_of(self, elf: ElfFile) -> FileFrames:
        """Return the unwind tables of a file, which its processes share."""
        if (found := self._frames.get(elf)) is None:
            found = self._frames[elf] = FileFrames(elf)
        return found

    def frames_at(self, pid: int, mapping: Mapping) -> FileFrames | None:
        """
        Return the unwind tables of a mapped file, or None if it is not accessible.

        The file may be in another mount namespace.
        """
        elf = self.of(mapping, pid)
        return None if elf is None else self.frames_of(elf)

    def of(self, mapping: Mapping, pid: int | None = None) -> ElfFile | None:
        """
        Return the file of a mapping, of a running process if ``pid`` is given.

        Return None if it is gone, or not a module.
        """
        key = (mapping.device, mapping.inode, mapping.path)
        if key not in self._files:
            while len(self._files) >= _FILES_MAX:
                self._files.popitem(last=False)
            self._files[key] = None
            for path in (mapping.path,) if pid is None else (root_of(pid) + mapping.path, f"/proc/{pid}/exe"):
                with contextlib.suppress(TargetError, OSError):
                    status = Path(path).stat()
                    limit = _SIZE_MAX if foreign_owner(status) is None else _FOREIGN_MAX
                    if status.st_ino == mapping.inode and status.st_size <= limit:
                        self._files[key] = ElfFile.open(path)
                        break
        return self._files[key]


class _Loaded(NamedTuple):
    """Module as it was mapped. ``bias`` is the run-time address minus the link address."""

    elf: ElfFile
    bias: int

    @property
    def base(self) -> int:
        """The address of the first byte of the file."""
        first = self.elf.load_segments[0]
        return (self.bias + first.vaddr - first.offset) & -PAGE_SIZE

    @property
    def end(self) -> int:
        last = self.elf.load_segments[-1]
        return self.bias + last.vaddr + last.filesz


class FileSpace:
    """
    Address space of a process that has exited: code and unwind tables from its files, and a copied stack.

    A file is used only if its inode is the one that the process had mapped. ``read_stack`` returns bytes of a copied
    stack, and raises ``TargetError`` for other addresses.
    """

    byte_order: ByteOrder = sys.byteorder

    def __init__(
        self,
        word_size: Literal[4, 8],
        image: ProcessImage,
        files: MappedFiles,
    ) -> None:
        self.word_size = word_size
        self._image = image
        self._files = files
        self.read_stack: Callable[[int, int], bytes] = _no_stack
        self._loaded: dict[int, _Loaded | None] = {}
        self._tables: dict[int, FrameRules | None] = {}

    def read(self, address: int, n: int) -> bytes:
        """Return ``n`` bytes of the stack or of a module; raise ``TargetError`` if neither has them."""
        with contextlib.suppress(TargetError):
            return self.read_stack(address, n)
        for loaded in self._loaded.values():
            if loaded is not None and loaded.base <= address < loaded.end:
                offset = loaded.elf.file_offset(address - loaded.bias)
                data = b"" if offset is None else bytes(loaded.elf.data[offset : offset + n])
                if len(data) == n:
                    return data
        raise TargetError(f"{n} bytes at {address:#x} are in no file")

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that contains an address, or None if there is none."""
        mapping = self._image.covering(address)
        if mapping is None or not mapping.is_file:
            return None
        if mapping.start not in self._loaded:
            self._loaded[mapping.start] = self._load(mapping)
        loaded = self._loaded[mapping.start]
        if loaded is None:
            return None
        if loaded.base not in self._tables:
            table = MemoryFrameTable.at(self, loaded.base)
            self._tables[loaded.base] = completed(table, MovedFrames(self._files.frames_of(loaded.elf), loaded.bias))
        return self._tables[loaded.base]

    def _load(self, mapping: Mapping) -> _Loaded | None:
        elf = self._files.of(mapping)
        if elf is None or elf.word_size != self.word_size or elf.byte_order != self.byte_order:
            return None
        bias = bias_of(elf, mapping)
        return None if bias is None else _Loaded(elf, bias)


def _no_stack(address: int, size: int) -> bytes:
    raise TargetError(f"{size} bytes at {address:#x} are in no copy of a stack")
