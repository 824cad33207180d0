"""
Routines that say who hits a probe, and when: what the kernel's helpers do.

A system call takes its number in x8, returns in x0, and keeps all other registers (arch/arm64/kernel/entry.S).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import Condition, Gpr, Memory, Operation, Shift, SystemRegister
from dprobes.native.a64.registers import RESULT, SCRATCH_1, SCRATCH_2, SCRATCH_3
from dprobes.native.processpage import CLOCK_COUNTER, CLOCK_RATE, CLOCK_TIME, CLOCK_VERSION, PROCESS_PID

if TYPE_CHECKING:
    from dprobes.native.a64.assembler import A64Assembler

__all__ = ["write_clock", "write_ids", "write_name", "write_signal", "write_user"]

_CLOCK_GETTIME, _TGKILL, _PRCTL, _GETPID, _GETUID, _GETGID, _GETTID = 113, 131, 167, 172, 174, 176, 178
"""Numbers of system calls (include/uapi/asm-generic/unistd.h)."""
_PR_GET_NAME = 16
_CLOCK_MONOTONIC, _SECOND = 1, 1_000_000_000
_TIMESPEC_SIZE = 16
"""Two words: seconds, and nanoseconds."""

_TRIES = 256
"""How often the clock page is looked at while somebody changes it."""


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

    ``tid_place`` is where the C library has the thread id, in bytes from the thread pointer; None: ask the kernel.
    """
    known, page = asm.label(), Memory(SCRATCH_1, PROCESS_PID)
    asm.mov_number(SCRATCH_1, process_page)
    asm.load(SCRATCH_2, page, 4)
    asm.compare(SCRATCH_2, 0)
    asm.jump_if(Condition.NE, known)
    _system_call(asm, _GETPID)
    asm.mov(SCRATCH_2, Gpr.X0)
    asm.store(page, SCRATCH_2, 4)
    asm.place(known)
    if tid_place is None:
        _system_call(asm, _GETTID)
    else:
        asm.read_system(Gpr.X0, SystemRegister.TPIDR_EL0)
        asm.load(Gpr.X0, Memory(Gpr.X0, tid_place), 4)
    _write_pair(asm, SCRATCH_2, Gpr.X0)


def write_user(asm: A64Assembler) -> None:
    """Write GET_CURRENT_UID_GID: the group id in the upper half, the user id in the lower one."""
    _system_call(asm, _GETGID)
    asm.mov(SCRATCH_1, Gpr.X0)
    _system_call(asm, _GETUID)
    _write_pair(asm, SCRATCH_1, Gpr.X0)


def write_name(asm: A64Assembler) -> None:
    """Write GET_CURRENT_COMM: 16 bytes to R1, whatever R2 says; prctl(2) writes as many."""
    asm.mov(Gpr.X1, Gpr.X0)
    asm.mov_number(Gpr.X0, _PR_GET_NAME)
    _system_call(asm, _PRCTL)
    asm.mov(RESULT, Gpr.X0)
    asm.ret()


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

        time + (counter - CLOCK_COUNTER) * rate / 2**32, signed, of what the clock page says in one version

    The counter may have been read on another CPU than the page was written on, or before it was: the difference is
    signed. Who changes the page may have been killed meanwhile: after some tries the kernel is asked.
    """
    again, changing = asm.label(), asm.label()
    version, number, other, tries = SCRATCH_1, RESULT, SCRATCH_2, SCRATCH_3
    page = Gpr.X0
    asm.mov_number(page, clock_page)
    asm.mov_number(tries, _TRIES)
    asm.place(again)
    _write_field(asm, version, page, CLOCK_VERSION)
    asm.test(version, 1)
    asm.jump_if(Condition.NE, changing)
    asm.synchronize()
    asm.read_system(number, SystemRegister.CNTVCT_EL0)
    _write_field(asm, other, page, CLOCK_COUNTER)
    asm.calculate(Operation.SUB, number, number, other)
    _write_field(asm, other, page, CLOCK_RATE)
    asm.multiply_high(Gpr.X2, number, other, is_signed=True)
    asm.calculate(Operation.MUL, number, number, other)
    asm.extract(number, Gpr.X2, number, 32)
    _write_field(asm, other, page, CLOCK_TIME)
    asm.calculate(Operation.ADD, number, number, other)
    _write_field(asm, other, page, CLOCK_VERSION)
    asm.compare(version, other)
    asm.jump_if(Condition.NE, changing)
    asm.ret()
    asm.place(changing)
    asm.calculate(Operation.SUBS, tries, tries, 1)
    asm.jump_if(Condition.NE, again)
    asm.calculate(Operation.SUB, Gpr.SP, Gpr.SP, _TIMESPEC_SIZE)
    asm.mov_number(Gpr.X0, _CLOCK_MONOTONIC)
    asm.calculate(Operation.ADD, Gpr.X1, Gpr.SP, 0)
    _system_call(asm, _CLOCK_GETTIME)
    asm.load(number, Memory(Gpr.SP))
    asm.load(other, Memory(Gpr.SP, 8))
    asm.calculate(Operation.ADD, Gpr.SP, Gpr.SP, _TIMESPEC_SIZE)
    asm.calculate(Operation.MUL, number, number, _SECOND)
    asm.calculate(Operation.ADD, number, number, other)
    asm.ret()


def _write_field(asm: A64Assembler, dst: Gpr, page: Gpr, place: int) -> None:
    """Load a word of a page so that no later load is done before."""
    asm.calculate(Operation.ADD, dst, page, place)
    asm.load_acquire(dst, dst)
