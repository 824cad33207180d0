"""
The memory of a process whose mappings nobody tells, as its own words lead to it.

What is loaded is known by its ELF headers in memory. Around everything else that a register or the dynamic linker's
list points to, pages are tried one by one until one cannot be read.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from typing import TYPE_CHECKING

from dprobes.engines.core.corefile import Segment
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.processmaps import PAGE_SIZE, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.gdb.target import StubTarget

__all__ = ["FoundMemory"]

_AROUND = 256
"""How many pages in either direction are tried around an address."""
_STACK = 2048
"""How many are tried above a stack pointer."""
_PT_LOAD = 1
_HEADERS_MAX = 1024


class _Layout(NamedTuple):
    """Where the program headers are told in an ELF header, and what is in one of them (elf(5))."""

    table: tuple[str, int]
    counts: int
    entry: str


_LAYOUTS = {8: _Layout(("Q", 32), 54, "IIQQQQQQ"), 4: _Layout(("I", 28), 42, "IIIIIIII")}


class FoundMemory:
    """The memory that was found in a ``target`` with words of ``word_size`` bytes: ``segments``, and the ``files``."""

    def __init__(self, target: StubTarget, word_size: int) -> None:
        self._target = target
        self._layout = _LAYOUTS[word_size]
        self._word_size = word_size
        self._order = "<" if target.byte_order == "little" else ">"
        self._segments: list[tuple[int, Segment]] = []
        self.files: list[Mapping] = []

    @property
    def segments(self) -> list[Segment]:
        """What was found, in order of addresses."""
        return [segment for _, segment in self._segments]

    def add_file(self, header: int, path: str) -> int:
        """
        Add what is loaded of the file whose ELF header is at an address, and return where that ends.

        Of what is not writable only the headers are in a core file: the rest is as in the file.
        """
        end = header
        loaded = list(self._load_segments(header))
        first = next((vaddr for _, offset, vaddr, _ in loaded if offset == 0), 0)
        bias = header - (first & -PAGE_SIZE)
        for flags, offset, vaddr, size in loaded:
            start, end = bias + vaddr & -PAGE_SIZE, -(-(bias + vaddr + size) // PAGE_SIZE) * PAGE_SIZE
            permissions = "".join(letter if flags & bit else "-" for bit, letter in ((4, "r"), (2, "w"), (1, "x")))
            stored = end - start if flags & 2 else PAGE_SIZE * (start == header)
            self._add(Segment(start, end, f"{permissions}p", stored))
            if path:
                place = (start, end, f"{permissions}p", offset & -PAGE_SIZE, 0, 0, path)
                self.files.append(Mapping(*place, deleted=False))
        return end

    def _load_segments(self, header: int) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over flags, file offset, address and size of what is loaded of a file."""
        (word, at), counts, entry = self._layout
        head = self._target.read(header, 64)
        if len(head) < 64 or head[:4] != b"\x7fELF":
            return
        (table,) = struct.unpack_from(f"{self._order}{word}", head, at)
        size, count = struct.unpack_from(f"{self._order}HH", head, counts)
        form = struct.Struct(f"{self._order}{entry}")
        data = self._target.read(header + table, size * min(count, _HEADERS_MAX))
        for place in range(0, len(data) - form.size + 1, size or form.size):
            fields = form.unpack_from(data, place)
            if fields[0] == _PT_LOAD:
                if self._word_size == 8:
                    _, flags, offset, vaddr, _, _, in_memory, _ = fields
                else:
                    _, offset, vaddr, _, _, in_memory, flags, _ = fields
                yield flags, offset, vaddr, in_memory

    def add_stack(self, pointer: int) -> None:
        """Add the memory above a stack pointer, and its page."""
        self._explore(pointer, 0, _STACK)

    def add_around(self, addresses: Iterable[int]) -> None:
        """Add the memory around addresses, where there is any."""
        for address in addresses:
            self._explore(address, _AROUND, _AROUND)

    def _explore(self, address: int, below: int, above: int) -> None:
        page = address & -PAGE_SIZE
        if page <= 0 or page >> 8 * self._word_size or not self._is_new(page):
            return
        start = end = page
        while end < page + above * PAGE_SIZE and self._is_new(end):
            end += PAGE_SIZE
        while start > page - below * PAGE_SIZE and self._is_new(start - PAGE_SIZE):
            start -= PAGE_SIZE
        self._add(Segment(start, end, "rw-p", end - start))

    def _is_new(self, page: int) -> bool:
        """Return whether there is memory that is in no segment yet."""
        number = bisect_right(self._segments, page, key=_start_of) - 1
        is_known = number >= 0 and page < self._segments[number][1].end
        return not is_known and len(self._target.read_anew(page, 1)) == 1

    def _add(self, segment: Segment) -> None:
        """Add a segment; one of a file may begin in the page in which the one before it ends, and counts there."""
        number = bisect_right(self._segments, segment.start, key=_start_of) - 1
        if number >= 0 and segment.start < (before := self._segments[number][1]).end:
            size = min(before.size, segment.start - before.start)
            self._segments[number] = (before.start, Segment(before.start, segment.start, before.permissions, size))
        insort(self._segments, (segment.start, segment), key=_start_of)


def _start_of(entry: tuple[int, Segment]) -> int:
    return entry[0]
