"""
Maps: memory that BPF programs and this process share.

A map lives as long as its object here is open, or a program that uses it is loaded.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Literal

from dprobes.engines.ebpf.kernel.descriptors import Descriptor
from dprobes.engines.linux.cpus import cpu_limit
from dprobes.engines.linux.mapcalls import (
    MapFlag,
    MapType,
    create_map,
    delete_element,
    lookup_element,
    map_keys,
    update_element,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ArrayMap", "HashMap", "OuterMap"]


class ArrayMap(Descriptor):
    """
    Hold an array whose elements this process sees as memory.

    Views of the memory must not be kept beyond ``close``; any thread may ask for them before that. In a map with one
    element programs may address the value directly; elements of others begin at multiples of ``stride``.
    """

    def __init__(self, value_size: int, entries: int = 1, name: str = "") -> None:
        super().__init__(create_map(MapType.ARRAY, 4, value_size, entries, MapFlag.MMAPABLE, name))
        self.stride = (value_size + 7) & ~7
        self._size = self.stride * entries
        self._mapping: mmap.mmap | None = None
        self._views: dict[str, memoryview] = {}
        self._mapping_lock = threading.Lock()

    def _view(self, kind: Literal["B", "I", "Q"]) -> memoryview:
        view = self._views.get(kind)
        return self._map(kind) if view is None else view

    def _map(self, kind: Literal["B", "I", "Q"]) -> memoryview:
        with self._mapping_lock:
            if self._mapping is None:
                # mmap(2) works on whole pages; the array ends in its last one.
                self._mapping = mmap.mmap(self.fd, -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE)
            if kind not in self._views:
                with memoryview(self._mapping) as whole, whole[: self._size] as used:
                    self._views[kind] = used.cast(kind)
            return self._views[kind]

    @property
    def memory(self) -> memoryview:
        """The elements as bytes."""
        return self._view("B")

    @property
    def words(self) -> memoryview:
        """The elements as unsigned 64-bit numbers, each read and written at once."""
        return self._view("Q")

    @property
    def halves(self) -> memoryview:
        """The elements as unsigned 32-bit numbers."""
        return self._view("I")

    def close(self) -> None:
        """Give up the map and its memory."""
        for view in self._views.values():
            view.release()
        self._views.clear()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        super().close()


class OuterMap(Descriptor):
    """
    Hold one map for programs that are loaded before it exists; it is like the one with the descriptor ``example``.

    The map lives as long as it is held.
    """

    def __init__(self, example: int, name: str = "") -> None:
        super().__init__(create_map(MapType.ARRAY_OF_MAPS, 4, 4, 1, name=name, inner=example))

    def put(self, descriptor: int) -> None:
        """Hold a map from now on; programs find it when this returns."""
        update_element(self.fd, bytes(4), descriptor.to_bytes(4, "little"))


class LruHashMap(Descriptor):
    """Hold a hash that programs alone use, and that forgets what was not used for longest when it is full."""

    def __init__(self, key_size: int, value_size: int, entries: int, name: str = "") -> None:
        super().__init__(create_map(MapType.LRU_HASH, key_size, value_size, entries, MapFlag.NONE, name))


class HashMap(Descriptor):
    """
    Hold a hash from keys to values of fixed sizes in bytes, with room for so many entries.

    ``preallocated`` takes all the memory at once, which programs on perf events want before Linux kernel commit
    34dd3bad1a6f ("bpf: Relax the requirement to use preallocated hash maps in tracing progs.") (in v6.1). With
    ``per_cpu`` a value is those of all CPUs that there can be, one behind the other.
    """

    def __init__(
        self,
        key_size: int,
        value_size: int,
        entries: int,
        name: str = "",
        *,
        preallocated: bool = False,
        per_cpu: bool = False,
    ) -> None:
        flags = MapFlag.NONE if preallocated else MapFlag.NO_PREALLOC
        kind = MapType.PERCPU_HASH if per_cpu else MapType.HASH
        super().__init__(create_map(kind, key_size, value_size, entries, flags, name))
        self._key_size = key_size
        self._value_size = cpu_limit() * (-(-value_size // 8) * 8) if per_cpu else value_size

    def __getitem__(self, key: bytes) -> bytes:
        value = lookup_element(self.fd, key, self._value_size)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        update_element(self.fd, key, value)

    def __contains__(self, key: bytes) -> bool:
        return lookup_element(self.fd, key, self._value_size) is not None

    def __iter__(self) -> Iterator[bytes]:
        return map_keys(self.fd, self._key_size)

    def discard(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        return delete_element(self.fd, key)
