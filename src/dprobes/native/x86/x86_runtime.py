"""
Routines that copy between the program's memory, which may not be there, and ours: what the kernel's helpers do.

They take their arguments as eBPF's helpers do, change rax, rdi, rsi, rdx, rcx, r8, r10 and r11, and return 0 or EFAULT.
They use no string instructions, which depend on the direction flag, and read nothing beyond what was asked for.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Helper
from dprobes.native.generated_code import Fixup, RoutineWriters, written_runtime
from dprobes.native.process_page import (
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
from dprobes.native.x86.x86_assembler import Condition, Gpr, Memory, Operation, Shift, X86Assembler
from dprobes.native.x86.x86_translator import write_routine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.generated_code import ProcessFacts, Runtime
    from dprobes.native.routines.handler_ring import RingShape
    from dprobes.native.routines.shared_hash_table import TableShape
    from dprobes.native.x86.x86_assembler import Label

__all__ = [
    "fault_entry",
    "make_runtime",
    "write_clock",
    "write_ids",
    "write_read",
    "write_read_string",
    "write_signal",
    "write_stack_end",
    "write_write",
]

# Routines that say who hits a probe, and when: what the kernel's helpers do, without the kernel.
#
# A filter of the process's own may end it for a system call that it does not expect (seccomp(2)). What only the kernel
# knows, the name of a thread and its user, is added to records by who reads them. The one exception is a signal, which
# the process gets because a handler wants it stopped.
#
# A system call keeps all registers but rax, rcx and r11 (arch/x86/entry/entry_64.S).


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


_WORD = 8
_ONES, _HIGHS = 0x0101010101010101, 0x8080808080808080
_PAGE_SHIFT = 12


def _may_fault(asm: X86Assembler, fixups: list[tuple[int, Label]], target: Label) -> None:
    """Note that the next instruction may fault."""
    fixups.append((asm.here, target))


def _resolved(asm: X86Assembler, places: list[tuple[int, Label]]) -> list[Fixup]:
    return [Fixup(at, asm.address_of(target)) for at, target in places]


def _copy(asm: X86Assembler, size: Gpr, faulting: list[tuple[int, Label]], fault: Label, *, stores: bool) -> None:
    """Write the copying of ``size`` bytes from rdx to rdi, by words and then by bytes; r8 is taken."""
    words, tail, byte, done = asm.label(), asm.label(), asm.label(), asm.label()
    source, target = Memory(Gpr.RDX), Memory(Gpr.RDI)
    asm.place(words)
    asm.compare(size, _WORD)
    asm.jump_if(Condition.B, tail)
    for label, width in ((words, _WORD), (byte, 1)):
        if width == 1:
            asm.place(tail)
            asm.compare(size, 0)
            asm.jump_if(Condition.E, done)
            asm.place(byte)
        if not stores:
            _may_fault(asm, faulting, fault)
        asm.load(Gpr.R8, source, width)
        if stores:
            _may_fault(asm, faulting, fault)
        asm.store(target, Gpr.R8, width)
        asm.calculate(Operation.ADD, Gpr.RDX, width)
        asm.calculate(Operation.ADD, Gpr.RDI, width)
        asm.calculate(Operation.SUB, size, width)
        if width == 1:
            asm.jump_if(Condition.NE, label)
        else:
            asm.jump(label)
    asm.place(done)


def _clear(asm: X86Assembler, fault: Label) -> None:
    """Write what follows a fault of a read: rsi bytes at r10 are cleared, and EFAULT is returned."""
    cleared = asm.label()
    asm.place(fault)
    asm.compare(Gpr.RSI, 0)
    asm.jump_if(Condition.E, cleared)
    asm.store_number(Memory(Gpr.R10), 0, 1)
    asm.calculate(Operation.ADD, Gpr.R10, 1)
    asm.calculate(Operation.SUB, Gpr.RSI, 1)
    asm.jump(fault)
    asm.place(cleared)
    asm.mov_number(Gpr.RAX, -errno.EFAULT)
    asm.ret()


def write_read(asm: X86Assembler) -> list[Fixup]:
    """
    Write the routine that reads: rsi bytes at rdx to rdi. If one cannot be read all are cleared.

    A word, the most frequent size, takes the shortest way.
    """
    faulting: list[tuple[int, Label]] = []
    fault, any_size = asm.label(), asm.label()
    asm.mov(Gpr.R10, Gpr.RDI)
    asm.mov(Gpr.RCX, Gpr.RSI)
    asm.compare(Gpr.RSI, _WORD)
    asm.jump_if(Condition.NE, any_size)
    _may_fault(asm, faulting, fault)
    asm.load(Gpr.RAX, Memory(Gpr.RDX))
    asm.store(Memory(Gpr.RDI), Gpr.RAX)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    asm.place(any_size)
    _copy(asm, Gpr.RCX, faulting, fault, stores=False)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    _clear(asm, fault)
    return _resolved(asm, faulting)


def write_write(asm: X86Assembler) -> list[Fixup]:
    """Write the routine that changes the program's memory: rdx bytes at rsi to rdi."""
    faulting: list[tuple[int, Label]] = []
    fault = asm.label()
    asm.mov(Gpr.RCX, Gpr.RDX)
    asm.mov(Gpr.RDX, Gpr.RSI)
    _copy(asm, Gpr.RCX, faulting, fault, stores=True)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    asm.place(fault)
    asm.mov_number(Gpr.RAX, -errno.EFAULT)
    asm.ret()
    return _resolved(asm, faulting)


def write_read_string(asm: X86Assembler) -> list[Fixup]:
    """
    Write the routine that reads a string at rdx to rdi, rsi bytes with its NUL at most.

    rax is its length with the NUL. A string that is longer is cut, and ends with a NUL all the same. Words are read
    whole only where they do not reach into another page: so what follows the string is never asked for.
    """
    faulting: list[tuple[int, Label]] = []
    again, byte, ended, cut, fault, empty = (asm.label() for _ in range(6))
    asm.compare(Gpr.RSI, 0)
    asm.jump_if(Condition.E, empty)
    asm.mov(Gpr.R10, Gpr.RDI)
    asm.mov(Gpr.RCX, Gpr.RSI)
    asm.place(again)
    # A word at once, if there is room for nine bytes, and it lies in one page.
    asm.compare(Gpr.RCX, _WORD)
    asm.jump_if(Condition.BE, byte)
    asm.lea(Gpr.RAX, Memory(Gpr.RDX, _WORD - 1))
    asm.calculate(Operation.XOR, Gpr.RAX, Gpr.RDX)
    asm.shift(Shift.SHR, Gpr.RAX, _PAGE_SHIFT)
    asm.jump_if(Condition.NE, byte)
    _may_fault(asm, faulting, fault)
    asm.load(Gpr.RAX, Memory(Gpr.RDX))
    asm.mov_number(Gpr.R11, -_ONES)
    asm.calculate(Operation.ADD, Gpr.R11, Gpr.RAX)
    asm.mov(Gpr.R8, Gpr.RAX)
    asm.calculate(Operation.XOR, Gpr.R8, -1)
    asm.calculate(Operation.AND, Gpr.R11, Gpr.R8)
    asm.mov_number(Gpr.R8, _HIGHS)
    asm.test(Gpr.R11, Gpr.R8)
    asm.jump_if(Condition.NE, byte)  # one of the bytes is 0
    asm.store(Memory(Gpr.RDI), Gpr.RAX)
    asm.calculate(Operation.ADD, Gpr.RDX, _WORD)
    asm.calculate(Operation.ADD, Gpr.RDI, _WORD)
    asm.calculate(Operation.SUB, Gpr.RCX, _WORD)
    asm.jump(again)
    asm.place(byte)
    asm.compare(Gpr.RCX, 1)
    asm.jump_if(Condition.E, cut)
    _may_fault(asm, faulting, fault)
    asm.load(Gpr.RAX, Memory(Gpr.RDX), 1)
    asm.store(Memory(Gpr.RDI), Gpr.RAX, 1)
    asm.calculate(Operation.ADD, Gpr.RDX, 1)
    asm.calculate(Operation.ADD, Gpr.RDI, 1)
    asm.calculate(Operation.SUB, Gpr.RCX, 1)
    asm.compare(Gpr.RAX, 0)
    asm.jump_if(Condition.E, ended)
    asm.test(Gpr.RDX, _WORD - 1)
    asm.jump_if(Condition.NE, byte)
    asm.jump(again)
    asm.place(cut)
    asm.store_number(Memory(Gpr.RDI), 0, 1)
    asm.calculate(Operation.ADD, Gpr.RDI, 1)
    asm.place(ended)
    asm.mov(Gpr.RAX, Gpr.RDI)
    asm.calculate(Operation.SUB, Gpr.RAX, Gpr.R10)
    asm.ret()
    asm.place(empty)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    _clear(asm, fault)
    return _resolved(asm, faulting)


# A signal handler for SIGSEGV and SIGBUS that lets a thread go on at a fix-up, for a process of our own.
#
# In the probed process it is the tracer who does this, who sees a signal before the program does.


_RIP = 168
"""Where ``ucontext_t`` has rip: behind uc_flags, uc_link, uc_stack, and the 16 registers before it."""

_ENTRY = 16


def fault_entry(address: int, fixups: Sequence[Fixup], otherwise: int) -> bytes:
    """
    Return the code of a handler with SA_SIGINFO, to be placed at ``address``.

    ``otherwise`` is the address of the handler for all other faults.
    """
    asm = X86Assembler(address)
    again, found, table, none = (asm.label() for _ in range(4))
    asm.load(Gpr.RAX, Memory(Gpr.RDX, _RIP))
    asm.lea_label(Gpr.RCX, table)
    asm.mov_number(Gpr.R8, len(fixups))
    asm.place(again)
    asm.compare(Gpr.R8, 0)
    asm.jump_if(Condition.E, none)
    asm.calculate(Operation.CMP, Gpr.RAX, Memory(Gpr.RCX))
    asm.jump_if(Condition.E, found)
    asm.calculate(Operation.ADD, Gpr.RCX, _ENTRY)
    asm.calculate(Operation.SUB, Gpr.R8, 1)
    asm.jump(again)
    asm.place(none)
    asm.mov_number(Gpr.RAX, otherwise)
    asm.jump_by(Gpr.RAX)
    asm.place(found)
    asm.load(Gpr.RAX, Memory(Gpr.RCX, 8))
    asm.store(Memory(Gpr.RDX, _RIP), Gpr.RAX)
    asm.ret()
    asm.place(table)
    for fixup in fixups:
        asm.raw(fixup.instruction.to_bytes(8, "little") + fixup.target.to_bytes(8, "little"))
    return asm.assemble()


# The routines for x86-64.


def make_runtime(address: int, facts: ProcessFacts, rings: RingShape, tables: Mapping[MapName, TableShape]) -> Runtime:
    """Return the routines for ``address``."""
    writers = RoutineWriters(
        {
            Helper.PROBE_READ_USER: write_read,
            Helper.PROBE_READ_USER_STR: write_read_string,
            Helper.PROBE_WRITE_USER: write_write,
        },
        {Helper.SEND_SIGNAL: write_signal},
        write_ids,
        write_clock,
        write_stack_end,
        write_routine,
    )
    return written_runtime(X86Assembler(address), writers, facts, rings, tables)
