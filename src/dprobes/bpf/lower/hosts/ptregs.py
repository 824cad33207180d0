"""``struct pt_regs``: where it holds the registers, and those with which the current thread has entered the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register
from dprobes.bpf.layout import SNAPSHOT_REGISTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler, Label

__all__ = ["REGISTER_OFFSETS", "USER_MODE", "copy_task_registers", "task_registers"]

REGISTER_OFFSETS = {
    "r15": 0, "r14": 8, "r13": 16, "r12": 24, "ebp": 32, "ebx": 40, "r11": 48, "r10": 56, "r9": 64, "r8": 72, "eax": 80,
    "ecx": 88, "edx": 96, "esi": 104, "edi": 112, "eip": 128, "cs": 136, "eflags": 144, "esp": 152, "ss": 160,
}  # fmt: skip
"""Where ``struct pt_regs`` holds the registers (arch/x86/include/asm/ptrace.h), for 32-bit processes as well."""

USER_MODE = 3
"""The bits of ``cs`` that are all set in user mode."""


def task_registers(asm: Assembler, nobody: Label) -> None:
    """
    Let R0 point to the registers with which the current thread has entered the kernel. Takes R1-R5.

    Go to ``nobody`` in a thread of the kernel: those have zeros there (copy_thread in arch/x86/kernel/process.c).
    """
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    asm.mov(Register.R1, Register.R0)
    asm.call(Helper.TASK_PT_REGS)
    asm.load(Register.R1, Register.R0, REGISTER_OFFSETS["cs"])
    asm.alu(Alu.AND, Register.R1, USER_MODE)
    asm.jump_if(Jump.JNE, Register.R1, USER_MODE, nobody)


def copy_task_registers(asm: Assembler, nobody: Label, to: Callable[[Register], None]) -> None:
    """Write those registers to where ``to`` lets a register point; takes R0-R5."""
    task_registers(asm, nobody)
    to(Register.R2)
    for offset in range(0, 8 * SNAPSHOT_REGISTERS, 8):
        asm.load(Register.R1, Register.R0, offset)
        asm.store(Register.R2, offset, Register.R1)
