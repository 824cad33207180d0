"""
The local descriptor table of a process: only the process itself can ask the kernel for it (modify_ldt(2)).

A descriptor is 8 bytes (Intel SDM, volume 3, 3.4.5), from the lowest bit on::

    limit 0-15 | base 0-23 | type (4) | 1: code or data | privilege (2) | present | limit 16-19
    | for programs | 64-bit | 32-bit | limit counts pages | base 24-31
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.linux.ptracecalls import SegmentDescriptor
from dprobes.engines.ptrace.tracer.injection import MMAP, MODIFY_LDT, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.processes import ThreadGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.linux.ptracecalls import RemoteMemory
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["LocalTables", "decode_descriptor"]

_READ = 0

_PROT_READ_WRITE = 0x3
_MAP_PRIVATE_ANONYMOUS = 0x22
_SIZE = 8


class LocalTables:
    """Look descriptors up in the tables of stopped threads; ``warn`` is told where that is not possible."""

    def __init__(self, stopper: Stopper, memory: RemoteMemory, warn: Callable[[str, str | None], None]) -> None:
        self._stopper = stopper
        self._memory = memory
        self._warn = warn

    def descriptor(self, thread: Thread, index: int) -> SegmentDescriptor | None:
        """
        Return the descriptor with an index in the table of a thread that stands at a breakpoint, None if there is none.

        The thread is made to ask for it, every time: the program may change its table. Raise ``ProcessLookupError`` if
        the thread is killed meanwhile.
        """
        if not may_inject(thread):
            self._cannot(thread, "a seccomp filter or a shadow stack forbids to make it do system calls")
            return None
        try:
            with self._stopper.others_stopped(thread.space, thread):
                data = self._ask(thread, index)
        except InjectionError as error:
            self._cannot(thread, str(error))
            return None
        except ThreadGoneError as gone:
            self._stopper.defer(thread.tid, gone.status)
            raise ProcessLookupError from gone
        return decode_descriptor(data) if len(data) == _SIZE else None

    def _ask(self, thread: Thread, index: int) -> bytes:
        word_size, size = thread.space.word_size, (index + 1) * _SIZE
        with injecting(thread) as call:
            buffer = call(MMAP[word_size], 0, size, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
            if -4096 < buffer < 0:
                raise InjectionError("its address space has no room")
            # The whole table up to the descriptor; what lies behind the table's end is zeros.
            filled = call(MODIFY_LDT[word_size], _READ, buffer, size)
            data = self._memory.read(thread.tid, buffer + index * _SIZE, _SIZE) if filled == size else b""
            call(MUNMAP[word_size], buffer, size)
        return data

    def _cannot(self, thread: Thread, why: str) -> None:
        self._warn(f"the local descriptor table of process {thread.pid} cannot be read: {why}", None)


def decode_descriptor(data: bytes) -> SegmentDescriptor | None:
    """Return the descriptor in 8 bytes of a table; None for one that programs cannot use."""
    bits = int.from_bytes(data, "little")
    kind = bits >> 40 & 0xF
    is_segment, privilege, is_present = bits >> 44 & 1, bits >> 45 & 3, bits >> 47 & 1
    if not (is_segment and is_present and privilege == 3):
        return None
    is_code = bool(kind & 8)
    return SegmentDescriptor(
        base=(bits >> 16 & 0xFFFFFF) | (bits >> 56 & 0xFF) << 24,
        limit=(bits & 0xFFFF) | (bits >> 48 & 0xF) << 16,
        is_32_bit=bits >> 54 & 1,
        contents=kind >> 2,
        read_exec_only=not kind & 2,
        limit_in_pages=bits >> 55 & 1,
        not_present=False,
        usable=bits >> 52 & 1,
        lm=is_code and bits >> 53 & 1,
    )
