"""What bpf(2) does with maps; layouts are those of ``union bpf_attr`` (``bpfcalls``)."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from dprobes.engines.linux.bpfcalls import Command, Request, attributes_of, call, issue
from dprobes.quickenum import IntEnum, IntFlag

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MapFlag",
    "MapType",
    "create_map",
    "delete_element",
    "lookup_element",
    "map_keys",
    "update_element",
]


class MapType(IntEnum):
    """Number the kinds of map that the engine uses (``enum bpf_map_type``)."""

    HASH = 1
    ARRAY = 2
    PERCPU_HASH = 5
    LRU_HASH = 9
    ARRAY_OF_MAPS = 12
    RINGBUF = 27


class MapFlag(IntFlag):
    """Name the flags of a map (BPF_F_*)."""

    NONE = 0
    NO_PREALLOC = 1 << 0
    """Allocate the elements of a hash as they come."""
    MMAPABLE = 1 << 10
    """Let user space map the elements of an array, each 8-aligned (in v5.5)."""


# struct { u32 map_type, key_size, value_size, max_entries, map_flags, inner_map_fd, numa_node; char map_name[16]; ... }
_MAP_CREATE = struct.Struct("=IIIIII4x16s20x")


def create_map(
    kind: MapType,
    key_size: int,
    value_size: int,
    entries: int,
    flags: MapFlag = MapFlag.NONE,
    name: str = "",
    inner: int = 0,
) -> int:
    """
    Create a map and return its descriptor.

    Sizes are in bytes; ``entries`` of a ring buffer is its size in bytes, a power of two and at least a page.
    ``name`` is cut to 15 characters, which are to be letters, digits, underscores and dots.
    ``inner`` is the descriptor of a map like those that a map of maps is to hold.
    """
    attributes = _MAP_CREATE.pack(kind, key_size, value_size, entries, flags, inner, name.encode()[:15])
    return issue(Request(Command.MAP_CREATE, attributes))


# struct { u32 map_fd; u64 key; u64 value or next_key; u64 flags; }
_ELEMENT = struct.Struct("=I4xQQQ")


def lookup_element(map_fd: int, key: bytes, value_size: int) -> bytes | None:
    """Return the value of a key; None if there is none."""
    key_buffer, value = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value_size)
    try:
        call(
            Command.MAP_LOOKUP_ELEM,
            attributes_of(_ELEMENT, map_fd, ctypes.addressof(key_buffer), ctypes.addressof(value), 0),
        )
    except FileNotFoundError:
        return None
    return value.raw


def update_element(map_fd: int, key: bytes, value: bytes) -> None:
    """Set the value of a key, whether there is one or not."""
    key_buffer, value_buffer = (
        ctypes.create_string_buffer(key, len(key)),
        ctypes.create_string_buffer(value, len(value)),
    )
    call(
        Command.MAP_UPDATE_ELEM,
        attributes_of(_ELEMENT, map_fd, ctypes.addressof(key_buffer), ctypes.addressof(value_buffer), 0),
    )


def delete_element(map_fd: int, key: bytes) -> bool:
    """Delete a key; return whether it was there."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    try:
        call(Command.MAP_DELETE_ELEM, attributes_of(_ELEMENT, map_fd, ctypes.addressof(key_buffer), 0, 0))
    except FileNotFoundError:
        return False
    return True


def map_keys(map_fd: int, key_size: int) -> Iterator[bytes]:
    """Iterate over the keys of a hash; some come twice when others are deleted meanwhile, as the kernel starts over."""
    key, following = None, ctypes.create_string_buffer(key_size)
    while True:
        start = 0 if key is None else ctypes.addressof(key)
        try:
            call(
                Command.MAP_GET_NEXT_KEY,
                attributes_of(_ELEMENT, map_fd, start, ctypes.addressof(following), 0),
            )
        except FileNotFoundError:
            return
        yield following.raw
        key = ctypes.create_string_buffer(following.raw, key_size)
