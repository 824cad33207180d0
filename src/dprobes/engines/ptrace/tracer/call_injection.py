"""
System calls that a stopped thread executes for the tracer, transparently to the program.

* The thread executes a ``syscall; ret`` of its own code, between the stops of PTRACE_SYSCALL. Static executables may
  contain no call of rt_sigreturn(2); then the tracer writes the instructions into the unused end of a page of code. The
  thread is never single-stepped, because the SIGTRAP of a step is forced, and resets its disposition in a program that
  blocks or ignores it.
* If the tracer is killed meanwhile, the thread returns into a signal frame as the kernel builds it for a handler. It
  executes rt_sigreturn(2), which restores its registers, signal mask and FPU state.
* The thread's registers are restored at an event stop, because there the kernel still restarts an interrupted system
  call.
* Signals are held until the call is over. All other threads of the address space are stopped, because the frame may be
  in memory that is in use (a small stack of a coroutine). That memory is restored afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from dprobes.engines.ptrace.tracer.interrupted_calls import ARGUMENTS, RESTART_NO_HANDLER, is_restarted
from dprobes.engines.ptrace.tracer.thread_stopper import await_stop_for
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError, ThreadState
from dprobes.errors import TargetError
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import process_field
from dprobes.platform.linux.ptrace_calls import TRAP_FLAG, Event, Register, StopKind, classify_stop
from dprobes.platform.x86.register_images import TILE_DATA, cpuid_of_leaf, frame_32, frame_64, restorable
from dprobes.target.process_maps import code_mappings, mappings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.ptrace_calls import RegisterWords
    from dprobes.platform.x86.register_images import SignalFrame
    from dprobes.target.process_maps import Mapping

__all__ = [
    "MADVISE",
    "MMAP",
    "MODIFY_LDT",
    "MPROTECT",
    "MUNMAP",
    "Call",
    "InjectionError",
    "OccupiedError",
    "ThreadBusyError",
    "injecting",
    "may_inject",
    "take_out_gadgets",
]

# Numbers of system calls by word size; with 4 bytes MMAP is mmap2.
MMAP = {8: 9, 4: 192}
MUNMAP = {8: 11, 4: 91}
MADVISE = {8: 28, 4: 219}
MPROTECT = {8: 10, 4: 125}
MODIFY_LDT = {8: 154, 4: 123}

_ALL_SIGNALS = (1 << 64) - 1
_MASKS = {8: (1 << 64) - 1, 4: (1 << 32) - 1}

# By word size: the instructions that make a system call and return, and those that return from a signal. The latter are
# __restore_rt of glibc, Go and musl, and __kernel_rt_sigreturn of the 32-bit vDSO.
_CALL_GADGETS = {8: (b"\x0f\x05\xc3",), 4: (b"\xcd\x80\x5d\x5a\x59\xc3",)}
_RETURN_GADGETS = {
    8: (b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05", b"\xb8\x0f\x00\x00\x00\x0f\x05"),
    4: (b"\xb8\xad\x00\x00\x00\xcd\x80",),
}
_CALL_SIZE = 2
"""Size of ``syscall`` and of ``int $0x80`` in bytes."""
_ENOSYS = (1 << 64) - errno.ENOSYS
"""Value of the result register while a system call is executed."""

_SEARCHED = 1 << 20
"""Number of bytes of code that are read at once in the search for gadgets."""
_SEARCHED_MAX = 1 << 30
_SEARCHED_MAPPINGS = 1 << 13
"""Maximum bytes and mappings that are searched: a process can map any number of pages without gadgets."""

_XSAVE_LEAF = 0xD
"""Leaf of ``cpuid`` with the size (eax) and offset (ebx) of each XSAVE component."""

_FRAME_SIZE = 4096
"""Upper limit in bytes of the size of a signal frame without the state of the floating-point unit."""

_PATIENCE = 2.0
"""Maximum number of seconds for which an injected system call may sleep. None of them should."""

_NO_ROOM = "the stack has no room for a signal frame"

_REST = (StopKind.EVENT, int(Event.STOP))


class InjectionError(Exception):
    """Error that no system call can be injected into a process; the process is unchanged."""


class ThreadBusyError(InjectionError):
    """Error that a thread cannot make a system call at present."""


class OccupiedError(InjectionError):
    """Error that the process has a mapping at the requested address."""


class Call(Protocol):
    """Function that makes a system call in a thread."""

    def __call__(self, number: int, *arguments: int) -> int:
        """Make the call and return its result, a negative errno if it failed."""


def may_inject(thread: Thread) -> bool:
    """
    Return False for a process with a seccomp filter, and for a thread with a shadow stack.

    A seccomp filter may kill the process for an unexpected system call. A thread with a shadow stack cannot return into
    a frame that is not on that stack.
    """
    return not thread.space.has_shadow_stack and process_field(thread.tid, "Seccomp") in ("", "0")


@contextlib.contextmanager
def injecting(thread: Thread) -> Iterator[Call]:
    """
    Return a context manager that yields a function for system calls in a thread, and restores the thread's state.

    The thread must have stopped without a signal to be delivered, and all others of its address space must be stopped.
    At the end it is at an event stop. Raise ``InjectionError`` if no call can be made. If the thread is killed, raise
    ``ThreadGoneError`` with its end, or ``ProcessLookupError`` if the end is not reported yet.
    """
    space = thread.space
    gadgets = _gadgets(thread)
    registers = ptrace_calls.Registers()
    ptrace_calls.get_registers(thread.tid, registers)
    if registers[Register.ORIG_RAX] < ptrace_calls.NO_SYSTEM_CALL and registers[Register.RAX] == _ENOSYS:
        # Until the call is finished, the kernel would overwrite the registers with its result.
        raise ThreadBusyError("the thread is in the middle of a system call")
    mask = ptrace_calls.get_signal_mask(thread.tid)
    frame = _frame(thread, registers, mask, gadgets[1])
    overwritten = _exchange(space, frame)
    session = _Session(thread, registers, frame, gadgets[0])
    session.lead_back()  # before anything else: it could be left with a wrong signal mask
    ptrace_calls.set_signal_mask(thread.tid, _ALL_SIGNALS)
    try:
        yield session.call
    finally:
        # A thread that was killed needs no restoring, and its end has been reported already. A thread that does not
        # return from a call is restored by its signal frame.
        if not session.has_ended:
            session.come_to_rest()
            ptrace_calls.set_signal_mask(thread.tid, mask)
            ptrace_calls.set_registers(thread.tid, registers)
            with contextlib.suppress(OSError):
                space.write(frame.address, overwritten)
            session.send_stops()


def _frame(thread: Thread, registers: RegisterWords, mask: int, return_to: int) -> SignalFrame:
    xstate = ptrace_calls.get_register_set(thread.tid, ptrace_calls.RegisterSet.XSTATE)
    if not xstate:
        raise InjectionError("the state of the floating-point unit cannot be read")
    with contextlib.suppress(OSError):
        xstate = restorable(xstate, cpuid_of_leaf(_XSAVE_LEAF, TILE_DATA)[1])
    values = list(registers)
    if values[Register.RSP] & _MASKS[thread.space.word_size] < len(xstate) + _FRAME_SIZE:
        raise InjectionError(_NO_ROOM)  # there is no memory below: the program uses the register for something else
    if is_restarted(registers, thread.space):
        values[Register.RAX] = RESTART_NO_HANDLER
    if thread.space.word_size == 8:
        return frame_64(values, mask, xstate, return_to)
    fsave = ptrace_calls.get_register_set(thread.tid, ptrace_calls.RegisterSet.FLOATING_POINT)
    return frame_32(values, mask, xstate, fsave, return_to)


def _exchange(space: AddressSpace, frame: SignalFrame) -> bytes:
    """
    Write a signal frame to the thread's stack, and return the bytes that were there before.

    Raise ``InjectionError`` if the stack has no room for it.
    """
    try:
        former = space.read(frame.address, len(frame.data))
        if len(former) < len(frame.data) or space.write(frame.address, frame.data) < len(frame.data):
            raise InjectionError(_NO_ROOM)
    except OSError as error:
        raise InjectionError(_NO_ROOM) from error
    return former


def _gadgets(thread: Thread) -> tuple[int, int]:
    """Return the addresses of a system call instruction and of a return from a signal in the thread's code."""
    space = thread.space
    if space.gadgets is None:
        call = back = 0
        for mapping in islice(_code_of(thread.tid), _SEARCHED_MAPPINGS):
            call = call or _find(space, mapping.start, mapping.end, _CALL_GADGETS[space.word_size])
            back = back or _find(space, mapping.start, mapping.end, _RETURN_GADGETS[space.word_size])
            if call and back:
                break
        space.gadgets = (call, back) if call and back else _made_gadgets(space)
    if not all(space.gadgets):
        raise InjectionError("the program holds no code that makes a system call and returns from a signal")
    return space.gadgets


def _code_of(tid: int) -> Iterator[Mapping]:
    """
    Iterate over the executable mappings of a process in the order of the search for gadgets, each part of a file once.

    Code of files comes before generated code, which may change.
    """
    try:
        files, _ = code_mappings(tid)
    except TargetError as error:
        raise ProcessLookupError from error
    left = _SEARCHED_MAX
    pieces = {(each.device, each.inode, each.offset, each.end - each.start): each for each in reversed(files)}
    for mapping in chain(reversed(pieces.values()), _made_code_of(tid)):
        if mapping.end - mapping.start <= left:
            left -= mapping.end - mapping.start
            yield mapping


def _made_code_of(tid: int) -> Iterator[Mapping]:
    """Iterate over the mappings of code without a file, except the kernel's own page, which cannot be read."""
    with contextlib.suppress(TargetError):  # it has ended, or has more mappings than are read
        made = (each for each in mappings_of(tid) if each.executable and not each.is_file and each.path != "[vsyscall]")
        yield from sorted(made, key=lambda each: not each.path)


def _made_gadgets(space: AddressSpace) -> tuple[int, int]:
    """Write the instructions into padding, and return their addresses; zeros if there is no padding."""
    call, back = _CALL_GADGETS[space.word_size][0], _RETURN_GADGETS[space.word_size][0]
    size = len(call) + len(back)
    for number, (start, end) in enumerate(space.slots.padding):
        address = end - size
        if address < start:
            continue
        with contextlib.suppress(OSError):
            former = os.pread(space.memory, size, address)
            if len(former) == size and os.pwrite(space.memory, call + back, address) == size:
                space.slots.padding[number] = start, address
                space.made_gadgets = address, former
                return address, address + len(call)
    return 0, 0


def take_out_gadgets(space: AddressSpace) -> None:
    """Restore the padding into which the instructions were written, if any. No thread may be in them."""
    if space.made_gadgets is not None:
        address, former = space.made_gadgets
        with contextlib.suppress(OSError):
            os.pwrite(space.memory, former, address)
        space.made_gadgets = space.gadgets = None


def _find(space: AddressSpace, start: int, end: int, patterns: tuple[bytes, ...]) -> int:
    for position in range(start, end, _SEARCHED):
        with contextlib.suppress(OSError):
            code = os.pread(space.memory, min(_SEARCHED + 16, end - position), position)
            for pattern in patterns:
                found = code.find(pattern)
                if found >= 0:
                    return position + found
    return 0


class _Session:
    """Saved state of a thread while system calls are injected into it, from the first to the last call."""

    def __init__(self, thread: Thread, registers: RegisterWords, frame: SignalFrame, instruction: int) -> None:
        self._thread = thread
        self._before = registers
        self._frame = frame
        self._instruction = instruction
        self._stops: list[int] = []
        self.has_ended = False

    def lead_back(self) -> None:
        """Move the thread to the return from the signal, for the case that no call follows."""
        registers = self._registers_at(self._instruction + _CALL_SIZE)
        ptrace_calls.set_registers(self._thread.tid, registers)

    def _registers_at(self, place: int) -> RegisterWords:
        registers = ptrace_calls.Registers(*self._before)
        registers[Register.RIP] = place
        registers[Register.RSP] = self._frame.stack_pointer
        registers[Register.EFLAGS] &= ~TRAP_FLAG
        registers[Register.EFLAGS] |= ptrace_calls.RESUME_FLAG  # an execute watchpoint there is the program's
        registers[Register.ORIG_RAX] = _MASKS[8]  # -1: no system call is to be restarted
        return registers

    def call(self, number: int, *arguments: int) -> int:
        thread, size = self._thread, self._thread.space.word_size
        registers = self._registers_at(self._instruction)
        registers[Register.RAX] = number
        for register, value in zip(ARGUMENTS[size], arguments, strict=False):
            registers[register] = value & _MASKS[size]
        ptrace_calls.set_registers(thread.tid, registers)
        self._advance(StopKind.SYSCALL)
        self._advance(StopKind.SYSCALL)
        ptrace_calls.get_registers(thread.tid, registers)
        result = registers[Register.RAX] & _MASKS[size]
        return result - (1 << 8 * size) if result > _MASKS[size] - 4096 else result

    def come_to_rest(self) -> None:
        """Bring the thread to an event stop, before it executes anything more."""
        ptrace_calls.interrupt(self._thread.tid)
        self._advance(StopKind.EVENT)

    def send_stops(self) -> None:
        """Send stop signals, which cannot be blocked, again if they arrived during the calls."""
        for number in self._stops:
            with contextlib.suppress(OSError):
                process_calls.send_signal(self._thread.pid, self._thread.tid, number)

    def _advance(self, expected: StopKind) -> None:
        """Resume the thread until the next stop of the expected kind."""
        tid = self._thread.tid
        while True:
            if expected is StopKind.SYSCALL:
                ptrace_calls.resume_to_syscall(tid)
            else:
                ptrace_calls.resume(tid)
            status = self._await_stop()
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                self.has_ended = True
                raise ThreadGoneError(status)
            if kind is StopKind.SYSCALL and kind is expected:
                return
            if expected is StopKind.EVENT and (kind is StopKind.GROUP_STOP or (kind, number) == _REST):
                return
            if kind is StopKind.SIGNAL and number != signal.SIGTRAP:
                self._stops.append(number)

    def _await_stop(self) -> int:
        """
        Wait for the next stop of the thread, and return its wait status.

        A call that sleeps longer than ``_PATIENCE`` seconds is interrupted. If it still sleeps, the tracer gives it up:
        the thread returns through its signal frame, as after the tracer's death. Another process that shares its files
        or memory can cause this.
        """
        thread = self._thread
        try:
            for _ in range(2):
                if (status := await_stop_for(thread.tid, _PATIENCE)) is not None:
                    return status
                ptrace_calls.interrupt(thread.tid)
        except ProcessLookupError:
            self.has_ended = True
            raise
        self.has_ended = True
        thread.state = ThreadState.RUNNING
        raise InjectionError("an injected system call does not return")
