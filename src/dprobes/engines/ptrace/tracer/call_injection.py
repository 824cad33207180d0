"""
System calls that a stopped thread makes for us, and does not notice.

* The thread runs a ``syscall; ret`` that its memory holds anyway, or that we put into the unused end of a page of code
  (static programs may hold no return from a signal), between the stops of PTRACE_SYSCALL. It is never
  single-stepped: the SIGTRAP of a step is forced, and costs a program that blocks or ignores it its disposition.
* Should we die meanwhile, the thread returns into a signal frame as the kernel builds it for a handler: it executes
  rt_sigreturn(2) and has its registers, signal mask and FPU state back.
* Its registers are given back at an event stop: there the kernel still restarts a system call that it was in.
* Signals wait until it is over; all other threads of the address space stand still, since the frame may lie in memory
  that is not really free (a small stack of a coroutine), which is why it is restored.
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
    "MUNMAP",
    "Call",
    "InjectionError",
    "OccupiedError",
    "ThreadBusyError",
    "injecting",
    "may_inject",
    "take_out_gadgets",
]

# The numbers of system calls by word size; with 4 bytes MMAP is mmap2.
MMAP = {8: 9, 4: 192}
MUNMAP = {8: 11, 4: 91}
MADVISE = {8: 28, 4: 219}
MODIFY_LDT = {8: 154, 4: 123}

_ALL_SIGNALS = (1 << 64) - 1
_MASKS = {8: (1 << 64) - 1, 4: (1 << 32) - 1}

# For each word size: the instructions that make a system call and return, and those that return from a signal. The
# latter are __restore_rt of glibc, Go and musl, and __kernel_rt_sigreturn of the 32-bit vDSO.
_CALL_GADGETS = {8: (b"\x0f\x05\xc3",), 4: (b"\xcd\x80\x5d\x5a\x59\xc3",)}
_RETURN_GADGETS = {
    8: (b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05", b"\xb8\x0f\x00\x00\x00\x0f\x05"),
    4: (b"\xb8\xad\x00\x00\x00\xcd\x80",),
}
_CALL_SIZE = 2
"""Bytes of ``syscall`` and of ``int $0x80``."""
_ENOSYS = (1 << 64) - errno.ENOSYS
"""What the register for the result holds while a system call is under way."""

_SEARCHED = 1 << 20
"""Bytes of code that are read at once in the search for gadgets."""
_SEARCHED_MAX = 1 << 30
_SEARCHED_MAPPINGS = 1 << 13
"""Bytes and mappings that are searched at most: a process can map any number of pages that hold nothing."""

_XSAVE_LEAF = 0xD
"""The leaf of ``cpuid`` that says for each XSAVE component how long it is (eax) and where (ebx)."""

_FRAME_SIZE = 4096
"""More than a signal frame takes besides the state of the floating-point unit."""

_PATIENCE = 2.0
"""Seconds that a system call may sleep: none of ours waits for anything."""

_NO_ROOM = "the stack has no room for a signal frame"

_REST = (StopKind.EVENT, int(Event.STOP))


class InjectionError(Exception):
    """Report that no system call can be made in a process; it has not been changed."""


class ThreadBusyError(InjectionError):
    """Report that a thread can make no system call just now."""


class OccupiedError(InjectionError):
    """Report that the process itself has something where memory was to be mapped."""


class Call(Protocol):
    """A function that makes a system call in a thread."""

    def __call__(self, number: int, *arguments: int) -> int:
        """Make the call and return its result, a negative errno if it failed."""


def may_inject(thread: Thread) -> bool:
    """
    Return whether a process may be made to do a system call at all.

    A seccomp filter may end the process for a call that it does not expect, and a thread with a shadow stack cannot
    return into a frame that is not on it.
    """
    return not thread.space.has_shadow_stack and process_field(thread.tid, "Seccomp") in ("", "0")


@contextlib.contextmanager
def injecting(thread: Thread) -> Iterator[Call]:
    """
    Make system calls in a thread that has stopped without a signal to be delivered; the others must be stopped.

    Raise ``InjectionError`` if that is not possible here. If the thread is killed, raise ``ThreadGoneError`` with its
    end, or ``ProcessLookupError`` if that is still to be reported. Else it is as it was, and at an event stop.
    """
    space = thread.space
    gadgets = _gadgets(thread)
    registers = ptrace_calls.Registers()
    ptrace_calls.get_registers(thread.tid, registers)
    if registers[Register.ORIG_RAX] < ptrace_calls.NO_SYSTEM_CALL and registers[Register.RAX] == _ENOSYS:
        # Until that is done, the kernel would overwrite our registers with its result.
        raise ThreadBusyError("the thread is in the middle of a system call")
    mask = ptrace_calls.get_signal_mask(thread.tid)
    frame = _frame(thread, registers, mask, gadgets[1])
    overwritten = _exchange(space, frame)
    session = _Session(thread, registers, frame, gadgets[0])
    session.lead_back()  # before anything else: it could be left with a mask that is not its own
    ptrace_calls.set_signal_mask(thread.tid, _ALL_SIGNALS)
    try:
        yield session.call
    finally:
        # A thread that was killed has nothing to be given back, and its end has been reported already. One that does
        # not come back from a call gives it back itself.
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
        raise InjectionError(_NO_ROOM)  # there is nothing below: the program uses the register for something else
    if is_restarted(registers, thread.space):
        values[Register.RAX] = RESTART_NO_HANDLER
    if thread.space.word_size == 8:
        return frame_64(values, mask, xstate, return_to)
    fsave = ptrace_calls.get_register_set(thread.tid, ptrace_calls.RegisterSet.FLOATING_POINT)
    return frame_32(values, mask, xstate, fsave, return_to)


def _exchange(space: AddressSpace, frame: SignalFrame) -> bytes:
    """Write a frame, and return what was there."""
    try:
        former = space.read(frame.address, len(frame.data))
        if len(former) < len(frame.data) or space.write(frame.address, frame.data) < len(frame.data):
            raise InjectionError(_NO_ROOM)
    except OSError as error:
        raise InjectionError(_NO_ROOM) from error
    return former


def _gadgets(thread: Thread) -> tuple[int, int]:
    """Return where in the thread's code a system call instruction and a return from a signal are."""
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
    Iterate over the mappings of a process that are searched for gadgets, each piece of a file once.

    Code of files comes first: its pages are there, and what a program generates may change.
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
    """Iterate over the mappings of code that are of no file, but for the kernel's own page, which cannot be read."""
    with contextlib.suppress(TargetError):  # it has ended, or has more of them than are looked at
        made = (each for each in mappings_of(tid) if each.executable and not each.is_file and each.path != "[vsyscall]")
        yield from sorted(made, key=lambda each: not each.path)


def _made_gadgets(space: AddressSpace) -> tuple[int, int]:
    """Write the instructions into padding, and return where they are; zeros if there is none."""
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
    """Give padding back in which the instructions are, if they were put there; no thread may be in them."""
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
    """A thread between its first and its last injected call."""

    def __init__(self, thread: Thread, registers: RegisterWords, frame: SignalFrame, instruction: int) -> None:
        self._thread = thread
        self._before = registers
        self._frame = frame
        self._instruction = instruction
        self._stops: list[int] = []
        self.has_ended = False

    def lead_back(self) -> None:
        """Let the thread stand where it returns from the signal, should nobody ask it for a call."""
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
        """Send the stop signals again that came meanwhile: they cannot be blocked."""
        for number in self._stops:
            with contextlib.suppress(OSError):
                process_calls.send_signal(self._thread.pid, self._thread.tid, number)

    def _advance(self, expected: StopKind) -> None:
        """Let the thread run to the next stop of the expected kind."""
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

        A call that sleeps for long is interrupted. If that does not help either, the thread is left to itself: it comes
        back by its signal frame, as if we had died. Somebody who shares its files or memory can bring that about.
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
        raise InjectionError("a system call that it was made to do does not come to its end")
