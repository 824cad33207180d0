"""
The files of this machine that a process behind a stub has loaded: by them addresses of its code get names.

A stub says where a file is and what it is called there, which may be another machine, or a directory that an emulator
takes for its root. A file here is taken for it if it begins with the very bytes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile
from dprobes.target.modules import find_module
from dprobes.target.processmaps import PAGE_SIZE, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.gdb.loadedfiles import LoadedFile
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.target.processimages import ProcessImages

__all__ = ["CodeFiles"]

_HEAD = 1024
"""Bytes that are compared: headers, and mostly the build-id."""


class CodeFiles:
    """
    Tell ``images`` what the process ``pid`` has loaded, which is called ``name``; ``module`` is the probed file.

    ``program`` is the path of its program, as far as that is known.
    """

    def __init__(
        self, target: StubTarget, images: ProcessImages, module: ElfFile, pid: int, name: str, program: str
    ) -> None:
        self._target, self._images, self._module = target, images, module
        self._pid, self._program = pid, program
        self._known: set[LoadedFile] = set()
        images.began(pid, time.monotonic_ns(), (), name)

    def look(self, loaded: Sequence[LoadedFile]) -> None:
        """Take notice of what is loaded now."""
        for file in loaded:
            if file not in self._known:
                self._known.add(file)
                for mapping in self._mappings(file):
                    self._images.mapped(self._pid, time.monotonic_ns(), mapping)

    def _mappings(self, file: LoadedFile) -> Iterator[Mapping]:
        """Iterate over where the code of a file is; nothing if it is not on this machine."""
        for elf in self._candidates(file.path or self._program):
            if self._is_at(elf, file.bias):
                status = elf.path.stat()
                for segment in elf.load_segments:
                    if segment.executable:
                        start, end = file.bias + segment.vaddr & -PAGE_SIZE, file.bias + segment.vaddr + segment.memsz
                        offset = segment.offset & -PAGE_SIZE
                        place = (start, end, "r-xp", offset, status.st_dev, status.st_ino, str(elf.path))
                        yield Mapping(*place, deleted=False)
                return

    def _candidates(self, path: str) -> Iterator[ElfFile]:
        """Iterate over the files of this machine that may be the one that has a path behind the stub."""
        yield self._module
        if path:
            by_name = find_module(os.path.basename(path), architecture=self._module.machine)
            for each in dict.fromkeys((Path(path), by_name)):
                if each is not None:
                    try:
                        yield ElfFile.open(each)
                    except TargetError:
                        continue

    def _is_at(self, elf: ElfFile, bias: int) -> bool:
        """Return whether a file is what is loaded so far above its link addresses, as its beginning says."""
        if elf.machine != self._module.machine or not elf.load_segments:
            return False
        first = elf.load_segments[0]
        head = bytes(elf.data[first.offset : first.offset + min(first.filesz, _HEAD)])
        return self._target.read(bias + first.vaddr, len(head)) == head
