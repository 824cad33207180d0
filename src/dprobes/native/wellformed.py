"""
What eBPF must be like to become machine code, whichever processor it is for.

Nobody verifies it behind us, as the kernel does: so what is not known by its opcode, goes elsewhere than to the start
of an instruction, or reaches beyond the frame by a constant, is refused here. What registers point to is not followed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.bpf.asm.insn import WIDE_LOAD
from dprobes.bpf.asm.isa import Alu, Atomic, CallKind, Class, Helper, Jump, LoadImmediate, Mode, Register, Size, X
from dprobes.errors import NotSupportedError

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn

__all__ = ["FRAME_MAX", "check_code"]

FRAME_MAX = 512
"""The most that the kernel lets a program have (MAX_BPF_STACK)."""

_CLASS, _OPERATION, _MODE, _SIZE = 0x07, 0xF0, 0xE0, 0x18
_FRAME = Register.R10.value
_LAST = max(register.value for register in Register)

_FETCHING = {operation | Atomic.FETCH for operation in (Atomic.ADD, Atomic.OR, Atomic.AND, Atomic.XOR)}
_ATOMIC = {Atomic.ADD, Atomic.OR, Atomic.AND, Atomic.XOR, Atomic.XCHG, Atomic.CMPXCHG, *_FETCHING}

_CALCULATIONS = {kind | operation | x for kind in (Class.ALU, Class.ALU64) for operation in Alu for x in (0, X)} - {
    kind | Alu.NEG | X for kind in (Class.ALU, Class.ALU64)
}
_PLAIN = (Jump.JA, Jump.CALL, Jump.EXIT, Jump.MAY_GOTO)
_BRANCHES = {
    kind | condition | x
    for kind in (Class.JMP, Class.JMP32)
    for condition in Jump
    if condition not in _PLAIN
    for x in (0, X)
}
_GOES = {*_BRANCHES, Class.JMP | Jump.JA, Class.JMP | Jump.MAY_GOTO}
_CALL, _EXIT = Class.JMP | Jump.CALL, Class.JMP | Jump.EXIT
_LOADS = {Class.LDX | Mode.MEM | size for size in Size}
_STORES = {kind | Mode.MEM | size for kind in (Class.ST, Class.STX) for size in Size}
_ATOMICS = {Class.STX | Mode.ATOMIC | size for size in (Size.W, Size.DW)}
_KNOWN = {*_CALCULATIONS, *_GOES, *_LOADS, *_STORES, *_ATOMICS, _CALL, _EXIT, WIDE_LOAD}
_WITH_OFFSET = {*_GOES, *_LOADS, *_STORES, *_ATOMICS}
_DATA = (LoadImmediate.NUMBER, LoadImmediate.MAP, LoadImmediate.MAP_VALUE)


@lru_cache(64)
def check_code(assembled: Assembled) -> None:
    """Raise ``NotSupportedError`` for code that cannot be translated, or that must not be."""
    if len(assembled.functions) > 1:
        raise NotSupportedError("a handler with functions of its own cannot be translated to machine code")
    code = assembled.code
    starts = set()
    index = 0
    while index < len(code):
        starts.add(index)
        insn = code[index]
        _check_opcode(insn)
        _check_registers(insn)
        _check_frame(code, index)
        if insn.opcode == WIDE_LOAD:
            index += 1
            if index == len(code) or code[index].opcode or code[index].dst or code[index].src or code[index].off:
                raise NotSupportedError("a load of 64 bits lacks its second half")
        index += 1
    for index in starts:
        insn = code[index]
        if insn.opcode in _GOES and index + 1 + insn.off not in starts:
            raise NotSupportedError(f"the eBPF instruction {index} goes to {index + 1 + insn.off}, where none begins")
    if not code or code[-1].opcode not in (_EXIT, Class.JMP | Jump.JA):
        raise NotSupportedError("the eBPF code runs off its end")


def _check_opcode(insn: Insn) -> None:
    if insn.opcode not in _KNOWN or (insn.off and insn.opcode not in _WITH_OFFSET):
        with_offset = f" with the offset {insn.off}" if insn.off else ""
        raise NotSupportedError(f"there is no machine code for the eBPF opcode {insn.opcode:#04x}{with_offset}")
    if insn.opcode in _ATOMICS and insn.imm not in _ATOMIC:
        raise NotSupportedError(f"there is no machine code for the atomic operation {insn.imm:#04x}")
    if insn.opcode == WIDE_LOAD and insn.src not in _DATA:
        raise NotSupportedError("there is no machine code for the address of a function")
    if insn.opcode == _CALL:
        if insn.src != CallKind.HELPER:
            raise NotSupportedError("there is no machine code for calls of kernel functions")
        if insn.imm not in Helper.__members__.values():
            raise NotSupportedError(f"there is no routine for helper {insn.imm} of the kernel")


def _check_registers(insn: Insn) -> None:
    kind = insn.opcode & _CLASS
    if insn.dst > _LAST or (insn.src > _LAST):
        raise NotSupportedError(f"there is no eBPF register {max(insn.dst, insn.src)}")
    writes = kind in (Class.ALU, Class.ALU64, Class.LDX) or insn.opcode == WIDE_LOAD
    changes = {insn.dst} if writes else set()
    if insn.opcode in _ATOMICS and insn.imm & Atomic.FETCH and insn.imm != Atomic.CMPXCHG:
        changes = {insn.src}
    if _FRAME in changes:
        raise NotSupportedError("eBPF code may not change R10")


def _check_frame(code: tuple[Insn, ...], index: int) -> None:
    """Refuse accesses outside of the frame: by R10, or by a copy to which a number is added at once."""
    insn = code[index]
    kind = insn.opcode & _CLASS
    if (kind == Class.LDX and insn.src == _FRAME) or (kind in (Class.ST, Class.STX) and insn.dst == _FRAME):
        size = Size(insn.opcode & _SIZE).bytes
        if not -FRAME_MAX <= insn.off <= -size:
            raise NotSupportedError(f"eBPF code has no frame at R10{insn.off:+d}")
    elif insn.opcode == Class.ALU64 | Alu.MOV | X and insn.src == _FRAME and index + 1 < len(code):
        following = code[index + 1]
        is_moved = following.opcode == Class.ALU64 | Alu.ADD and following.dst == insn.dst
        if is_moved and not -FRAME_MAX <= following.imm <= 0:
            raise NotSupportedError(f"eBPF code has no frame at R10{following.imm:+d}")
