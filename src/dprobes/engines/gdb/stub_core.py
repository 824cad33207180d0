"""
Core files of a process that a stub serves. The process is stopped while its core file is written.

If the stub can read files of its machine, ``/proc`` there determines the memory in the core file, as for other
processes. Otherwise the memory is found through pointers (``FoundMemory``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.core.core_file import PROCESSORS, CoreProcess, CoreThread, Note, Segment, image_of, signal_info_at
from dprobes.platform.core.core_writer import (
    CoreContents,
    CorePart,
    CoreRequest,
    HeldThread,
    contents_of,
    page_exists,
    write_contents,
)
from dprobes.target.process_maps import PAGE_SIZE, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_process import StubProcess
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor
    from dprobes.engines.gdb.stub_requests import Stub
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.platform.core.core_file import CoreProcessor

__all__ = ["FoundMemory", "StubCore", "open_remote", "read_remote"]

_AROUND = 256
"""Number of pages in either direction that are tried around an address."""
_STACK = 2048
"""Number of pages that are tried above a stack pointer."""
_PT_LOAD = 1
_HEADERS_MAX = 1024


class _Layout(NamedTuple):
    """Positions of the program headers' fields in an ELF header, and the format of a program header (elf(5))."""

    table: tuple[str, int]
    counts: int
    entry: str


_LAYOUTS = {8: _Layout(("Q", 32), 54, "IIQQQQQQ"), 4: _Layout(("I", 28), 42, "IIIIIIII")}


class FoundMemory:
    """
    Memory of a process whose mappings are unknown: ``segments`` found through its own pointers, and ``files``.

    Loaded files are recognized by their ELF headers in memory. Around any other address in a register or in the dynamic
    linker's list, pages are tried one by one until one cannot be read. ``word_size`` is the word size of the
    ``target``.
    """

    def __init__(self, target: StubTarget, word_size: int) -> None:
        self._target = target
        self._layout = _LAYOUTS[word_size]
        self._word_size = word_size
        self._order = "<" if target.byte_order == "little" else ">"
        self._segments: list[tuple[int, Segment]] = []
        self.files: list[Mapping] = []

    @property
    def segments(self) -> list[Segment]:
        """Found segments, in order of addresses."""
        return [segment for _, segment in self._segments]

    def add_file(self, header: int, path: str) -> int:
        """
        Add the segments of a file whose ELF header is at an address; return the end of the last one.

        Segments that are not writable are as in the file, so the core file has only their page with the ELF header.
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
        """Iterate over flags, file offset, address and size of the loadable segments of a file."""
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
        """Add the page of a stack pointer, and the memory above it."""
        self._explore(pointer, 0, _STACK)

    def add_around(self, addresses: Iterable[int]) -> None:
        """Add the memory around addresses, as far as it exists."""
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
        """Return whether a page exists that is in no segment yet."""
        number = bisect_right(self._segments, page, key=_start_of) - 1
        is_known = number >= 0 and page < self._segments[number][1].end
        return not is_known and len(self._target.read_anew(page, 1)) == 1

    def _add(self, segment: Segment) -> None:
        """Add a segment. If it begins in the last page of the segment before, cut off that page."""
        number = bisect_right(self._segments, segment.start, key=_start_of) - 1
        if number >= 0 and segment.start < (before := self._segments[number][1]).end:
            size = min(before.size, segment.start - before.start)
            self._segments[number] = (before.start, Segment(before.start, segment.start, before.permissions, size))
        insort(self._segments, (segment.start, segment), key=_start_of)


def _start_of(entry: tuple[int, Segment]) -> int:
    return entry[0]


# Files of a stub's machine are read by the packets of GDB manual, appendix E.7 ("Host I/O Packets"). gdbserver has
# them, and QEMU since 8.1. Errors are raised as ``OSError``, with GDB's numbers, which are a subset of Linux's
# (appendix E.13.7, "Errno Values").


_CHUNK = 0x1000
_FILE_MAX = 64 << 20


class RemoteFile:
    """An open file, by the number that the stub gave it."""

    def __init__(self, stub: Stub, number: int) -> None:
        self._stub = stub
        self._number = number

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes from an offset on; fewer at the end of the file."""
        data = bytearray()
        while len(data) < size:
            count = min(_CHUNK, size - len(data))
            _, piece = _asked(self._stub, f"pread:{self._number:x},{count:x},{offset + len(data):x}")
            if not piece:
                break
            data += piece[:count]
        return bytes(data)

    def close(self) -> None:
        """Close the file in the stub."""
        _asked(self._stub, f"close:{self._number:x}")


@contextlib.contextmanager
def open_remote(stub: Stub, path: str) -> Iterator[RemoteFile]:
    """
    Open the file ``path`` on the stub's machine for reading, until the end of the context.

    Raise OSError if there is none, or the stub does not support files.
    """
    number, _ = _asked(stub, f"open:{os.fsencode(path).hex()},0,0")
    file = RemoteFile(stub, number)
    try:
        yield file
    finally:
        file.close()


def read_remote(stub: Stub, path: str) -> bytes:
    """Return the contents of the file ``path`` on the stub's machine; raise OSError if it cannot be read."""
    with open_remote(stub, path) as file:
        return file.read_at(0, _FILE_MAX)


def _asked(stub: Stub, what: str) -> tuple[int, bytes]:
    """
    Return the result and the attached data in a stub's answer to the ``vFile`` request ``what``.

    Raise OSError with the stub's error, or ENOSYS if it does not support these requests.
    """
    answer = stub.ask_if_known_kind("vFile", f"vFile:{what}")
    if answer is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    numbers, _, data = answer.partition(b";")
    result, _, problem = numbers.decode("ascii", "replace").removeprefix("F").partition(",")
    try:
        number, code = int(result, 16), int(problem or "0", 16)
    except ValueError:
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO)) from None
    if number < 0:
        raise OSError(code, os.strerror(code))
    return number, data


_BASES = ("fs_base", "gs_base", "tpidr_el0")
"""Registers that point to the thread-local storage of a thread, if no general register does."""


@dataclass(frozen=True, slots=True)
class StubCore:
    """Core file of a ``process``, whose ``thread`` with the ``registers`` has hit a probepoint at ``at``."""

    target: StubTarget
    processor: StubProcessor
    architecture: str
    process: StubProcess
    thread: ThreadId | None
    registers: Registers
    at: int

    def write(self, output: int) -> int:
        """Write the core to a new, empty file, and return its size in bytes; raise OSError if it cannot be written."""
        layout = PROCESSORS[self.architecture]
        states = tuple(self._states(layout))
        threads = tuple(state for state, _ in states)
        request = CoreRequest(max(self.process.pid, 1), layout, threads, signal_info_at(layout, self.at))
        stub = self.target.stub
        with contextlib.ExitStack() as open_files:
            pages = None
            with contextlib.suppress(OSError):
                pages = open_files.enter_context(open_remote(stub, f"/proc/{self.process.pid}/pagemap"))
            memory = _StubMemory(self.target, pages, layout.prefix)
            try:
                contents = contents_of(request, lambda path: read_remote(stub, path), memory)
            except OSError:
                contents = self._found(request, [registers for _, registers in states])
            return write_contents(contents, memory, output)

    def _states(self, layout: CoreProcessor) -> Iterator[tuple[HeldThread, Registers]]:
        """Iterate over the threads and their registers. The thread that has the hit is the first one."""
        yield self._state(layout, self.thread, self.registers), self.registers
        for thread in self.target.stub.threads():
            if thread != self.thread:
                registers = self.target.registers(thread)
                yield self._state(layout, thread, registers), registers

    def _state(self, layout: CoreProcessor, thread: ThreadId | None, registers: Registers) -> HeldThread:
        def value(name: str) -> int | None:
            return registers[name] if name in registers else None  # noqa: SIM401 - it has no get

        more = tuple(
            Note(kind, image_of(fields, layout.order, value))
            for kind, fields in layout.more
            if any(name in registers for field in fields for name in field.names)
        )
        tid = self.process.pid if thread is None else thread.thread
        return HeldThread(max(tid, 1), image_of(layout.general, layout.order, value), more)

    def _found(self, request: CoreRequest, registers: list[Registers]) -> CoreContents:
        """Return the contents that can be determined without files: loaded segments, and memory that is pointed to."""
        layout = request.processor
        found = FoundMemory(self.target, layout.word_size)
        for number, (header, path) in enumerate(self.process.files_in_memory()):
            end = found.add_file(header, path)
            if not number:
                heap = end
        found.add_around(self.process.linker_entries())
        for each in registers:
            found.add_stack(each[self.processor.sp])
        found.add_around([heap])
        for each in registers:
            names = [name for field in layout.general for name in field.names]
            found.add_around(each[name] for name in (*names, *_BASES) if name in each)
        whole = CoreProcess(
            processor=layout,
            pid=request.pid,
            parent=0,
            group=0,
            session=0,
            uid=self.process.uid,
            gid=0,
            name=self.process.name,
            arguments=os.fsencode(self.process.program),
            auxv=self.target.stub.read_object("auxv") or b"",
            signal_info=request.signal_info,
        )
        threads = [CoreThread(each.tid, each.registers, each.more) for each in request.threads]
        return CoreContents(whole, threads, found.files, [CorePart(each, False) for each in found.segments])


class _StubMemory:
    """Memory of a target; ``pages`` is its pagemap file in the byte order ``order``, None if the stub has no files."""

    def __init__(self, target: StubTarget, pages: RemoteFile | None, order: str) -> None:
        self._target, self._pages, self._order = target, pages, order

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of memory; fewer if some cannot be read."""
        return self._target.read_anew(address, size)

    def has_any(self, start: int, size: int) -> bool:
        """Return True if a page of the range exists, or if that is unknown."""
        if self._pages is None:
            return True
        count = size // PAGE_SIZE
        try:
            return page_exists(self._pages.read_at(start // PAGE_SIZE * 8, 8 * count), count, self._order)
        except OSError:
            return True
