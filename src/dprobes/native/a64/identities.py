"""
Routines that say who hits a probe, and when: what the kernel's helpers do, without the kernel.

What only that knows is added to records by who reads them; a signal is the one exception (``native.x86.identities``).

A system call takes its number in x8, returns in x0, and keeps all other registers (arch/arm64/kernel/entry.S).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import Condition, Gpr, Memory, Operation, Shift, SystemRegister
from dprobes.native.a64.registers import RESULT, SCRATCH_1, SCRATCH_2, SCRATCH_3
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

if TYPE_CHECKING:
    from dprobes.native.a64.assembler import A64Assembler
    from dprobes.native.faults import Fixup

__all__ = ["write_clock", "write_ids", "write_signal", "write_stack_end"]

_TGKILL, _GETPID, _GETTID = 131, 172, 178
"""Numbers of system calls (include/uapi/asm-generic/unistd.h)."""


def _system_call(asm: A64Assembler, number: int) -> None:
    asm.mov_number(Gpr.X8, number)
    asm.system_call()


def _write_pair(asm: A64Assembler, high: Gpr, low: Gpr) -> None:
    """Write the return of two words in one."""
    asm.shift(Shift.LSL, high, high, 32)
    asm.calculate(Operation.ORR, RESULT, high, low)
    asm.ret()


def write_ids(asm: A64Assembler, process_page: int, tid_place: int | None) -> None:
    """
    Write GET_CURRENT_PID_TGID: the process id in the upper half, the thread id in the lower one.

    ``tid_place`` is where the C library has the thread id, in bytes from the thread pointer; None: it is given as 0.
    Where that is the id of a nested PID namespace, the process page has the other one; 0 if it is not there.
    """
    place, pid, found, tid, local, left = SCRATCH_1, SCRATCH_2, SCRATCH_3, Gpr.X0, Gpr.X1, Gpr.X2
    asm.mov_number(place, process_page)
    asm.load(pid, Memory(place, PROCESS_PID), 4)
    if tid_place is None:
        asm.mov_number(tid, 0)
    else:
        following, known, told = asm.label(), asm.label(), asm.label()
        asm.read_system(tid, SystemRegister.TPIDR_EL0)
        asm.load(tid, Memory(tid, tid_place), 4)
        asm.load(found, Memory(place, PROCESS_IS_NESTED), 4)
        asm.compare(found, 0, wide=False)
        asm.jump_if(Condition.EQ, told)
        asm.mov(local, tid, wide=False)
        asm.mov_number(tid, 0)
        asm.calculate(Operation.AND, found, local, THREAD_SLOTS - 1)
        asm.calculate(Operation.MUL, found, found, THREAD.size)
        asm.calculate(Operation.ADD, place, place, found)
        asm.mov_number(left, THREAD_WINDOW)
        asm.place(following)
        asm.load(found, Memory(place, PROCESS_THREADS), 4)
        asm.compare(found, local, wide=False)
        asm.jump_if(Condition.EQ, known)
        asm.calculate(Operation.ADD, place, place, THREAD.size)
        asm.calculate(Operation.SUBS, left, left, 1)
        asm.jump_if(Condition.NE, following)
        asm.jump(told)
        asm.place(known)
        asm.load(tid, Memory(place, PROCESS_THREADS + THREAD.size // 2), 4)
        asm.place(told)
    _write_pair(asm, pid, tid)


def write_stack_end(asm: A64Assembler, first_stack: int | None) -> list[Fixup]:
    """
    Write GET_CURRENT_TASK: the end of the stack that the address in R1 is in, as far as anybody knows; else 0.

    It is what the thread pointer says or ``first_stack``, the first of both that is above the address
    (``native.x86.identities``). Nothing of that faults.
    """
    none, known = asm.label(), asm.label()
    asm.read_system(RESULT, SystemRegister.TPIDR_EL0)
    if first_stack is not None:
        asm.mov_number(SCRATCH_1, first_stack)
    else:
        asm.mov(SCRATCH_1, RESULT)
    # Of two distances that are counted without a sign, that to what lies below is the greater one.
    asm.calculate(Operation.SUB, SCRATCH_2, RESULT, Gpr.X0)
    asm.calculate(Operation.SUB, SCRATCH_3, SCRATCH_1, Gpr.X0)
    asm.compare(SCRATCH_2, SCRATCH_3)
    asm.jump_if(Condition.LS, known)
    asm.mov(RESULT, SCRATCH_1)
    asm.place(known)
    asm.compare(RESULT, Gpr.X0)
    asm.jump_if(Condition.LO, none)
    asm.ret()
    asm.place(none)
    asm.mov_number(RESULT, 0)
    asm.ret()
    return []


def write_signal(asm: A64Assembler) -> None:
    """Write SEND_SIGNAL: the signal in R1 goes to this thread, at once."""
    asm.mov(Gpr.X2, Gpr.X0)
    _system_call(asm, _GETTID)
    asm.mov(Gpr.X1, Gpr.X0)
    _system_call(asm, _GETPID)
    _system_call(asm, _TGKILL)
    asm.mov(RESULT, Gpr.X0)
    asm.ret()


def write_clock(asm: A64Assembler, clock_page: int) -> None:
    """
    Write KTIME_GET_NS: CLOCK_MONOTONIC, from the timer's counter.

    ::

        time + (counter - CLOCK_COUNTER) * rate / 2**32, signed, of the valid reading of the clock page

    The counter may have been read on another CPU than the page was written on, or before it was: the difference is
    signed. It begins anew if the page has changed meanwhile, which happens some times in a second.
    """
    again = asm.label()
    version, number, other, reading = SCRATCH_1, RESULT, SCRATCH_2, SCRATCH_3
    page = Gpr.X0
    asm.mov_number(page, clock_page)
    asm.place(again)
    _write_field(asm, version, page, CLOCK_VERSION)
    asm.calculate(Operation.AND, reading, version, 1)
    asm.calculate(Operation.MUL, reading, reading, CLOCK_READING.size)
    asm.calculate(Operation.ADD, reading, reading, page)
    asm.synchronize()
    asm.read_system(number, SystemRegister.CNTVCT_EL0)
    _write_field(asm, other, reading, CLOCK_READINGS + CLOCK_COUNTER)
    asm.calculate(Operation.SUB, number, number, other)
    _write_field(asm, other, reading, CLOCK_READINGS + CLOCK_RATE)
    asm.multiply_high(Gpr.X2, number, other, is_signed=True)
    asm.calculate(Operation.MUL, number, number, other)
    asm.extract(number, Gpr.X2, number, 32)
    _write_field(asm, other, reading, CLOCK_READINGS + CLOCK_TIME)
    asm.calculate(Operation.ADD, number, number, other)
    _write_field(asm, other, page, CLOCK_VERSION)
    asm.compare(version, other)
    asm.jump_if(Condition.NE, again)
    asm.ret()


def _write_field(asm: A64Assembler, dst: Gpr, page: Gpr, place: int) -> None:
    """Load a word of a page so that no later load is done before."""
    asm.calculate(Operation.ADD, dst, page, place)
    asm.load_acquire(dst, dst)
