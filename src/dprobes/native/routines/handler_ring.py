"""
Ring buffers to which threads write entries, and from which the tool reads: one for each CPU, to reduce contention.

::

    ring     0     u64 consumer   the reader's position, which the reader writes
             128   u64 producer   the position after the last reserved place
             4096  data           its size is a power of two

    entry    u32 length; bit 31: is being written; bit 30: discarded | u32 0 | data, padded to a multiple of 8 bytes

Positions only grow; their low bits are offsets in the data. An entry does not wrap around: a discarded one fills the
room before the end. So an entry of more than half a ring may find no room even if the ring is empty.

The reader clears the entries that it has read before it frees their room. So an entry is complete as soon as its length
is not 0, and bit 31 is clear. A preempted thread that has reserved room delays the entries after its own. If the thread
was killed, the reader skips the reserved room: the length in the entry, or all zeros if there is no length yet.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from typing import NamedTuple

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size

__all__ = [
    "BUSY",
    "CONSUMER",
    "DATA",
    "DISCARDED",
    "ENTRY_HEADER",
    "PRODUCER",
    "RingShape",
    "output_code",
    "output_routine",
]

_R = Register

CONSUMER, PRODUCER, DATA = 0, 128, 4096
DISCARDED, BUSY = 1 << 30, 1 << 31
ENTRY_HEADER = 8
_BUSY_IMMEDIATE = BUSY - (1 << 32)


class RingShape(NamedTuple):
    """The number of rings, and the size in bytes of the data of each; both are powers of two."""

    rings: int
    size: int

    @property
    def stride(self) -> int:
        """Distance in bytes between the starts of two rings."""
        return DATA + self.size


def output_routine(shape: RingShape) -> Assembled:
    """Return the routine that copies R3 bytes at R2 into the current CPU's ring at R1; R0 is 0, or a negative errno."""
    asm = Assembler()
    full, again, pad, copy, copied = (asm.label() for _ in range(5))
    mask = shape.size - 1
    asm.mov(_R.R6, _R.R1)
    asm.call(Helper.GET_SMP_PROCESSOR_ID)
    asm.alu(Alu.AND, _R.R0, shape.rings - 1)
    asm.alu(Alu.MUL, _R.R0, shape.stride)
    asm.alu(Alu.ADD, _R.R6, _R.R0)
    asm.add(_R.R7, _R.R3, ENTRY_HEADER + 7)
    asm.alu(Alu.AND, _R.R7, ~7)
    asm.place(again)
    asm.load(_R.R0, _R.R6, PRODUCER)
    asm.load(_R.R4, _R.R6, CONSUMER)
    asm.add(_R.R1, _R.R0, _R.R7)
    asm.derive(Alu.SUB, _R.R5, _R.R1, _R.R4)
    asm.jump_if(Jump.JGT, _R.R5, shape.size, full)
    asm.derive(Alu.AND, _R.R5, _R.R0, mask)
    asm.mov(_R.R4, shape.size)
    asm.alu(Alu.SUB, _R.R4, _R.R5)
    asm.jump_if(Jump.JLT, _R.R4, _R.R7, pad)
    asm.mov(_R.R4, _R.R0)
    asm.atomic(Atomic.CMPXCHG, _R.R6, PRODUCER, _R.R1)
    asm.jump_if(Jump.JNE, _R.R0, _R.R4, again)
    asm.alu(Alu.ADD, _R.R6, _R.R5)
    asm.mov(_R.R0, _R.R3)
    asm.alu(Alu.OR, _R.R0, _BUSY_IMMEDIATE, wide=False)
    asm.store(_R.R6, DATA, _R.R0, Size.W)
    asm.mov(_R.R4, _R.R6)
    asm.mov(_R.R5, _R.R3)
    asm.place(copy)
    asm.jump_if(Jump.JSLE, _R.R5, 0, copied)
    asm.copy_from(_R.R2, 0, _R.R4, DATA + ENTRY_HEADER, by=_R.R0)
    asm.alu(Alu.ADD, _R.R2, 8)
    asm.alu(Alu.ADD, _R.R4, 8)
    asm.alu(Alu.SUB, _R.R5, 8)
    asm.jump(copy)
    asm.place(copied)
    asm.store(_R.R6, DATA, _R.R3, Size.W)
    asm.exit(0)
    asm.place(pad)
    asm.add(_R.R1, _R.R0, _R.R4)
    asm.mov(_R.R8, _R.R0)
    asm.atomic(Atomic.CMPXCHG, _R.R6, PRODUCER, _R.R1)
    asm.jump_if(Jump.JNE, _R.R0, _R.R8, again)
    asm.alu(Alu.ADD, _R.R5, _R.R6)
    asm.alu(Alu.SUB, _R.R4, ENTRY_HEADER)
    asm.mov(_R.R1, DISCARDED)
    asm.alu(Alu.OR, _R.R4, _R.R1)
    asm.store(_R.R5, DATA, _R.R4, Size.W)
    asm.jump(again)
    asm.place(full)
    asm.exit(-errno.ENOSPC)
    return asm.assemble()


@lru_cache(64)
def output_code(shape: RingShape, size: int, pieces: tuple[int, ...]) -> Assembled:
    """
    Return inline code, in place of a call of the routine, that copies ``size`` bytes at R2 into the ring at R1.

    The bytes are copied in ``pieces`` of 4 or 8 bytes: a load that spans several recent stores is slow (store
    forwarding). R0 is 0, or a negative errno. Clobbers R0 to R5, and uses no frame.
    """
    asm = Assembler()
    full, again, pad = asm.label(), asm.label(), asm.label()
    mask, whole = shape.size - 1, size + ENTRY_HEADER + 7 & ~7
    asm.call(Helper.GET_SMP_PROCESSOR_ID)
    asm.alu(Alu.AND, _R.R0, shape.rings - 1)
    asm.alu(Alu.MUL, _R.R0, shape.stride)
    asm.alu(Alu.ADD, _R.R1, _R.R0)
    asm.place(again)
    asm.load(_R.R0, _R.R1, PRODUCER)
    asm.load(_R.R5, _R.R1, CONSUMER)
    asm.mov(_R.R4, _R.R0)
    asm.add(_R.R3, _R.R0, whole)
    asm.alu(Alu.SUB, _R.R5, _R.R3)
    asm.jump_if(Jump.JSLT, _R.R5, -shape.size, full)
    asm.derive(Alu.AND, _R.R5, _R.R0, mask)
    asm.jump_if(Jump.JGT, _R.R5, shape.size - whole, pad)
    asm.atomic(Atomic.CMPXCHG, _R.R1, PRODUCER, _R.R3)
    asm.jump_if(Jump.JNE, _R.R0, _R.R4, again)
    asm.alu(Alu.ADD, _R.R1, _R.R5)
    asm.store(_R.R1, DATA, size + _BUSY_IMMEDIATE, Size.W)
    at = 0
    for piece in pieces:
        asm.copy_from(_R.R2, at, _R.R1, DATA + ENTRY_HEADER + at, by=_R.R0, size=Size.of(piece))
        at += piece
    asm.store(_R.R1, DATA, size, Size.W)
    asm.exit(0)
    asm.place(pad)
    asm.alu(Alu.SUB, _R.R5, shape.size)  # the room before the end, as a negative number
    asm.derive(Alu.SUB, _R.R3, _R.R0, _R.R5)
    asm.atomic(Atomic.CMPXCHG, _R.R1, PRODUCER, _R.R3)
    asm.jump_if(Jump.JNE, _R.R0, _R.R4, again)
    asm.alu(Alu.AND, _R.R4, mask)
    asm.alu(Alu.ADD, _R.R4, _R.R1)
    asm.neg(_R.R5)
    asm.alu(Alu.SUB, _R.R5, ENTRY_HEADER)
    asm.alu(Alu.OR, _R.R5, DISCARDED)
    asm.store(_R.R4, DATA, _R.R5, Size.W)
    asm.jump(again)
    asm.place(full)
    asm.exit(-errno.ENOSPC)
    return asm.assemble()
