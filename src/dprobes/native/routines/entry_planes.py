"""
Routines that make packed records (``record_table``) of the entries in an index (``entry_walk``).

The first step lists the places of the entries of one group. The second step finds the bytes in which these entries
differ. The third one writes a plane for each such byte: the bytes of all entries at that position. The second and third
step work on batches of 192 entries, which stay in the processor's cache.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Jump, Register, Size
from dprobes.native.routines.entry_walk import LINE_SIZE
from dprobes.native.routines.handler_ring import ENTRY_HEADER

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembled, Label

__all__ = [
    "PACKING_SIZE",
    "PLACE_SIZE",
    "Packing",
    "copy_routine",
    "difference_routine",
    "order_routine",
    "places_routine",
    "planes_routine",
]

_R = Register

PLACE_SIZE = 4
"""Size in bytes of a place in a list; a place is the distance in bytes of an entry from BASE."""

_TOGETHER = 192 * PLACE_SIZE


class Packing(enum.IntEnum):
    """
    The offsets of the u64 words in the parameter block of packing.

    All words are addresses, except COUNT.
    """

    PLACES = 0
    PLACES_END = 8
    BASE = 16
    FIRST = 24
    """The first entry; the others are compared with it."""
    DIFFERENCES = 32
    """The output: for each word of an entry, the bits in which some entry differs from the first one."""
    DIFFERENCES_END = 40
    WHICH = 48
    """A list of u32 positions in an entry, for each of which a plane is wanted."""
    WHICH_END = 56
    OUT = 64
    COUNT = 72
    """The number of entries."""


PACKING_SIZE = 80


def places_routine() -> Assembled:
    """
    Return the routine that lists the places of entries of group R3, from the lines of an index between R1 and R2.

    R1 and R2 are addresses, R2 exclusive. The list is written at R4; R0 is its end.
    """
    asm = Assembler()
    again, following, done = asm.label(), asm.label(), asm.label()
    asm.mov(_R.R0, _R.R4)
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, done)
    asm.load(_R.R5, _R.R1, 8)
    asm.alu(Alu.ADD, _R.R1, LINE_SIZE)
    asm.derive(Alu.RSH, _R.R4, _R.R5, 32)
    asm.jump_if(Jump.JNE, _R.R4, _R.R3, following)
    asm.store(_R.R0, 0, _R.R5, Size.W)
    asm.alu(Alu.ADD, _R.R0, PLACE_SIZE)
    asm.place(following)
    asm.jump(again)
    asm.place(done)
    asm.exit()
    return asm.assemble()


def order_routine() -> Assembled:
    """Return the routine that writes the group of each line between the addresses R1 and R2, as a byte, to R3."""
    asm = Assembler()
    again, done = asm.label(), asm.label()
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, done)
    asm.load(_R.R0, _R.R1, 12, Size.W)
    asm.store(_R.R3, 0, _R.R0, Size.B)
    asm.alu(Alu.ADD, _R.R1, LINE_SIZE)
    asm.alu(Alu.ADD, _R.R3, 1)
    asm.jump(again)
    asm.place(done)
    asm.exit(0)
    return asm.assemble()


def difference_routine() -> Assembled:
    """Return the routine that finds the bits in which entries differ; R1 is the address of a ``Packing`` block."""
    asm = Assembler()
    batch, word, again, following, done = (asm.label() for _ in range(5))
    _begin(asm, batch, done)
    asm.load(_R.R6, _R.R1, Packing.BASE)
    asm.load(_R.R7, _R.R1, Packing.FIRST)
    asm.load(_R.R8, _R.R1, Packing.DIFFERENCES)
    asm.place(word)
    asm.load(_R.R0, _R.R7, 0)
    asm.load(_R.R9, _R.R8, 0)
    asm.mov(_R.R4, _R.R2)
    asm.place(again)
    asm.load(_R.R5, _R.R4, 0, Size.W)
    asm.alu(Alu.ADD, _R.R4, PLACE_SIZE)
    asm.alu(Alu.ADD, _R.R5, _R.R6)
    asm.load(_R.R5, _R.R5, 0)
    asm.alu(Alu.XOR, _R.R5, _R.R0)
    asm.alu(Alu.OR, _R.R9, _R.R5)
    asm.jump_if(Jump.JLT, _R.R4, _R.R3, again)
    asm.store(_R.R8, 0, _R.R9)
    asm.alu(Alu.ADD, _R.R6, 8)
    asm.alu(Alu.ADD, _R.R7, 8)
    asm.alu(Alu.ADD, _R.R8, 8)
    asm.load(_R.R0, _R.R1, Packing.DIFFERENCES_END)
    asm.jump_if(Jump.JLT, _R.R8, _R.R0, word)
    asm.place(following)
    asm.mov(_R.R2, _R.R3)
    asm.jump(batch)
    asm.place(done)
    asm.exit(0)
    return asm.assemble()


def planes_routine() -> Assembled:
    """Return the routine that writes the planes, of COUNT bytes each; R1 is the address of a ``Packing`` block."""
    asm = Assembler()
    batch, plane, again, done = (asm.label() for _ in range(4))
    _begin(asm, batch, done)
    asm.load(_R.R7, _R.R1, Packing.WHICH)
    asm.load(_R.R8, _R.R1, Packing.OUT)
    asm.load(_R.R0, _R.R1, Packing.PLACES)
    asm.derive(Alu.SUB, _R.R9, _R.R2, _R.R0)
    asm.alu(Alu.RSH, _R.R9, PLACE_SIZE.bit_length() - 1)
    asm.alu(Alu.ADD, _R.R8, _R.R9)  # the output for the bytes of these entries
    asm.place(plane)
    asm.load(_R.R6, _R.R7, 0, Size.W)
    asm.load(_R.R0, _R.R1, Packing.BASE)
    asm.alu(Alu.ADD, _R.R6, _R.R0)
    asm.mov(_R.R4, _R.R2)
    asm.mov(_R.R9, _R.R8)
    asm.place(again)
    asm.load(_R.R5, _R.R4, 0, Size.W)
    asm.alu(Alu.ADD, _R.R4, PLACE_SIZE)
    asm.alu(Alu.ADD, _R.R5, _R.R6)
    asm.copy_from(_R.R5, 0, _R.R9, 0, by=_R.R5, size=Size.B)
    asm.alu(Alu.ADD, _R.R9, 1)
    asm.jump_if(Jump.JLT, _R.R4, _R.R3, again)
    asm.load(_R.R0, _R.R1, Packing.COUNT)
    asm.alu(Alu.ADD, _R.R8, _R.R0)
    asm.alu(Alu.ADD, _R.R7, PLACE_SIZE)
    asm.load(_R.R0, _R.R1, Packing.WHICH_END)
    asm.jump_if(Jump.JLT, _R.R7, _R.R0, plane)
    asm.mov(_R.R2, _R.R3)
    asm.jump(batch)
    asm.place(done)
    asm.exit(0)
    return asm.assemble()


def _begin(asm: Assembler, batch: Label, done: Label) -> None:
    """Write the head of a loop over batches of places, from R2 to R3; jump to ``done`` after the last. Clobbers R0."""
    whole = asm.label()
    asm.load(_R.R2, _R.R1, Packing.PLACES)
    asm.place(batch)
    asm.load(_R.R0, _R.R1, Packing.PLACES_END)
    asm.jump_if(Jump.JGE, _R.R2, _R.R0, done)
    asm.add(_R.R3, _R.R2, _TOGETHER)
    asm.jump_if(Jump.JLE, _R.R3, _R.R0, whole)
    asm.mov(_R.R3, _R.R0)
    asm.place(whole)


def copy_routine() -> Assembled:
    """
    Return the routine that copies the entries of the lines between R1 and R2 to R4, in the order of the lines.

    R1 and R2 are addresses; R3 is the base of places. The copies have no gaps between them; R0 is their end.
    """
    asm = Assembler()
    again, word, done = asm.label(), asm.label(), asm.label()
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, done)
    asm.load(_R.R5, _R.R1, 8, Size.W)
    asm.alu(Alu.ADD, _R.R1, LINE_SIZE)
    asm.alu(Alu.ADD, _R.R5, _R.R3)
    asm.load(_R.R6, _R.R5, 0, Size.W)
    asm.alu(Alu.ADD, _R.R6, ENTRY_HEADER + 7)
    asm.alu(Alu.AND, _R.R6, ~7)
    asm.alu(Alu.ADD, _R.R6, _R.R4)
    asm.place(word)
    asm.copy_from(_R.R5, 0, _R.R4, 0, by=_R.R0)
    asm.alu(Alu.ADD, _R.R5, 8)
    asm.alu(Alu.ADD, _R.R4, 8)
    asm.jump_if(Jump.JLT, _R.R4, _R.R6, word)
    asm.jump(again)
    asm.place(done)
    asm.exit(_R.R4)
    return asm.assemble()
