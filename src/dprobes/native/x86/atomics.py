"""The atomic operations of eBPF (RFC 9669, section 5.3) on x86-64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Atomic
from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation
from dprobes.native.x86.registers import RESULT, SCRATCH_1, SCRATCH_2, gpr

if TYPE_CHECKING:
    from dprobes.bpf.asm.insn import Insn
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["write_atomic"]

_OPERATIONS = {
    Atomic.ADD: Operation.ADD,
    Atomic.OR: Operation.OR,
    Atomic.AND: Operation.AND,
    Atomic.XOR: Operation.XOR,
}


def write_atomic(asm: X86Assembler, insn: Insn, size: int) -> None:
    """Write an atomic operation on ``size`` bytes."""
    memory, src = Memory(gpr(insn.dst), insn.off), gpr(insn.src)
    operation = insn.imm
    if operation == Atomic.XCHG:
        asm.exchange(memory, src, size)
    elif operation == Atomic.CMPXCHG:
        asm.compare_exchange(memory, src, size)
        if size == 4:
            asm.mov(RESULT, RESULT, wide=False)
    elif operation == Atomic.ADD | Atomic.FETCH:
        asm.exchange_add(memory, src, size)
    elif operation in _OPERATIONS:
        asm.calculate_in(_OPERATIONS[Atomic(operation)], memory, src, size, lock=True)
    else:
        _fetch(asm, _OPERATIONS[Atomic(operation & ~Atomic.FETCH)], memory, src, size)


def _fetch(asm: X86Assembler, operation: Operation, memory: Memory, src: Gpr, size: int) -> None:
    """Write an operation whose old value is wanted: it is tried until nobody has interfered."""
    again, wide = asm.label(), size == 8
    base = memory.base
    assert base is not None
    if RESULT in (base, src):
        asm.push(kept := Gpr.R12)
        if base is RESULT:
            asm.mov(kept, base)
            memory = Memory(kept, memory.displacement)
    asm.mov(SCRATCH_2, RESULT)
    operand = SCRATCH_2 if src is RESULT else src
    asm.load(RESULT, memory, size)
    asm.place(again)
    asm.mov(SCRATCH_1, RESULT)
    asm.calculate(operation, SCRATCH_1, operand, wide=wide)
    asm.compare_exchange(memory, SCRATCH_1, size)
    asm.jump_if(Condition.NE, again)
    if src is not RESULT:
        asm.mov(src, RESULT, wide=wide)
        asm.mov(RESULT, SCRATCH_2)
    elif not wide:
        asm.mov(RESULT, RESULT, wide=False)
    if RESULT in (base, src):
        asm.pop(Gpr.R12)
