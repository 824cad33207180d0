"""Entries of rings as handlers in processes write them, and a reader's buffer with some."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import ENTRY_HEAD, KIND_SHIFT, Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dprobes.engines.inline.entry_index import EntryBuffer

__all__ = ["entry", "put", "putting"]


def entry(probe: int, body: bytes, kind: int = Entry.RECORD, tid: int = 0, flags: int = 0) -> bytes:
    """Return an entry; ``flags`` are bits of its length."""
    data = ENTRY_HEAD.pack(probe | kind << KIND_SHIFT, tid) + body
    return (len(data) | flags).to_bytes(8, "little") + data.ljust(len(data) + 7 & ~7, b"\0")


def put(buffer: EntryBuffer, *pieces: bytes) -> None:
    """Put pieces of rings into a buffer."""
    for ring, piece in enumerate(pieces):
        ctypes.memmove(buffer.address + buffer.end, piece, len(piece))
        buffer.add(len(piece), ring)


def putting(*pieces: bytes, waiting: Collection[int] = ()) -> Callable[[EntryBuffer, Collection[int]], set[int]]:
    """Return what moves these pieces to a buffer, as rings do; those that are ``waiting`` have more to come."""

    def move(buffer: EntryBuffer, _: Collection[int]) -> set[int]:
        put(buffer, *pieces)
        return set(waiting)

    return move
