"""
The memory that compiled handlers share with user space: maps, probe table, status page, ring entries.

The one place for these layouts: handlers are compiled against it, and the engine reads with it. All numbers are in the
machine's byte order. Maps are named by what they hold; the loader puts file descriptors in the place of the names.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

from dprobes.rpn.keyed_tables import TABLES_MAX

__all__ = [
    "ARRIVAL",
    "AWAITING",
    "CALL_KEY",
    "CALL_MULTIPLIER",
    "CALL_WINDOW",
    "CPU_LOAD_SIZE",
    "CROSSED_SIZE",
    "ENTRY_HEAD",
    "HEAD_CELLS",
    "KEY_POSITION",
    "KIND_SHIFT",
    "LOAD_LIMIT",
    "LOAD_WINDOW",
    "NAME_SIZE",
    "NOTE_HITS",
    "NOTE_SIZE",
    "PROBE_ENTRY_SIZE",
    "PROBE_LOAD_SIZE",
    "PROBE_MAX",
    "PROBE_SHIFT",
    "REGISTERS",
    "REMOVED_BY",
    "SAMPLE_SIZE",
    "SCOPE_VALUE",
    "SLOTS_SHIFT",
    "SNAPSHOT",
    "SNAPSHOT_REGISTERS",
    "SNAPSHOT_STACK_MAX",
    "STACK_COPY",
    "STACK_COPY_MAX",
    "STATUS_SIZE",
    "TALLY",
    "TICKETS_SHIFT",
    "TIME",
    "CallTable",
    "CpuLoad",
    "Entry",
    "MapName",
    "ProbeField",
    "ProbeLoad",
    "ScopeField",
    "Status",
    "SwitchOver",
    "awaiting_key",
    "call_key",
    "power_of_two",
    "table_map",
]

AWAITING = 1 << 30
"""Process ids are below PID_MAX_LIMIT (1 << 22), so this bit is free; it is one that an immediate can hold."""


def awaiting_key(pid: int) -> int:
    """Return what stands in SCOPE for a process that comes into scope when it executes its program."""
    return pid | AWAITING


def table_map(number: int) -> MapName:
    """Return the name of the map with the entries of a keyed table, by its number in the program."""
    return MapName(f"{_TABLE}{number}")


_TABLE = "table "


class MapName(Enum):
    """
    The maps that handlers use.

    Each is an array with one element, which is addressed directly, except SCRATCH (an array with an element for each
    running handler), RING (a ring buffer), SCOPE, THREAD_VARIABLES, ENTRIES and SPACES (hashes) and SUCCESSOR.

    The keyed tables of a program are ``table_map(0)`` and so on: hashes from keys to values (``table_layout``), or for
    one without keys an array with one element: for each CPU, or once, a word that is not 0 once there is a value, and
    the value's cells. They are members from their first use on: to make 64 takes as long as to make all else here.
    """

    TABLES_LOST = "tables_lost"
    """How many tallies of each keyed table found no room for their keys: a 64-bit word each."""
    SCRATCH = "scratch"
    """The state of running handlers; an element belongs to one hit at a time."""
    CLAIMS = "claims"
    """A 64-bit word for each element of SCRATCH: not 0 while that is in use."""
    PROBES = "probes"
    """The probe table: ``ProbeField`` entries."""
    STATUS = "status"
    """``Status`` words."""
    LOCALS = "locals"
    """Local variables, 8 bytes each."""
    GLOBALS = "globals"
    """Global variables, 8 bytes each."""
    CPU_VARIABLES = "cpu"
    """Per-CPU variables, 8 bytes each: those of CPU n from n * power_of_two(cvars) on."""
    THREAD_VARIABLES = "thread"
    """
    A hash of what each thread has: u64 thread to its variables, 8 bytes each. A thread is its id in the initial
    namespace; idle threads, whose ids are all 0, are their CPU's number plus 1 in the upper half.
    """
    ZEROS = "zeros"
    """As many zeros as a thread has variables."""
    ENTRIES = "entries"
    """
    The calls of functions whose returns want to know of their entry, of which the oldest are forgotten when it is full.

    Key::

         0 u64 space    that of the process in SPACES; 0 in the kernel
         8 u64 frame    the address of the return address; 0 for system calls
        16 u32 probe    the probepoint
        20 u32 task     the process, the thread for system calls; 0 in the kernel
        24 u64 level    0 for the innermost call with this frame, n for the nth one of those that have called it

    Value::

         0              the first 24 bytes of the key: an element may come to be that of another call while it is read
        24 u64 below    how many calls with the same frame go on besides
        32 u64 time     when the call began
        40 u64 ...      registers

    Where handlers run in the process, it is an array with one element instead (``bpf.map_layouts``).
    """
    SPACES = "spaces"
    """A number for each process that executes a program: u32 process id to u64. No other program has had it before."""
    RING = "ring"
    """Where records go."""
    NOTES = "notes"
    """
    What the last hit of each thread has taken from a limit, in case its instruction faults: u32 thread id (of the
    initial namespace) to ``NOTE_HITS`` pairs of u64 instruction pointer and u64 entry of the probe table. A hit may
    concern two probepoints, an instruction's and that of a return; a pair that says nothing has the pointer 0.
    """
    UNSEEN_RETURNS = "unseen_returns"
    """A 64-bit word for each entry of the probe table: how many calls' return the kernel had no room to await."""
    SCOPE = "scope"
    """A hash of the processes in scope: u32 process id (of the initial namespace) to ``ScopeField`` values."""
    ENDING = "ending"
    """
    A hash of the threads that have come to ``sched_process_exit``: those of THREAD_VARIABLES to the addresses of their
    ``task_struct``, until ``sched_process_free`` or until another thread has the number.
    """
    MAPPERS = "mappers"
    """A hash of the processes that map a watched module: u32 process id to u64 load bias."""
    BIASES = "biases"
    """A hash of the load biases for which that module's watchpoints are attached, or cannot be: u64 to u32."""
    SAMPLES = "samples"
    """What the last sample on each CPU interrupted: ``SAMPLE_SIZE`` bytes each, for the samplers of a run alone."""
    ARRIVALS = "arrivals"
    """A ring buffer of processes in which the module has just come to lie elsewhere: ``ARRIVAL``."""
    CROSSED = "crossed"
    """A bit for each thread id (of the initial namespace): set once it has hit a program that replaces another one."""
    SUCCESSOR = "successor"
    """An array of maps with one element: CROSSED of the program that replaces this one, as soon as there is one."""
    CPU_LOAD = "cpu_load"
    """What hits take of each CPU: ``CpuLoad`` entries, in programs with an overload guard alone."""
    PROBE_LOAD = "probe_load"
    """What hits of each probepoint take, and how many run no handler: ``ProbeLoad`` entries, by the probe table's."""
    STOPS = "stops"
    """The processes that are stopped for a core (``bpf.core_stop_layout``), in programs with ``exit 3`` alone."""

    def __reduce_ex__(self, _protocol: object) -> tuple[type[MapName], tuple[str]]:
        return MapName, (self.value,)

    @classmethod
    def _missing_(cls, value: object) -> MapName | None:
        number = value.removeprefix(_TABLE) if isinstance(value, str) else ""
        if not number.isdecimal() or int(number) >= TABLES_MAX or value != f"{_TABLE}{int(number)}":
            return None
        member = object.__new__(cls)
        member._name_, member._value_ = f"TABLE_{number}", value
        # Should two threads come here at once, both get the same one.
        return cls._value2member_map_.setdefault(value, member)  # type: ignore[return-value]


class ScopeField(IntEnum):
    """
    The offsets of the fields of a value in SCOPE.

    ::

         0 u64 identity    the address of the process's ``signal_struct``, once a thread has come to its end
         8 i32 ending      threads that have come to ``sched_process_exit``, but not to ``sched_process_free``
        12 u32 has_ended   not 0: no thread is left that has not come to its end, and ``Status.ALIVE`` counts without it
    """

    IDENTITY = 0
    ENDING = 8
    HAS_ENDED = 12


SCOPE_VALUE = struct.Struct("=QiI")


class ProbeField(IntEnum):
    """
    The offsets of the fields of a probe table entry.

    An attach cookie is the index of an entry, and in its upper 32 bits how far (signed) the breakpoint is from the
    written place.

    ::

         0 u64 hits        all hits, those skipped included; may exceed passcount + maxhits
         8 u64 records     records emitted, stack traces included
        16 u64 lost        records for which the ring had no room
        24 u64 missed      those of the hits that ran no handler because all of SCRATCH was in use
        32 u32 disabled    not 0: no handler runs any more; REMOVED_BY and a thread id if 'remove' of a hit said so
        40 u64 link        the link address of the written place
        48 u64 unhandled   the bits of the exceptions that ended handlers, and that nothing caught
        56 u64 offset      the file offset of the written place
    """

    HITS = 0
    RECORDS = 8
    LOST = 16
    MISSED = 24
    DISABLED = 32
    LINK = 40
    UNHANDLED = 48
    OFFSET = 56


PROBE_ENTRY_SIZE = 64


class CpuLoad(IntEnum):
    """
    The offsets of the fields of a CPU_LOAD entry (``bpf.lower.hits.hit_limits``); times are in nanoseconds.

    Others that run on the CPU meanwhile may undo what is added to a field: that is rare, and no count depends on it.

    ::

         0 u64 traps       what hits have taken so far besides their handlers
         8 u64 handlers    what handlers have taken: those that were measured, with their weight
        16 u64 runs        handlers that have run
        24 u64 since       when the present window began
        32 u64 mark        what ``handlers`` was then
        40 u64 braked      until when no handler runs; 0 if they do
    """

    TRAPS = 0
    HANDLERS = 8
    RUNS = 16
    SINCE = 24
    MARK = 32
    BRAKED = 40


CPU_LOAD_SIZE = 64

LOAD_WINDOW = 500_000_000
"""Nanoseconds of a window, in which handlers may take so much of a CPU before they are skipped."""

LOAD_LIMIT = 2 * LOAD_WINDOW
"""
The nanoseconds that handlers may take of a window for each CPU that hits should take.

So they are skipped at twice the budget, and without anybody's decision; never where the budget is half a CPU.
"""


class ProbeLoad(IntEnum):
    """
    The offsets of the fields of a PROBE_LOAD entry.

    ::

         0 u64 skipped     hits that ran no handler because of the overload guard
         8 u64 time        nanoseconds in handlers: the measured ones, with their weight
        16 u64 foreign     hits of threads that are not in scope, which cost their trap all the same
        24 u64 turn        hits that had to await their turn
        32 u32 thinning    one hit of so many runs the handler; 0 and 1: each of them
        36 u32 cost        nanoseconds of a hit besides the handler
    """

    SKIPPED = 0
    TIME = 8
    FOREIGN = 16
    TURN = 24
    THINNING = 32
    COST = 36


PROBE_LOAD_SIZE = 64

NOTE_HITS = 2
NOTE_SIZE = 16 * NOTE_HITS

REMOVED_BY = 1 << 31
"""What is in ``disabled`` besides the id of the thread whose hit may still turn out not to count."""

PROBE_MAX = 1 << 20
"""How many probepoints a table can hold."""


class Status(IntEnum):
    """
    The offsets of the words of STATUS.

    ::

         0 u64 waiting     the reader sleeps until it is woken; a handler that sees 1 here takes it back and wakes it
         8 u64 alive       how many processes in SCOPE have not ended
        16 u64 unfollowed  processes that should be in SCOPE, but for which it had no room
        24 u64 unseen      SIGNAL entries for which the ring had no room
        32 u64 late        processes that ran on before their watchpoints were attached
        40 u64 switch_over where this program stands in a switch-over (``SwitchOver``)
    """

    WAITING = 0
    ALIVE = 8
    UNFOLLOWED = 16
    UNSEEN = 24
    LATE = 32
    SWITCH_OVER = 40


STATUS_SIZE = 64


class SwitchOver(IntEnum):
    """
    Which hits are a program's while one replaces another (``bpf.lower.hits.hit_prologue``).

    Each program reads the word of its own STATUS.
    """

    OURS = 0
    """All hits: no other program is involved."""
    NOT_OURS = 1
    """None yet, or none any more."""
    CROSSING = 2
    """All from now on, and the program sets the bit of the hit thread in CROSSED."""
    REPLACED = 3
    """Only those of threads without a bit in the other program's CROSSED."""


CROSSED_SIZE = (1 << 22) // 8
"""Bytes of CROSSED: thread ids are below PID_MAX_LIMIT (include/linux/threads.h), whatever kernel.pid_max says."""


class Entry(IntEnum):
    """
    The kinds of ring entry.

    An entry is a head and a body::

        u32 probe (low 24 bits) and kind (high 8 bits) | u32 thread id, or 0 where nobody asks for it | body

    The thread id is of the initial namespace.
    """

    RECORD = 0
    """A record of ``record.log_record``; a process name takes ``NAME_SIZE`` bytes, zeros after its end."""
    TRACE = 1
    """The same for a stack trace."""
    ENDED = 2
    """The probepoint is to be removed: u32 exit code, or ``LIMIT`` or ``REMOVE``; u32 process id."""
    SIGNAL = 3
    """
    The thread got a signal for what its instruction did: u64 ip, u32 signal (low 8 bits) and the number of tickets
    that were given back (above), u32 code.

    The records of a probepoint that gives tickets back (NOTES) are concerned only if there were any.
    """
    PROCESS = 4
    """A process left the scope: u32 process id."""
    SNAPSHOT = 5
    """
    What a call stack is found by: ``SNAPSHOT``, ``SNAPSHOT_REGISTERS`` words of ``struct pt_regs``, and memory from the
    stack pointer on, up to SNAPSHOT_STACK_MAX bytes. It comes before the record that it belongs to.
    """
    TALLY = 6
    """
    What a table with call stacks takes in: ``TALLY``, the key without the stacks, and what is kept if that is no number
    (``keyed.table_layout``). The SNAPSHOT before it has the stack, unless there is a ``StackEnd`` as its first address.
    """
    UNTALLY = 7
    """What is taken out of such a table: ``TALLY`` and the key, as above."""
    STACKED = 8
    """A record, and after it what its call stacks are found by, as ``STACK_COPY`` says."""


ENTRY_HEAD = struct.Struct("=II")
KIND_SHIFT = 24
"""Where the kind is in the first word of an entry."""
TICKETS_SHIFT = 8
"""Where the number of tickets is in a SIGNAL entry's word for the signal."""

NAME_SIZE = 16

SAMPLE_SIZE = 64

ARRIVAL = struct.Struct("=IxxxxQ")
"""An entry of ARRIVALS: process id and load bias."""

SNAPSHOT = struct.Struct("=IIII")
"""
The head of a SNAPSHOT entry: process id, the number of the handler's state plus one, where in the log the stack is to
stand, and the bytes of a word.

In the log, the first word of that item is the number of the state plus one, and the others are 0.
"""

TALLY = struct.Struct("=IIq")
"""The head of a TALLY entry: the number of the table, that of the handler's state plus one, and the number to take."""

STACK_COPY = struct.Struct("=IIII")
"""
The end of a STACKED entry, and of a TALLY entry that has no SNAPSHOT (``Abilities.copies_stacks``): process id, where
in the log the last call stack stands plus one, how many bytes there are before the copy, and how many of the stack.

::

    bytes before the copy, filled up to 8 | SNAPSHOT_REGISTERS words | the stack, filled up to 8 | STACK_COPY

In the log, the first word of each call stack says where the one before it stands plus one, and the others are 0.
"""

STACK_COPY_MAX = 120 << 10
"""Bytes of a stack that such a copy has at most: a handler in the process makes it, for which there are no limits."""

HEAD_CELLS = 1
"""The cells before a value in a table without keys."""

KEY_POSITION = 0xFFFF_FFFF
"""What a SNAPSHOT has in the place of a position in the log if its stack is a key."""

SNAPSHOT_REGISTERS = 21
"""Words of ``struct pt_regs`` (arch/x86/include/asm/ptrace.h)."""

SNAPSHOT_STACK_MAX = 12 << 10

INLINE_ENDING, SKIPPED = 120, 0x100
"""
Where the context of a handler in a process says how that has ended: as ``struct pt_regs`` has ``orig_ax``, which is no
register. It is a code of ``exit``, or this one for a function that is skipped.
"""

LIMIT, REMOVE = 0x100, 0x101
"""Reasons in an ENDED entry: ``maxhits`` was reached, the instruction ``remove`` was executed."""


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least ``count``, and at least 1."""
    return 1 << max(0, count - 1).bit_length()


# The calls of one process that have not returned, where handlers run in the process: layout and places.
#
# The table is memory of that process alone, which its children do not inherit; ``MapName.ENTRIES`` names it. It
# consists of slots of one size, a power of two, and is addressed by hashing::
#
#      0 u64 key         the address of the return address, and from bit 48 on the probepoint; 0: the slot is free
#      8 u64 time        when the call began; 0 while the slot is free, or being filled
#     16 u64 ...         registers
#
# A call is in one of the WINDOW slots from its place on. No two calls of a function that go on have the same key, so
# none but their own threads write to their slots; a free slot is taken by an atomic exchange. A call that is left
# without a return leaves its slot there, until the same key is entered again, or a call that finds no other room takes
# the one whose time is the oldest.


CALL_KEY, TIME, REGISTERS = 0, 8, 16
PROBE_SHIFT = 48
"""Addresses of programs have less than 48 bits (Documentation/arch/x86/x86_64/mm.rst in the kernel)."""
SLOTS_SHIFT = 15
CALL_WINDOW = 16
CALL_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio: what lies close together is far apart afterwards (Knuth, volume 3, 6.4)."""
_WORD, _MASK, _LINE = 8, (1 << 64) - 1, 64


def call_key(probe: int, frame: int) -> int:
    """Return the key of a call."""
    return (frame | probe << PROBE_SHIFT) & _MASK


@dataclass(frozen=True, slots=True)
class CallTable:
    """How many bytes each slot has, of ``1 << SLOTS_SHIFT`` and what the last window needs."""

    slot: int

    @classmethod
    def of(cls, registers: int) -> CallTable:
        """Return a table for so many registers."""
        return cls(max(_LINE, power_of_two(REGISTERS + _WORD * registers)))

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return ((1 << SLOTS_SHIFT) + CALL_WINDOW) * self.slot

    def window(self, key: int) -> range:
        """Return where the slots begin in which a call may be."""
        first = (key * CALL_MULTIPLIER & _MASK) >> 64 - SLOTS_SHIFT
        return range(first * self.slot, (first + CALL_WINDOW) * self.slot, self.slot)
