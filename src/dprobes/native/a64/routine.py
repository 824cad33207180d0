"""A routine in eBPF as a function, which keeps what calls keep: R6 to R9, and the frame of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import Gpr, Memory, Operation
from dprobes.native.a64.registers import CALL_CHANGED, FRAME
from dprobes.native.a64.translator import A64Translator
from dprobes.native.frame import frame_size
from dprobes.native.wellformed import check_code

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.native.a64.assembler import A64Assembler
    from dprobes.native.code import Surroundings

__all__ = ["write_function", "write_routine"]

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
