"""
The manifest of what is written into a process: for who comes when tracer, client and restorer were all killed.

It is in the process's own memory, in a mapping that is found by its name: so it is there as long as what it lists is, a
forked child has a copy of it, and executing another program ends it. What is to be written is entered before that, and
each entry says what is to be found and what belongs there: who reads it writes nothing where anything else is.

::

    0  8s  MAGIC
    8  u64 how many bytes of entries there are
    16 entries, each   u32 size | JSON   {"memory": [page, own, region, size, [[address, size], ...], [address, size]],
                                          "code": [[start, end], ...],
                                          "writes": [[[address, written, original], ...], ...]}

The pieces of ``writes`` that belong to one jump stand together, bytes in hexadecimal digits. Nothing that a process has
in its memory is trusted: what is no such entry counts for nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dprobes.engines.ptrace.site_patches import NativeMemory, SitePatch
from dprobes.engines.ptrace.tracer_messages import Lowered, Placed, Raised, Removed, Watched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "ENTRIES",
    "FOR_RESTORERS",
    "MANIFEST_FILE_NAME",
    "MANIFEST_LENGTH",
    "MANIFEST_MAGIC",
    "MANIFEST_SIZE",
    "FilesShared",
    "JumpsCopied",
    "JumpsPlanned",
    "LeftEntry",
    "MemoryUnmapped",
    "PagesMapped",
    "TracerBegun",
    "entries_in",
    "entry_of",
    "length_in",
]

FOR_RESTORERS = (Placed, Removed, Raised, Lowered, Watched)


@dataclass(frozen=True, slots=True)
class TracerBegun:
    """
    The first message: the process id of the tracer.

    Frames are those of ``tracer_messages``: all that is for the crash restorer in the client is for that process too,
    and these besides.
    """

    pid: int


@dataclass(frozen=True, slots=True)
class FilesShared:
    """
    A report that files in memory, (device, inode) each, are about to be mapped for handlers.

    Where they are is said by the ``JumpsPlanned`` that follows. The ``page`` that only the process has, (address,
    size), is there already, unless its size is 0.
    """

    pid: int
    files: tuple[tuple[int, int], ...]
    page: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class JumpsPlanned:
    """
    A report that ``pages``, (start, end) each, are about to be mapped for code, and jumps to be written.

    They are for handlers that have a ``memory``.
    """

    pid: int
    memory: NativeMemory
    pages: tuple[tuple[int, int], ...]
    patches: tuple[SitePatch, ...]


@dataclass(frozen=True, slots=True)
class PagesMapped:
    """A report that ``pages``, (start, end) each, are about to be mapped for copies of instructions."""

    pid: int
    pages: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class JumpsCopied:
    """A report that a process has a copy of its parent's memory, with the jumps and pages in it."""

    pid: int
    parent: int


@dataclass(frozen=True, slots=True)
class MemoryUnmapped:
    """A report that a process has given back the memory of ``JumpsPlanned`` at a ``region``, and the pages for code."""

    pid: int
    region: int


MANIFEST_FILE_NAME = "dprobes-left"
"""What the file in memory is called; the mapping is ``/memfd:dprobes-left (deleted)``."""
MANIFEST_SIZE = 4 << 20
"""The bytes of the mapping: those that nobody has written take no memory."""

MANIFEST_MAGIC = b"DPROBES1"
MANIFEST_LENGTH, ENTRIES = 8, 16
_SIZE = struct.Struct("=I")
_LENGTH = struct.Struct("=Q")
_WORD_MAX = (1 << 63) - 1
_PIECE_MAX = 64
"""Bytes of a piece of a jump at most."""


@dataclass(frozen=True, slots=True)
class LeftEntry:
    """Memory that handlers have, ``code`` mapped for them, (start, end) each, and what is written for them."""

    memory: NativeMemory
    code: tuple[tuple[int, int], ...]
    writes: tuple[SitePatch, ...]


def entry_of(
    memory: NativeMemory,
    code: Sequence[tuple[int, int]],
    patches: Sequence[SitePatch],
    breakpoints: Sequence[tuple[int, int]],
) -> bytes:
    """Return an entry; ``breakpoints`` are their addresses and the bytes that belong there."""
    import json  # the tracer of a run without jumps needs none

    writes = [
        [[address, data.hex(), original.hex()] for (address, data), original in zip(p.writes, p.originals, strict=True)]
        for p in patches
    ]
    writes += [[[address, "cc", f"{original:02x}"]] for address, original in breakpoints]
    named = [memory.page, memory.own, memory.region, memory.size, memory.others, memory.manifest]
    text = json.dumps({"memory": named, "code": code, "writes": writes}).encode()
    return _SIZE.pack(len(text)) + text


def length_in(head: bytes) -> int | None:
    """Return how many bytes of entries there are behind a head; None if it is none."""
    if len(head) < ENTRIES or not head.startswith(MANIFEST_MAGIC):
        return None
    length = int(_LENGTH.unpack_from(head, MANIFEST_LENGTH)[0])
    return length if length <= MANIFEST_SIZE - ENTRIES else None


def entries_in(data: bytes) -> Iterator[LeftEntry]:
    """Iterate over the entries in what stands behind a head, up to the first thing that is none."""
    import json

    position = 0
    while position + _SIZE.size <= len(data):
        start = position + _SIZE.size
        position = start + _SIZE.unpack_from(data, position)[0]
        try:
            yield _entry(json.loads(data[start:position]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return


def _entry(found: Any) -> LeftEntry:
    page, own, region, size, others, manifest = found["memory"]
    page, own, region, size = map(_number, (page, own, region, size))
    memory = NativeMemory(page, own, region, size, None, _pairs(others), _pairs([manifest])[0])
    writes = [[(_number(at), _piece(written), _piece(there)) for at, written, there in p] for p in found["writes"]]
    if any(len(written) != len(there) for pieces in writes for _, written, there in pieces):
        raise ValueError("a piece has another size than what belongs there")
    patches = tuple(
        SitePatch((), 0, b"", (0, b""), tuple((at, written) for at, written, _ in p), tuple(there for _, _, there in p))
        for p in writes
    )
    return LeftEntry(memory, _pairs(found["code"]), patches)


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _WORD_MAX:
        raise ValueError(f"{value!r} is neither an address nor a size")
    return value


def _pairs(values: Any) -> tuple[tuple[int, int], ...]:
    return tuple((_number(first), _number(second)) for first, second in values)


def _piece(text: str) -> bytes:
    data = bytes.fromhex(text)
    if not 0 < len(data) <= _PIECE_MAX:
        raise ValueError(f"a piece of {len(data)} bytes")
    return data
