"""
eBPF instructions to A64, one by one, as the kernel's JIT does it.

The registers are where ``registers`` says. Handlers see memory as the processor shows it. Routines, which threads use
at the same time, are written for x86-64, whose stores are seen in their order: so here theirs release, and their loads
acquire, other than those of the frame, which nobody else sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Class, Jump, Register, X
from dprobes.native.a64.a64_assembler import (
    CALL_CHANGED,
    FRAME,
    RESULT,
    SCRATCH_1,
    SCRATCH_2,
    SCRATCH_3,
    A64Assembler,
    Condition,
    Gpr,
    Memory,
    Operation,
    Shift,
    SystemRegister,
    gpr,
)
from dprobes.native.ebpf_translator import Translator
from dprobes.native.generated_code import NativeCode
from dprobes.native.handler_analysis import check_code, frame_size, trimmed

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.native.a64.a64_assembler import Label
    from dprobes.native.generated_code import MapPlace, Surroundings

__all__ = ["A64Translator", "handler_function", "write_function", "write_routine"]

# The arithmetic of eBPF (RFC 9669, section 4.1) on AArch64.
#
# Division by zero gives 0 with both, and so a remainder by zero the dividend; shifts take the low bits of their count.


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


# The atomic operations of eBPF (RFC 9669, section 5.3) on AArch64.
#
# They are loops of an exclusive load and an exclusive store, which all processors have. Where the old value is wanted
# the operation keeps the order of everything around it, as the kernel's does (Documentation/atomic_t.txt).


_ATOMICS_OPERATIONS = {
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
        asm.calculate(_ATOMICS_OPERATIONS[Atomic(operation & ~Atomic.FETCH)], new, old, src)
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


# What is a call in eBPF, and few instructions here; registers that calls keep are kept, and more.


_GETCPU = 168
"""The number of the system call (include/uapi/asm-generic/unistd.h)."""
_ROOM = 16


def write_cpu(asm: A64Assembler, cpu_place: int | None) -> None:
    """
    Load the number of the CPU that the thread runs on to R0.

    ``cpu_place`` is where the C library has the thread's struct rseq, at its ``cpu_id``, in bytes from the thread
    pointer (rseq(2)); None: ask the kernel.
    """
    if cpu_place is not None:
        asm.read_system(RESULT, SystemRegister.TPIDR_EL0)
        asm.load(RESULT, Memory(RESULT, cpu_place), 4)
        return
    kept = (Gpr.X0, Gpr.X1, Gpr.X2)
    asm.calculate(Operation.SUB, Gpr.SP, Gpr.SP, _ROOM + 32)
    for place, register in enumerate(kept):
        asm.store(Memory(Gpr.SP, _ROOM + 8 * place), register)
    asm.calculate(Operation.ADD, Gpr.X0, Gpr.SP, 0)
    asm.mov_number(Gpr.X1, 0)
    asm.mov_number(Gpr.X2, 0)
    asm.mov_number(Gpr.X8, _GETCPU)
    asm.system_call()
    asm.load(RESULT, Memory(Gpr.SP), 4)
    for place, register in enumerate(kept):
        asm.load(register, Memory(Gpr.SP, _ROOM + 8 * place))
    asm.calculate(Operation.ADD, Gpr.SP, Gpr.SP, _ROOM + 32)


def write_value_address(asm: A64Assembler, place: MapPlace) -> None:
    """Let R0 be the address of the value whose index, a u32 that is in bounds, is at R2."""
    asm.load(RESULT, Memory(Gpr.X1), 4)
    asm.calculate(Operation.MUL, RESULT, RESULT, place.stride)
    asm.mov_number(Gpr.X17, place.address)
    asm.calculate(Operation.ADD, RESULT, RESULT, Gpr.X17)


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
_TRANSLATOR_CLASS, _TRANSLATOR_OPERATION = 0x07, 0xF0
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
        operation, wide = insn.opcode & _TRANSLATOR_OPERATION, insn.opcode & _TRANSLATOR_CLASS == Class.JMP
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


# A routine in eBPF as a function, which keeps what calls keep: R6 to R9, and the frame of the caller.


_ALIGNMENT = 16
"""What the stack pointer is a multiple of (AAPCS64, section 6.4.5.1)."""


def write_routine(asm: A64Assembler, assembled: Assembled, around: Surroundings) -> int:
    """Write a routine; return its address."""
    return write_function(asm, assembled, around, is_shared=True)


def write_function(asm: A64Assembler, assembled: Assembled, around: Surroundings, *, is_shared: bool) -> int:
    """
    Write a function of what is well formed; return its address.

    ::

        sp ─► frame of eBPF │ FRAME ─► x30 │ registers that are kept
    """
    check_code(assembled)
    start = asm.here
    trial = type(asm)(start)
    A64Translator(trial, assembled, around, trial.label(), is_shared=is_shared).write()
    frame = frame_size(assembled)
    kept = sorted(trial.changed - CALL_CHANGED - {Gpr.ZR} | ({FRAME} if frame else set()) | {Gpr.X30})
    room = frame + -(-8 * len(kept) // _ALIGNMENT) * _ALIGNMENT
    asm.calculate(Operation.SUB, Gpr.SP, Gpr.SP, room)
    for place, register in enumerate(kept):
        asm.store(Memory(Gpr.SP, frame + 8 * place), register)
    if frame:
        asm.calculate(Operation.ADD, FRAME, Gpr.SP, frame)
    out = asm.label()
    A64Translator(asm, assembled, around, out, is_shared=is_shared).write()
    asm.place(out)
    for place, register in enumerate(kept):
        asm.load(register, Memory(Gpr.SP, frame + 8 * place))
    asm.calculate(Operation.ADD, Gpr.SP, Gpr.SP, room)
    asm.ret()
    return start


# A handler as a function, which takes the registers of the hit in x0; it keeps what functions in C keep.


def handler_function(address: int, assembled: Assembled, around: Surroundings) -> NativeCode:
    """Return a handler at ``address``; raise ``NotSupportedError`` for what there is no machine code for."""
    check_code(assembled)
    asm = A64Assembler(address)
    write_function(asm, trimmed(assembled), around, is_shared=False)
    return NativeCode(address, asm.assemble())
