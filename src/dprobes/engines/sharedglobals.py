"""
Global variables in memory that several engines share: handlers in the kernel, and those that a tracer interprets.

The memory is an array of 64-bit cells, a BPF map where this user may make one, else a file in memory; both are mapped
by their descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Self

from dprobes.bpf.layout import power_of_two
from dprobes.engines.atomiccells import AtomicCells
from dprobes.engines.linux.memoryfile import memory_file
from dprobes.errors import EngineError

__all__ = ["GlobalVariables", "MappedCells", "mapped_size"]

_CELL = 8


class MappedCells(AtomicCells):
    """Show the cells behind a descriptor; ``close`` gives the mapping up."""

    def __init__(self, descriptor: int, count: int) -> None:
        self._mapping = mmap.mmap(descriptor, mapped_size(count))
        address = ctypes.c_char.from_buffer(self._mapping)
        super().__init__(memoryview(self._mapping)[: _CELL * count], ctypes.addressof(address))
        del address

    def close(self) -> None:
        """Give up the mapping."""
        self.release()
        self._mapping.close()


def mapped_size(count: int) -> int:
    """Return how many bytes are mapped for so many cells: whole pages."""
    return -(-max(count, 1) * _CELL // mmap.PAGESIZE) * mmap.PAGESIZE


class GlobalVariables:
    """
    Own the memory of ``count`` global variables; leaving the context manager gives it up.

    ``descriptor`` may be handed to other processes, and to handlers in the kernel if ``is_map``.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_map = False
        self.descriptor = -1
        with contextlib.suppress(OSError):
            from dprobes.engines.linux.mapcalls import MapFlag, MapType, create_map

            # Handlers in the kernel mask an index to a power of two.
            size = _CELL * power_of_two(count)
            self.descriptor = create_map(MapType.ARRAY, 4, size, 1, MapFlag.MMAPABLE, "dprobes_gv")
            self.is_map = True
        if not self.is_map:
            self.descriptor = memory_file("dprobes_gv", mapped_size(count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self, wanted: int) -> None:
        """Raise ``EngineError`` if a program wants more variables than there are."""
        if wanted > self.count:
            raise EngineError(
                f"the program wants {wanted} global variables, and there are {self.count}",
                hint=f"write 'gvars = {self.count}' or less",
            )

    def cells(self) -> MappedCells:
        """Return the cells as this process sees them, to be closed."""
        return MappedCells(self.descriptor, self.count)

    def close(self) -> None:
        """Give up the memory, which lives on while others have it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
