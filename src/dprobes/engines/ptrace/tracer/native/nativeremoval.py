"""
The giving back of memory that handlers ran in: when no thread can come back into it.

A thread may stand in a handler, or be in a signal handler that has interrupted one: then the address is on its stack,
in the signal frame. So the stacks of all threads are looked through (``threadstacks``); one that is too large for that
counts as in use. So is the rest of the memory, where a program may have saved a context to come back to.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import thread_state
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.tracer.injection import MUNMAP
from dprobes.engines.ptrace.tracer.native.patches import Patches
from dprobes.engines.ptrace.tracer.native.threadstacks import saved_parts, stacks_from
from dprobes.errors import TargetError
from dprobes.target.processmaps import mapping_finder, mappings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.injection import Call
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["is_left", "is_outside", "unmap_native", "unmap_program"]

_ENDED = ("Z", "X")
"""The states of threads that execute nothing more, though their end may still be to be handled."""
_LOOKED_THROUGH_MAX = 256 << 20
"""Bytes of memory that are looked through, at about 1 GB/s; a larger process keeps the code."""
_GRANULE = 16
"""Bits of an address that are not searched for: the others are six bytes, which are found quickly."""


def is_left(space: AddressSpace, threads: Sequence[Thread], ranges: Sequence[tuple[int, int]] | None = None) -> bool:
    """
    Return whether no thread of a space can come back into code of ours, all or that in ``ranges``.

    All threads must be stopped.
    """
    if not all(is_outside(space, thread, ranges) for thread in threads):
        return False
    if ranges is None:
        ranges = space.patches.code_ranges()
    return not ranges or _is_saved_nowhere(space, threads, ranges)


def _is_saved_nowhere(space: AddressSpace, threads: Sequence[Thread], ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether the program has certainly saved no address in our code, with a context or by itself."""
    pointers: list[int] = []
    registers = ptracecalls.Registers()
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            ptracecalls.get_registers(thread.tid, registers)
            pointers.append(registers[Register.RSP])
    for thread in threads:
        try:
            parts = saved_parts(space, thread.tid, mappings_of(thread.tid), pointers, _LOOKED_THROUGH_MAX)
            return parts is not None and not any(names_address(part, *each) for part in parts for each in ranges)
        except (OSError, TargetError):
            continue  # it has ended
    return True


def is_outside(space: AddressSpace, thread: Thread, ranges: Sequence[tuple[int, int]] | None = None) -> bool:
    """Return whether a thread of a space that is stopped, or has ended, can certainly not come back into our code."""
    if ranges is None:
        ranges = space.patches.code_ranges()
    if not ranges:
        return True
    registers = ptracecalls.Registers()
    try:
        ptracecalls.get_registers(thread.tid, registers)
        if any(start <= registers[Register.RIP] < end for start, end in ranges):
            return False
        stacks = stacks_from(space, mapping_finder(thread.tid), [registers[Register.RSP]])
    except (OSError, TargetError):
        return thread_state(thread.tid) in _ENDED
    return stacks is not None and not any(names_address(data, *each) for data in stacks for each in ranges)


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
    patches = space.patches
    for number in patches.code.keys() | patches.memories.keys():
        unmap_program(space, call, number)
    space.patches = Patches()


def unmap_program(space: AddressSpace, call: Call, number: int) -> None:
    """
    Unmap what handlers of one program had.

    Should we be killed meanwhile, others go on with what is left (``client.memoryremoval``). The region comes before
    the page, which cannot be told from what the program may map there next; the manifest, which lists all, is the last.
    """
    number_of_call, patches = MUNMAP[space.word_size], space.patches
    for start, end in patches.code.get(number, ()):
        call(number_of_call, start, end - start)
    memory = patches.memories.get(number)
    if memory is not None:
        (region, size), *rest = memory.shared
        for address, length in ((region, size), (memory.page, memory.own), *rest):
            if length:
                call(number_of_call, address, length)
    patches.forget_program(number)
