"""
What ``/proc`` says of a process for its core file: who it is, its threads, and which memory belongs into the file.

The files may be those of this machine, or of another one: ``read`` returns the contents of one by its path, and raises
OSError where there is none.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING

from dprobes.engines.core.corefile import (
    CoreProcess,
    CoreThread,
    Extent,
    Note,
    Segment,
    extent,
    parse_smaps,
)
from dprobes.engines.core.corewriter import CoreContents, CorePart
from dprobes.lazydataclass import dataclass
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.core.corefile import Area
    from dprobes.engines.core.corewriter import CoreMemory
    from dprobes.engines.core.processors import CoreProcessor

    Reader = Callable[[str], bytes]

__all__ = ["CoreRequest", "ThreadState", "contents_of", "page_exists"]

_DEFAULT_FILTER = 0x33  # core(5)
_PRESENT_OR_SWAPPED = 3 << 62  # Documentation/admin-guide/mm/pagemap.rst


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Hold what is known of a thread; without ``registers`` it is one that could not be stopped."""

    tid: int
    registers: bytes
    more: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """
    Say what is to be written: a process whose threads are all stopped, the first of ``threads`` being the one that hit.

    ``left_out`` is memory of ours, (start, end) each.
    """

    pid: int
    processor: CoreProcessor
    threads: tuple[ThreadState, ...]
    signal_info: bytes
    left_out: Sequence[tuple[int, int]] = ()


def contents_of(request: CoreRequest, read: Reader, memory: CoreMemory) -> CoreContents:
    """Return what belongs into the file; raise OSError if the process is gone."""
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
    """Return whether one of so many pages exists, by their entries in ``/proc/PID/pagemap`` (proc(5)), in an order."""
    if len(entries) < 8 * count:
        return True  # the kernel does not say
    return any(entry & _PRESENT_OR_SWAPPED for entry in struct.unpack_from(f"{order}{count}Q", entries))


def _is_left_out(request: CoreRequest, area: Area) -> bool:
    """Return whether a mapping is none of the program's, or no memory."""
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
    """Return the fields of a ``stat`` file from the fourth on (proc(5)), as numbers."""
    return [int(value) for value in read(path).rpartition(b")")[2].split()[1:]]


def _status(read: Reader, tid: int) -> dict[str, str]:
    """Return the fields of a ``status`` file."""
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
    """Return the vector up to its end mark; the kernel gives more for an i386 program."""
    for position in range(0, len(data), 2 * word_size):
        if not any(data[position : position + word_size]):
            return data[: position + 2 * word_size]
    return data


def _threads(request: CoreRequest, read: Reader) -> Iterator[CoreThread]:
    """Iterate over the threads that have not just ended, as one that is about to when it is stopped does."""
    for state in request.threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield _thread(request, state, read)


def _thread(request: CoreRequest, state: ThreadState, read: Reader) -> CoreThread:
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


# Where proc(5), /proc/PID/syscall, shows the number, six arguments, stack pointer and program counter in the words of
# user_regs_struct: orig_rax rdi rsi rdx r10 r8 r9 rsp rip; orig_eax ebx ecx edx esi edi ebp esp eip.
_SYSCALL_WORDS = {8: (15, 14, 13, 12, 7, 9, 8, 19, 16), 4: (11, 0, 1, 2, 3, 4, 5, 15, 12)}


def _registers_of_sleeper(processor: CoreProcessor, path: str, read: Reader) -> bytes:
    """Return what is known of the registers of a thread that is deep in the kernel, on x86."""
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
