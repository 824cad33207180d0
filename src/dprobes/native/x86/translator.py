"""
eBPF instructions to x86-64, one by one, as the kernel's JIT does it.

The registers are where ``registers`` says, R10 at the end of a frame that whoever calls has made. So the code of a
handler has neither a prologue nor a ``ret``: it begins with R1 set, and goes to a label at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.insn import WIDE_LOAD
from dprobes.bpf.asm.isa import Alu, Atomic, Class, Helper, Jump, LoadImmediate, Mode, Register, Size, X
from dprobes.errors import NotSupportedError
from dprobes.native.copies import pieces_of
from dprobes.native.memory import MapShape
from dprobes.native.routines.ring import output_code
from dprobes.native.wellformed import FRAME_MAX
from dprobes.native.x86.arithmetic import write_arithmetic
from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation
from dprobes.native.x86.atomics import write_atomic
from dprobes.native.x86.intrinsics import write_cpu, write_value_address
from dprobes.native.x86.registers import FRAME, SCRATCH_1, gpr

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn
    from dprobes.bpf.layout import MapName
    from dprobes.native.code import Surroundings
    from dprobes.native.memory import MapPlace
    from dprobes.native.routines.ring import RingShape
    from dprobes.native.x86.assembler import Label, X86Assembler

__all__ = ["Translator", "frame_size", "takes_scratch"]

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

_BUDGET = 1 << 23
"""How often MAY_GOTO goes on (BPF_MAX_LOOPS)."""

_SIZES = {size << 0: size.bytes for size in Size}
_CLASS, _OPERATION, _MODE, _SIZE = 0x07, 0xF0, 0xE0, 0x18
_FIRST_ARGUMENT, _LENGTH = Register.R1.value, Register.R3.value
_COPIED_MAX = 256
"""The size of an entry up to which it is copied where it is written, word by word."""


def _uses_budget(code: tuple[Insn, ...]) -> bool:
    return any(insn.opcode == Class.JMP | Jump.MAY_GOTO for insn in code)


def _depth(code: tuple[Insn, ...]) -> int:
    """Return how far below its end the frame is used, in bytes."""
    frame = Register.R10.value
    lowest = 0
    for index, insn in enumerate(code):
        kind = insn.opcode & _CLASS
        if (kind == Class.LDX and insn.src == frame) or (kind in (Class.ST, Class.STX) and insn.dst == frame):
            lowest = min(lowest, insn.off)
        elif insn.src == frame and insn.opcode == Class.ALU64 | Alu.MOV | X:
            following = code[index + 1]
            if following.opcode != Class.ALU64 | Alu.ADD or following.dst != insn.dst:
                return FRAME_MAX
            lowest = min(lowest, following.imm)
        elif insn.src == frame and insn.opcode & X and kind in (Class.ALU64, Class.ALU):
            return FRAME_MAX
    return -lowest


def frame_size(assembled: Assembled) -> int:
    """Return how many bytes below R10 the code of a handler needs: a multiple of 16."""
    return -(-(_depth(assembled.code) + (8 if _uses_budget(assembled.code) else 0)) // 16) * 16


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


class Translator:
    """Write the code of one handler, which is well formed (``native.wellformed``); it goes to ``out`` at its end."""

    def __init__(self, asm: X86Assembler, assembled: Assembled, surroundings: Surroundings, out: Label) -> None:
        self._asm = asm
        self._code = assembled.code
        self._around = surroundings
        self._out = out
        self._references = {reference.index: reference.map for reference in assembled.maps}
        self._labels: dict[int, Label] = {}
        self._budget: Memory | None = None
        self._argument: MapName | None = None
        """The map that R1 is known to be."""
        self._length: int | None = None
        """The number that R3 is known to be."""

    def write(self) -> None:
        """Write all of it."""
        code = self._code
        targets = {
            index + 1 + insn.off
            for index, insn in enumerate(code)
            if insn.opcode & _CLASS in (Class.JMP, Class.JMP32)
            and insn.opcode & _OPERATION not in (Jump.CALL, Jump.EXIT)
        }
        self._labels = {index: self._asm.label() for index in sorted(targets)}
        if _uses_budget(code):
            self._budget = Memory(FRAME, -_depth(code) - 8)
            self._asm.store_number(self._budget, _BUDGET)
        index = 0
        while index < len(code):
            if index in self._labels:
                self._asm.place(self._labels[index])
                self._argument = self._length = None
            insn = code[index]
            if insn.opcode == WIDE_LOAD:
                self._wide_load(index, insn, code[index + 1])
                index += 2
                continue
            self._write(index, insn)
            index += 1

    def _write(self, index: int, insn: Insn) -> None:
        asm, opcode = self._asm, insn.opcode
        match opcode & _CLASS:
            case Class.ALU64 | Class.ALU:
                write_arithmetic(asm, insn)
            case Class.LDX if opcode & _MODE == Mode.MEM:
                asm.load(gpr(insn.dst), Memory(gpr(insn.src), insn.off), _SIZES[opcode & _SIZE])
            case Class.STX if opcode & _MODE == Mode.MEM:
                asm.store(Memory(gpr(insn.dst), insn.off), gpr(insn.src), _SIZES[opcode & _SIZE])
            case Class.ST:
                asm.store_number(Memory(gpr(insn.dst), insn.off), insn.imm, _SIZES[opcode & _SIZE])
            case Class.STX if opcode & _MODE == Mode.ATOMIC:
                write_atomic(asm, insn, _SIZES[opcode & _SIZE])
                if insn.imm & Atomic.FETCH and insn.src == _FIRST_ARGUMENT:
                    self._argument = None
                elif insn.imm & Atomic.FETCH and insn.src == _LENGTH:
                    self._length = None
                return
            case Class.JMP | Class.JMP32:
                self._jump(index, insn)
                return
            case _:
                raise AssertionError(f"the code is not well formed: opcode {opcode:#04x}")
        if opcode & _CLASS in (Class.ALU64, Class.ALU, Class.LDX):
            if insn.dst == _FIRST_ARGUMENT:
                self._argument = None
            elif insn.dst == _LENGTH:
                self._length = insn.imm if opcode == Class.ALU64 | Alu.MOV else None

    def _wide_load(self, index: int, low: Insn, high: Insn) -> None:
        dst = gpr(low.dst)
        name = self._references.get(index)
        if name is None:
            self._asm.mov_number(dst, low.imm & 0xFFFF_FFFF | high.imm << 32)
        else:
            offset = high.imm if low.src == LoadImmediate.MAP_VALUE else 0
            self._asm.mov_number(dst, self._place(name).address + offset)
        if low.dst == _LENGTH:
            self._length = None
        if low.dst == _FIRST_ARGUMENT:
            self._argument = name if low.src == LoadImmediate.MAP else None

    def _place(self, name: MapName) -> MapPlace:
        place = self._around.maps.get(name)
        if place is None:
            raise NotSupportedError(f"the memory that handlers share with the tool has no map '{name.value}'")
        return place

    def _jump(self, index: int, insn: Insn) -> None:
        asm, operation = self._asm, insn.opcode & _OPERATION
        if operation == Jump.CALL:
            self._call(index, insn)
            return
        if operation == Jump.EXIT:
            if index + 1 < len(self._code):
                asm.jump(self._out)
            return
        target = self._labels[index + 1 + insn.off]
        if operation == Jump.JA:
            if insn.off:
                asm.jump(target)
        elif operation == Jump.MAY_GOTO:
            assert self._budget is not None
            asm.mov_number(SCRATCH_1, 1)
            asm.calculate_in(Operation.SUB, self._budget, SCRATCH_1)
            asm.jump_if(Condition.S, target)
        else:
            self._compare(insn, operation)
            asm.jump_if(_CONDITIONS[Jump(operation)], target)

    def _compare(self, insn: Insn, operation: int) -> None:
        wide = insn.opcode & _CLASS == Class.JMP
        operand = gpr(insn.src) if insn.opcode & X else insn.imm
        if operation == Jump.JSET:
            self._asm.test(gpr(insn.dst), operand, wide=wide)
        else:
            self._asm.compare(gpr(insn.dst), operand, wide=wide)

    def _call(self, index: int, insn: Insn) -> None:
        helper, around = Helper(insn.imm), self._around
        if helper is Helper.GET_SMP_PROCESSOR_ID:
            write_cpu(self._asm, Gpr.RAX, has_rdpid=around.has_rdpid)
            return
        argument, self._argument = self._argument, None
        length, self._length = self._length or 0, None
        if helper is Helper.RINGBUF_OUTPUT and around.rings is not None and 0 < length <= _COPIED_MAX:
            self._output(index, around.rings, length)
            return
        if argument is not None and helper is Helper.MAP_LOOKUP_ELEM:
            place = self._place(argument)
            if place.shape is MapShape.VALUES:
                write_value_address(self._asm, place)
                return
        routine = None if argument is None else around.map_routines.get((argument, helper))
        routine = around.routines.get(helper) if routine is None else routine
        if routine is None:
            raise NotSupportedError(f"there is no routine for what the kernel has as bpf_{helper.name.lower()}")
        self._asm.call_at(routine)

    def _output(self, index: int, shape: RingShape, size: int) -> None:
        """Write an entry of known size to a ring."""
        done = self._asm.label()
        pieces = pieces_of(self._code, index, size)
        Translator(self._asm, output_code(shape, size, pieces), self._around, done).write()
        self._asm.place(done)
