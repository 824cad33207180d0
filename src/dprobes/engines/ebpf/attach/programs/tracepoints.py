"""
The arguments of the kernel's tracepoints, and process ids, for programs that follow processes.

A thread executes much of the kernel's code after ``sched_process_exit``: it closes files, sends SIGCHLD, and leaves its
CPU for the last time. Then its parent waits for it, and its number may be given to another one. ``sched_process_free``
comes after all of that, for each thread, but may come when its number has been given away. So whatever is forgotten
there is noted with the address of what ends, which nothing else can have until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.layout import MapName

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.layout import Status
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes

__all__ = [
    "add_to_status",
    "begin_exit",
    "begin_fork",
    "load_argument",
    "load_process",
    "point_to_stack",
]

R0, R1, R2, R3, R4, R6, R7, R10 = (Register(number) for number in (0, 1, 2, 3, 4, 6, 7, 10))


def load_argument(asm: Assembler, dst: Register, number: int) -> None:
    """Load an argument of the tracepoint; R1 is still the context."""
    asm.load(dst, R1, 8 * number)


def point_to_stack(asm: Assembler, dst: Register, offset: int) -> None:
    """Let a register point to the program's stack."""
    asm.mov(dst, R10)
    asm.alu(Alu.ADD, dst, offset)


def load_process(asm: Assembler) -> None:
    """Load the id of the running process to R0; takes R1-R5."""
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.alu(Alu.RSH, R0, 32)


def add_to_status(asm: Assembler, word: Status, number: int) -> None:
    """Add to a word of STATUS; takes R1 and R2."""
    asm.load_value(R1, MapName.STATUS, word)
    asm.mov(R2, number)
    asm.atomic(Atomic.ADD, R1, 0, R2)


def begin_fork(asm: Assembler, types: KernelTypes, end: Label) -> None:
    """Load the id of the new process to R6, and that of its parent to R4, at ``sched_process_fork(parent, child)``."""
    tgid, pid = types.member_offset("task_struct", "tgid"), types.member_offset("task_struct", "pid")
    load_argument(asm, R2, 0)
    load_argument(asm, R3, 1)
    asm.load(R6, R3, tgid, Size.W)
    asm.load(R4, R3, pid, Size.W)
    asm.jump_if(Jump.JNE, R6, R4, end)  # a thread
    asm.load(R4, R2, tgid, Size.W)


def begin_exit(asm: Assembler, types: KernelTypes) -> None:
    """
    At ``sched_process_exit(task)`` or ``sched_process_free(task)`` load the process: its id to R6, what it is to R7.

    The latter is the address of what its threads have in common. R4 is how many of them have not begun to end.
    """
    load_argument(asm, R2, 0)
    asm.load(R6, R2, types.member_offset("task_struct", "tgid"), Size.W)
    asm.load(R7, R2, types.member_offset("task_struct", "signal"))
    # do_exit() counts a thread out of "live" before it gets here; when several find 0, all of them do.
    asm.load(R4, R7, types.member_offset("signal_struct", "live"), Size.W)
