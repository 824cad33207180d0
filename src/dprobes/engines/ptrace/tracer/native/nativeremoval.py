"""
The giving back of memory that handlers ran in: when no thread can come back into it.

A thread may stand in a handler, or be in a signal handler that has interrupted one: then the address is on its stack,
in the signal frame. So the stacks of all threads are looked through, from the stack pointer to the end of its mapping;
one that is too large for that counts as in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import thread_state
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.tracer.injection import MUNMAP
from dprobes.engines.ptrace.tracer.native.patches import Patches
from dprobes.errors import TargetError
from dprobes.target.processmaps import parse_maps, read_maps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.injection import Call
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["is_left", "is_outside", "unmap_native"]

_ENDED = ("Z", "X")
"""The states of threads that execute nothing more, though their end may still be to be handled."""
_STACK_MAX = 16 << 20
_GRANULE = 16
"""Bits of an address that are not searched for: the others are six bytes, which are found quickly."""


def is_left(space: AddressSpace, threads: Sequence[Thread]) -> bool:
    """Return whether no thread of a space can come back into code of ours; all must be stopped."""
    return all(is_outside(space, thread) for thread in threads)


def is_outside(space: AddressSpace, thread: Thread) -> bool:
    """Return whether a thread of a space that is stopped, or has ended, can certainly not come back into our code."""
    ranges = space.patches.code
    if not ranges:
        return True
    registers = ptracecalls.Registers()
    try:
        ptracecalls.get_registers(thread.tid, registers)
        mappings = parse_maps(read_maps(thread.tid))
    except (OSError, TargetError):
        return thread_state(thread.tid) in _ENDED
    if any(start <= registers[Register.RIP] < end for start, end in ranges):
        return False
    pointer = registers[Register.RSP]
    stack = next((mapping for mapping in mappings if mapping.start <= pointer < mapping.end), None)
    if stack is None or stack.end - pointer > _STACK_MAX:
        return False
    try:
        data = space.read(pointer, stack.end - pointer)
    except OSError:
        return False
    return not any(names_address(data, start, end) for start, end in ranges)


def names_address(data: bytes, start: int, end: int) -> bool:
    """Return whether eight bytes anywhere in ``data`` are an address from ``start`` to ``end`` (excluded)."""
    for granule in range(start >> _GRANULE, (end - 1 >> _GRANULE) + 1):
        pattern = granule.to_bytes(6, "little")
        place = data.find(pattern)
        while place >= 0:
            if place >= 2 and start <= int.from_bytes(data[place - 2 : place + 6], "little") < end:
                return True
            place = data.find(pattern, place + 1)
    return False


def unmap_native(space: AddressSpace, call: Call) -> None:
    """Unmap all that handlers in a space had, which no thread comes back to."""
    word_size = space.word_size
    for start, end in space.patches.code:
        call(MUNMAP[word_size], start, end - start)
    for memory in space.patches.memories.values():
        call(MUNMAP[word_size], memory.page, memory.own)
        for address, size in memory.shared:
            call(MUNMAP[word_size], address, size)
    space.patches = Patches()
