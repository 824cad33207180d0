"""
eBPF instructions to x86-64, one by one, as the kernel's JIT does it.

The registers are where ``registers`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Class, Jump, Mode, Register, X
from dprobes.native.ebpf_translator import Translator
from dprobes.native.generated_code import NativeCode
from dprobes.native.handler_analysis import check_code, frame_size, trimmed
from dprobes.native.x86.x86_assembler import (
    FRAME,
    RESULT,
    SCRATCH_1,
    SCRATCH_2,
    Condition,
    Gpr,
    Memory,
    Operation,
    Shift,
    X86Assembler,
    gpr,
)

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.native.generated_code import MapPlace, Surroundings
    from dprobes.native.x86.x86_assembler import Label

__all__ = ["X86Translator", "handler_function", "takes_scratch", "write_cpu", "write_routine"]

# The arithmetic of eBPF (RFC 9669, section 4.1) on x86-64.
#
# Division by zero gives 0, and a remainder by zero the dividend; shifts take the low bits of their count.


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


# The atomic operations of eBPF (RFC 9669, section 5.3) on x86-64.


_ATOMICS_OPERATIONS = {
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
    elif operation in _ATOMICS_OPERATIONS:
        asm.calculate_in(_ATOMICS_OPERATIONS[Atomic(operation)], memory, src, size, lock=True)
    else:
        _fetch(asm, _ATOMICS_OPERATIONS[Atomic(operation & ~Atomic.FETCH)], memory, src, size)


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


# What is a call in eBPF, and few instructions here; registers that calls keep are kept, and more.


_CPU_NODE_SELECTOR = 0x7B
"""The segment whose limit is what RDPID reads (GDT_ENTRY_CPUNODE in arch/x86/include/asm/segment.h)."""
_CPU_MASK = 0xFFF
_LSL_EAX_EAX = b"\x0f\x03\xc0"


def write_cpu(asm: X86Assembler, dst: Gpr, *, has_rdpid: bool) -> None:
    """Load the number of the CPU that the thread runs on to ``dst``; without RDPID that must be rax."""
    if has_rdpid:
        asm.rdpid(dst)
    else:
        assert dst is Gpr.RAX
        asm.mov_number(dst, _CPU_NODE_SELECTOR)
        asm.raw(_LSL_EAX_EAX)
    asm.calculate(Operation.AND, dst, _CPU_MASK, wide=False)


def write_value_address(asm: X86Assembler, place: MapPlace) -> None:
    """Let rax be the address of the value whose index, a u32 that is in bounds, is at rsi."""
    asm.load(Gpr.RAX, Memory(Gpr.RSI), 4)
    asm.multiply(Gpr.RAX, place.stride)
    asm.mov_number(SCRATCH_1, place.address)
    asm.calculate(Operation.ADD, Gpr.RAX, SCRATCH_1)


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

_TRANSLATOR_CLASS, _TRANSLATOR_OPERATION, _SIZE = 0x07, 0xF0, 0x18


def takes_scratch(assembled: Assembled) -> bool:
    """Return whether code may change registers that eBPF does not have."""
    return any(_takes_scratch(insn) for insn in assembled.code)


def _takes_scratch(insn: Insn) -> bool:
    kind, operation = insn.opcode & _TRANSLATOR_CLASS, insn.opcode & _TRANSLATOR_OPERATION
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
        operation, wide = insn.opcode & _TRANSLATOR_OPERATION, insn.opcode & _TRANSLATOR_CLASS == Class.JMP
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


# A routine in eBPF as a function, which keeps what calls keep: R6 to R9, and the frame of the caller.


_KEPT = (Register.R6, Register.R7, Register.R8, Register.R9)


def write_routine(asm: X86Assembler, assembled: Assembled, around: Surroundings) -> int:
    """
    Write a routine; return its address.

    Its arguments, its result and what it keeps are where C has them as well (System V ABI, section 3.2).
    """
    check_code(assembled)
    start, out = asm.here, asm.label()
    used = {insn.dst for insn in assembled.code} | {insn.src for insn in assembled.code}
    kept = [gpr(register.value) for register in _KEPT if register.value in used]
    frame = frame_size(assembled)
    if frame:
        asm.push(FRAME)
        asm.mov(FRAME, Gpr.RSP)
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, -frame))
    for register in kept:
        asm.push(register)
    X86Translator(asm, assembled, around, out).write()
    asm.place(out)
    for register in reversed(kept):
        asm.pop(register)
    if frame:
        asm.calculate(Operation.ADD, Gpr.RSP, frame)
        asm.pop(FRAME)
    asm.ret()
    return start


# A handler as a function, which takes the registers of the hit, as a ``struct pt_regs``, in rdi.
#
# It may change any register, and the arithmetic flags. The frame of eBPF's R10 is on the stack.


def handler_function(address: int, assembled: Assembled, around: Surroundings) -> NativeCode:
    """Return a handler at ``address``; raise ``NotSupportedError`` for what there is no machine code for."""
    check_code(assembled)
    assembled = trimmed(assembled)
    asm = X86Assembler(address)
    out, frame = asm.label(), frame_size(assembled)
    if frame:
        asm.mov(FRAME, Gpr.RSP)
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, -frame))
    X86Translator(asm, assembled, around, out).write()
    asm.place(out)
    if frame:
        asm.mov(Gpr.RSP, FRAME)
    asm.ret()
    return NativeCode(address, asm.assemble())
