"""
A signal handler for SIGSEGV and SIGBUS that lets a thread go on at a fix-up, for a process of our own.

In the probed process it is the tracer who does this, who sees a signal before the program does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation, X86Assembler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.native.faults import Fixup

__all__ = ["fault_entry"]

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
