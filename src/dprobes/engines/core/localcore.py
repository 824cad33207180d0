"""
The core file of a stopped process of this machine, written in a process of its own, a child of the tracer.

Only what ptrace alone can tell comes from the tracer; everything else is read from ``/proc`` here, because for a large
process that takes a while.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from dprobes.engines.core.corewriter import write_contents
from dprobes.engines.core.processfacts import contents_of, page_exists
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.core.processfacts import CoreRequest

__all__ = ["write_core"]


def write_core(request: CoreRequest, descriptor: int, hidden: Mapping[int, int], output: int) -> int:
    """
    Write the core file to a new, empty file, and return its size; raise OSError if it cannot be written.

    ``descriptor`` is one of the process's memory, ``hidden`` holds the original bytes of breakpoints by address.
    """
    with _LocalMemory(request.threads[0].tid, descriptor, hidden) as memory:
        return write_contents(contents_of(request, _bytes, memory), memory, output)


class _LocalMemory:
    """The memory of a process; all of its pages may exist if the kernel does not say which do."""

    def __init__(self, tid: int, descriptor: int, hidden: Mapping[int, int]) -> None:
        self._descriptor, self._hidden, self._addresses = descriptor, hidden, sorted(hidden)
        try:
            self._pages = os.open(f"/proc/{tid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pages = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pages >= 0:
            os.close(self._pages)

    def has_any(self, start: int, size: int) -> bool:
        """Return whether one of the pages exists."""
        count = size // PAGE_SIZE
        if self._pages < 0:
            return True
        try:
            return page_exists(os.pread(self._pages, 8 * count, start // PAGE_SIZE * 8), count)
        except OSError:
            return True

    def read(self, address: int, size: int) -> bytes:
        """Return memory without breakpoints; nothing if it cannot be read."""
        try:
            data = os.pread(self._descriptor, size, address)
        except (OSError, OverflowError):
            return b""
        mine = [at for at in self._addresses if address <= at < address + len(data)]
        if not mine:
            return data
        clean = bytearray(data)
        for at in mine:
            clean[at - address] = self._hidden[at]
        return bytes(clean)


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
