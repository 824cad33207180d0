"""
In which pieces an entry of a ring is best copied.

A processor hands on what was stored a moment ago if a load wants a part of what one store has written; else it waits
until all of it is in the cache (Intel optimization manual, section 3.6.4, store forwarding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Class, Mode, Register, Size, X

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.asm.insn import Insn

__all__ = ["pieces_of"]

_FRAME, _SOURCE = Register.R10.value, Register.R2.value
_WORD, _HALF = 8, 4
_STORES = (Class.ST | Mode.MEM | Size.DW, Class.STX | Mode.MEM | Size.DW)


def pieces_of(code: Sequence[Insn], index: int, size: int) -> tuple[int, ...]:
    """Return the sizes of pieces for a call at ``index`` that puts ``size`` bytes at R2 into a ring."""
    start = _start(code, index)
    stored = {insn.off for insn in code if insn.opcode in _STORES and insn.dst == _FRAME}
    pieces: list[int] = []
    at = 0
    while at < size:
        is_word = start is None or start + at in stored
        pieces.append(_WORD if is_word else _HALF)
        at += pieces[-1]
    return tuple(pieces)


def _start(code: Sequence[Insn], index: int) -> int | None:
    """Return where in the frame R2 points to before ``index``, if it does."""
    for place in range(index - 1, 0, -1):
        insn, before = code[place], code[place - 1]
        if insn.dst != _SOURCE or insn.opcode & 0x07 in (Class.ST, Class.STX, Class.JMP, Class.JMP32):
            continue
        copied = (before.opcode, before.dst, before.src) == (Class.ALU64 | Alu.MOV | X, _SOURCE, _FRAME)
        return insn.imm if copied and insn.opcode == Class.ALU64 | Alu.ADD else None
    return None
