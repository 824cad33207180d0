"""A file in memory that probed processes and we map; maps are parts of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from dprobes.engines.linux.memoryfile import memory_file
from dprobes.errors import NotSupportedError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Region"]


class Region:
    """
    Own so many bytes of memory, which begin as zeros.

    ``place`` is the address at which a probed process has it; this process has it elsewhere. Parts are handed out until
    there is no more room, which is an error of whoever made it too small.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = memory_file("dprobes", self.size) if descriptor is None else descriptor
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self.mapping = mmap.mmap(self.descriptor, self.size)
        self._used = 0
        self.place = 0

    @property
    def own_address(self) -> int:
        """The address at which this process has it."""
        first = ctypes.c_char.from_buffer(self.mapping)
        try:
            return ctypes.addressof(first)
        finally:
            del first

    def take(self, size: int, alignment: int = 64) -> int:
        """Return the offset of a part of ``size`` bytes."""
        start = -(-self._used // alignment) * alignment
        if start + size > self.size:
            raise NotSupportedError(f"{size} bytes do not fit into the memory that handlers share with the tool")
        self._used = start + size
        return start

    def view(self, offset: int, size: int) -> memoryview:
        """Return bytes of it, to be released before the region."""
        with memoryview(self.mapping) as whole:
            return whole[offset : offset + size]

    def close(self) -> None:
        """Give it up here; processes that map it go on with it."""
        self.mapping.close()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
