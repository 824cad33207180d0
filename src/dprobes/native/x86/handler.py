"""
A handler as a function, which takes the registers of the hit, as a ``struct pt_regs``, in rdi.

It may change any register, and the arithmetic flags. The frame of eBPF's R10 is on the stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.code import NativeCode
from dprobes.native.frame import frame_size
from dprobes.native.trim import trimmed
from dprobes.native.wellformed import check_code
from dprobes.native.x86.assembler import Gpr, Memory, X86Assembler
from dprobes.native.x86.registers import FRAME
from dprobes.native.x86.translator import X86Translator

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.native.code import Surroundings

__all__ = ["handler_function"]


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
