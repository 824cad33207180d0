"""
eBPF instructions to x86-64, one by one, as the kernel's JIT does it.

The registers are where ``registers`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Class, Jump, Mode, X
from dprobes.native.translator import Translator
from dprobes.native.x86.arithmetic import write_arithmetic
from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation, X86Assembler
from dprobes.native.x86.atomics import write_atomic
from dprobes.native.x86.intrinsics import write_cpu, write_value_address
from dprobes.native.x86.registers import FRAME, SCRATCH_1, gpr

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn
    from dprobes.native.memory import MapPlace
    from dprobes.native.x86.assembler import Label

__all__ = ["X86Translator", "takes_scratch"]

_CONDITIONS = {
    Jump.JEQ: Condition.E,
    Jump.JNE: Condition.NE,
    Jump.JGT: Condition.A,
    Jump.JGE: Condition.AE,
    Jump.JLT: Condition.B,
    Jump.JLE: Condition.BE,
    Jump.JSGT: Condition.G,
    Jump.JSGE: Condition.GE,
    Jump.JSLT: Condition.L,
    Jump.JSLE: Condition.LE,
    Jump.JSET: Condition.NE,
}

_CLASS, _OPERATION, _SIZE = 0x07, 0xF0, 0x18


def takes_scratch(assembled: Assembled) -> bool:
    """Return whether code may change registers that eBPF does not have."""
    return any(_takes_scratch(insn) for insn in assembled.code)


def _takes_scratch(insn: Insn) -> bool:
    kind, operation = insn.opcode & _CLASS, insn.opcode & _OPERATION
    if kind in (Class.ALU, Class.ALU64):
        is_shift = operation in (Alu.LSH, Alu.RSH, Alu.ARSH)
        return operation in (Alu.DIV, Alu.MOD) or (is_shift and bool(insn.opcode & X))
    if kind in (Class.JMP, Class.JMP32):
        return operation in (Jump.CALL, Jump.MAY_GOTO)
    return insn.opcode == Class.STX | Mode.ATOMIC | insn.opcode & _SIZE and bool(insn.imm & Atomic.FETCH)


class X86Translator(Translator[X86Assembler]):
    """Write the code of one handler for x86-64."""

    def _write_arithmetic(self, insn: Insn) -> None:
        write_arithmetic(self._asm, insn)

    def _write_load(self, insn: Insn, size: int) -> None:
        self._asm.load(gpr(insn.dst), Memory(gpr(insn.src), insn.off), size)

    def _write_store(self, insn: Insn, size: int) -> None:
        self._asm.store(Memory(gpr(insn.dst), insn.off), gpr(insn.src), size)

    def _write_store_of_number(self, insn: Insn, size: int) -> None:
        self._asm.store_number(Memory(gpr(insn.dst), insn.off), insn.imm, size)

    def _write_atomic(self, insn: Insn, size: int) -> None:
        write_atomic(self._asm, insn, size)

    def _write_number(self, register: int, number: int) -> None:
        self._asm.mov_number(gpr(register), number)

    def _write_jump(self, target: Label) -> None:
        self._asm.jump(target)

    def _write_branch(self, insn: Insn, target: Label) -> None:
        operation, wide = insn.opcode & _OPERATION, insn.opcode & _CLASS == Class.JMP
        operand = gpr(insn.src) if insn.opcode & X else insn.imm
        if operation == Jump.JSET:
            self._asm.test(gpr(insn.dst), operand, wide=wide)
        else:
            self._asm.compare(gpr(insn.dst), operand, wide=wide)
        self._asm.jump_if(_CONDITIONS[Jump(operation)], target)

    def _write_budget(self, place: int, passes: int) -> None:
        self._asm.store_number(Memory(FRAME, place), passes)

    def _write_pass(self, place: int, target: Label) -> None:
        self._asm.mov_number(SCRATCH_1, 1)
        self._asm.calculate_in(Operation.SUB, Memory(FRAME, place), SCRATCH_1)
        self._asm.jump_if(Condition.S, target)

    def _write_call(self, routine: int) -> None:
        self._asm.call_at(routine)

    def _write_cpu(self) -> None:
        write_cpu(self._asm, Gpr.RAX, has_rdpid=self._around.has_rdpid)

    def _write_value_address(self, place: MapPlace) -> None:
        write_value_address(self._asm, place)

    def _nested(self, assembled: Assembled, out: Label) -> X86Translator:
        return X86Translator(self._asm, assembled, self._around, out)
