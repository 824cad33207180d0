"""
Variables in memory that handlers in the kernel or in probed processes change at the same time.

Each change is one atomic instruction, as in those handlers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from functools import cache
from typing import TYPE_CHECKING, Self

from dprobes.bpf.map_layouts import power_of_two
from dprobes.errors import EngineError
from dprobes.platform.linux.call_proxy import map_code
from dprobes.platform.linux.process_calls import memory_file
from dprobes.vm.world_context import SharedCells

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GLOBALS_MAX", "AtomicCells", "GlobalVariables", "MappedCells", "add_to_word", "mapped_size", "raise_word"]

GLOBALS_MAX = 65536
"""Maximum number of global variables that the programs of one owner share."""

_CELL = 8
_MASK = (1 << 64) - 1

# Functions of an address and a number, in the System V AMD64 ABI.
_ADD_8 = bytes.fromhex("f0480fc137 4889f0 c3")  # lock xadd %rsi, (%rdi); mov %rsi, %rax; ret
_ADD_4 = bytes.fromhex("f00137 c3")  # lock add %esi, (%rdi); ret
_RAISE = bytes.fromhex("488b07 4839f0 7307 f0480fb137 75f4 c3")
"""mov (%rdi), %rax; again: cmp %rsi, %rax; jae done; lock cmpxchg %rsi, (%rdi); jne again; done: ret"""


@cache
def _function(code: bytes) -> Callable[[int, int], int]:
    function: Callable[[int, int], int] = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)(
        map_code(code)
    )
    return function


def add_to_word(address: int, amount: int) -> int:
    """Add atomically to the 64-bit word at an address, modulo 2**64, and return its previous value."""
    return _function(_ADD_8)(address, amount & _MASK)


def raise_word(address: int, number: int) -> None:
    """Atomically raise the unsigned 64-bit word at an address to ``number``; a larger word is unchanged."""
    _function(_RAISE)(address, number & _MASK)


class AtomicCells(SharedCells):
    """Atomic 64-bit cells at ``address`` of this process; ``release`` releases ``memory``, the view of their bytes."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self._bytes = memory
        self._cells = memory.cast("Q")
        self._halves = memory.cast("I")
        self._count = len(self._cells)
        self._address = address

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        value: int = self._cells[self._checked(index)]
        return value

    def __setitem__(self, index: int, value: int) -> None:  # type: ignore[override]
        self._cells[self._checked(index)] = value

    def store(self, index: int, value: int, word_size: int) -> None:
        """Set a cell, or with a ``word_size`` of 4 bytes its low half."""
        if word_size == _CELL:
            self._cells[self._checked(index)] = value
        else:
            self._halves[2 * self._checked(index)] = value

    def add(self, index: int, amount: int, word_size: int) -> None:
        """Add to a cell, or with a ``word_size`` of 4 bytes to its low half, in one instruction."""
        address = self._address + _CELL * self._checked(index)
        if word_size == _CELL:
            add_to_word(address, amount)
        else:
            _function(_ADD_4)(address, amount & _MASK)

    def view(self) -> memoryview:
        """Return a view of the memory of all cells; the caller releases it before ``release`` is called."""
        return self._cells[: self._count]

    def release(self) -> None:
        """Release the memory views of the cells, before their memory is unmapped."""
        for view in (self._cells, self._halves, self._bytes):
            view.release()

    def _checked(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return index


# Global variables in memory that handlers of several engines share: in the kernel, and interpreted by a tracer.
#
# The memory is an array of 64-bit cells: a BPF map if this user may create one, else a memfd. Both are mapped by their
# descriptor.


class MappedCells(AtomicCells):
    """Atomic cells that are mapped from ``descriptor``, which stays open; ``close`` unmaps them."""

    def __init__(self, descriptor: int, count: int) -> None:
        self._mapping = mmap.mmap(descriptor, mapped_size(count))
        address = ctypes.c_char.from_buffer(self._mapping)
        super().__init__(memoryview(self._mapping)[: _CELL * count], ctypes.addressof(address))
        del address

    def close(self) -> None:
        """Unmap the memory of the cells."""
        self.release()
        self._mapping.close()


def mapped_size(count: int) -> int:
    """Return the size in bytes of a mapping of ``count`` cells, rounded up to whole pages."""
    return -(-max(count, 1) * _CELL // mmap.PAGESIZE) * mmap.PAGESIZE


class GlobalVariables:
    """
    Memory of ``count`` global variables, and its context manager.

    ``descriptor`` may be passed to other processes. If ``is_map``, it is that of a BPF map, which BPF programs can use.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_map = False
        self.descriptor = -1
        with contextlib.suppress(OSError):
            from dprobes.platform.linux.bpf_calls import MapFlag, MapType, create_map

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
        """Map the variables into this process, and return the cells; the caller closes them."""
        return MappedCells(self.descriptor, self.count)

    def close(self) -> None:
        """Close the descriptor; the kernel frees the memory when no process or BPF program uses it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
