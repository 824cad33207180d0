"""How much of a stack frame the code of a handler uses, below R10."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Class, Jump, Register, X
from dprobes.native.wellformed import FRAME_MAX

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn

__all__ = ["budget_place", "frame_size", "uses_budget"]

_CLASS = 0x07
_LOAD, _STORES, _CALCULATIONS = Class.LDX, (Class.ST, Class.STX), (Class.ALU64, Class.ALU)
_COPY, _ADDITION, _MAY_GOTO = Class.ALU64 | Alu.MOV | X, Class.ALU64 | Alu.ADD, Class.JMP | Jump.MAY_GOTO
_BUDGET_SIZE, _ALIGNMENT = 8, 16


def uses_budget(code: tuple[Insn, ...]) -> bool:
    """Return whether code counts how often MAY_GOTO goes on, which takes a word of its frame."""
    return any(insn.opcode == _MAY_GOTO for insn in code)


def budget_place(code: tuple[Insn, ...]) -> int:
    """Return where that word is, in bytes from R10."""
    return -_depth(code) - _BUDGET_SIZE


def frame_size(assembled: Assembled) -> int:
    """Return how many bytes below R10 the code of a handler needs: a multiple of 16."""
    code = assembled.code
    return -(-(_depth(code) + (_BUDGET_SIZE if uses_budget(code) else 0)) // _ALIGNMENT) * _ALIGNMENT


def _depth(code: tuple[Insn, ...]) -> int:
    """Return how far below its end the frame is used by the code itself, in bytes."""
    frame = Register.R10.value
    lowest = 0
    for index, insn in enumerate(code):
        if frame not in (insn.src, insn.dst):
            continue
        kind = insn.opcode & _CLASS
        if (kind == _LOAD and insn.src == frame) or (kind in _STORES and insn.dst == frame):
            lowest = min(lowest, insn.off)
        elif insn.src == frame and insn.opcode == _COPY:
            following = code[index + 1]
            if following.opcode != _ADDITION or following.dst != insn.dst:
                return FRAME_MAX
            lowest = min(lowest, following.imm)
        elif insn.src == frame and insn.opcode & X and kind in _CALCULATIONS:
            return FRAME_MAX
    return -lowest
