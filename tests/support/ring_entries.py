"""Entries in the rings of handlers in processes, and a reader's buffer with such entries."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import ENTRY_HEAD, KIND_SHIFT, Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dprobes.engines.inline.entry_index import EntryBuffer

__all__ = ["entry", "put", "putting"]


def entry(probe: int, body: bytes, kind: int = Entry.RECORD, tid: int = 0, flags: int = 0) -> bytes:
    """Return an encoded entry of a ring for probepoint ``probe``; ``flags`` are bits of its length word."""
    data = ENTRY_HEAD.pack(probe | kind << KIND_SHIFT, tid) + body
    return (len(data) | flags).to_bytes(8, "little") + data.ljust(len(data) + 7 & ~7, b"\0")


def put(buffer: EntryBuffer, *pieces: bytes) -> None:
    """Append the bytes of each ring, in order, to a reader's buffer."""
    for ring, piece in enumerate(pieces):
        ctypes.memmove(buffer.address + buffer.end, piece, len(piece))
        buffer.add(len(piece), ring)


def putting(*pieces: bytes, waiting: Collection[int] = ()) -> Callable[[EntryBuffer, Collection[int]], set[int]]:
    """
    Return a substitute for the function that moves the contents of rings to a reader's buffer.

    It moves ``pieces``, one of each ring, and returns ``waiting``, the rings with more entries.
    """

    def move(buffer: EntryBuffer, _: Collection[int]) -> set[int]:
        put(buffer, *pieces)
        return set(waiting)

    return move
