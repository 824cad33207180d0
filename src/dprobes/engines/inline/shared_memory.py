"""
Memory that handlers share with the tool: regions, arrays and hash tables (``native.routines.shared_hash_table``).

The tool changes hash tables with the same routines that handlers call, which it executes itself.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import NO_OVERWRITE, Helper
from dprobes.errors import NotSupportedError
from dprobes.native.ebpf_translator import write_function
from dprobes.native.generated_code import MapPlace, MapShape, Surroundings
from dprobes.native.routines.shared_hash_table import BLOCK, DELETED, HEAD_SIZE, TableShape, hash_routine
from dprobes.native.x86.x86_operations import X86Operations
from dprobes.platform.linux.call_proxy import map_code, unmap_code
from dprobes.platform.linux.process_calls import memory_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self

    from dprobes.bpf.bpf_assembler import Assembled

__all__ = ["Region", "SharedArray", "SharedHash", "Words", "own_function"]


class Words:
    """Private zeroed memory of ``size`` bytes, as bytes and as 64-bit words; unused pages need no physical memory."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        first = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(first)
        del first
        self._view = memoryview(self.memory)
        self.words = self._view.cast("Q")

    def close(self) -> None:
        """Unmap the memory of the words."""
        self.words.release()
        self._view.release()
        self.memory.close()


_ARGUMENTS = 5


def own_function(assembled: Assembled, calls: Mapping[Helper, Assembled] | None = None) -> Callable[..., int]:
    """
    Return a routine as a function of up to five words that returns a word; ``calls`` are the routines that it calls.

    The code is position-independent, and mapped as long as the function exists.
    """
    asm = X86Operations()
    plain = Surroundings({}, {}, {})
    called = {helper: write_function(asm, routine, plain) for helper, routine in (calls or {}).items()}
    start = write_function(asm, assembled, Surroundings({}, called, {}))
    code = asm.assemble()
    address = map_code(code)
    function = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * _ARGUMENTS)(address + start)

    def run(*arguments: int) -> int:
        word: int = function(*arguments, *(0,) * (_ARGUMENTS - len(arguments)))
        return word

    weakref.finalize(run, unmap_code, address, len(code)).atexit = False
    return run


class Region:
    """
    Shared memory of ``size`` bytes, zeroed at first.

    ``place`` is its address in a probed process, which differs from that in this process. ``descriptor`` is that of the
    file; None: create one. Parts are allocated one after the other; the creator must make the region large enough.
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
        """The address of the region in this process."""
        first = ctypes.c_char.from_buffer(self.mapping)
        try:
            return ctypes.addressof(first)
        finally:
            del first

    def take(self, size: int, alignment: int = 64) -> int:
        """Return the offset of a new part of ``size`` bytes; raise ``NotSupportedError`` if there is no room."""
        start = -(-self._used // alignment) * alignment
        if start + size > self.size:
            raise NotSupportedError(f"{size} bytes do not fit into the memory that handlers share with the tool")
        self._used = start + size
        return start

    def view(self, offset: int, size: int) -> memoryview:
        """Return a view of ``size`` bytes of the region; the caller must release it before ``close``."""
        with memoryview(self.mapping) as whole:
            return whole[offset : offset + size]

    def close(self) -> None:
        """Unmap the region here, and close the file; other processes keep their mappings."""
        self.mapping.close()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SharedArray:
    """Array of values; elements begin at multiples of ``stride``. Views must be released before the region."""

    def __init__(self, region: Region, value_size: int, entries: int = 1) -> None:
        self.stride = value_size + 7 & ~7
        self._region = region
        self._size = self.stride * entries
        self._offset = region.take(self._size)
        self.memory = region.view(self._offset, self._size)
        self.words = self.memory.cast("Q")
        self.halves = self.memory.cast("I")

    @property
    def place(self) -> MapPlace:
        """The place of the array in the probed process."""
        return MapPlace(self._region.place + self._offset, stride=self.stride)

    @property
    def own_address(self) -> int:
        """The address of the array in this process."""
        return self._region.own_address + self._offset

    @property
    def elements(self) -> range:
        """The offsets of the elements in the region."""
        return range(self._offset, self._offset + self._size, self.stride)

    def close(self) -> None:
        """Release the memory views of the array."""
        for view in (self.halves, self.words, self.memory):
            view.release()


_STATE = 8
_SEEN = 1024
"""Number of slots that an iteration copies at a time."""


@lru_cache(256)
def _routine(helper: Helper, shape: TableShape) -> Callable[..., int]:
    """Return a routine as a function of this process; the result is signed unless it is an address."""
    function = own_function(hash_routine(helper, shape))
    if helper is Helper.MAP_LOOKUP_ELEM:
        return function
    return lambda *arguments: ctypes.c_int64(function(*arguments)).value


class SharedHash:
    """Hash table; ``shape`` has the sizes of its keys and values."""

    def __init__(self, region: Region, shape: TableShape) -> None:
        self.shape = shape
        self._region = region
        self._offset = region.take(shape.size)
        self._stuck: list[int] = []
        """The offsets of locks for which a wait has failed."""

    @property
    def place(self) -> MapPlace:
        """The place of the table in the probed process."""
        return MapPlace(self._region.place + self._offset, MapShape.HASH)

    @property
    def locks(self) -> range:
        """The offsets in the region of the lock words; a word is not 0 while a thread has the lock."""
        shape, first = self.shape, self._offset + self.shape.locks
        return range(first, first + BLOCK * (shape.capacity // shape.block), BLOCK)

    def _change(self, helper: Helper, key: bytes, value: bytes = b"", flags: int = 0) -> int:
        """
        Insert or delete a key under the lock of its slots; return 0 or a negative errno, EBUSY without the lock.

        A thread with the lock may be preempted, so the routine waits. But a killed thread may have the lock forever. So
        after a timeout, further calls fail at once until the locks that were taken then are free.
        """
        memory = self._region.mapping
        self._stuck = [place for place in self._stuck if memory[place]]
        if self._stuck:
            return -errno.EBUSY
        result = self._call(helper, key, value, flags)
        if result == -errno.EBUSY:
            self._stuck = [place for place in self.locks if memory[place]]
        return result

    def _call(self, helper: Helper, key: bytes, value: bytes = b"", flags: int = 0) -> int:
        # Each call has its own buffers, because several threads may look up keys at the same time.
        named, given = ctypes.create_string_buffer(key), ctypes.create_string_buffer(value)
        table = self._region.own_address + self._offset
        return _routine(helper, self.shape)(table, ctypes.addressof(named), ctypes.addressof(given), flags)

    def address_of(self, key: bytes) -> int:
        """Return the address in this process of a key's value; 0 if the key does not exist."""
        return self._call(Helper.MAP_LOOKUP_ELEM, key)

    def __getitem__(self, key: bytes) -> bytes:
        if not (address := self.address_of(key)):
            raise KeyError(key)
        return ctypes.string_at(address, self.shape.value_size)

    def __contains__(self, key: bytes) -> bool:
        return self._call(Helper.MAP_LOOKUP_ELEM, key) != 0

    def __setitem__(self, key: bytes, value: bytes) -> None:
        """Set a value; raise OSError if there is no room, or if the wait for the lock has timed out."""
        self._changed(self._change(Helper.MAP_UPDATE_ELEM, key, value))

    def add(self, key: bytes, value: bytes) -> bool:
        """Set a value unless the key exists; return False if it exists. Raise ``OSError`` as for an assignment."""
        result = self._change(Helper.MAP_UPDATE_ELEM, key, value, NO_OVERWRITE)
        if result == -errno.EEXIST:
            return False
        self._changed(result)
        return True

    def discard(self, key: bytes) -> bool:
        """Delete a key; return False if it did not exist."""
        result = self._change(Helper.MAP_DELETE_ELEM, key)
        if result == -errno.ENOENT:
            return False
        self._changed(result)
        return True

    @staticmethod
    def _changed(result: int) -> None:
        if result:
            raise OSError(-result, os.strerror(-result))

    def __iter__(self) -> Iterator[bytes]:
        stride, size = self.shape.stride, self.shape.key_size
        slot = struct.Struct(f"<Q{size}s{stride - _STATE - size}x")
        first = self._offset + HEAD_SIZE
        end = first + self.shape.capacity * stride
        for start in range(first, end, _SEEN * stride):
            for state, key in slot.iter_unpack(self._region.mapping[start : min(start + _SEEN * stride, end)]):
                if state > DELETED:
                    yield key

    def close(self) -> None:
        """Do nothing: all memory belongs to the region."""
