"""What the code of a handler touches: eBPF registers, and the registers of the hit that it reads and writes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.bpf.asm.insn import WIDE_LOAD
from dprobes.bpf.asm.isa import Alu, Class, Jump, Mode, Register, Size, X
from dprobes.lazydataclass import dataclass
from dprobes.native.trim import is_first_argument_used

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.asm.insn import Insn

__all__ = ["CONTEXT_WORDS", "Footprint", "footprint"]

CONTEXT_WORDS = range(0, 168, 8)
"""Where ``struct pt_regs`` of x86-64 has its words."""

_CLASS, _OPERATION, _SIZE = 0x07, 0xF0, 0x18
_ARGUMENTS = range(6)
_MOVE = Class.ALU64 | Alu.MOV | X


@dataclass(frozen=True, slots=True)
class Footprint:
    """
    Hold the numbers of the eBPF registers that are used, and the words of the context that are read and written.

    ``calls`` says whether helpers are called, which may change all registers that calls do not keep.
    """

    registers: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    calls: bool


@lru_cache(64)
def footprint(assembled: Assembled, context: range = CONTEXT_WORDS) -> Footprint:
    """Return what code touches; where it passes the context on, that is all of it, which has words at ``context``."""
    code = assembled.code
    contexts = {Register.R1.value} if is_first_argument_used(code) else set()
    registers: set[int] = set()
    reads: set[int] = set()
    writes: set[int] = set()
    escapes = calls = False
    knows_first = bool(contexts)
    for index, insn in enumerate(code):
        kind = insn.opcode & _CLASS
        registers |= {insn.dst} | ({insn.src} if _has_source(insn) else set())
        if kind in (Class.JMP, Class.JMP32) and insn.opcode & _OPERATION == Jump.CALL:
            calls = True
            escapes |= knows_first  # the context may be an argument
            registers |= set(_ARGUMENTS)
            continue
        if not index and insn.opcode == _MOVE and (insn.dst, insn.src) == (Register.R6.value, Register.R1.value):
            contexts, knows_first = {Register.R6.value}, False
            continue
        if kind == Class.LDX and insn.src in contexts:
            reads |= _words(insn)
        elif kind in (Class.ST, Class.STX) and insn.dst in contexts:
            writes |= _words(insn)
            is_whole = insn.opcode == kind | Mode.MEM | Size.DW and not insn.off & 7
            if not is_whole:
                reads |= _words(insn)
            escapes |= kind == Class.STX and insn.src in contexts
        elif kind == Class.STX:
            escapes |= insn.src in contexts
        elif kind in (Class.ALU64, Class.ALU):
            escapes |= insn.dst in contexts or (bool(insn.opcode & X) and insn.src in contexts)
        elif kind == Class.LDX or insn.opcode == WIDE_LOAD:
            escapes |= insn.dst in contexts
    words = set(context)
    if escapes:
        reads |= words
        writes |= words
    return Footprint(frozenset(registers), frozenset(reads & words), frozenset(writes & words), calls)


def _words(insn: Insn) -> set[int]:
    """Return the words of the context that an access touches."""
    size = Size(insn.opcode & _SIZE).bytes
    return {insn.off & ~7, insn.off + size - 1 & ~7}


def _has_source(insn: Insn) -> bool:
    kind = insn.opcode & _CLASS
    if kind in (Class.LDX, Class.STX):
        return True
    return kind in (Class.ALU, Class.ALU64, Class.JMP, Class.JMP32) and bool(insn.opcode & X)
