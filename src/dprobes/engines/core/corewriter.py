"""
Writing a core file whose contents are known, with the memory from whoever can read it.

Pages that the process never touched become holes in the file, and so do pages of zeros.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from dprobes.engines.core.corefile import notes, place
from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.core.corefile import CoreProcess, CoreThread, Segment
    from dprobes.target.processmaps import Mapping

__all__ = ["CoreContents", "CoreMemory", "CorePart", "write_contents"]

_CHUNK = 1 << 20
_ZEROS = bytes(PAGE_SIZE)


class CoreMemory(Protocol):
    """The memory of a process that stands still, without breakpoints."""

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of memory; fewer if they cannot all be read."""

    def has_any(self, start: int, size: int) -> bool:
        """Return whether one of these pages exists, or may."""


class CorePart(NamedTuple):
    """A mapping; ``may_be_empty`` says whether pages of it that do not exist can only be zeros."""

    segment: Segment
    may_be_empty: bool


@dataclass(frozen=True, slots=True)
class CoreContents:
    """Say what is in a core file; the first of ``threads`` is the one that a debugger shows first."""

    process: CoreProcess
    threads: Sequence[CoreThread]
    files: Sequence[Mapping]
    parts: Sequence[CorePart]


def write_contents(contents: CoreContents, memory: CoreMemory, output: int) -> int:
    """Write a core file to a new, empty file, and return its size; raise OSError if it cannot be written."""
    process = contents.process
    note_bytes = notes(process, contents.threads, contents.files)
    layout = place(process.processor, note_bytes, [part.segment for part in contents.parts])
    _write(output, layout.head, 0)
    for part, offset in zip(contents.parts, layout.offsets, strict=True):
        _copy(part, memory, output, offset)
    os.ftruncate(output, layout.size)
    return layout.size


def _copy(part: CorePart, memory: CoreMemory, output: int, offset: int) -> None:
    segment = part.segment
    end = segment.start + segment.size
    for start in range(segment.start, end, _CHUNK):
        size = min(_CHUNK, end - start)
        if part.may_be_empty and not memory.has_any(start, size):
            continue
        data = _read_all(memory, start, size)
        for first, last in _filled(data):
            _write(output, data[first:last], offset + start - segment.start + first)


def _read_all(memory: CoreMemory, start: int, size: int) -> bytes:
    """Return memory with zeros where it cannot be read, such as behind the end of a mapped file."""
    data = memory.read(start, size)
    if len(data) == size:
        return data
    pages = (memory.read(address, PAGE_SIZE) for address in range(start, start + size, PAGE_SIZE))
    return b"".join(page.ljust(PAGE_SIZE, b"\0") for page in pages)


def _filled(data: bytes) -> Iterator[tuple[int, int]]:
    """Iterate over the runs of pages that are not all zeros."""
    if not any(data[:PAGE_SIZE]) and not data.strip(b"\0"):
        return
    first: int | None = None
    for position in range(0, len(data), PAGE_SIZE):
        empty = data[position : position + PAGE_SIZE] == _ZEROS
        if empty and first is not None:
            yield first, position
            first = None
        elif not empty and first is None:
            first = position
    if first is not None:
        yield first, len(data)


def _write(output: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(output, rest, offset)
        rest, offset = rest[count:], offset + count
