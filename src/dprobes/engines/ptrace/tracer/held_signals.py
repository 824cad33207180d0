"""
Signals of threads in the engine's code in a process, and signals that arrive during a step.

An instruction of a handler that accesses memory and faults has a fix-up: an address where the thread continues. A trial
that fails (``SitePatch.stops``) is handled as a breakpoint: the thread is moved to the probed instruction, with the
registers of the probed program.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.ptrace_calls import RESUME_FLAG, Register

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.site_patches import NativeStop
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = [
    "FAULTS",
    "STOPPING",
    "HeldSignals",
    "fix_up",
    "is_in_native_stop",
    "leave_to_us",
    "move_fault",
    "move_signal_address",
    "set_back",
    "stop_of",
]

# Words of siginfo_t that contain si_addr.
_ADDRESS_LOW, _ADDRESS_HIGH = 4, 5

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
"""
Signals that an instruction itself raises, if ``si_code`` shows that the kernel sent them (sigaction(2)).

The kernel kills a thread that raises one of them while it is blocked, so they are never blocked.
"""

_ALL_BUT_FAULTS = ((1 << 64) - 1) & ~sum(1 << number - 1 for number in (*FAULTS, signal.SIGSYS))


class HeldSignals:
    """
    Signals that arrive at a thread before its instruction is completed.

    The first is held with its ``siginfo``. All others are blocked from then on and wait in the kernel. Only signals
    that must not be blocked, like SIGSEGV, may follow; they are sent again. SIGSTOP is not held, because the SIGCONT
    that cancels it could arrive first. The group stop that follows is held, because after it a held signal could not be
    delivered with its ``siginfo``.
    """

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._first: tuple[int, list[int]] | None = None
        self._more: list[int] = []
        self._mask: int | None = None
        self._unheld = 0
        self._stops = False

    def __bool__(self) -> bool:
        return self._mask is not None

    def hold(self, number: int, info: ctypes.Array[ctypes.c_int32]) -> None:
        """Keep the signal ``number``, for which the thread has stopped, with its siginfo ``info``; block all others."""
        if number == signal.SIGSTOP:
            self._unheld = number
        elif self._first is not None:
            self._more.append(number)
        else:
            self._first = (number, list(info))
            self._mask = ptrace_calls.get_signal_mask(self._thread.tid)
            ptrace_calls.set_signal_mask(self._thread.tid, self._mask | _ALL_BUT_FAULTS)

    def take_unheld(self) -> int:
        """Return the signal with which the thread must continue its step, or 0."""
        number, self._unheld = self._unheld, 0
        return number

    def hold_stop(self) -> None:
        """Keep a group stop: the thread continues its step, and the group stop takes effect afterwards."""
        self._stops = True

    def give_back(self) -> int:
        """Restore the held signals of a thread in a signal stop; return the signal to resume it with, or 0."""
        if self._stops:
            # If the group stop has ended meanwhile, this is just another requested stop.
            self._stops = False
            with contextlib.suppress(OSError):
                ptrace_calls.interrupt(self._thread.tid)
        if self._first is None:
            return 0
        number, info = self._first
        self._first = None
        self.send_again()
        # Resuming with a signal other than the reported one makes the kernel fill in a siginfo; set the original one.
        with contextlib.suppress(OSError):
            ptrace_calls.set_signal_info(self._thread.tid, ptrace_calls.SignalInfo(*info))
        return number

    def send_again(self) -> None:
        """
        Send the held signals again, and restore the signal mask of the thread.

        The kernel fills in a new ``siginfo`` for them. So use this only for a thread that creates a process in its
        step.
        """
        if self._mask is None:
            return
        with contextlib.suppress(OSError):
            ptrace_calls.set_signal_mask(self._thread.tid, self._mask)
        for number in ([self._first[0]] if self._first is not None else []) + self._more:
            with contextlib.suppress(OSError):
                process_calls.send_signal(self._thread.pid, self._thread.tid, number)
        self._mask = None


def move_signal_address(info: ctypes.Array[ctypes.c_int32], former: int, address: int) -> None:
    """Change the address in a ``siginfo`` to ``address`` if it is ``former``."""
    low, high = info[_ADDRESS_LOW] & 0xFFFFFFFF, info[_ADDRESS_HIGH] & 0xFFFFFFFF
    if low | high << 32 == former:
        info[_ADDRESS_LOW] = _signed(address & 0xFFFFFFFF)
        info[_ADDRESS_HIGH] = _signed(address >> 32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


STOPPING = (signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
"""Signals for which a thread may stop in the engine's code."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS)

_RAX, _RIP, _RSP, _FLAGS = (int(each) for each in (Register.RAX, Register.RIP, Register.RSP, Register.EFLAGS))
_FRAME_SIZE, _RAX_AT, _FLAGS_AT = 304, 80, 144
"""Size of a handler's frame in bytes, and offsets of rax and the flags in it (``native.x86.x86_operations``)."""
_ARITHMETIC, _OVERFLOW, _DIRECTION = 0x8D5, 0x800, 0x400
_LOW_FLAGS = 0xD5
"""Bits that LAHF stores in the image's second byte; SETO stores OF in the first."""


def stop_of(space: AddressSpace, registers: RegisterWords, number: int) -> NativeStop | None:
    """
    Return the ``NativeStop`` at which a thread has stopped for the signal ``number``.

    Return None if no instruction there has raised the signal. Other signals may arrive anywhere, and the signal of a
    timer may come from the kernel, too.
    """
    stops = space.patches.stops
    if not stops or number not in STOPPING:
        return None
    is_trap = number == signal.SIGTRAP
    stop = stops.get(registers[_RIP] - is_trap)
    return stop if stop is not None and stop.is_trap == is_trap else None


def set_back(space: AddressSpace, stop: NativeStop, registers: RegisterWords) -> bool:
    """
    Set ``registers`` of a thread at a ``NativeStop`` to those that the program has at the probed instruction.

    They are on the stack, in the frame of the trampoline. Return False if the stack cannot be read.
    """
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


def leave_to_us(thread: Thread, registers: RegisterWords, info: ctypes.Array[ctypes.c_int32]) -> bool:
    """
    Move a thread that has stopped in a handler's code, which leaves the hit to the tracer, to the probed instruction.

    If the instruction has a copy, the thread is moved to the copy. Return False if the thread has stopped for another
    reason. ``registers`` are the thread's, and are changed; ``info`` is a buffer for the ``siginfo``.
    """
    space = thread.space
    if not is_in_native_stop(space, registers[_RIP]):
        return False
    try:
        code, number = ptrace_calls.get_signal_info(thread.tid, info), info[0]
        stop = stop_of(space, registers, number) if code > 0 else None
        if stop is None or not set_back(space, stop, registers):
            return False
        breakpoint_ = space.breakpoints.get(stop.site)
        if breakpoint_ is not None and not stop.exit_code:
            registers[_RIP] = space.slots.way_on(stop.site, breakpoint_.site)
        ptrace_calls.set_registers(thread.tid, registers)
    except OSError:
        return False  # it was killed meanwhile, or has not stopped for a signal
    thread.trapped, thread.is_left_to_us = stop.site, True
    thread.parked = stop if stop.exit_code else None
    return True


def fix_up(thread: Thread, registers: RegisterWords, number: int) -> bool:
    """
    Move a thread whose handler has faulted in an access to memory to the code that handles such a fault.

    ``number`` is the signal for which it has stopped. Return False for any other signal or instruction.
    """
    fixups = thread.space.patches.fixups
    if not fixups or number not in _FAULTS:
        return False
    ptrace_calls.get_registers(thread.tid, registers)
    target = fixups.get(registers[_RIP])
    if target is None or ptrace_calls.get_signal_info(thread.tid, ptrace_calls.SignalInfo()) <= 0:
        return False
    registers[_RIP] = target
    ptrace_calls.set_registers(thread.tid, registers)
    return True


def move_fault(thread: Thread, registers: RegisterWords, address: int) -> None:
    """Move a thread that has stopped for a fault to ``address``, and set the address in its siginfo_t accordingly."""
    info = ptrace_calls.SignalInfo()
    ptrace_calls.get_signal_info(thread.tid, info)
    move_signal_address(info, registers[_RIP], address)
    ptrace_calls.set_signal_info(thread.tid, info)
    registers[_RIP] = address
    ptrace_calls.set_registers(thread.tid, registers)


def is_in_native_stop(space: AddressSpace, pc: int) -> bool:
    """Return whether a thread at ``pc`` may have a pending signal that the engine's code has raised."""
    patches = space.patches
    trap = patches.stops.get(pc - 1)
    return pc in patches.fixups or pc in patches.stops or (trap is not None and trap.is_trap)
