"""
The arithmetic of eBPF (RFC 9669, section 4.1) on x86-64.

Division by zero gives 0, and a remainder by zero the dividend; shifts take the low bits of their count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Class, X
from dprobes.native.x86.assembler import Condition, Gpr, Operation, Shift
from dprobes.native.x86.registers import SCRATCH_1, SCRATCH_2, gpr

if TYPE_CHECKING:
    from dprobes.bpf.asm.insn import Insn
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["write_arithmetic"]

_OPERATIONS = {
    Alu.ADD: Operation.ADD,
    Alu.SUB: Operation.SUB,
    Alu.OR: Operation.OR,
    Alu.AND: Operation.AND,
    Alu.XOR: Operation.XOR,
}
_SHIFTS = {Alu.LSH: Shift.SHL, Alu.RSH: Shift.SHR, Alu.ARSH: Shift.SAR}
_OPERATION, _CLASS = 0xF0, 0x07


def write_arithmetic(asm: X86Assembler, insn: Insn) -> None:
    """Write an instruction of the classes ALU and ALU64."""
    wide = insn.opcode & _CLASS == Class.ALU64
    dst, operand = gpr(insn.dst), gpr(insn.src) if insn.opcode & X else insn.imm
    match insn.opcode & _OPERATION:
        case Alu.MOV if isinstance(operand, Gpr):
            asm.mov(dst, operand, wide=wide)
        case Alu.MOV:
            asm.mov_number(dst, operand if wide else operand & 0xFFFF_FFFF)
        case Alu.NEG:
            asm.neg(dst, wide=wide)
        case Alu.MUL:
            asm.multiply(dst, operand, wide=wide)
        case Alu.DIV | Alu.MOD as operation:
            _divide(asm, dst, operand, wide=wide, is_remainder=operation == Alu.MOD)
        case Alu.LSH | Alu.RSH | Alu.ARSH as operation:
            _shift(asm, _SHIFTS[Alu(operation)], dst, operand, wide=wide)
        case operation:
            asm.calculate(_OPERATIONS[Alu(operation)], dst, operand, wide=wide)


def _shift(asm: X86Assembler, shift: Shift, dst: Gpr, count: Gpr | int, *, wide: bool) -> None:
    if not isinstance(count, Gpr):
        asm.shift(shift, dst, count & (63 if wide else 31), wide=wide)
        return
    if count is Gpr.RCX:
        shifted = SCRATCH_1 if dst is Gpr.RCX else dst
        if shifted is not dst:
            asm.mov(shifted, dst)
        asm.shift_by_cl(shift, shifted, wide=wide)
        if shifted is not dst:
            asm.mov(dst, shifted)
        return
    asm.mov(SCRATCH_2, Gpr.RCX)
    asm.mov(Gpr.RCX, count)
    if dst is Gpr.RCX:
        asm.shift_by_cl(shift, SCRATCH_2, wide=wide)
    else:
        asm.shift_by_cl(shift, dst, wide=wide)
    asm.mov(Gpr.RCX, SCRATCH_2)


def _divide(asm: X86Assembler, dst: Gpr, divisor: Gpr | int, *, wide: bool, is_remainder: bool) -> None:
    """Write a division, which the processor does in rax and rdx; both keep what they have, unless one is ``dst``."""
    by_zero, done = asm.label(), asm.label()
    if isinstance(divisor, Gpr):
        asm.mov(SCRATCH_2, divisor, wide=wide)
    else:
        asm.mov_number(SCRATCH_2, divisor if wide else divisor & 0xFFFF_FFFF)
    asm.compare(SCRATCH_2, 0)
    asm.jump_if(Condition.E, by_zero)
    kept = [register for register in (Gpr.RAX, Gpr.RDX) if register is not dst]
    for register in kept:
        asm.push(register)
    if dst is not Gpr.RAX:
        asm.mov(Gpr.RAX, dst)
    asm.mov_number(Gpr.RDX, 0)
    asm.div(SCRATCH_2, wide=wide)
    asm.mov(SCRATCH_1, Gpr.RDX if is_remainder else Gpr.RAX, wide=wide)
    for register in reversed(kept):
        asm.pop(register)
    asm.mov(dst, SCRATCH_1)
    asm.jump(done)
    asm.place(by_zero)
    if not is_remainder:
        asm.mov_number(dst, 0)
    elif not wide:
        asm.mov(dst, dst, wide=False)
    asm.place(done)
