"""
Routines that say who hits a probe, and when: what the kernel's helpers do.

A system call keeps all registers but rax, rcx and r11 (arch/x86/entry/entry_64.S).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.processpage import CLOCK_COUNTER, CLOCK_RATE, CLOCK_TIME, CLOCK_VERSION, PROCESS_PID
from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation, Shift

if TYPE_CHECKING:
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["write_clock", "write_ids", "write_name", "write_signal", "write_user"]

_GETPID, _GETUID, _GETGID, _PRCTL, _GETTID, _TGKILL = 39, 102, 104, 157, 186, 234
"""Numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl)."""
_CLOCK_GETTIME = 228
_PR_GET_NAME = 16
_CLOCK_MONOTONIC, _SECOND = 1, 1_000_000_000
_TIMESPEC_SIZE = 16
"""Two words: seconds, and nanoseconds."""

_TRIES = 256
"""How often the clock page is looked at while somebody changes it."""


def _system_call(asm: X86Assembler, number: int) -> None:
    asm.mov_number(Gpr.RAX, number)
    asm.syscall()


def write_ids(asm: X86Assembler, process_page: int, tid_place: int | None) -> None:
    """
    Write GET_CURRENT_PID_TGID: the process id in the upper half, the thread id in the lower one.

    ``tid_place`` is where the C library has the thread id, in bytes from the thread pointer; None: ask the kernel.
    """
    known, page = asm.label(), Memory(Gpr.R10, PROCESS_PID)
    asm.mov_number(Gpr.R10, process_page)
    asm.load(Gpr.RAX, page, 4)
    asm.compare(Gpr.RAX, 0)
    asm.jump_if(Condition.NE, known)
    _system_call(asm, _GETPID)
    asm.store(page, Gpr.RAX, 4)
    asm.place(known)
    asm.mov(Gpr.RDX, Gpr.RAX)
    if tid_place is None:
        _system_call(asm, _GETTID)
    else:
        asm.load(Gpr.RAX, Memory(None, tid_place, of_thread=True), 4)
    asm.shift(Shift.SHL, Gpr.RDX, 32)
    asm.calculate(Operation.OR, Gpr.RAX, Gpr.RDX)
    asm.ret()


def write_user(asm: X86Assembler) -> None:
    """Write GET_CURRENT_UID_GID: the group id in the upper half, the user id in the lower one."""
    _system_call(asm, _GETGID)
    asm.mov(Gpr.RDX, Gpr.RAX)
    _system_call(asm, _GETUID)
    asm.shift(Shift.SHL, Gpr.RDX, 32)
    asm.calculate(Operation.OR, Gpr.RAX, Gpr.RDX)
    asm.ret()


def write_name(asm: X86Assembler) -> None:
    """Write GET_CURRENT_COMM: 16 bytes to rdi, whatever rsi says; prctl(2) writes as many."""
    asm.mov(Gpr.RSI, Gpr.RDI)
    asm.mov_number(Gpr.RDI, _PR_GET_NAME)
    _system_call(asm, _PRCTL)
    asm.ret()


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
    signed. Who changes the page may have been killed meanwhile: after some tries the kernel is asked.
    """
    again, changing = asm.label(), asm.label()
    asm.mov_number(Gpr.R10, clock_page)
    asm.mov_number(Gpr.R11, _TRIES)
    asm.place(again)
    asm.load(Gpr.R8, Memory(Gpr.R10, CLOCK_VERSION))
    asm.test(Gpr.R8, 1)
    asm.jump_if(Condition.NE, changing)
    asm.rdtsc()
    asm.shift(Shift.SHL, Gpr.RDX, 32)
    asm.calculate(Operation.OR, Gpr.RAX, Gpr.RDX)
    asm.calculate(Operation.SUB, Gpr.RAX, Memory(Gpr.R10, CLOCK_COUNTER))
    asm.multiply_wide(Memory(Gpr.R10, CLOCK_RATE))
    asm.shrd(Gpr.RAX, Gpr.RDX, 32)
    asm.calculate(Operation.ADD, Gpr.RAX, Memory(Gpr.R10, CLOCK_TIME))
    asm.calculate(Operation.CMP, Gpr.R8, Memory(Gpr.R10, CLOCK_VERSION))
    asm.jump_if(Condition.NE, changing)
    asm.ret()
    asm.place(changing)
    asm.calculate(Operation.SUB, Gpr.R11, 1)
    asm.jump_if(Condition.NE, again)
    asm.lea(Gpr.RSP, Memory(Gpr.RSP, -_TIMESPEC_SIZE))
    asm.mov_number(Gpr.RDI, _CLOCK_MONOTONIC)
    asm.mov(Gpr.RSI, Gpr.RSP)
    _system_call(asm, _CLOCK_GETTIME)
    asm.pop(Gpr.RAX)
    asm.pop(Gpr.RDX)
    asm.multiply(Gpr.RAX, _SECOND)
    asm.calculate(Operation.ADD, Gpr.RAX, Gpr.RDX)
    asm.ret()
