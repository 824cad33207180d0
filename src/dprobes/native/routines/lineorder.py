"""
Routines that bring the lines of an index (``entrywalk``) into the order of their time.

Those of one ring nearly are: a thread may have been interrupted, or have changed its CPU, between asking for the time
and taking its place. So each is moved back over few others; then runs that are in order are merged. Lines with the same
time stay in the order in which they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Alu, Jump, Register
from dprobes.native.routines.entrywalk import LINE_SIZE

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembled

__all__ = ["insertion_routine", "merge_routine"]

_R = Register


def insertion_routine() -> Assembled:
    """Return the routine that sorts the lines from R1 to R2, addresses, by insertion."""
    asm = Assembler()
    again, following, shift, found, done = (asm.label() for _ in range(5))
    asm.mov(_R.R3, _R.R1)
    asm.alu(Alu.ADD, _R.R3, LINE_SIZE)
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R3, _R.R2, done)
    asm.load(_R.R4, _R.R3, 0)
    asm.load(_R.R5, _R.R3, -LINE_SIZE)
    asm.jump_if(Jump.JGE, _R.R4, _R.R5, following)
    asm.load(_R.R6, _R.R3, 8)
    asm.mov(_R.R7, _R.R3)
    asm.place(shift)
    asm.jump_if(Jump.JLE, _R.R7, _R.R1, found)
    asm.load(_R.R5, _R.R7, -LINE_SIZE)
    asm.jump_if(Jump.JLE, _R.R5, _R.R4, found)
    asm.load(_R.R0, _R.R7, 8 - LINE_SIZE)
    asm.store(_R.R7, 0, _R.R5)
    asm.store(_R.R7, 8, _R.R0)
    asm.alu(Alu.SUB, _R.R7, LINE_SIZE)
    asm.jump(shift)
    asm.place(found)
    asm.store(_R.R7, 0, _R.R4)
    asm.store(_R.R7, 8, _R.R6)
    asm.place(following)
    asm.alu(Alu.ADD, _R.R3, LINE_SIZE)
    asm.jump(again)
    asm.place(done)
    asm.mov(_R.R0, 0)
    asm.exit()
    return asm.assemble()


def merge_routine() -> Assembled:
    """Return the routine that merges the lines from R1 to R2 and those from R3 to R4 to R5: addresses."""
    asm = Assembler()
    again, second, rest, others, done = (asm.label() for _ in range(5))
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, others)
    asm.jump_if(Jump.JGE, _R.R3, _R.R4, rest)
    asm.load(_R.R0, _R.R1, 0)
    asm.load(_R.R6, _R.R3, 0)
    asm.jump_if(Jump.JGT, _R.R0, _R.R6, second)
    asm.load(_R.R7, _R.R1, 8)
    asm.store(_R.R5, 0, _R.R0)
    asm.store(_R.R5, 8, _R.R7)
    asm.alu(Alu.ADD, _R.R1, LINE_SIZE)
    asm.alu(Alu.ADD, _R.R5, LINE_SIZE)
    asm.jump(again)
    asm.place(second)
    asm.load(_R.R7, _R.R3, 8)
    asm.store(_R.R5, 0, _R.R6)
    asm.store(_R.R5, 8, _R.R7)
    asm.alu(Alu.ADD, _R.R3, LINE_SIZE)
    asm.alu(Alu.ADD, _R.R5, LINE_SIZE)
    asm.jump(again)
    asm.place(others)  # none of the first ones are left: what is left of the second takes their place
    asm.mov(_R.R1, _R.R3)
    asm.mov(_R.R2, _R.R4)
    asm.place(rest)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, done)
    asm.load(_R.R0, _R.R1, 0)
    asm.load(_R.R7, _R.R1, 8)
    asm.store(_R.R5, 0, _R.R0)
    asm.store(_R.R5, 8, _R.R7)
    asm.alu(Alu.ADD, _R.R1, LINE_SIZE)
    asm.alu(Alu.ADD, _R.R5, LINE_SIZE)
    asm.jump(rest)
    asm.place(done)
    asm.mov(_R.R0, 0)
    asm.exit()
    return asm.assemble()
