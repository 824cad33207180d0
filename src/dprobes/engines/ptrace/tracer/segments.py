"""
Segments: what a selector means in a stopped thread.

User code sees three kinds of selector (Intel SDM, volume 3, 3.4.2; ``arch/x86/include/asm/segment.h``)::

    index of descriptor (13 bits) | table: 0 GDT, 1 LDT | privilege (2 bits)

the kernel's flat user segments and three thread-local ones in the GDT, and the program's own in its LDT, which only the
process itself can ask the kernel for (modify_ldt(2)). A descriptor there is 8 bytes (3.4.5), from the lowest bit on::

    limit 0-15 | base 0-23 | type (4) | 1: code or data | privilege (2) | present | limit 16-19
    | for programs | 64-bit | 32-bit | limit counts pages | base 24-31

In 64-bit code the processor ignores bases and limits, but for the bases of fs and gs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.linux import processcalls, ptracecalls
from dprobes.engines.linux.ptracecalls import Register, SegmentDescriptor
from dprobes.engines.ptrace.tracer.injection import MMAP, MODIFY_LDT, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.state import ThreadGoneError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.vm import SelectorFault

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.engines.ptrace.tracer.stopper import Stopper

    LocalDescriptors = Callable[[Thread, int], SegmentDescriptor | None]
    """A look-up of the descriptor with an index in a thread's table, which may raise ``InjectionError``."""

__all__ = ["LocalTables", "Segments", "decode_descriptor", "no_descriptor"]

_USER_CODE_32, _USER_DATA, _USER_CODE_64 = 4, 5, 6  # indices in the GDT
_LOCAL_TABLE = 4
_PRIVILEGE = 3
_CONTENTS_EXPAND_DOWN, _CONTENTS_CODE = 1, 2

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


class _Segment(NamedTuple):
    """A segment, whose valid offsets are ``first`` to ``last``."""

    base: int
    first: int
    last: int
    readable: bool
    writable: bool


_FLAT_DATA = _Segment(0, 0, _MASK_32, readable=True, writable=True)
_FLAT_CODE = _Segment(0, 0, _MASK_32, readable=True, writable=False)
_FLAT = {_USER_CODE_32: _FLAT_CODE, _USER_DATA: _FLAT_DATA, _USER_CODE_64: _FLAT_CODE}


def no_descriptor(thread: Thread, index: int) -> None:
    """Say that a thread has no local descriptors."""


class Segments:
    """The segments of stopped threads; ``warn`` is told where the ``local`` descriptors cannot be looked up."""

    def __init__(self, local: LocalDescriptors, warn: Callable[[str, str | None], None]) -> None:
        self._local = local
        self._warn = warn

    def linear_address(
        self,
        thread: Thread,
        registers: ctypes.Array[ctypes.c_ulong],
        selector: int,
        offset: int,
        size: int,
        *,
        write: bool,
    ) -> int:
        """
        Return the flat address of ``size`` bytes at ``selector:offset``; 0 bytes stand for the address alone.

        Raise ``SelectorFault`` if the selector names no segment, or the segment does not hold or allow them. In 64-bit
        code, only an unknown selector does so.
        """
        number = selector & 0xFFFF
        if thread.space.word_size == 8:
            return self._base_64(thread, registers, number) + offset & _MASK_64
        segment = self._segment(thread, number)
        allowed = segment.writable if write else segment.readable or not size
        if not allowed or offset < segment.first or offset + max(1, size) - 1 > segment.last:
            raise SelectorFault(number)
        return segment.base + offset & _MASK_32

    def selector_to_load(self, thread: Thread, value: int) -> tuple[int, int]:
        """
        Return the selector to store in ds, es, fs or gs, and the base of its segment, for the value that is wanted.

        Raise ``SelectorFault`` where the processor would refuse to load it, or the kernel to set it
        (``invalid_selector`` in ``arch/x86/kernel/ptrace.c``).
        """
        selector = value & 0xFFFF
        if selector == 0:
            return 0, 0
        if selector & _PRIVILEGE != _PRIVILEGE:
            raise SelectorFault(selector)
        if selector == _PRIVILEGE:
            return selector, 0
        segment = self._segment(thread, selector)
        if not segment.readable:
            raise SelectorFault(selector)
        return selector, segment.base

    def _base_64(self, thread: Thread, registers: ctypes.Array[ctypes.c_ulong], selector: int) -> int:
        if selector <= _PRIVILEGE:
            return 0  # what ds, es, fs and gs hold in most 64-bit programs
        for register, base in ((Register.FS, Register.FS_BASE), (Register.GS, Register.GS_BASE)):
            if registers[register] == selector:
                return registers[base]
        return self._segment(thread, selector).base

    def _segment(self, thread: Thread, selector: int) -> _Segment:
        """Return the segment of a selector, whatever its privilege bits."""
        index = selector >> 3
        if selector & _LOCAL_TABLE:
            descriptor = self._local_descriptor(thread, index)
            if descriptor is None:
                raise SelectorFault(selector)
            return _decoded(descriptor)
        if (flat := _FLAT.get(index)) is not None:
            return flat
        descriptor = ptracecalls.get_thread_area(thread.tid, index) if index else None
        if descriptor is None or descriptor.not_present:
            raise SelectorFault(selector)
        return _decoded(descriptor)

    def _local_descriptor(self, thread: Thread, index: int) -> SegmentDescriptor | None:
        try:
            return self._local(thread, index)
        except InjectionError as problem:
            self._warn(f"the local descriptor table of process {thread.pid} cannot be read: {problem}", None)
            return None


def _decoded(descriptor: SegmentDescriptor) -> _Segment:
    limit = descriptor.limit
    if descriptor.limit_in_pages:
        limit = limit << 12 | 0xFFF
    is_code = bool(descriptor.contents & _CONTENTS_CODE)
    first, last = 0, limit
    if descriptor.contents == _CONTENTS_EXPAND_DOWN:
        first, last = limit + 1, _MASK_32 if descriptor.is_32_bit else 0xFFFF
    only = bool(descriptor.read_exec_only)
    return _Segment(descriptor.base, first, last, readable=not (is_code and only), writable=not (is_code or only))


_READ = 0

_PROT_READ_WRITE = 0x3
_MAP_PRIVATE_ANONYMOUS = 0x22
_SIZE = 8


class LocalTables:
    """The local descriptor tables of stopped threads, each of which is made to ask the kernel for its own."""

    def __init__(self, stopper: Stopper) -> None:
        self._stopper = stopper
        self._memory = processcalls.RemoteMemory()

    def descriptor(self, thread: Thread, index: int) -> SegmentDescriptor | None:
        """
        Return the descriptor with an index in the table of a thread that stands at a breakpoint, None if there is none.

        It is asked for every time, because the program may change its table. Raise ``InjectionError`` if the thread
        cannot ask, and ``ProcessLookupError`` if it is killed meanwhile.
        """
        if not may_inject(thread):
            raise InjectionError("a seccomp filter or a shadow stack forbids to make it do system calls")
        try:
            with self._stopper.others_stopped(thread.space, thread):
                data = self._ask(thread, index)
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
