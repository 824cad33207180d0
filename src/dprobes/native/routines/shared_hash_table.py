"""
Hash tables in memory that several processes share.

::

    table    8  u64 count    the number of keys
            64  slots        their number, ``capacity``, is a power of two
                locks        64 bytes for each block of 64 slots; 0, or 1 while a thread inserts or deletes there

    slot     0  u64 state    0: free, 1: being written, 3: deleted, else the key's hash with 6 in its low three bits
             8  key          padded to a multiple of 8 bytes
                value

The hash of a key selects a slot. The key is in the block of that slot, and no free slot is between the two; after the
last slot of a block follows its first one. Look-ups take no lock. An update waits for a lock long enough for a
preempted holder to run. It then gives up: the holder may have been killed, or interrupted by a probed signal handler. A
key for which there is no room is not inserted; in a table with ``forgets`` it replaces another key of its block.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import NO_OVERWRITE, Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.map_layouts import power_of_two

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembled, Label

__all__ = ["BLOCK", "DELETED", "FREE", "HASH_FACTOR", "HEAD_SIZE", "TableShape", "hash_routine"]

_R = Register

HEAD_SIZE = 64
BLOCK = 64
"""Number of slots for each lock, and size in bytes of a lock: a cache line."""
HASH_FACTOR = 0x9E37_79B9_7F4A_7C15
"""The golden ratio, as a fraction of 2**64: the factor of Knuth's hash (TAOCP volume 3, section 6.4)."""
FREE, _WRITING, DELETED, _READY = 0, 1, 3, 6
_COUNT = 8
_STATE = 8
_SPINS = 1 << 24
"""Number of reads of a lock before a timeout. They take several milliseconds, in which a preempted holder can run."""

_FLAGS, _HOME, _HELD = -8, -16, -24
"""Frame offsets of an update's flags, of the slot that the hash selects, and of the lock's address."""


class TableShape(NamedTuple):
    """
    The shape of a table: sizes in bytes of keys and values, multiples of 4, and the maximum number of entries.

    With ``forgets``, a full table evicts a key to insert another one.
    """

    key_size: int
    value_size: int
    entries: int
    forgets: bool = False

    @property
    def capacity(self) -> int:
        """Number of slots, a power of two above ``entries``: even a full table has free slots."""
        return power_of_two(max(2 * self.entries, 8))

    @property
    def value_place(self) -> int:
        """Offset in bytes of the value in a slot."""
        return _STATE + (self.key_size + 7 & ~7)

    @property
    def stride(self) -> int:
        """The size of a slot in bytes."""
        return self.value_place + (self.value_size + 7 & ~7)

    @property
    def block(self) -> int:
        """The number of slots for each lock."""
        return min(BLOCK, self.capacity)

    @property
    def locks(self) -> int:
        """Offset in bytes of the locks in the table."""
        return HEAD_SIZE + self.capacity * self.stride

    @property
    def size(self) -> int:
        """The size of the table in bytes."""
        return self.locks + BLOCK * (self.capacity // self.block)


@lru_cache(64)  # each process that is probed has routines for the same shapes
def hash_routine(helper: Helper, shape: TableShape) -> Assembled:
    """Return the routine for MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM or MAP_DELETE_ELEM on tables of a shape."""
    asm = Assembler()
    writer = _Writer(asm, shape)
    write = {
        Helper.MAP_LOOKUP_ELEM: writer.look_up,
        Helper.MAP_UPDATE_ELEM: writer.update,
        Helper.MAP_DELETE_ELEM: writer.delete,
    }
    write[helper]()
    return asm.assemble()


def _pieces(size: int) -> list[tuple[int, Size]]:
    """Return the offset and size of each word of ``size`` bytes; the last one has 4 bytes if a remainder is left."""
    words = [(at, Size.DW) for at in range(0, size - 7, 8)]
    return [*words, (size - 4, Size.W)] if size % 8 else words


class _Writer:
    """
    Writer of the routines of one shape.

    R1 and R2 are the addresses of table and key, as for the kernel's helpers.
    """

    def __init__(self, asm: Assembler, shape: TableShape) -> None:
        self._asm = asm
        self._shape = shape
        self._key = _pieces(shape.key_size)

    def _hash(self, key: Register) -> None:
        """
        Write code that sets R3 to the state of the key's slot, and R4 to the number of the slot that its hash selects.

        ``key`` is a register with the key's address. Clobbers R5.
        """
        asm = self._asm
        asm.mov(_R.R4, HASH_FACTOR)
        asm.mov(_R.R3, _R.R4)
        for at, size in self._key:
            asm.load(_R.R5, key, at, size)
            asm.alu(Alu.XOR, _R.R3, _R.R5)
            asm.alu(Alu.MUL, _R.R3, _R.R4)
            asm.derive(Alu.RSH, _R.R5, _R.R3, 32)
            asm.alu(Alu.XOR, _R.R3, _R.R5)
        asm.derive(Alu.RSH, _R.R4, _R.R3, 3)
        asm.alu(Alu.AND, _R.R4, self._shape.capacity - 1)
        asm.alu(Alu.OR, _R.R3, _READY | 1)
        asm.alu(Alu.XOR, _R.R3, 1)

    def _slot(self, table: Register) -> None:
        """Write code that sets R0 to the address of slot R4, minus HEAD_SIZE."""
        self._asm.derive(Alu.MUL, _R.R0, _R.R4, self._shape.stride)
        self._asm.alu(Alu.ADD, _R.R0, table)

    def _go_on(self, again: Label) -> None:
        """Write a jump to ``again`` for the next slot, unless R5, the number of slots left, is 0."""
        asm = self._asm
        self._next()
        asm.alu(Alu.SUB, _R.R5, 1)
        asm.jump_if(Jump.JNE, _R.R5, 0, again)

    def _next(self) -> None:
        """Write code that sets R4 to the number of the next slot of the block."""
        asm, block, inside = self._asm, self._shape.block, self._asm.label()
        asm.alu(Alu.ADD, _R.R4, 1)
        asm.jump_if(Jump.JSET, _R.R4, block - 1, inside)
        asm.alu(Alu.SUB, _R.R4, block)
        asm.place(inside)

    def _previous(self) -> None:
        """Write code that sets R4 to the number of the previous slot of the block."""
        asm, block, inside = self._asm, self._shape.block, self._asm.label()
        asm.jump_if(Jump.JSET, _R.R4, block - 1, inside)
        asm.alu(Alu.ADD, _R.R4, block)
        asm.place(inside)
        asm.alu(Alu.SUB, _R.R4, 1)

    def _compare(self, key: Register, other: Label, first: Register, second: Register) -> None:
        """Write a jump to ``other`` unless the slot at R0 has the key. Clobbers ``first`` and ``second``."""
        for at, size in self._key:
            self._asm.load(first, _R.R0, HEAD_SIZE + _STATE + at, size)
            self._asm.load(second, key, at, size)
            self._asm.jump_if(Jump.JNE, first, second, other)

    def look_up(self) -> None:
        """Write the look-up: R0 is the address of the value, or 0."""
        asm, again, following, none = self._asm, self._asm.label(), self._asm.label(), self._asm.label()
        self._hash(_R.R2)
        asm.mov(_R.R5, self._shape.block)
        asm.place(again)
        self._slot(_R.R1)
        asm.jump_if_word(Jump.JEQ, _R.R0, HEAD_SIZE, FREE, none, by=_R.R6)
        asm.jump_if(Jump.JNE, _R.R6, _R.R3, following)
        self._compare(_R.R2, following, _R.R6, _R.R7)
        asm.alu(Alu.ADD, _R.R0, HEAD_SIZE + self._shape.value_place)
        asm.exit()
        asm.place(following)
        self._go_on(again)
        asm.place(none)
        asm.exit(0)

    def _lock(self) -> None:
        """
        Write code that acquires the lock of slot R4 of the table at R6.

        The routine returns -EBUSY after a timeout. Clobbers R0, R1, R5 and R9.
        """
        asm, again, busy, locked = self._asm, self._asm.label(), self._asm.label(), self._asm.label()
        asm.derive(Alu.AND, _R.R9, _R.R4, -BLOCK)
        asm.alu(Alu.ADD, _R.R9, self._shape.locks)
        asm.alu(Alu.ADD, _R.R9, _R.R6)
        asm.store(_R.R10, _HELD, _R.R9)
        asm.mov(_R.R1, 1)
        asm.mov(_R.R5, _SPINS)
        asm.place(again)
        asm.jump_if_word(Jump.JNE, _R.R9, 0, 0, busy, by=_R.R0)
        asm.atomic(Atomic.CMPXCHG, _R.R9, 0, _R.R1)
        asm.jump_if(Jump.JEQ, _R.R0, 0, locked)
        asm.place(busy)
        asm.alu(Alu.SUB, _R.R5, 1)
        asm.jump_if(Jump.JNE, _R.R5, 0, again)
        asm.exit(-errno.EBUSY)
        asm.place(locked)

    def _return(self, value: int) -> None:
        """Write code that releases the lock and returns ``value``. Clobbers R1 and R2."""
        self._asm.load(_R.R1, _R.R10, _HELD)
        self._asm.mov(_R.R2, 0)
        self._asm.atomic(Atomic.XCHG, _R.R1, 0, _R.R2)
        self._asm.exit(value)

    def _walk(self, free: Label, found: Label, *, notes_deleted: bool) -> None:
        """
        Write a search for the key at R7: it jumps to ``found`` or to ``free``, with R0 at the key's or a free slot.

        If the block has neither, execution falls through. With ``notes_deleted``, R1 is the first slot of a deleted
        key; 0: there is none. Clobbers R2, R5 and R9.
        """
        asm, again, following = self._asm, self._asm.label(), self._asm.label()
        asm.mov(_R.R1, 0)
        asm.mov(_R.R5, self._shape.block)
        asm.place(again)
        self._slot(_R.R6)
        asm.jump_if_word(Jump.JEQ, _R.R0, HEAD_SIZE, FREE, free, by=_R.R2)
        if notes_deleted:
            other = asm.label()
            asm.jump_if(Jump.JNE, _R.R2, DELETED, other)
            asm.jump_if(Jump.JNE, _R.R1, 0, following)
            asm.mov(_R.R1, _R.R0)
            asm.place(other)
        asm.jump_if(Jump.JNE, _R.R2, _R.R3, following)
        self._compare(_R.R7, following, _R.R2, _R.R9)
        asm.jump(found)
        asm.place(following)
        self._go_on(again)

    def update(self) -> None:
        """
        Write the update: R3 is the address of the value, R4 are flags.

        R0 is 0, -EEXIST (the key exists, NO_OVERWRITE), -E2BIG (no room) or -EBUSY (timeout).
        """
        asm, shape = self._asm, self._shape
        free, found, chosen, no_room, insert = (asm.label() for _ in range(5))
        asm.mov(_R.R6, _R.R1)
        asm.mov(_R.R7, _R.R2)
        asm.mov(_R.R8, _R.R3)
        asm.store(_R.R10, _FLAGS, _R.R4)
        self._hash(_R.R7)
        asm.store(_R.R10, _HOME, _R.R4)
        self._lock()
        self._walk(free, found, notes_deleted=True)
        asm.jump_if(Jump.JNE, _R.R1, 0, chosen)
        asm.jump(no_room)
        asm.place(free)
        asm.jump_if(Jump.JNE, _R.R1, 0, chosen)
        asm.mov(_R.R1, _R.R0)
        asm.place(chosen)
        asm.mov(_R.R2, 1)
        asm.atomic(Atomic.ADD, _R.R6, _COUNT, _R.R2, fetch=True)
        asm.jump_if(Jump.JLT, _R.R2, shape.entries, insert)
        asm.mov(_R.R2, -1)
        asm.atomic(Atomic.ADD, _R.R6, _COUNT, _R.R2)
        asm.place(no_room)
        if shape.forgets:
            self._forget(insert)
        else:
            self._return(-errno.E2BIG)
        asm.place(insert)
        asm.store(_R.R1, HEAD_SIZE, _WRITING)
        for at, size in self._key:
            asm.copy_from(_R.R7, at, _R.R1, HEAD_SIZE + _STATE + at, by=_R.R2, size=size)
        self._copy_value(_R.R1)
        asm.atomic(Atomic.XCHG, _R.R1, HEAD_SIZE, _R.R3)
        self._return(0)
        asm.place(found)
        asm.load(_R.R2, _R.R10, _FLAGS)
        other = asm.label()
        asm.jump_if(Jump.JNE, _R.R2, NO_OVERWRITE, other)
        self._return(-errno.EEXIST)
        asm.place(other)
        self._copy_value(_R.R0)
        self._return(0)

    def _forget(self, insert: Label) -> None:
        """
        Write code that evicts a key, and sets R1 to a slot for the new one: R1, if it is not 0, or the evicted key's.

        The evicted key is the first one at or after the slot that the hash selects. If the block has none, the table
        gets one key more than ``entries``. Clobbers R0, R2, R4, R5 and R9.
        """
        asm, again, found, goes = self._asm, self._asm.label(), self._asm.label(), self._asm.label()
        asm.load(_R.R4, _R.R10, _HOME)
        asm.mov(_R.R5, self._shape.block)
        asm.place(again)
        self._slot(_R.R6)
        asm.jump_if_word(Jump.JGT, _R.R0, HEAD_SIZE, DELETED, found, by=_R.R2)
        self._go_on(again)
        asm.count(_R.R6, _COUNT)
        asm.jump(insert)
        asm.place(found)
        asm.jump_if(Jump.JNE, _R.R1, 0, goes)
        asm.mov(_R.R1, _R.R0)
        asm.jump(insert)
        asm.place(goes)
        asm.store(_R.R1, HEAD_SIZE, _WRITING)  # it is not free any more: slots before it must not become free
        self._vacate()
        asm.jump(insert)

    def _vacate(self) -> None:
        """
        Write code that removes the key from the slot at R0, whose number is R4. Clobbers R2, R4, R5 and R9.

        If the next slot is free, no key is beyond this slot. Then it becomes free, and so do the deleted ones before
        it.
        """
        asm, free, previous, done = self._asm, self._asm.label(), self._asm.label(), self._asm.label()
        asm.mov(_R.R2, _R.R0)
        self._next()
        self._slot(_R.R6)
        asm.jump_if_word(Jump.JEQ, _R.R0, HEAD_SIZE, FREE, free, by=_R.R9)
        asm.store(_R.R2, HEAD_SIZE, DELETED)
        asm.jump(done)
        asm.place(free)
        self._previous()
        asm.mov(_R.R5, self._shape.block)
        asm.place(previous)
        asm.store(_R.R2, HEAD_SIZE, FREE)
        self._previous()
        self._slot(_R.R6)
        asm.mov(_R.R2, _R.R0)
        asm.jump_if_word(Jump.JNE, _R.R2, HEAD_SIZE, DELETED, done, by=_R.R9)
        asm.alu(Alu.SUB, _R.R5, 1)
        asm.jump_if(Jump.JNE, _R.R5, 0, previous)
        asm.place(done)

    def _copy_value(self, slot: Register) -> None:
        for at, size in _pieces(self._shape.value_size):
            self._asm.copy_from(_R.R8, at, slot, HEAD_SIZE + self._shape.value_place + at, by=_R.R2, size=size)

    def delete(self) -> None:
        """Write the deletion: R0 is 0, -ENOENT if the key does not exist, or -EBUSY if the lock timed out."""
        asm, free, found = self._asm, self._asm.label(), self._asm.label()
        asm.mov(_R.R6, _R.R1)
        asm.mov(_R.R7, _R.R2)
        self._hash(_R.R7)
        self._lock()
        self._walk(free, found, notes_deleted=False)
        asm.place(free)
        self._return(-errno.ENOENT)
        asm.place(found)
        self._vacate()
        asm.mov(_R.R3, -1)
        asm.atomic(Atomic.ADD, _R.R6, _COUNT, _R.R3)
        self._return(0)
