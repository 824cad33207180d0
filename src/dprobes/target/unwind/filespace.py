"""
The memory of a process that has ended, as far as its files show it: code and unwind tables, which nobody changes.

They are those of the very code if a file is still what the process had mapped, which its inode tells.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.elf.file import ElfFile
from dprobes.target.modules import root_of
from dprobes.target.ownership import foreign_owner
from dprobes.target.processmaps import PAGE_SIZE
from dprobes.target.unwind.fileframes import FileFrames, MovedFrames, bias_of, completed
from dprobes.target.unwind.frametable import MemoryFrameTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.arch import ByteOrder
    from dprobes.target.processimages import ProcessImage
    from dprobes.target.processmaps import Mapping
    from dprobes.target.unwind.fileframes import FrameRules

__all__ = ["FileSpace", "MappedFiles"]

_FILES_MAX = 64
"""How many files are kept open."""

_SIZE_MAX, _FOREIGN_MAX = 1 << 30, 64 << 20
"""Bytes of the largest file that is looked into, and of the largest one of other users."""


class MappedFiles:
    """Keep the files that processes had mapped."""

    def __init__(self) -> None:
        self._frames: WeakKeyDictionary[ElfFile, FileFrames] = WeakKeyDictionary()
        self._files: OrderedDict[tuple[int, int, str], ElfFile | None] = OrderedDict()

    def frames_of(self, elf: ElfFile) -> FileFrames:
        """Return the unwind tables of a file; its processes have them in common."""
        if (found := self._frames.get(elf)) is None:
            found = self._frames[elf] = FileFrames(elf)
        return found

    def frames_at(self, pid: int, mapping: Mapping) -> FileFrames | None:
        """Return the unwind tables of a file that a process maps, also if it runs in another mount namespace."""
        elf = self.of(mapping, pid)
        return None if elf is None else self.frames_of(elf)

    def of(self, mapping: Mapping, pid: int | None = None) -> ElfFile | None:
        """Return the file of a mapping, of a process that runs if that is given; None if it is gone, or no module."""
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
    """A module where it was: its link addresses lack ``bias`` to be those of the process."""

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
    The address space of a process that has ended.

    ``read_stack`` returns bytes of a stack that somebody has copied; it raises ``TargetError`` for others.
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
        """Return ``n`` bytes of the stack or of a module."""
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
        """Return the unwind table of the module that an address lies in; None if there is none."""
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
