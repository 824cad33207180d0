"""
Global variables in memory that several engines share: handlers in the kernel, and those that a tracer interprets.

The memory is an array of 64-bit cells, a BPF map where this user may make one, else a file in memory; both are mapped
by their descriptor. Adding is one instruction (``lock add``), as it is for a handler in the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from functools import cache
from typing import TYPE_CHECKING, Self

from dprobes.bpf.layout import power_of_two
from dprobes.engines.linux.machinecode import map_code
from dprobes.errors import EngineError
from dprobes.vm.context import SharedCells

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GlobalVariables", "MappedCells"]

_CELL = 8

# void add(address, amount) in the System V AMD64 ABI, on 8 and on 4 bytes.
_ADD_8 = bytes.fromhex("f0480137c3")  # lock add %rsi, (%rdi); ret
_ADD_4 = bytes.fromhex("f00137c3")  # lock add %esi, (%rdi); ret


@cache
def _adding() -> tuple[Callable[[int, int], None], Callable[[int, int], None]]:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
    return function(map_code(_ADD_8)), function(map_code(_ADD_4))


class MappedCells(SharedCells):
    """Show the cells behind a descriptor; ``close`` gives the mapping up."""

    def __init__(self, descriptor: int, count: int) -> None:
        size = -(-max(count, 1) * _CELL // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapping = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._mapping)
        self._cells = self._bytes.cast("Q")
        self._halves = self._bytes.cast("I")
        self._count = count
        address = ctypes.c_char.from_buffer(self._mapping)
        self._address = ctypes.addressof(address)
        del address

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        value: int = self._cells[self._checked(index)]
        return value

    def __setitem__(self, index: int, value: int) -> None:  # type: ignore[override]
        self._cells[self._checked(index)] = value

    def store(self, index: int, value: int, word_size: int) -> None:
        """Set a cell, or its low half."""
        if word_size == _CELL:
            self._cells[self._checked(index)] = value
        else:
            self._halves[2 * self._checked(index)] = value

    def add(self, index: int, amount: int, word_size: int) -> None:
        """Add to a cell, or to its low half, in one instruction."""
        wide, narrow = _adding()
        (wide if word_size == _CELL else narrow)(self._address + _CELL * self._checked(index), amount & (1 << 64) - 1)

    def view(self) -> memoryview:
        """Return all cells to look at, as they are now and become; to be released before ``close``."""
        return self._cells[: self._count]

    def close(self) -> None:
        """Give up the mapping."""
        self._cells.release()
        self._halves.release()
        self._bytes.release()
        self._mapping.close()

    def _checked(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return index


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
            self.descriptor = os.memfd_create("dprobes_gv")
            os.ftruncate(self.descriptor, -(-max(count, 1) * _CELL // mmap.PAGESIZE) * mmap.PAGESIZE)

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
