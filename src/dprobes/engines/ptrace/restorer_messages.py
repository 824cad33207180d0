"""
Messages to the restorer, and the manifest of the bytes written into a process.

With the manifest, a process can be cleaned up after tracer, client and restorer were all killed. The manifest is in the
process's own memory, in a mapping that is found by its name. So it exists as long as the bytes that it lists, a forked
child has a copy of it, and an execve discards it. Each write is listed before it is made. An entry contains the written
and the original bytes: a reader restores nothing where memory has other bytes.

::

    0  8s  MAGIC
    8  u64 size of the entries in bytes
    16 entries, each   u32 size | JSON   {"memory": [page, own, region, size, [[address, size], ...], [address, size]],
                                          "code": [[start, end], ...],
                                          "writes": [[[address, written, original], ...], ...]}

The pieces of ``writes`` that belong to one jump form one list; bytes are in hexadecimal digits. Memory of a process is
not trusted: data that is not a valid entry is ignored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.engines.ptrace.site_patches import NativeMemory, SitePatch
from dprobes.engines.ptrace.tracer_messages import (
    Lowered,
    MemoryCopied,
    PagesMapped,
    PagesUnmapped,
    Placed,
    Raised,
    Removed,
    Watched,
)

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
    "JumpsPlanned",
    "LeftEntry",
    "MemoryUnmapped",
    "TracerBegun",
    "entries_in",
    "entry_of",
    "length_in",
]

FOR_RESTORERS = (Placed, Removed, Raised, Lowered, Watched, PagesMapped, PagesUnmapped, MemoryCopied)


class TracerBegun(NamedTuple):
    """
    First message to the restorer: the process id of the tracer.

    Frames have the format of ``tracer_messages``. The restorer receives the messages for the client's crash restorer,
    and those of this module.
    """

    pid: int


class FilesShared(NamedTuple):
    """
    A report that files in memory, (device, inode) each, are about to be mapped for handlers.

    Their addresses follow in ``JumpsPlanned``. The private ``page`` of the process, (address, size), is already mapped,
    unless its size is 0.
    """

    pid: int
    files: tuple[tuple[int, int], ...]
    page: tuple[int, int] = (0, 0)


class JumpsPlanned(NamedTuple):
    """
    A report that ``pages``, (start, end) each, are about to be mapped for code, and jumps to be written.

    They belong to handlers that use ``memory``.
    """

    pid: int
    memory: NativeMemory
    pages: tuple[tuple[int, int], ...]
    patches: tuple[SitePatch, ...]


class MemoryUnmapped(NamedTuple):
    """A report that a process has unmapped the memory of ``JumpsPlanned`` at a ``region``, and the pages for code."""

    pid: int
    region: int


MANIFEST_FILE_NAME = "dprobes-left"
"""Name of the memory file; the mapping is shown as ``/memfd:dprobes-left (deleted)``."""
MANIFEST_SIZE = 32 << 20
"""Size of the mapping in bytes; pages that are never written take no memory."""

MANIFEST_MAGIC = b"DPROBES1"
MANIFEST_LENGTH, ENTRIES = 8, 16
_SIZE = struct.Struct("=I")
_LENGTH = struct.Struct("=Q")
_WORD_MAX = (1 << 63) - 1
_PIECE_MAX = 64
"""Maximum size of a piece of a jump in bytes."""


class LeftEntry(NamedTuple):
    """Memory of handlers, the ranges of their ``code``, (start, end) each, and the jumps and breakpoints for them."""

    memory: NativeMemory
    code: tuple[tuple[int, int], ...]
    writes: tuple[SitePatch, ...]


def entry_of(
    memory: NativeMemory,
    code: Sequence[tuple[int, int]],
    patches: Sequence[SitePatch],
    breakpoints: Sequence[tuple[int, int]],
) -> bytes:
    """
    Return the bytes of a manifest entry, by which another process can undo the writes of a killed tracer.

    ``code`` has pages of code as (start, end). ``breakpoints`` has pairs of address and original byte.
    """
    import json  # the tracer of a run without jumps does not need it

    writes = [
        [[address, data.hex(), original.hex()] for (address, data), original in zip(p.writes, p.originals, strict=True)]
        for p in patches
    ]
    writes += [[[address, "cc", f"{original:02x}"]] for address, original in breakpoints]
    named = [memory.page, memory.own, memory.region, memory.size, memory.others, memory.manifest]
    text = json.dumps({"memory": named, "code": code, "writes": writes}).encode()
    return _SIZE.pack(len(text)) + text


def length_in(head: bytes) -> int | None:
    """Return the size in bytes of the entries from the header before them, or None if the header is invalid."""
    if len(head) < ENTRIES or not head.startswith(MANIFEST_MAGIC):
        return None
    length = int(_LENGTH.unpack_from(head, MANIFEST_LENGTH)[0])
    return length if length <= MANIFEST_SIZE - ENTRIES else None


def entries_in(data: bytes) -> Iterator[LeftEntry]:
    """Iterate over the entries in ``data``, the bytes after the header, up to the first invalid one."""
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
