"""
Disassembler for eBPF, in the notation of the kernel's verifier and of bpftool.

::

      3: r2 = *(u64 *)(r6 + 112)
      4: if r2 s> 0 goto +5 <10>
      5: call probe_read_user#112
      6: r1 = map[probes][0] + 64

A jump shows its distance, and in angle brackets the index of its target. Any bytes can be shown: an invalid instruction
is shown as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import (
    WIDE_LOAD,
    Alu,
    Atomic,
    CallKind,
    Class,
    Helper,
    Insn,
    Jump,
    LoadImmediate,
    Mode,
    Size,
    X,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.bpf.map_layouts import MapName

__all__ = ["Line", "disassemble"]

_ALU = {
    Alu.ADD: "+=", Alu.SUB: "-=", Alu.MUL: "*=", Alu.DIV: "/=", Alu.OR: "|=", Alu.AND: "&=", Alu.LSH: "<<=",
    Alu.RSH: ">>=", Alu.MOD: "%=", Alu.XOR: "^=", Alu.MOV: "=", Alu.ARSH: "s>>=",
}  # fmt: skip
_CONDITIONS = {
    Jump.JEQ: "==", Jump.JGT: ">", Jump.JGE: ">=", Jump.JSET: "&", Jump.JNE: "!=", Jump.JSGT: "s>", Jump.JSGE: "s>=",
    Jump.JLT: "<", Jump.JLE: "<=", Jump.JSLT: "s<", Jump.JSLE: "s<=",
}  # fmt: skip
_ATOMICS = {Atomic.ADD: ("+=", "add"), Atomic.OR: ("|=", "or"), Atomic.AND: ("&=", "and"), Atomic.XOR: ("^=", "xor")}
_TYPES = {Size.B: "u8", Size.H: "u16", Size.W: "u32", Size.DW: "u64"}
_HELPERS = {helper.value: helper.name.lower() for helper in Helper}


@dataclass(frozen=True, slots=True)
class Line:
    """Text of the instruction at ``index``. A 64-bit load has one line for both of its slots."""

    index: int
    text: str


def disassemble(code: Sequence[Insn], maps: Mapping[int, MapName] | None = None) -> Iterator[Line]:
    """Iterate over the lines of a program. ``maps`` has the maps of 64-bit loads, by instruction index."""
    names = {index: name.value for index, name in (maps or {}).items()}
    index = 0
    while index < len(code):
        insn = code[index]
        if insn.opcode == WIDE_LOAD and index + 1 < len(code):
            yield Line(index, _wide_load(insn, code[index + 1], index, names.get(index)))
            index += 2
            continue
        yield Line(index, _text(insn, index) or _unknown(insn))
        index += 1


def _unknown(insn: Insn) -> str:
    return f"unknown opcode {insn.opcode:#04x}, r{insn.dst}, r{insn.src}, {insn.off}, {insn.imm}"


def _text(insn: Insn, index: int) -> str | None:
    match insn.opcode & 7:
        case Class.ALU | Class.ALU64:
            return _arithmetic(insn)
        case Class.JMP | Class.JMP32:
            return _jump(insn, index)
        case Class.LDX | Class.ST | Class.STX:
            return _access(insn)
    return None


def _arithmetic(insn: Insn) -> str | None:
    register = "r" if insn.opcode & 7 == Class.ALU64 else "w"
    target = f"{register}{insn.dst}"
    operation = insn.opcode & 0xF0
    if insn.off:
        return None
    if operation == Alu.NEG:
        return f"{target} = -{target}" if not insn.opcode & X and not insn.src and not insn.imm else None
    if operation not in _ALU:
        return None
    operand = _operand(insn, register)
    return operand and f"{target} {_ALU[Alu(operation)]} {operand}"


def _operand(insn: Insn, register: str) -> str | None:
    """
    Return the text of an instruction's second operand: ``register``, or the immediate.

    Return None if the unused one of the two fields is not 0.
    """
    if insn.opcode & X:
        return f"{register}{insn.src}" if not insn.imm else None
    return str(insn.imm) if not insn.src else None


def _jump(insn: Insn, index: int) -> str | None:
    is_wide = insn.opcode & 7 == Class.JMP
    operation, target = insn.opcode & 0xF0, f"{insn.off:+d} <{index + 1 + insn.off}>"
    if operation in _CONDITIONS:
        register = "r" if is_wide else "w"
        operand = _operand(insn, register)
        return operand and f"if {register}{insn.dst} {_CONDITIONS[Jump(operation)]} {operand} goto {target}"
    if not is_wide or insn.opcode & X or insn.dst:
        return None
    match operation:
        case Jump.JA if not insn.src and not insn.imm:
            return f"goto {target}"
        case Jump.MAY_GOTO if not insn.src and not insn.imm:
            return f"may_goto {target}"
        case Jump.EXIT if not insn.src and not insn.imm and not insn.off:
            return "exit"
        case Jump.CALL if not insn.off:
            return _call(insn, index)
    return None


def _call(insn: Insn, index: int) -> str | None:
    match insn.src:
        case CallKind.HELPER:
            return f"call {_HELPERS.get(insn.imm, 'helper')}#{insn.imm}"
        case CallKind.LOCAL:
            return f"call pc{insn.imm:+d} <{index + 1 + insn.imm}>"
        case CallKind.KFUNC:
            return f"call kernel_function#{insn.imm}"
    return None


def _access(insn: Insn) -> str | None:
    kind, mode, size = insn.opcode & 7, insn.opcode & 0xE0, Size(insn.opcode & 0x18)
    base = insn.src if kind == Class.LDX else insn.dst
    place = f"({_TYPES[size]} *)(r{base} {'-' if insn.off < 0 else '+'} {abs(insn.off)})"
    if mode == Mode.ATOMIC and kind == Class.STX:
        return _atomic(insn, size, place)
    if mode != Mode.MEM:
        return None
    if kind == Class.ST:
        return f"*{place} = {insn.imm}" if not insn.src else None
    if insn.imm:
        return None
    return f"r{insn.dst} = *{place}" if kind == Class.LDX else f"*{place} = r{insn.src}"


def _atomic(insn: Insn, size: Size, place: str) -> str | None:
    if size not in (Size.W, Size.DW):
        return None
    function = "atomic64" if size is Size.DW else "atomic"
    match insn.imm:
        case Atomic.XCHG:
            return f"r{insn.src} = {function}_xchg({place}, r{insn.src})"
        case Atomic.CMPXCHG:
            return f"r0 = {function}_cmpxchg({place}, r0, r{insn.src})"
    operation = insn.imm & ~Atomic.FETCH
    if operation not in _ATOMICS:
        return None
    sign, name = _ATOMICS[Atomic(operation)]
    if insn.imm & Atomic.FETCH:
        return f"r{insn.src} = {function}_fetch_{name}({place}, r{insn.src})"
    return f"lock *{place} {sign} r{insn.src}"


def _wide_load(insn: Insn, second: Insn, index: int, name: str | None) -> str:
    if insn.off or second != Insn(0, imm=second.imm):
        return _unknown(insn)
    match insn.src:
        case LoadImmediate.NUMBER:
            number = insn.imm & 0xFFFF_FFFF | (second.imm & 0xFFFF_FFFF) << 32
            return f"r{insn.dst} = {number:#x} ll"
        case LoadImmediate.MAP if not second.imm:
            return f"r{insn.dst} = map[{name or f'fd:{insn.imm}'}]"
        case LoadImmediate.MAP_VALUE:
            return f"r{insn.dst} = map[{name or f'fd:{insn.imm}'}][0] + {second.imm}"
        case LoadImmediate.FUNCTION if not second.imm:
            return f"r{insn.dst} = function <{index + 1 + insn.imm}>"
    return _unknown(insn)
