"""
The atomic operations of eBPF (RFC 9669, section 5.3) on AArch64.

They are loops of an exclusive load and an exclusive store, which all processors have. Where the old value is wanted the
operation keeps the order of everything around it, as the kernel's does (Documentation/atomic_t.txt).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Atomic
from dprobes.native.a64.assembler import Condition, Gpr, Operation
from dprobes.native.a64.registers import RESULT, SCRATCH_1, SCRATCH_2, SCRATCH_3, gpr

if TYPE_CHECKING:
    from dprobes.bpf.asm.insn import Insn
    from dprobes.native.a64.assembler import A64Assembler

__all__ = ["write_atomic"]

_OPERATIONS = {
    Atomic.ADD: Operation.ADD,
    Atomic.OR: Operation.ORR,
    Atomic.AND: Operation.AND,
    Atomic.XOR: Operation.EOR,
}


def write_atomic(asm: A64Assembler, insn: Insn, size: int) -> None:
    """Write an atomic operation on ``size`` bytes."""
    src, operation = gpr(insn.src), insn.imm
    address = _write_address(asm, gpr(insn.dst), insn.off)
    again, done = asm.label(), asm.label()
    old, new = SCRATCH_2, SCRATCH_3
    asm.place(again)
    asm.load_exclusive(old, address, size)
    if operation == Atomic.CMPXCHG:
        asm.compare(old, RESULT, wide=size == 8)
        asm.jump_if(Condition.NE, done)
        new = src
    elif operation == Atomic.XCHG:
        new = src
    else:
        asm.calculate(_OPERATIONS[Atomic(operation & ~Atomic.FETCH)], new, old, src)
    asm.store_exclusive(Gpr.X17, address, new, size)
    asm.compare(Gpr.X17, 0, wide=False)
    asm.jump_if(Condition.NE, again)
    asm.place(done)
    if operation & Atomic.FETCH:
        asm.barrier()
        asm.mov(RESULT if operation == Atomic.CMPXCHG else src, old)


def _write_address(asm: A64Assembler, base: Gpr, displacement: int) -> Gpr:
    """Return a register with the sum; exclusive accesses take no displacement."""
    if not displacement:
        return base
    asm.calculate(Operation.ADD, SCRATCH_1, base, displacement)
    return SCRATCH_1
