"""
Collection of the data for a process's core file from ``/proc``: ids, threads, and the memory to be written.

The process may run on this machine or on another one: all files are read through ``read``, which returns the contents
of the file at a path, and raises OSError if the file does not exist.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from dprobes.platform.core.core_file import (
    CoreProcess,
    CoreThread,
    Extent,
    Note,
    NoteType,
    Segment,
    extent,
    notes,
    parse_smaps,
    place,
)
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import RegisterSet
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from collections.abc import Mapping as AbstractMapping

    from dprobes.platform.core.core_file import Area, CoreProcessor
    from dprobes.target.process_maps import Mapping

__all__ = [
    "POINTER",
    "CoreContents",
    "CorePart",
    "CoreRequest",
    "HeldThread",
    "contents_of",
    "create_core_file",
    "page_exists",
    "register_sets_of",
    "write_contents",
    "write_core",
]

_CHUNK = 1 << 20
_ZEROS = bytes(PAGE_SIZE)


class CoreMemory(Protocol):
    """
    Memory of a stopped process, without breakpoints.

    Pages that the process never touched become holes in the file, and so do pages of zeros.
    """

    def read(self, address: int, size: int) -> bytes:
        """
        Return up to ``size`` bytes of memory, with the original code at breakpoints.

        Fewer if some cannot be read.
        """

    def has_any(self, start: int, size: int) -> bool:
        """Return True if the process has touched a page of the range, or if that is unknown."""


class CorePart(NamedTuple):
    """
    Mapping in a core file.

    If ``may_be_empty`` is True, a page that the process has never touched contains only zeros, and need not be read.
    """

    segment: Segment
    may_be_empty: bool


@dataclass(frozen=True, slots=True)
class CoreContents:
    """Contents of a core file. A debugger selects the first thread."""

    process: CoreProcess
    threads: Sequence[CoreThread]
    files: Sequence[Mapping]
    parts: Sequence[CorePart]


def write_contents(contents: CoreContents, memory: CoreMemory, output: int) -> int:
    """
    Write a core file to the empty file with the descriptor ``output``, and return its size in bytes.

    Raise OSError if a write fails.
    """
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
    """
    Return memory, with zeros for unreadable bytes, such as those after the end of a mapped file.

    ``size`` is a multiple of the page size.
    """
    data = memory.read(start, size)
    if len(data) == size:
        return data
    pages = (memory.read(address, PAGE_SIZE) for address in range(start, start + size, PAGE_SIZE))
    return b"".join(page.ljust(PAGE_SIZE, b"\0") for page in pages)


def _filled(data: bytes) -> Iterator[tuple[int, int]]:
    """Iterate over the runs of pages that are not all zeros: offsets of their start and end (excluded) in ``data``."""
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


if TYPE_CHECKING:
    Reader = Callable[[str], bytes]

_DEFAULT_FILTER = 0x33  # core(5)
_PRESENT_OR_SWAPPED = 3 << 62  # Documentation/admin-guide/mm/pagemap.rst


@dataclass(frozen=True, slots=True)
class HeldThread:
    """State of a stopped thread for a core file. ``registers`` is empty if the thread could not be stopped."""

    tid: int
    registers: bytes
    more: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """
    Request for a core file of a process whose threads are all stopped.

    The first one of ``threads`` had the hit. ``left_out`` has the ranges (start, end) of memory that dprobes mapped
    into the process; the core file omits them.
    """

    pid: int
    processor: CoreProcessor
    threads: tuple[HeldThread, ...]
    signal_info: bytes
    left_out: Sequence[tuple[int, int]] = ()


def contents_of(request: CoreRequest, read: Reader, memory: CoreMemory) -> CoreContents:
    """
    Return the contents of the requested core file; raise OSError if the process has ended.

    ``read`` returns the contents of the file in ``/proc`` with a given path.
    """
    tid = request.threads[0].tid
    areas = list(parse_smaps(os.fsdecode(read(f"/proc/{tid}/smaps"))))
    wanted = _filter(read, tid)
    parts = [
        CorePart(_segment(memory, area, extent(area, wanted)), area.is_private_anonymous and "ht" not in area.flags)
        for area in areas
        if not _is_left_out(request, area)
    ]
    files = [area.mapping for area in areas if area.mapping.is_file]
    return CoreContents(_process(request, read), list(_threads(request, read)), files, parts)


def page_exists(entries: bytes, count: int, order: str = "=") -> bool:
    """
    Return True if one of ``count`` pages is in memory or swapped out, or may be.

    ``entries`` has their ``/proc/PID/pagemap`` entries (proc(5)); if it is too short, a page may exist. ``order`` is
    the byte order, as a character of ``struct``.
    """
    if len(entries) < 8 * count:
        return True  # the kernel does not show it
    return any(entry & _PRESENT_OR_SWAPPED for entry in struct.unpack_from(f"{order}{count}Q", entries))


def _is_left_out(request: CoreRequest, area: Area) -> bool:
    """Return True if dprobes mapped all of a mapping, or if it is the vsyscall page."""
    mapping = area.mapping
    covered = mapping.start
    for start, end in sorted(request.left_out):
        if start <= covered < end:
            covered = end
    return covered >= mapping.end or mapping.path == "[vsyscall]"


def _segment(memory: CoreMemory, area: Area, how: Extent) -> Segment:
    mapping = area.mapping
    size = 0
    if how is Extent.WHOLE:
        size = mapping.end - mapping.start
    elif how is Extent.ELF_HEADER and memory.read(mapping.start, 4) == b"\x7fELF":
        size = PAGE_SIZE
    return Segment(mapping.start, mapping.end, mapping.permissions, size)


def _filter(read: Reader, tid: int) -> int:
    try:
        return int(read(f"/proc/{tid}/coredump_filter"), 16)
    except (OSError, ValueError):
        return _DEFAULT_FILTER


def _stat(read: Reader, path: str) -> list[int]:
    """Return the fields of ``/proc/PID/stat`` from the fourth (ppid) on, as numbers (proc(5))."""
    return [int(value) for value in read(path).rpartition(b")")[2].split()[1:]]


def _status(read: Reader, tid: int) -> dict[str, str]:
    """Return the fields of ``/proc/TID/status`` by name."""
    lines = read(f"/proc/{tid}/status").decode("utf-8", "replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _process(request: CoreRequest, read: Reader) -> CoreProcess:
    tid = request.threads[0].tid
    fields, status = _stat(read, f"/proc/{tid}/stat"), _status(read, tid)
    return CoreProcess(
        processor=request.processor,
        pid=request.pid,
        parent=fields[0],
        group=fields[1],
        session=fields[2],
        uid=int(status["Uid"].split()[0]),
        gid=int(status["Gid"].split()[0]),
        name=read(f"/proc/{tid}/comm").rstrip(b"\n"),
        arguments=read(f"/proc/{tid}/cmdline"),
        auxv=_auxiliary_vector(request.processor.word_size, read(f"/proc/{tid}/auxv")),
        signal_info=request.signal_info,
        nice=fields[15],
        flags=fields[5],
    )


def _auxiliary_vector(word_size: int, data: bytes) -> bytes:
    """
    Return the auxiliary vector up to and including AT_NULL.

    For an i386 process, the kernel returns bytes after that.
    """
    for position in range(0, len(data), 2 * word_size):
        if not any(data[position : position + word_size]):
            return data[: position + 2 * word_size]
    return data


def _threads(request: CoreRequest, read: Reader) -> Iterator[CoreThread]:
    """Iterate over the threads of a core file with their register sets, except threads that have ended."""
    for state in request.threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield _thread(request, state, read)


def _thread(request: CoreRequest, state: HeldThread, read: Reader) -> CoreThread:
    path = f"/proc/{request.pid}/task/{state.tid}"
    ticks = os.sysconf("SC_CLK_TCK")
    user, system, children_user, children_system = _stat(read, f"{path}/stat")[10:14]
    status = _status(read, state.tid)
    return CoreThread(
        tid=state.tid,
        registers=state.registers or _registers_of_sleeper(request.processor, path, read),
        more=state.more,
        pending=int(status.get("SigPnd", "0"), 16),
        blocked=int(status.get("SigBlk", "0"), 16),
        times=(user / ticks, system / ticks, children_user / ticks, children_system / ticks),
    )


# Register words for the fields of /proc/PID/syscall (proc(5)): number, six arguments, stack pointer and program
# counter. The numbers are indices of user_regs_struct: orig_rax rdi rsi rdx r10 r8 r9 rsp rip; orig_eax ebx ecx edx esi
# edi ebp esp eip.
_SYSCALL_WORDS = {8: (15, 14, 13, 12, 7, 9, 8, 19, 16), 4: (11, 0, 1, 2, 3, 4, 5, 15, 12)}


def _registers_of_sleeper(processor: CoreProcessor, path: str, read: Reader) -> bytes:
    """
    Return the general registers of an x86 thread that sleeps in a system call, from ``/proc/TID/syscall``.

    Registers that this file does not show are 0.
    """
    size = processor.word_size
    words = [0] * (processor.general_size // size)
    try:
        values = [int(value, 0) for value in os.fsdecode(read(f"{path}/syscall")).split()]
    except (OSError, ValueError):
        values = []
    if len(values) == len(_SYSCALL_WORDS[size]):
        for word, value in zip(_SYSCALL_WORDS[size], values, strict=True):
            words[word] = value & (1 << 8 * size) - 1
    return struct.pack(f"{processor.prefix}{len(words)}{processor.word}", *words)


# The core file of a stopped process of this machine, written in a separate process, a child of the tracer.
#
# The tracer provides only what requires ptrace. Everything else is read from ``/proc`` here, because that takes a while
# for a large process.


def write_core(request: CoreRequest, descriptor: int, hidden: AbstractMapping[int, int], output: int) -> int:
    """
    Write a core file to the empty file with the descriptor ``output``, and return its size in bytes.

    ``descriptor`` is an open ``/proc/PID/mem``. ``hidden`` has the original bytes at breakpoints, by address. Raise
    OSError if a write fails.
    """
    with _LocalMemory(request.threads[0].tid, descriptor, hidden) as memory:
        return write_contents(contents_of(request, _bytes, memory), memory, output)


class _LocalMemory:
    """
    Memory of a process on this machine, through ``/proc/PID/mem`` and ``pagemap``.

    If ``pagemap`` cannot be read, all pages count as touched.
    """

    def __init__(self, tid: int, descriptor: int, hidden: AbstractMapping[int, int]) -> None:
        self._descriptor, self._hidden, self._addresses = descriptor, hidden, sorted(hidden)
        try:
            self._pages = os.open(f"/proc/{tid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pages = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pages >= 0:
            os.close(self._pages)

    def has_any(self, start: int, size: int) -> bool:
        """Return True if the process has touched one of the pages, by ``/proc/PID/pagemap``."""
        count = size // PAGE_SIZE
        if self._pages < 0:
            return True
        try:
            return page_exists(os.pread(self._pages, 8 * count, start // PAGE_SIZE * 8), count)
        except OSError:
            return True

    def read(self, address: int, size: int) -> bytes:
        """
        Return memory, with the original code instead of breakpoints.

        Return no bytes if the memory cannot be read.
        """
        try:
            data = os.pread(self._descriptor, size, address)
        except (OSError, OverflowError):
            return b""
        mine = [at for at in self._addresses if address <= at < address + len(data)]
        if not mine:
            return data
        clean = bytearray(data)
        for at in mine:
            clean[at - address] = self._hidden[at]
        return bytes(clean)


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


# Work of the process that has stopped the threads: the new file, and the register sets.
#
# It is the same whether the tracer has stopped the threads, or a process that traces them only for the core.


_ATTEMPTS = 1000
"""Maximum number of file names that are tried."""

_MORE_SETS = {
    8: ((RegisterSet.FLOATING_POINT, NoteType.PRFPREG), (RegisterSet.XSTATE, NoteType.XSTATE)),
    4: (
        (RegisterSet.FLOATING_POINT, NoteType.PRFPREG),
        (RegisterSet.FXSAVE_32, NoteType.PRXFPREG),
        (RegisterSet.XSTATE, NoteType.XSTATE),
        (RegisterSet.TLS_32, NoteType.TLS_386),
    ),
}

POINTER: dict[int, tuple[int, str]] = {8: (16 * 8, "=Q"), 4: (12 * 4, "=I")}
"""Offset and format of the instruction pointer in the general registers, by word size."""


def create_core_file(path: str) -> tuple[str, int]:
    """
    Create a file and return its name and descriptor; raise OSError if that fails.

    The name is ``path``, or ``path.N`` if that exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    name = path
    for number in range(1, _ATTEMPTS):
        try:
            return name, os.open(name, flags, 0o600)
        except FileExistsError:
            name = f"{path}.{number}"
    return name, os.open(name, flags, 0o600)


def register_sets_of(tid: int, word_size: int) -> tuple[Note, ...]:
    """Return the notes with the registers of a stopped thread, except the general ones."""
    sets = ((kind, ptrace_calls.get_register_set(tid, which)) for which, kind in _MORE_SETS[word_size])
    return tuple(Note(kind, data) for kind, data in sets if data)
