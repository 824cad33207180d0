"""
eBPF instructions to A64, one by one, as the kernel's JIT does it.

The registers are where ``registers`` says. Handlers see memory as the processor shows it. Routines, which threads use
at the same time, are written for x86-64, whose stores are seen in their order: so here theirs release, and their loads
acquire, other than those of the frame, which nobody else sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Class, Jump, Register, X
from dprobes.native.a64.arithmetic import write_arithmetic
from dprobes.native.a64.assembler import A64Assembler, Condition, Gpr, Memory, Operation
from dprobes.native.a64.atomics import write_atomic
from dprobes.native.a64.intrinsics import write_cpu, write_value_address
from dprobes.native.a64.registers import CALL_CHANGED, FRAME, SCRATCH_1, gpr
from dprobes.native.translator import Translator

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn
    from dprobes.native.a64.assembler import Label
    from dprobes.native.code import Surroundings
    from dprobes.native.memory import MapPlace

__all__ = ["A64Translator"]

_CONDITIONS = {
    Jump.JEQ: Condition.EQ,
    Jump.JNE: Condition.NE,
    Jump.JGT: Condition.HI,
    Jump.JGE: Condition.HS,
    Jump.JLT: Condition.LO,
    Jump.JLE: Condition.LS,
    Jump.JSGT: Condition.GT,
    Jump.JSGE: Condition.GE,
    Jump.JSLT: Condition.LT,
    Jump.JSLE: Condition.LE,
    Jump.JSET: Condition.NE,
}
_CLASS, _OPERATION = 0x07, 0xF0
_FRAME = Register.R10.value


class A64Translator(Translator[A64Assembler]):
    """Write the code of one handler for AArch64; accesses of what is ``shared`` by threads are seen in their order."""

    def __init__(
        self,
        asm: A64Assembler,
        assembled: Assembled,
        surroundings: Surroundings,
        out: Label,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(asm, assembled, surroundings, out)
        self._is_shared = is_shared

    def _write_arithmetic(self, insn: Insn) -> None:
        write_arithmetic(self._asm, insn)

    def _write_load(self, insn: Insn, size: int) -> None:
        dst, base = gpr(insn.dst), gpr(insn.src)
        if self._is_shared and insn.src != _FRAME:
            self._asm.load_acquire(dst, self._address(base, insn.off), size)
        else:
            self._asm.load(dst, Memory(base, insn.off), size)

    def _write_store(self, insn: Insn, size: int) -> None:
        self._store(insn, gpr(insn.src), size)

    def _write_store_of_number(self, insn: Insn, size: int) -> None:
        value = Gpr.ZR
        if insn.imm:
            self._asm.mov_number(value := Gpr.X17, insn.imm)
        self._store(insn, value, size)

    def _store(self, insn: Insn, value: Gpr, size: int) -> None:
        base = gpr(insn.dst)
        if self._is_shared and insn.dst != _FRAME:
            self._asm.store_release(self._address(base, insn.off), value, size)
        else:
            self._asm.store(Memory(base, insn.off), value, size)

    def _address(self, base: Gpr, displacement: int) -> Gpr:
        if not displacement:
            return base
        self._asm.calculate(Operation.ADD, SCRATCH_1, base, displacement)
        return SCRATCH_1

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
        self._asm.mov_number(SCRATCH_1, passes)
        self._asm.store(Memory(FRAME, place), SCRATCH_1)

    def _write_pass(self, place: int, target: Label) -> None:
        self._asm.load(SCRATCH_1, Memory(FRAME, place))
        self._asm.calculate(Operation.SUBS, SCRATCH_1, SCRATCH_1, 1)
        self._asm.store(Memory(FRAME, place), SCRATCH_1)
        self._asm.jump_if(Condition.MI, target)

    def _write_call(self, routine: int) -> None:
        self._asm.call_at(routine)
        self._asm.changed |= CALL_CHANGED
        self._asm.changes_flags = True

    def _write_cpu(self) -> None:
        write_cpu(self._asm, self._around.cpu_place)

    def _write_value_address(self, place: MapPlace) -> None:
        write_value_address(self._asm, place)

    def _nested(self, assembled: Assembled, out: Label) -> A64Translator:
        return A64Translator(self._asm, assembled, self._around, out, is_shared=True)
