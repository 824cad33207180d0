"""
A signal handler for SIGSEGV and SIGBUS that lets a thread go on at a fix-up, for a process of our own.

In the probed process it is the tracer who does this, who sees a signal before the program does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import A64Assembler, Condition, Gpr, Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.native.faults import Fixup

__all__ = ["fault_entry"]

_PC = 440
"""Where ``ucontext_t`` has pc: its sigcontext is at 176, with the fault's address, 31 registers and sp before it."""

_CONTEXT = Gpr.X2
"""The third argument of a handler with SA_SIGINFO."""


def fault_entry(address: int, fixups: Sequence[Fixup], otherwise: int) -> bytes:
    """
    Return the code of a handler with SA_SIGINFO, to be placed at ``address``.

    ``otherwise`` is the address of the handler for all other faults.
    """
    asm = A64Assembler(address)
    asm.load(Gpr.X9, Memory(_CONTEXT, _PC))
    for fixup in fixups:
        following = asm.label()
        asm.mov_number(Gpr.X10, fixup.instruction)
        asm.compare(Gpr.X9, Gpr.X10)
        asm.jump_if(Condition.NE, following)
        asm.mov_number(Gpr.X10, fixup.target)
        asm.store(Memory(_CONTEXT, _PC), Gpr.X10)
        asm.ret()
        asm.place(following)
    asm.mov_number(Gpr.X10, otherwise)
    asm.jump_by(Gpr.X10)
    return asm.assemble()
