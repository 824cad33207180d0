"""A routine in eBPF as a function, which keeps what calls keep: R6 to R9, and the frame of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Register
from dprobes.native.frame import frame_size
from dprobes.native.wellformed import check_code
from dprobes.native.x86.assembler import Gpr, Memory, Operation
from dprobes.native.x86.registers import FRAME, gpr
from dprobes.native.x86.translator import X86Translator

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.native.code import Surroundings
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["write_routine"]

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
