"""
Segments: what a selector means in a stopped thread.

User code sees three kinds of selector (Intel SDM, volume 3, 3.4.2; ``arch/x86/include/asm/segment.h``)::

    index of descriptor (13 bits) | table: 0 GDT, 1 LDT | privilege (2 bits)

the kernel's flat user segments and three thread-local ones in the GDT, and the program's own in its LDT.

In 64-bit code the processor takes no notice of bases and limits, but of the base of fs and gs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import Register
from dprobes.vm import SelectorFault

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from dprobes.engines.linux.ptracecalls import SegmentDescriptor
    from dprobes.engines.ptrace.tracer.processes import Thread

    LocalDescriptors = Callable[[Thread, int], SegmentDescriptor | None]

__all__ = ["Segments"]

_USER_CODE_32, _USER_DATA, _USER_CODE_64 = 4, 5, 6  # indices in the GDT
_LOCAL_TABLE = 4
_PRIVILEGE = 3
_CONTENTS_EXPAND_DOWN, _CONTENTS_CODE = 1, 2

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


class _Segment(NamedTuple):
    """Hold a segment whose valid offsets are ``first`` to ``last``."""

    base: int
    first: int
    last: int
    readable: bool
    writable: bool


_FLAT_DATA = _Segment(0, 0, _MASK_32, readable=True, writable=True)
_FLAT_CODE = _Segment(0, 0, _MASK_32, readable=True, writable=False)
_FLAT = {_USER_CODE_32: _FLAT_CODE, _USER_DATA: _FLAT_DATA, _USER_CODE_64: _FLAT_CODE}


def _no_descriptor(thread: Thread, index: int) -> None:
    """Say that a thread has no local descriptors."""


class Segments:
    """Know the segments of stopped threads; ``local`` looks up the descriptors of local tables."""

    def __init__(self) -> None:
        self.local: LocalDescriptors = _no_descriptor

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
            descriptor = self.local(thread, index)
            if descriptor is None:
                raise SelectorFault(selector)
            return _decoded(descriptor)
        if (flat := _FLAT.get(index)) is not None:
            return flat
        descriptor = ptracecalls.get_thread_area(thread.tid, index) if index else None
        if descriptor is None or descriptor.not_present:
            raise SelectorFault(selector)
        return _decoded(descriptor)


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
