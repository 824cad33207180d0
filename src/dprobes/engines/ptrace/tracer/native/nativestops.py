"""
Threads that stop in code of ours in a process: at an access of a handler's, or where a hit is left to the breakpoint.

An access of a handler that faults has a fix-up, where the thread goes on. A trial that fails (``SitePatch.stops``)
makes the thread one that has run into the breakpoint: with the registers of the program, at the probed instruction.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import RESUME_FLAG, Register
from dprobes.engines.ptrace.tracer.steps.heldsignals import move_signal_address

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.sitepatch import NativeStop
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["STOPPING", "fix_up", "is_in_native_stop", "leave_to_us", "move_fault", "set_back", "stop_of"]

STOPPING = (signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
"""The signals with which a thread may stop there."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS)

_RAX, _RIP, _RSP, _FLAGS = (int(each) for each in (Register.RAX, Register.RIP, Register.RSP, Register.EFLAGS))
_FRAME_SIZE, _RAX_AT, _FLAGS_AT = 304, 80, 144
"""How far the stack pointer was moved, and what the frame has where (``native.x86.trampoline``)."""
_ARITHMETIC, _OVERFLOW, _DIRECTION = 0x8D5, 0x800, 0x400
_LOW_FLAGS = 0xD5
"""What LAHF has in its second byte, and SETO says in the first one of OF."""


def stop_of(space: AddressSpace, registers: ctypes.Array[ctypes.c_ulong], number: int) -> NativeStop | None:
    """
    Return what it means that a thread has stopped for a signal where its registers say.

    One that an instruction does not raise means nothing: it comes anywhere, that of a timer also from the kernel.
    """
    stops = space.patches.stops
    if not stops or number not in STOPPING:
        return None
    is_trap = number == signal.SIGTRAP
    stop = stops.get(registers[_RIP] - is_trap)
    return stop if stop is not None and stop.is_trap == is_trap else None


def set_back(space: AddressSpace, stop: NativeStop, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
    """Let registers be those of the program at the probed instruction; return False if its stack cannot be read."""
    frame = registers[_RSP]
    flags, image, kept = registers[_FLAGS] & ~RESUME_FLAG, 0, 0
    if stop.has_frame:
        try:
            rax = space.read(frame + _RAX_AT, 8)
            image = int.from_bytes(space.read(frame + _FLAGS_AT, 8), "little")
        except OSError:
            return False
        kept = _ARITHMETIC
        if stop.has_flags:
            kept |= _DIRECTION
        else:
            image = image >> 8 & _LOW_FLAGS | (_OVERFLOW if image & 0xFF else 0)
        registers[_RAX] = int.from_bytes(rax, "little")
    registers[_FLAGS] = flags & ~kept | image & kept
    registers[_RSP] = frame + _FRAME_SIZE
    registers[_RIP] = stop.site
    return True


def leave_to_us(thread: Thread, registers: ctypes.Array[ctypes.c_ulong], info: ctypes.Array[ctypes.c_int32]) -> bool:
    """
    Put a stopped thread, with these registers, onto an instruction whose hit a handler in its process leaves to us.

    Where the instruction has a copy it is put there. Return False if the thread has not stopped for that; ``info`` is
    for what the kernel says of its signal.
    """
    space = thread.space
    if not is_in_native_stop(space, registers[_RIP]):
        return False
    try:
        code, number = ptracecalls.get_signal_info(thread.tid, info), info[0]
        stop = stop_of(space, registers, number) if code > 0 else None
        if stop is None or not set_back(space, stop, registers):
            return False
        breakpoint_ = space.breakpoints.get(stop.site)
        if breakpoint_ is not None and not stop.exit_code:
            registers[_RIP] = space.slots.way_on(stop.site, breakpoint_.site)
        ptracecalls.set_registers(thread.tid, registers)
    except OSError:
        return False  # killed meanwhile, or it has not stopped for a signal
    thread.trapped, thread.is_left_to_us = stop.site, True
    thread.parked = stop if stop.exit_code else None
    return True


def fix_up(thread: Thread, registers: ctypes.Array[ctypes.c_ulong], number: int) -> bool:
    """Let a thread go on that has stopped because a handler's access to memory faulted; return whether it has."""
    fixups = thread.space.patches.fixups
    if not fixups or number not in _FAULTS:
        return False
    ptracecalls.get_registers(thread.tid, registers)
    target = fixups.get(registers[_RIP])
    if target is None or ptracecalls.get_signal_info(thread.tid, ptracecalls.SignalInfo()) <= 0:
        return False
    registers[_RIP] = target
    ptracecalls.set_registers(thread.tid, registers)
    return True


def move_fault(thread: Thread, registers: ctypes.Array[ctypes.c_ulong], address: int) -> None:
    """Let a thread that has stopped for a fault stand at an address, and the fault be there."""
    info = ptracecalls.SignalInfo()
    ptracecalls.get_signal_info(thread.tid, info)
    move_signal_address(info, registers[_RIP], address)
    ptracecalls.set_signal_info(thread.tid, info)
    registers[_RIP] = address
    ptracecalls.set_registers(thread.tid, registers)


def is_in_native_stop(space: AddressSpace, pc: int) -> bool:
    """Return whether a thread whose instruction pointer is ``pc`` may have a signal to come that is ours."""
    patches = space.patches
    trap = patches.stops.get(pc - 1)
    return pc in patches.fixups or pc in patches.stops or (trap is not None and trap.is_trap)
