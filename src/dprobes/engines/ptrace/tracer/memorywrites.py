"""Writes to a process's memory as the program itself would make them: our breakpoints stay where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.breakpoints import INT3
from dprobes.errors import TargetError
from dprobes.target.processmaps import PAGE_SIZE, mapping_at
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    from dprobes.engines.linux.processcalls import RemoteMemory
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["WRITE_MAX", "is_mapped_writable", "write_memory"]

_LONGEST = 15  # bytes of an instruction

WRITE_MAX = 4096
"""How many bytes can be written at once."""


def write_memory(memory: RemoteMemory, thread: Thread, address: int, data: bytes) -> list[Breakpoint]:
    """
    Write at most ``WRITE_MAX`` bytes, and return our breakpoints whose instructions were changed by that.

    Raise ``AddressFault`` for the first byte that the program itself could not write; nothing is changed then.
    """
    end = address + len(data)
    if (served := thread.space.served_page(address, len(data))) is not None:
        raise AddressFault(served)
    near = _breakpoints_near(thread, address, end)
    hidden = [b for b in near if b.address >= address]
    visible = data
    if hidden:
        shown = bytearray(data)
        for breakpoint_ in hidden:
            shown[breakpoint_.address - address] = INT3[0]
        visible = bytes(shown)
    if end - 1 >> 12 == address >> 12:
        if not memory.write(thread.tid, address, visible):
            raise AddressFault(address)
    else:
        _write_pages(memory, thread, address, visible)
    for breakpoint_ in hidden:
        breakpoint_.original = data[breakpoint_.address - address]
    return [b for b in near if address < b.address + len(b.site.original)]


def _breakpoints_near(thread: Thread, address: int, end: int) -> list[Breakpoint]:
    """Return our breakpoints whose instructions may have bytes from ``address`` to ``end`` (excluded)."""
    breakpoints, first = thread.space.breakpoints, address - _LONGEST + 1
    if end - first < len(breakpoints):
        return [breakpoints[place] for place in range(first, end) if place in breakpoints]
    return [b for b in breakpoints.values() if first <= b.address < end]


def _write_pages(memory: RemoteMemory, thread: Thread, address: int, data: bytes) -> None:
    """Write across pages: the mappings are looked at first, so that other threads hardly ever see a part of it."""
    pages = [address, *range((address // PAGE_SIZE + 1) * PAGE_SIZE, address + len(data), PAGE_SIZE)]
    for page in pages:
        if not is_mapped_writable(thread, page):
            raise AddressFault(page)
    before = memory.read(thread.tid, address, len(data))
    for number, page in enumerate(pages):
        start, end = page - address, min(len(data), (page // PAGE_SIZE + 1) * PAGE_SIZE - address)
        if len(before) < end or not memory.write(thread.tid, page, data[start:end]):
            # A file that is shorter than its mapping, for one. What was written is taken back.
            for done in pages[:number]:
                first, last = done - address, (done // PAGE_SIZE + 1) * PAGE_SIZE - address
                memory.write(thread.tid, done, before[first:last])
            raise AddressFault(page)


def is_mapped_writable(thread: Thread, address: int) -> bool:
    """Return whether the program mapped the page of ``address`` for reading and writing."""
    try:
        mapping = mapping_at(thread.tid, address)
    except TargetError:
        return False
    return mapping is not None and mapping.permissions.startswith("rw")
