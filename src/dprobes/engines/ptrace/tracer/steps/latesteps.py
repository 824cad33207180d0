"""
Steps in which threads went to sleep: how such a thread goes on after a stop, and how it is seen that it has entered.

The thread stands in the slot still, with its hit unfinished, and the kernel has forgotten at the stop what was to end
the step. If it just ran on, nobody would see it leave the slot, and a system call would come back into that.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.x86.emulation import Action

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["has_entered", "step_on"]

_RAX, _RIP = int(Register.RAX), int(Register.RIP)
_ENTERING = -errno.ENOSYS & (1 << 64) - 1
"""What the register for the result holds when a thread enters the kernel."""


def step_on(thread: Thread, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
    """
    Let a stopped thread go on with the step in which it went to sleep; return False if it is not in one in a slot.

    ``registers`` are read anew. One that stands at the breakpoint runs into that.
    """
    hit = thread.hit
    if not hit.is_late or thread.trapped:
        return False
    breakpoint_, action = hit.breakpoint, hit.breakpoint.site.emulation[0]
    slot = thread.space.slots.known(breakpoint_.address, breakpoint_.site)
    if slot is None or action == Action.REPEAT:  # behind which a breakpoint is
        return False
    ptracecalls.get_registers(thread.tid, registers)
    if registers[_RIP] != slot.address:
        return False
    advance = ptracecalls.resume_to_syscall if action == Action.SYSTEM_CALL else ptracecalls.single_step
    advance(thread.tid)
    return True


def has_entered(thread: Thread, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
    """Return whether a thread, stopped at a system call, makes that of such a step; ``registers`` are read anew."""
    hit = thread.hit
    if not hit.is_late or hit.breakpoint.site.emulation[0] != Action.SYSTEM_CALL:
        return False
    address, site = hit.breakpoint.address, hit.breakpoint.site
    ptracecalls.get_registers(thread.tid, registers)
    behind = thread.space.slots.way_on(address, site) + len(site.original)
    return registers[_RAX] == _ENTERING and registers[_RIP] == behind
