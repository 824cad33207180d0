"""
The arithmetic of eBPF (RFC 9669, section 4.1) on AArch64.

Division by zero gives 0 with both, and so a remainder by zero the dividend; shifts take the low bits of their count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Class, X
from dprobes.native.a64.assembler import Gpr, Operation, Shift
from dprobes.native.a64.registers import SCRATCH_1, gpr

if TYPE_CHECKING:
    from dprobes.bpf.asm.insn import Insn
    from dprobes.native.a64.assembler import A64Assembler

__all__ = ["write_arithmetic"]

_OPERATIONS = {
    Alu.ADD: Operation.ADD,
    Alu.SUB: Operation.SUB,
    Alu.OR: Operation.ORR,
    Alu.AND: Operation.AND,
    Alu.XOR: Operation.EOR,
    Alu.MUL: Operation.MUL,
    Alu.DIV: Operation.UDIV,
    Alu.LSH: Operation.LSLV,
    Alu.RSH: Operation.LSRV,
    Alu.ARSH: Operation.ASRV,
}
_SHIFTS = {Alu.LSH: Shift.LSL, Alu.RSH: Shift.LSR, Alu.ARSH: Shift.ASR}
_OPERATION, _CLASS = 0xF0, 0x07


def write_arithmetic(asm: A64Assembler, insn: Insn) -> None:
    """Write an instruction of the classes ALU and ALU64."""
    wide = insn.opcode & _CLASS == Class.ALU64
    dst, operand = gpr(insn.dst), gpr(insn.src) if insn.opcode & X else insn.imm
    match insn.opcode & _OPERATION:
        case Alu.MOV if isinstance(operand, Gpr):
            asm.mov(dst, operand, wide=wide)
        case Alu.MOV:
            asm.mov_number(dst, operand if wide else operand & 0xFFFF_FFFF)
        case Alu.NEG:
            asm.neg(dst, dst, wide=wide)
        case Alu.MOD:
            _write_remainder(asm, dst, operand, wide=wide)
        case Alu.LSH | Alu.RSH | Alu.ARSH as operation if not isinstance(operand, Gpr):
            asm.shift(_SHIFTS[Alu(operation)], dst, dst, operand & (63 if wide else 31), wide=wide)
        case operation:
            asm.calculate(_OPERATIONS[Alu(operation)], dst, dst, operand, wide=wide)


def _write_remainder(asm: A64Assembler, dst: Gpr, divisor: Gpr | int, *, wide: bool) -> None:
    if not isinstance(divisor, Gpr):
        asm.mov_number(Gpr.X17, divisor)
        divisor = Gpr.X17
    asm.calculate(Operation.UDIV, SCRATCH_1, dst, divisor, wide=wide)
    asm.multiply_subtract(dst, SCRATCH_1, divisor, dst, wide=wide)
