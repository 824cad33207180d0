"""
Hash tables in shared memory (``native.routines.hashtable``): the tool's side.

The tool changes them by the very routines that handlers call, which it runs itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import NO_OVERWRITE, Helper
from dprobes.engines.inline.memory.ownroutines import own_function
from dprobes.native.memory import MapPlace, MapShape
from dprobes.native.routines.hashtable import BLOCK, DELETED, HEAD_SIZE, TableShape, hash_routine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.inline.memory.region import Region

__all__ = ["SharedHash"]

_STATE = 8
_SEEN = 1024
"""Slots that are copied at a time where all are looked at."""


@lru_cache(256)
def _routine(helper: Helper, shape: TableShape) -> Callable[..., int]:
    """Return a routine as a function of this process; what it returns is unsigned only where it is an address."""
    function = own_function(hash_routine(helper, shape))
    if helper is Helper.MAP_LOOKUP_ELEM:
        return function
    return lambda *arguments: ctypes.c_int64(function(*arguments)).value


class SharedHash:
    """A hash table; keys and values are bytes of the sizes that ``shape`` says."""

    def __init__(self, region: Region, shape: TableShape) -> None:
        self.shape = shape
        self._region = region
        self._offset = region.take(shape.size)
        self._stuck: list[int] = []
        """Locks that were waited for in vain."""

    @property
    def place(self) -> MapPlace:
        """Where the probed process has it."""
        return MapPlace(self._region.place + self._offset, MapShape.HASH)

    @property
    def locks(self) -> range:
        """Where in the region the words are that are not 0 while somebody has the lock of some slots."""
        shape, first = self.shape, self._offset + self.shape.locks
        return range(first, first + BLOCK * (shape.capacity // shape.block), BLOCK)

    def _change(self, helper: Helper, key: bytes, value: bytes = b"", flags: int = 0) -> int:
        """
        Insert or delete a key, for which a lock is needed.

        Whoever has one may be preempted, and is waited for; a probed process may also have it for ever. So nobody is
        waited for once more as long as that lock is held.
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
        # Buffers of each call: several threads may look at once.
        named, given = ctypes.create_string_buffer(key), ctypes.create_string_buffer(value)
        table = self._region.own_address + self._offset
        return _routine(helper, self.shape)(table, ctypes.addressof(named), ctypes.addressof(given), flags)

    def address_of(self, key: bytes) -> int:
        """Return where the value of a key is in this process, 0 if the key is not there."""
        return self._call(Helper.MAP_LOOKUP_ELEM, key)

    def __getitem__(self, key: bytes) -> bytes:
        if not (address := self.address_of(key)):
            raise KeyError(key)
        return ctypes.string_at(address, self.shape.value_size)

    def __contains__(self, key: bytes) -> bool:
        return self._call(Helper.MAP_LOOKUP_ELEM, key) != 0

    def __setitem__(self, key: bytes, value: bytes) -> None:
        """Set a value; raise OSError if there is no room, or somebody has the lock and does not run."""
        self._changed(self._change(Helper.MAP_UPDATE_ELEM, key, value))

    def add(self, key: bytes, value: bytes) -> bool:
        """Set a value unless the key is there; return whether it was not."""
        result = self._change(Helper.MAP_UPDATE_ELEM, key, value, NO_OVERWRITE)
        if result == -errno.EEXIST:
            return False
        self._changed(result)
        return True

    def discard(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
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
        """Do nothing: all of it belongs to the region."""
