"""
Routines of the reader of rings: they find the end of complete entries, and make an index of a copy of a ring.

A walk over the copy writes one line of the index for each entry. To sort the entries, only the lines are moved::

    line     0 u64 time     time of the record; an entry without time has that of the entry before it
             8 u32 place    offset of the entry in the copies of all rings
            12 u32 group    number of its group; a group has the entries of one kind and length

    group    0 u64 key      length in the lower half, kind in the upper half
             8 u64 count    the number of its entries

Probed processes can write anything into rings. The walk skips and counts entries that no handler of the probe program
can have written: of unknown kinds, for probepoints that do not exist, or too short. It also skips records with other
header items, or with a time in the future.

A record has ids in place of the thread's name and user id (``Abilities.named_later``). The walk replaces them by the
data of that thread from a table of threads; the thread id is in the entry's head. If a handler did not know the id of
its thread, the record gets the data of the first thread of its process. The walk stops at a thread that is not in the
table, and can be continued there. If the table marks a thread as unknown, the walk leaves the record unchanged.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register, Size
from dprobes.bpf.map_layouts import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, Entry
from dprobes.native.routines.handler_ring import BUSY, DISCARDED, ENTRY_HEADER
from dprobes.native.routines.shared_hash_table import TableShape
from dprobes.record.log_record import Item

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembled, Label

__all__ = [
    "GROUPS_MAX",
    "GROUP_SIZE",
    "LINE_SIZE",
    "NAMES",
    "NOBODY_KNOWS",
    "RECORD_PLACE",
    "WALK_SIZE",
    "RecordPlaces",
    "Walk",
    "WalkResult",
    "complete_routine",
    "insertion_routine",
    "merge_routine",
    "walk_routine",
]

_R = Register
_NOT_CUT = ~int(Item.CUT)

LINE_SIZE = 16
GROUP_SIZE = 16
GROUPS_MAX = 256
RECORD_PLACE = ENTRY_HEADER + ENTRY_HEAD.size
"""Offset in bytes of the record in its entry."""

NAMES = TableShape(8, 24, 4096, forgets=True)
"""
The table of threads: for a thread, its name, u32 user id, and u32 number of the reading with its last record.

The key is a u64 with the process id in the upper half, and the thread id in the lower one.
"""
THREAD_NAME, THREAD_UID, THREAD_READING = 0, NAME_SIZE, NAME_SIZE + 4
NOBODY_KNOWS = (1 << 32) - 1
"""Number of the reading that marks a thread as unknown."""

_HEAD, _TID, _KIND_BYTE = ENTRY_HEADER, ENTRY_HEADER + 4, ENTRY_HEADER + KIND_SHIFT // 8
_PROBE_MASK = (1 << KIND_SHIFT) - 1
_ENDED_SIZE = 8


class RecordPlaces(NamedTuple):
    """
    Offsets in bytes of header items in the records of a probe program; None for items that the records lack.

    All records have at least ``size`` bytes, and the item flags ``flags``; None: the flags are not checked.
    """

    time: int | None
    uid: int | None
    name: int | None
    flags: int | None = None
    size: int = 0

    @property
    def process(self) -> int | None:
        """Offset in bytes of the process id in a record before the walk; None if the walk adds nothing to records."""
        return self.uid if self.name is None else self.name


class Walk(enum.IntEnum):
    """
    The offsets of the u64 words in the block with the parameters and the progress of a walk.

    AT to END are the entries that remain; END is exclusive. GROUPS to GROUPS_END is the table of groups, and READING
    the number of this reading.
    """

    AT = 0
    END = 8
    BASE = 16
    """The address that is subtracted from an entry's address to get its place."""
    LINE = 24
    """The address of the next line."""
    TIME = 32
    """The time of the last record, for entries without time."""
    GROUPS = 40
    GROUPS_END = 48
    GROUP = 56
    """The address of the group of the last entry; 0 before the first entry."""
    COUNTS = 64
    """The address of an array with the number of records, a u64, of each probepoint."""
    PROBES = 72
    """The number of probepoints."""
    THREADS = 80
    """The address of the table of threads (``NAMES``)."""
    THREAD = 88
    """The key of the last thread that was looked up: after ``WalkResult.THREAD``, the missing one."""
    FOUND = 96
    """The address of this thread's data in the table; 0: unknown."""
    READING = 104
    SEEN = 112
    """The address for the key of the next thread with a first record in this reading; up to SEEN_END, exclusive."""
    SEEN_END = 120
    NAMELESS = 128
    """The number of records left unchanged because their thread is marked as unknown."""
    LATEST = 136
    """The latest possible time of a record, in nanoseconds of CLOCK_MONOTONIC."""
    REFUSED = 144
    """The number of skipped entries that no handler can have written."""


WALK_SIZE = 152


class WalkResult(enum.IntEnum):
    """Reason for which a walk over the entries of a ring has ended."""

    DONE = 0
    THREAD = 1
    """The thread of the entry at AT is not in the table."""
    GROUPS = 2
    """The table of groups has no room for the group of the entry at AT."""
    NONSENSE = 3
    """The entry at AT would reach beyond END."""


def complete_routine() -> Assembled:
    """
    Return the routine that returns the end address of the complete entries between the addresses R1 and R2.

    An entry that would reach beyond R2 is not complete. If an entry has the length of the previous one, the address of
    the next one does not depend on loaded data. So the processor can load several entries, which are not in its cache,
    at the same time.
    """
    asm = Assembler()
    again, alike, done = asm.label(), asm.label(), asm.label()
    asm.mov(_R.R0, _R.R1)
    asm.mov(_R.R4, -1)
    asm.mov(_R.R5, 0)
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R0, _R.R2, done)
    asm.jump_if_word(Jump.JEQ, _R.R0, 0, _R.R4, alike, by=_R.R3, size=Size.W)
    asm.jump_if(Jump.JEQ, _R.R3, 0, done)
    asm.mov(_R.R4, BUSY)
    asm.jump_if(Jump.JGE, _R.R3, _R.R4, done)
    asm.mov(_R.R4, _R.R3)
    asm.derive(Alu.AND, _R.R5, _R.R3, DISCARDED - 1)
    asm.alu(Alu.ADD, _R.R5, ENTRY_HEADER + 7)
    asm.alu(Alu.AND, _R.R5, ~7)
    asm.place(alike)
    asm.add(_R.R3, _R.R0, _R.R5)
    asm.jump_if(Jump.JGT, _R.R3, _R.R2, done)
    asm.mov(_R.R0, _R.R3)
    asm.jump(again)
    asm.place(done)
    asm.exit()
    return asm.assemble()


def walk_routine(places: RecordPlaces, *, again: bool = False) -> Assembled:
    """
    Return the routine that walks over ring entries, from AT to END of the ``Walk`` block at R1; R0 is a ``WalkResult``.

    ``places`` has the offsets of items in records. With ``again``, the entries have been walked over before: the
    routine neither checks nor counts them.
    """
    return _Writer(places, again=again).write()


class _Writer:
    """Writer of the routine: R6 and R7 are the addresses of walk and entry, R8 is its length, R9 its aligned size."""

    def __init__(self, places: RecordPlaces, *, again: bool) -> None:
        self._asm = Assembler()
        self._places = places
        self._again = again

    def write(self) -> Assembled:
        asm = self._asm
        again, skip, done, nonsense, refused = (asm.label() for _ in range(5))
        asm.mov(_R.R6, _R.R1)
        asm.load(_R.R7, _R.R6, Walk.AT)
        asm.place(again)
        asm.load(_R.R0, _R.R6, Walk.END)
        asm.jump_if(Jump.JGE, _R.R7, _R.R0, done)
        asm.load(_R.R8, _R.R7, 0, Size.W)
        asm.derive(Alu.AND, _R.R9, _R.R8, DISCARDED - 1)
        asm.alu(Alu.ADD, _R.R9, ENTRY_HEADER + 7)
        asm.alu(Alu.AND, _R.R9, ~7)
        asm.add(_R.R1, _R.R7, _R.R9)
        asm.jump_if(Jump.JGT, _R.R1, _R.R0, nonsense)
        asm.jump_if(Jump.JGE, _R.R8, DISCARDED, skip)
        if not self._again:
            self._check(refused)
        self._entry()
        asm.jump(skip)
        asm.place(refused)
        asm.increase(_R.R6, Walk.REFUSED, 1, by=_R.R0)
        asm.place(skip)
        asm.alu(Alu.ADD, _R.R7, _R.R9)
        asm.jump(again)
        asm.place(nonsense)
        self._stop(WalkResult.NONSENSE)
        asm.place(done)
        self._stop(WalkResult.DONE)
        return asm.assemble()

    def _check(self, refused: Label) -> None:
        """Write a jump to ``refused`` for an entry that no handler can have written. Clobbers R0 and R1."""
        asm, places, checked = self._asm, self._places, self._asm.label()
        asm.jump_if(Jump.JLT, _R.R8, ENTRY_HEAD.size, refused)
        asm.load(_R.R0, _R.R7, _HEAD, Size.W)
        asm.alu(Alu.AND, _R.R0, _PROBE_MASK)
        asm.load(_R.R1, _R.R6, Walk.PROBES)
        asm.jump_if(Jump.JGE, _R.R0, _R.R1, refused)
        asm.load(_R.R0, _R.R7, _KIND_BYTE, Size.B)
        is_record, has_flags = asm.label(), asm.label()
        asm.jump_if(Jump.JLE, _R.R0, Entry.TRACE, is_record)
        asm.jump_if(Jump.JEQ, _R.R0, Entry.STACKED, is_record)
        asm.jump_if(Jump.JEQ, _R.R0, Entry.TALLY, checked)
        asm.jump_if(Jump.JNE, _R.R0, Entry.ENDED, refused)
        asm.jump_if(Jump.JLT, _R.R8, ENTRY_HEAD.size + _ENDED_SIZE, refused)
        asm.jump(checked)
        asm.place(is_record)
        asm.jump_if(Jump.JLT, _R.R8, ENTRY_HEAD.size + places.size, refused)
        if places.flags is not None:
            asm.load(_R.R1, _R.R7, RECORD_PLACE, Size.W)
            asm.jump_if(Jump.JNE, _R.R0, Entry.TRACE, has_flags)
            asm.alu(Alu.XOR, _R.R1, int(Item.STACK_TRACE))
            asm.place(has_flags)
            asm.alu(Alu.AND, _R.R1, _NOT_CUT)
            asm.jump_if(Jump.JNE, _R.R1, places.flags, refused)
        if places.time is not None:
            asm.load(_R.R0, _R.R7, RECORD_PLACE + places.time)
            asm.load(_R.R1, _R.R6, Walk.LATEST)
            asm.jump_if(Jump.JGT, _R.R0, _R.R1, refused)
        asm.place(checked)

    def _entry(self) -> None:
        """
        Write code that processes one ring entry: check, count and name its record, and add a line to the index.

        Clobbers R0 to R5.
        """
        asm, places = self._asm, self._places
        plain, grouped, is_record = asm.label(), asm.label(), asm.label()
        asm.load(_R.R0, _R.R7, _KIND_BYTE, Size.B)
        asm.alu(Alu.LSH, _R.R0, 32)
        asm.alu(Alu.OR, _R.R8, _R.R0)  # the key of the group
        self._group(grouped)
        asm.place(grouped)
        asm.jump_if_word(Jump.JLE, _R.R7, _KIND_BYTE, Entry.TRACE, is_record, by=_R.R0, size=Size.B)
        asm.jump_if(Jump.JNE, _R.R0, Entry.STACKED, plain)
        asm.place(is_record)
        if places.process is not None:
            self._name(places.process)
        if places.time is not None:
            asm.copy_from(_R.R7, RECORD_PLACE + places.time, _R.R6, Walk.TIME, by=_R.R0)
        if not self._again:
            self._count()
        asm.place(plain)
        asm.load(_R.R0, _R.R6, Walk.LINE)
        asm.copy_from(_R.R6, Walk.TIME, _R.R0, 0)
        asm.load(_R.R1, _R.R6, Walk.BASE)
        asm.derive(Alu.SUB, _R.R2, _R.R7, _R.R1)
        asm.store(_R.R0, 8, _R.R2, Size.W)
        asm.load(_R.R3, _R.R6, Walk.GROUP)
        asm.increase(_R.R3, 8, 1, by=_R.R4)
        asm.load(_R.R4, _R.R6, Walk.GROUPS)
        asm.alu(Alu.SUB, _R.R3, _R.R4)
        asm.alu(Alu.RSH, _R.R3, GROUP_SIZE.bit_length() - 1)
        asm.store(_R.R0, 12, _R.R3, Size.W)
        asm.alu(Alu.ADD, _R.R0, LINE_SIZE)
        asm.store(_R.R6, Walk.LINE, _R.R0)

    def _group(self, known: Label) -> None:
        """
        Write code that sets GROUP to the group with the key R8, which it adds if it is new.

        Jump to ``known`` if GROUP is that group already. End the walk if there is no room. Clobbers R0 to R2.
        """
        asm, again, new, found, none = self._asm, *(self._asm.label() for _ in range(4))
        asm.jump_if_word(Jump.JEQ, _R.R6, Walk.GROUP, 0, none, by=_R.R0)
        asm.jump_if_word(Jump.JEQ, _R.R0, 0, _R.R8, known)
        asm.place(none)
        asm.load(_R.R0, _R.R6, Walk.GROUPS)
        asm.load(_R.R2, _R.R6, Walk.GROUPS_END)
        asm.place(again)
        asm.jump_if(Jump.JGE, _R.R0, _R.R2, new)
        asm.jump_if_word(Jump.JEQ, _R.R0, 0, _R.R8, found)
        asm.alu(Alu.ADD, _R.R0, GROUP_SIZE)
        asm.jump(again)
        asm.place(new)
        asm.load(_R.R1, _R.R6, Walk.GROUPS)
        asm.alu(Alu.SUB, _R.R2, _R.R1)
        room = asm.label()
        asm.jump_if(Jump.JLT, _R.R2, GROUPS_MAX * GROUP_SIZE, room)
        self._stop(WalkResult.GROUPS)
        asm.place(room)
        asm.store(_R.R0, 0, _R.R8)
        asm.store(_R.R0, 8, 0)
        asm.add(_R.R1, _R.R0, GROUP_SIZE)
        asm.store(_R.R6, Walk.GROUPS_END, _R.R1)
        asm.place(found)
        asm.store(_R.R6, Walk.GROUP, _R.R0)

    def _stop(self, why: WalkResult) -> None:
        self._asm.store(_R.R6, Walk.AT, _R.R7)
        self._asm.exit(why)

    def _name(self, process: int) -> None:
        """
        Write code that copies the thread's name and user id into the record, whose process id is at ``process``.

        The code ends the walk if the thread is not in the table. Clobbers R0 to R5.
        """
        asm, places = self._asm, self._places
        same, seen, known, different, named, nameless, has_id = (asm.label() for _ in range(7))
        asm.load(_R.R3, _R.R7, _TID, Size.W)
        asm.load(_R.R2, _R.R7, RECORD_PLACE + process, Size.W)
        asm.jump_if(Jump.JNE, _R.R3, 0, has_id)
        if self._again:
            asm.jump(named)
        else:  # the handler did not know its thread: use the first one of its process
            asm.mov(_R.R3, _R.R2)
            asm.jump_if(Jump.JEQ, _R.R3, 0, named)
            asm.store(_R.R7, _TID, _R.R3, Size.W)
        asm.place(has_id)
        asm.alu(Alu.LSH, _R.R2, 32)
        asm.alu(Alu.OR, _R.R2, _R.R3)
        asm.load(_R.R0, _R.R6, Walk.FOUND)
        asm.load(_R.R3, _R.R6, Walk.THREAD)
        asm.store(_R.R6, Walk.THREAD, _R.R2)
        asm.jump_if(Jump.JNE, _R.R2, _R.R3, different)
        asm.jump_if(Jump.JNE, _R.R0, 0, same)
        asm.place(different)
        asm.load(_R.R1, _R.R6, Walk.THREADS)
        asm.add(_R.R2, _R.R6, Walk.THREAD)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.store(_R.R6, Walk.FOUND, _R.R0)
        asm.jump_if(Jump.JNE, _R.R0, 0, known)
        self._stop(WalkResult.THREAD)
        asm.place(known)
        asm.load(_R.R1, _R.R0, THREAD_READING, Size.W)
        asm.load(_R.R2, _R.R6, Walk.READING)
        asm.jump_if(Jump.JEQ, _R.R1, _R.R2, seen)
        asm.mov(_R.R3, NOBODY_KNOWS)
        asm.jump_if(Jump.JEQ, _R.R1, _R.R3, nameless)
        asm.store(_R.R0, THREAD_READING, _R.R2, Size.W)
        asm.load(_R.R1, _R.R6, Walk.SEEN)
        asm.load(_R.R2, _R.R6, Walk.SEEN_END)
        asm.jump_if(Jump.JGE, _R.R1, _R.R2, seen)
        asm.copy_from(_R.R6, Walk.THREAD, _R.R1, 0, by=_R.R2)
        asm.alu(Alu.ADD, _R.R1, 8)
        asm.store(_R.R6, Walk.SEEN, _R.R1)
        asm.jump(seen)
        asm.place(nameless)
        asm.store(_R.R6, Walk.FOUND, 0)  # so that the thread is looked up the next time
        asm.increase(_R.R6, Walk.NAMELESS, 1)
        asm.jump(named)
        asm.place(seen)
        asm.place(same)
        asm.store(_R.R7, _TID, 0, Size.W)
        if places.name is not None:
            for at in range(0, NAME_SIZE, 8):
                asm.copy_from(_R.R0, THREAD_NAME + at, _R.R7, RECORD_PLACE + places.name + at)
        if places.uid is not None:
            asm.copy_from(_R.R0, THREAD_UID, _R.R7, RECORD_PLACE + places.uid, size=Size.W)
        asm.place(named)

    def _count(self) -> None:
        """Write code that counts the record for its probepoint. Clobbers R0 to R2."""
        asm = self._asm
        asm.load(_R.R0, _R.R7, _HEAD, Size.W)
        asm.alu(Alu.AND, _R.R0, _PROBE_MASK)
        asm.alu(Alu.LSH, _R.R0, 3)
        asm.load(_R.R1, _R.R6, Walk.COUNTS)
        asm.alu(Alu.ADD, _R.R0, _R.R1)
        asm.increase(_R.R0, 0, 1, by=_R.R2)


# Routines that sort the lines of an index (``entry_walk``) by time.
#
# The lines of one ring are nearly sorted: a thread may have been interrupted, or have changed its CPU, between reading
# the time and taking its place. So each line is moved back over few others; then sorted runs are merged. The sort is
# stable.


def insertion_routine() -> Assembled:
    """Return the routine that sorts the lines between the addresses R1 and R2 by time, by insertion."""
    asm = Assembler()
    again, following, shift, found, done = (asm.label() for _ in range(5))
    asm.add(_R.R3, _R.R1, LINE_SIZE)
    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R3, _R.R2, done)
    asm.load(_R.R4, _R.R3, 0)
    asm.load(_R.R5, _R.R3, -LINE_SIZE)
    asm.jump_if(Jump.JGE, _R.R4, _R.R5, following)
    asm.load(_R.R6, _R.R3, 8)
    asm.mov(_R.R7, _R.R3)
    asm.place(shift)
    asm.jump_if(Jump.JLE, _R.R7, _R.R1, found)
    asm.jump_if_word(Jump.JLE, _R.R7, -LINE_SIZE, _R.R4, found, by=_R.R5)
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
    asm.exit(0)
    return asm.assemble()


def merge_routine() -> Assembled:
    """Return the routine that merges two sorted runs of lines, from R1 to R2 and R3 to R4, into memory at R5."""
    asm = Assembler()
    again, second, rest, others, done = (asm.label() for _ in range(5))

    def take(line: Register, time: Register) -> None:
        """Write code that copies a line to R5 and advances both; the register ``time`` has its first word."""
        asm.load(_R.R7, line, 8)
        asm.store(_R.R5, 0, time)
        asm.store(_R.R5, 8, _R.R7)
        asm.alu(Alu.ADD, line, LINE_SIZE)
        asm.alu(Alu.ADD, _R.R5, LINE_SIZE)

    asm.place(again)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, others)
    asm.jump_if(Jump.JGE, _R.R3, _R.R4, rest)
    asm.load(_R.R0, _R.R1, 0)
    asm.load(_R.R6, _R.R3, 0)
    asm.jump_if(Jump.JGT, _R.R0, _R.R6, second)
    take(_R.R1, _R.R0)
    asm.jump(again)
    asm.place(second)
    take(_R.R3, _R.R6)
    asm.jump(again)
    asm.place(others)  # the first run is empty: the rest of the second takes its place
    asm.mov(_R.R1, _R.R3)
    asm.mov(_R.R2, _R.R4)
    asm.place(rest)
    asm.jump_if(Jump.JGE, _R.R1, _R.R2, done)
    asm.load(_R.R0, _R.R1, 0)
    take(_R.R1, _R.R0)
    asm.jump(rest)
    asm.place(done)
    asm.exit(0)
    return asm.assemble()
