"""
Routines that say who hits a probe, and when: what the kernel's helpers do, without the kernel.

A filter of the process's own may end it for a system call that it does not expect (seccomp(2)). What only the kernel
knows, the name of a thread and its user, is added to records by who reads them. The one exception is a signal, which
the process gets because a handler wants it stopped.

A system call keeps all registers but rax, rcx and r11 (arch/x86/entry/entry_64.S).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.faults import Fixup
from dprobes.native.processpage import (
    CLOCK_COUNTER,
    CLOCK_RATE,
    CLOCK_READING,
    CLOCK_READINGS,
    CLOCK_TIME,
    CLOCK_VERSION,
    PROCESS_IS_NESTED,
    PROCESS_PID,
    PROCESS_THREADS,
    THREAD,
    THREAD_SLOTS,
    THREAD_WINDOW,
)
from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation, Shift

if TYPE_CHECKING:
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["write_clock", "write_ids", "write_signal", "write_stack_end"]

_GETPID, _GETTID, _TGKILL = 39, 186, 234
"""Numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl)."""


def _system_call(asm: X86Assembler, number: int) -> None:
    asm.mov_number(Gpr.RAX, number)
    asm.syscall()


def write_ids(asm: X86Assembler, process_page: int, tid_place: int | None) -> None:
    """
    Write GET_CURRENT_PID_TGID: the process id in the upper half, the thread id in the lower one.

    ``tid_place`` is where the C library has the thread id, in bytes from the thread pointer; None: it is given as 0.
    Where that is the id of a nested PID namespace, the process page has the other one; 0 if it is not there.
    """
    asm.mov_number(Gpr.R10, process_page)
    asm.load(Gpr.RAX, Memory(Gpr.R10, PROCESS_PID), 4)
    asm.shift(Shift.SHL, Gpr.RAX, 32)
    if tid_place is not None:
        local, place, left, found = Gpr.RDX, Gpr.R10, Gpr.R11, Gpr.R8
        nested, following, known = asm.label(), asm.label(), asm.label()
        asm.load(local, Memory(None, tid_place, of_thread=True), 4)
        asm.load(found, Memory(place, PROCESS_IS_NESTED), 4)
        asm.compare(found, 0, wide=False)
        asm.jump_if(Condition.NE, nested)
        asm.calculate(Operation.OR, Gpr.RAX, local)
        asm.ret()
        asm.place(nested)
        asm.mov(found, local, wide=False)
        asm.calculate(Operation.AND, found, THREAD_SLOTS - 1, wide=False)
        asm.multiply(found, THREAD.size)
        asm.calculate(Operation.ADD, place, found)
        asm.mov_number(left, THREAD_WINDOW)
        asm.place(following)
        asm.load(found, Memory(place, PROCESS_THREADS), 4)
        asm.compare(found, local, wide=False)
        asm.jump_if(Condition.E, known)
        asm.calculate(Operation.ADD, place, THREAD.size)
        asm.calculate(Operation.SUB, left, 1)
        asm.jump_if(Condition.NE, following)
        asm.ret()
        asm.place(known)
        asm.load(found, Memory(place, PROCESS_THREADS + THREAD.size // 2), 4)
        asm.calculate(Operation.OR, Gpr.RAX, found)
    asm.ret()


def write_stack_end(asm: X86Assembler, first_stack: int | None) -> list[Fixup]:
    """
    Write GET_CURRENT_TASK: the end of the stack that the address in rdi is in, as far as anybody knows; else 0.

    Above the stack of a thread the C libraries have what the thread pointer points to, and it points to itself ("ELF
    Handling For Thread-Local Storage", 4.4.6); the one that the process began with ends at ``first_stack``. The end is
    the first of both that is above the address. Before there is a thread pointer, the load faults.
    """
    none, known = asm.label(), asm.label()
    fault = asm.here
    asm.load(Gpr.RAX, Memory(None, 0, of_thread=True))
    looked = asm.label()
    asm.place(looked)
    if first_stack is not None:
        # Of two distances that are counted without a sign, that to what lies below is the greater one.
        asm.mov_number(Gpr.RDX, first_stack)
        asm.mov(Gpr.RCX, Gpr.RAX)
        asm.calculate(Operation.SUB, Gpr.RCX, Gpr.RDI)
        asm.mov(Gpr.RSI, Gpr.RDX)
        asm.calculate(Operation.SUB, Gpr.RSI, Gpr.RDI)
        asm.calculate(Operation.CMP, Gpr.RCX, Gpr.RSI)
        asm.jump_if(Condition.BE, known)
        asm.mov(Gpr.RAX, Gpr.RDX)
    asm.place(known)
    asm.calculate(Operation.CMP, Gpr.RAX, Gpr.RDI)
    asm.jump_if(Condition.B, none)
    asm.ret()
    missing = asm.here
    asm.mov_number(Gpr.RAX, 0)
    asm.jump(looked)
    asm.place(none)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    return [Fixup(fault, missing)]


def write_signal(asm: X86Assembler) -> None:
    """Write SEND_SIGNAL: the signal in edi goes to this thread, at once."""
    asm.mov(Gpr.R8, Gpr.RDI)
    _system_call(asm, _GETPID)
    asm.mov(Gpr.RDI, Gpr.RAX)
    _system_call(asm, _GETTID)
    asm.mov(Gpr.RSI, Gpr.RAX)
    asm.mov(Gpr.RDX, Gpr.R8)
    _system_call(asm, _TGKILL)
    asm.ret()


def write_clock(asm: X86Assembler, clock_page: int) -> None:
    """
    Write KTIME_GET_NS: CLOCK_MONOTONIC in nanoseconds, from the time stamp counter.

    A counter that stands a little before that of the page, on another CPU, gives an earlier time: the difference is
    signed. It begins anew if the page has changed meanwhile, which happens some times in a second.
    """
    again = asm.label()
    asm.mov_number(Gpr.R10, clock_page)
    asm.place(again)
    asm.load(Gpr.R8, Memory(Gpr.R10, CLOCK_VERSION))
    asm.mov(Gpr.R11, Gpr.R8)
    asm.calculate(Operation.AND, Gpr.R11, 1)
    asm.multiply(Gpr.R11, CLOCK_READING.size)
    asm.calculate(Operation.ADD, Gpr.R11, Gpr.R10)
    asm.rdtsc()
    asm.shift(Shift.SHL, Gpr.RDX, 32)
    asm.calculate(Operation.OR, Gpr.RAX, Gpr.RDX)
    asm.calculate(Operation.SUB, Gpr.RAX, Memory(Gpr.R11, CLOCK_READINGS + CLOCK_COUNTER))
    asm.multiply_wide(Memory(Gpr.R11, CLOCK_READINGS + CLOCK_RATE))
    asm.shrd(Gpr.RAX, Gpr.RDX, 32)
    asm.calculate(Operation.ADD, Gpr.RAX, Memory(Gpr.R11, CLOCK_READINGS + CLOCK_TIME))
    asm.calculate(Operation.CMP, Gpr.R8, Memory(Gpr.R10, CLOCK_VERSION))
    asm.jump_if(Condition.NE, again)
    asm.ret()
