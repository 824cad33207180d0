"""
Writing the core file of a stopped process. It runs in a process of its own, a child of the tracer.

Only what ptrace alone can tell comes from the tracer; everything else is read from ``/proc`` here, because for a large
process that takes a while. Pages that the process never touched become holes in the file.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Literal, Self

from dprobes.engines.core.corefile import (
    CoreProcess,
    CoreThread,
    Extent,
    Note,
    Segment,
    extent,
    notes,
    parse_smaps,
    place,
)
from dprobes.engines.linux.procfs import process_field
from dprobes.lazydataclass import dataclass
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.core.corefile import Area

__all__ = ["CoreRequest", "ThreadState", "write_core"]

_CHUNK = 1 << 20
_PAGES = _CHUNK // PAGE_SIZE
_ZEROS = bytes(PAGE_SIZE)
_DEFAULT_FILTER = 0x33  # core(5)
_PRESENT_OR_SWAPPED = 3 << 62  # Documentation/admin-guide/mm/pagemap.rst


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Hold what the tracer knows of a thread; without ``registers`` it is one that could not be stopped."""

    tid: int
    registers: bytes
    more: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """
    Say what is to be written: a process whose threads are all stopped, the first of ``threads`` being the one that hit.

    ``memory`` is a descriptor of its memory. ``hidden`` holds the original bytes of breakpoints by address,
    and ``left_out`` is memory of ours, (start, end) each.
    """

    pid: int
    word_size: Literal[4, 8]
    memory: int
    threads: tuple[ThreadState, ...]
    signal_info: bytes
    hidden: Mapping[int, int]
    left_out: Sequence[tuple[int, int]] = ()


def write_core(request: CoreRequest, output: int) -> int:
    """Write the core file to a new, empty file, and return its size; raise OSError if it cannot be written."""
    tid = request.threads[0].tid
    areas = list(parse_smaps(_text(f"/proc/{tid}/smaps")))
    wanted = _filter(tid)
    chosen = [(area, _segment(request, area, extent(area, wanted))) for area in areas]
    chosen = [(area, segment) for area, segment in chosen if not _is_left_out(request, area)]
    files = [area.mapping for area in areas if area.mapping.is_file]
    threads = list(_threads(request))
    layout = place(request.word_size, notes(_process(request), threads, files), [segment for _, segment in chosen])
    _write(output, layout.head, 0)
    hidden = sorted(request.hidden)
    with _PageMap(tid) as pages:
        for (area, segment), offset in zip(chosen, layout.offsets, strict=True):
            if segment.size:
                _copy(request, hidden, area, segment, pages, output, offset)
    os.ftruncate(output, layout.size)
    return layout.size


def _is_left_out(request: CoreRequest, area: Area) -> bool:
    """Return whether a mapping is none of the program's, or no memory."""
    mapping = area.mapping
    covered = mapping.start
    for start, end in sorted(request.left_out):
        if start <= covered < end:
            covered = end
    return covered >= mapping.end or mapping.path == "[vsyscall]"


def _segment(request: CoreRequest, area: Area, how: Extent) -> Segment:
    mapping = area.mapping
    size = 0
    if how is Extent.WHOLE:
        size = mapping.end - mapping.start
    elif how is Extent.ELF_HEADER and _read(request.memory, mapping.start, 4) == b"\x7fELF":
        size = PAGE_SIZE
    return Segment(mapping.start, mapping.end, mapping.permissions, size)


# Memory


class _PageMap:
    """Tell which pages of a process exist (proc(5), ``/proc/PID/pagemap``); all of them if the kernel does not say."""

    def __init__(self, tid: int) -> None:
        try:
            self._descriptor = os.open(f"/proc/{tid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def has_any(self, start: int, size: int) -> bool:
        """Return whether one of the pages exists."""
        count = size // PAGE_SIZE
        if self._descriptor < 0:
            return True
        try:
            data = os.pread(self._descriptor, 8 * count, start // PAGE_SIZE * 8)
        except OSError:
            return True
        if len(data) < 8 * count:
            return True
        return any(entry & _PRESENT_OR_SWAPPED for entry in struct.unpack(f"={count}Q", data))


def _copy(
    request: CoreRequest,
    hidden: Sequence[int],
    area: Area,
    segment: Segment,
    pages: _PageMap,
    output: int,
    offset: int,
) -> None:
    end = segment.start + segment.size
    may_skip = area.is_private_anonymous and "ht" not in area.flags
    for start in range(segment.start, end, _CHUNK):
        size = min(_CHUNK, end - start)
        if may_skip and not pages.has_any(start, size):
            continue
        data = _without_breakpoints(request, hidden, start, _read_all(request.memory, start, size))
        for first, last in _filled(data):
            _write(output, data[first:last], offset + start - segment.start + first)


def _read(memory: int, address: int, size: int) -> bytes:
    try:
        return os.pread(memory, size, address)
    except (OSError, OverflowError):
        return b""


def _read_all(memory: int, start: int, size: int) -> bytes:
    """Return memory with zeros where it cannot be read, such as behind the end of a mapped file."""
    data = _read(memory, start, size)
    if len(data) == size:
        return data
    pages = (_read(memory, address, PAGE_SIZE) for address in range(start, start + size, PAGE_SIZE))
    return b"".join(page.ljust(PAGE_SIZE, b"\0") for page in pages)


def _without_breakpoints(request: CoreRequest, hidden: Sequence[int], start: int, data: bytes) -> bytes:
    mine = [address for address in hidden if start <= address < start + len(data)]
    if not mine:
        return data
    clean = bytearray(data)
    for address in mine:
        clean[address - start] = request.hidden[address]
    return bytes(clean)


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


# What /proc says


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _text(path: str) -> str:
    return os.fsdecode(_bytes(path))


def _filter(tid: int) -> int:
    try:
        return int(_bytes(f"/proc/{tid}/coredump_filter"), 16)
    except (OSError, ValueError):
        return _DEFAULT_FILTER


def _stat(path: str) -> list[int]:
    """Return the fields of a ``stat`` file from the fourth on (proc(5)), as numbers."""
    return [int(value) for value in _bytes(path).rpartition(b")")[2].split()[1:]]


def _process(request: CoreRequest) -> CoreProcess:
    tid = request.threads[0].tid
    fields = _stat(f"/proc/{tid}/stat")
    return CoreProcess(
        word_size=request.word_size,
        pid=request.pid,
        parent=fields[0],
        group=fields[1],
        session=fields[2],
        uid=int(process_field(tid, "Uid").split()[0]),
        gid=int(process_field(tid, "Gid").split()[0]),
        name=_bytes(f"/proc/{tid}/comm").rstrip(b"\n"),
        arguments=_bytes(f"/proc/{tid}/cmdline"),
        auxv=_auxiliary_vector(request.word_size, _bytes(f"/proc/{tid}/auxv")),
        signal_info=request.signal_info,
        nice=fields[15],
        flags=fields[5],
    )


def _auxiliary_vector(word_size: int, data: bytes) -> bytes:
    """Return the vector up to its end mark; the kernel gives more for an i386 program."""
    for position in range(0, len(data), 2 * word_size):
        if not any(data[position : position + word_size]):
            return data[: position + 2 * word_size]
    return data


def _threads(request: CoreRequest) -> Iterator[CoreThread]:
    """Iterate over the threads that have not just ended, as one that is about to when it is stopped does."""
    for state in request.threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield _thread(request, state)


def _thread(request: CoreRequest, state: ThreadState) -> CoreThread:
    path = f"/proc/{request.pid}/task/{state.tid}"
    ticks = os.sysconf("SC_CLK_TCK")
    user, system, children_user, children_system = _stat(f"{path}/stat")[10:14]
    return CoreThread(
        tid=state.tid,
        registers=state.registers or _registers_of_sleeper(request.word_size, path),
        more=state.more,
        pending=int(process_field(state.tid, "SigPnd") or "0", 16),
        blocked=int(process_field(state.tid, "SigBlk") or "0", 16),
        times=(user / ticks, system / ticks, children_user / ticks, children_system / ticks),
    )


# Where proc(5), /proc/PID/syscall, shows the number, six arguments, stack pointer and program counter in the words of
# user_regs_struct: orig_rax rdi rsi rdx r10 r8 r9 rsp rip; orig_eax ebx ecx edx esi edi ebp esp eip.
_SYSCALL_WORDS = {8: (15, 14, 13, 12, 7, 9, 8, 19, 16), 4: (11, 0, 1, 2, 3, 4, 5, 15, 12)}
_WORDS = {8: 27, 4: 17}


def _registers_of_sleeper(word_size: Literal[4, 8], path: str) -> bytes:
    """Return what is known of the registers of a thread that is deep in the kernel."""
    words = [0] * _WORDS[word_size]
    try:
        values = [int(value, 0) for value in _text(f"{path}/syscall").split()]
    except (OSError, ValueError):
        values = []
    if len(values) == len(_SYSCALL_WORDS[word_size]):
        for word, value in zip(_SYSCALL_WORDS[word_size], values, strict=True):
            words[word] = value & (1 << 8 * word_size) - 1
    return struct.pack(f"={len(words)}{'Q' if word_size == 8 else 'I'}", *words)
