"""
Kernels of machines that were seen before: their symbols and types, in the user's cache directory.

To read them takes seconds, in which the machine stands still. A kernel is known by where it lies and by its banner,
which says who has built it, of what, and when; a file's name has both, with the place of the banner::

    guestkernel-BASE-BANNER-DIGEST    u64 size of the symbols │ symbols │ types
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from dprobes.cachefiles import cache_directory, cached_names, keep_newest, mark_used, read_cached, write_cached
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KnownKernel", "keep_kernel", "known_kernel"]

_PREFIX = "guestkernel"
_BANNER = b"Linux version "
_BANNER_MAX = 512
_SIZE = struct.Struct("<Q")
_KEPT = 4
"""How many are kept, those that were used last."""


class KnownKernel(NamedTuple):
    """What a kernel says of itself: symbols as ``/proc/kallsyms`` lists them, and types (BTF)."""

    listing: bytes
    types: bytes


def _name(start: int, offset: int, banner: bytes) -> str:
    return f"{_PREFIX}-{start:x}-{offset:x}-{hashlib.sha256(banner).hexdigest()[:32]}"


def _banner_at(read: Callable[[int, int], bytes], address: int) -> bytes | None:
    text = read(address, _BANNER_MAX)
    end = text.find(b"\0")
    return text[:end] if text.startswith(_BANNER) and end > 0 else None


def known_kernel(read: Callable[[int, int], bytes], start: int) -> KnownKernel | None:
    """Return the kernel that begins at an address, None if it was not seen before; ``read`` reads memory."""
    directory = cache_directory()
    for name in cached_names(directory, f"{_PREFIX}-{start:x}-"):
        try:
            offset = int(name.split("-")[2], 16)
        except (ValueError, IndexError):
            continue
        banner = _banner_at(read, start + offset)
        if banner is None or name != _name(start, offset, banner):
            continue
        content = read_cached(directory, name)
        if content is not None and len(content) > _SIZE.size:
            size = _SIZE.unpack_from(content)[0]
            mark_used(directory, name)
            return KnownKernel(content[_SIZE.size : _SIZE.size + size], content[_SIZE.size + size :])
    return None


def keep_kernel(read: Callable[[int, int], bytes], start: int, banner_place: int, kernel: KnownKernel) -> None:
    """Keep what a kernel says, whose banner is at a place; those that were not used for long are taken away."""
    banner = _banner_at(read, banner_place)
    if banner is None:
        return
    directory = cache_directory()
    content = _SIZE.pack(len(kernel.listing)) + kernel.listing + kernel.types
    if write_cached(directory, _name(start, banner_place - start, banner), content):
        keep_newest(directory, f"{_PREFIX}-", _KEPT)
