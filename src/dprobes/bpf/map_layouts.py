"""
Layout of the memory that compiled handlers share with user space: maps, probe table, status page, ring entries.

This is the only place for these layouts: handlers are compiled with it, and the engine reads with it. All numbers are
in the machine's byte order. Maps are named by their contents; the loader replaces the names by file descriptors.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import NamedTuple

from dprobes.rpn.keyed_tables import TABLES_MAX

__all__ = [
    "ARRIVAL",
    "AWAITING",
    "CALL_KEY",
    "CALL_MULTIPLIER",
    "CALL_WINDOW",
    "COUNTER_CELL_SIZE",
    "COUNTER_READING_SIZE",
    "COUNTER_SHIFT",
    "COUNTER_UNREAD",
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
    "CounterCell",
    "CounterReading",
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
"""
Flag in a key of SCOPE for a process that comes into scope at its execve.

Process ids are below PID_MAX_LIMIT (1 << 22), so this bit is free. With it, the key still fits an immediate.
"""


def awaiting_key(pid: int) -> int:
    """Return the key in SCOPE of a process that comes into scope at its next execve."""
    return pid | AWAITING


def table_map(number: int) -> MapName:
    """Return the name of the map with the entries of a keyed table, by its number in the program."""
    return MapName(f"{_TABLE}{number}")


_TABLE = "table "


class MapName(Enum):
    """
    Maps that handlers use.

    Each map is an array with one element, which is addressed directly. The exceptions are SCRATCH (an array with an
    element for each running handler), RING (a ring buffer), SCOPE, THREAD_VARIABLES, ENTRIES and SPACES (hashes) and
    SUCCESSOR.

    The keyed tables of a program are ``table_map(0)`` and so on: hashes from keys to values (``table_layout``). A table
    without keys is an array with one element, for each CPU or once: a word that is not 0 if there is a value, and the
    value's cells. Tables become members of the enumeration when they are first used, because creating 64 would take as
    long as creating all else here.
    """

    TABLES_LOST = "tables_lost"
    """Number of tallies of each keyed table that found no room for their keys: a 64-bit word each."""
    SCRATCH = "scratch"
    """State of running handlers. One hit at a time uses an element."""
    CLAIMS = "claims"
    """A 64-bit word for each element of SCRATCH: not 0 while the element is in use."""
    PROBES = "probes"
    """The probe table: ``ProbeField`` entries."""
    STATUS = "status"
    """``Status`` words."""
    LOCALS = "locals"
    """Local variables, 8 bytes each."""
    GLOBALS = "globals"
    """Global variables, 8 bytes each."""
    CPU_VARIABLES = "cpu"
    """Per-CPU variables, 8 bytes each. Those of CPU n begin at n * power_of_two(cvars)."""
    THREAD_VARIABLES = "thread"
    """
    Variables of each thread: a hash from u64 thread to its variables, 8 bytes each.

    The key of a thread is its id in the initial namespace. Idle threads all have the id 0, so the key of an idle thread
    also has its CPU's number plus 1 in the upper half.
    """
    COUNTERS = "counters"
    """
    A hash with a cell (``CounterCell``) for each thread and each counter of CPUs that it has read.

    The key is the thread's id, with the number of the counter in the upper half.
    """
    COUNTER_EVENTS = "counter_events"
    """Perf events. Counter n on CPU c has the element ``n << COUNTER_SHIFT | c``."""
    ZEROS = "zeros"
    """Zeros, in the size of a thread's variables or of the largest value of a keyed table."""
    ENTRIES = "entries"
    """
    Pending calls of functions whose return handlers use data of the entry. When it is full, the oldest are evicted.

    Key::

         0 u64 space    the process's number in SPACES; 0 in the kernel
         8 u64 frame    the address of the return address; 0 for system calls
        16 u32 probe    the probepoint
        20 u32 task     the process, the thread for system calls; 0 in the kernel
        24 u64 level    0 for the innermost call with this frame, n for its nth caller with the same frame

    Value::

         0              the first 24 bytes of the key: the kernel may give an element to another call while it is read
        24 u64 below    the number of outer pending calls with the same frame
        32 u64 time     when the call began
        40 u64 ...      registers

    Where handlers run in the process, it is an array with one element instead (``CallTable``).
    """
    SPACES = "spaces"
    """Number of each process that executes a program: u32 process id to u64. No two programs get the same number."""
    RING = "ring"
    """The ring buffer for records."""
    NOTES = "notes"
    """
    Tickets for passcount and maxhits that the last hit of each thread drew, in case its instruction faults.

    It is a hash from u32 thread id (of the initial namespace) to ``NOTE_HITS`` pairs of u64 instruction pointer and u64
    entry of the probe table. A hit may count for two probepoints, one at the instruction and one at a return. The
    pointer of an empty pair is 0.
    """
    UNSEEN_RETURNS = "unseen_returns"
    """Number of calls whose return the kernel had no room to track: a 64-bit word for each entry of the probe table."""
    SCOPE = "scope"
    """A hash of the processes in scope: u32 process id (of the initial namespace) to ``ScopeField`` values."""
    ENDING = "ending"
    """
    A hash of the threads that have reached ``sched_process_exit``: keys as in THREAD_VARIABLES to u64 ``task_struct``.

    An element stays until ``sched_process_free``, or until another thread has the number.
    """
    MAPPERS = "mappers"
    """A hash of the processes that map a watched module: u32 process id to u64 load bias."""
    BIASES = "biases"
    """A hash of the load biases for which that module's watchpoints are attached, or cannot be attached: u64 to u32."""
    SAMPLES = "samples"
    """Code that the last sample on each CPU interrupted: ``SAMPLE_SIZE`` bytes each. Only samplers of a run use it."""
    ARRIVALS = "arrivals"
    """Ring buffer of processes that have just mapped the module at another address: ``ARRIVAL``."""
    CROSSED = "crossed"
    """A bit for each thread id (of the initial namespace): set once it has hit a program that replaces another one."""
    SUCCESSOR = "successor"
    """Array of maps with one element: CROSSED of the program that replaces this one, once there is one."""
    CPU_LOAD = "cpu_load"
    """Time that hits take on each CPU: ``CpuLoad`` entries. Only programs with an overload guard have it."""
    PROBE_LOAD = "probe_load"
    """
    The time that hits of each probepoint take, and the number that run no handler.

    ``ProbeLoad`` entries, one for each entry of the probe table.
    """
    STOPS = "stops"
    """Processes that are stopped for a core dump (``bpf.core_stop_layout``). Only programs with ``exit 3`` have it."""

    def __reduce_ex__(self, _protocol: object) -> tuple[type[MapName], tuple[str]]:
        return MapName, (self.value,)

    @classmethod
    def _missing_(cls, value: object) -> MapName | None:
        number = value.removeprefix(_TABLE) if isinstance(value, str) else ""
        if not number.isdecimal() or int(number) >= TABLES_MAX or value != f"{_TABLE}{int(number)}":
            return None
        member = object.__new__(cls)
        member._name_, member._value_ = f"TABLE_{number}", value
        # If two threads create a member at once, ``setdefault`` returns the same member to both.
        return cls._value2member_map_.setdefault(value, member)  # type: ignore[return-value]


class ScopeField(IntEnum):
    """
    Offsets of the fields of a value in SCOPE.

    ::

         0 u64 identity    the address of the process's ``signal_struct``, once a thread has ended
         8 i32 ending      threads that have reached ``sched_process_exit``, but not ``sched_process_free``
        12 u32 has_ended   not 0: all threads have ended, and ``Status.ALIVE`` no longer counts the process
    """

    IDENTITY = 0
    ENDING = 8
    HAS_ENDED = 12


SCOPE_VALUE = struct.Struct("=QiI")


class ProbeField(IntEnum):
    """
    The offsets of the fields of a probe table entry.

    The low 32 bits of an attach cookie are the index of an entry. The upper 32 bits are the signed distance of the
    breakpoint from the specified place.

    ::

         0 u64 hits        all hits, those skipped included; may exceed passcount + maxhits
         8 u64 records     records emitted, stack traces included
        16 u64 lost        records for which the ring had no room
        24 u64 missed      hits that ran no handler because all of SCRATCH was in use
        32 u32 disabled    not 0: no handler runs any more; REMOVED_BY and a thread id if 'remove' of a hit set it
        40 u64 link        the link address of the specified place
        48 u64 unhandled   the bits of the uncaught exceptions that ended handlers
        56 u64 offset      the file offset of the specified place
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


class CounterCell(IntEnum):
    """
    Offsets of the words of a cell: a counter of a thread that the CPUs count (``bpf.lower.hosts.thread_counters``).

    ``SINCE`` is the count of the CPU when the thread began to run there, and ``TOTAL`` the count before that.
    ``IS_BROKEN`` is not 0 once the CPU's counter could not be read.
    """

    SINCE = 0
    TOTAL = 8
    IS_BROKEN = 16


COUNTER_CELL_SIZE = 24


class CounterReading(IntEnum):
    """Offsets of the words of ``struct bpf_perf_event_value``. The times are in nanoseconds."""

    VALUE = 0
    ENABLED = 8
    RUNNING = 16


COUNTER_READING_SIZE = 24
COUNTER_UNREAD = -1
"""Value of a counter that could not be read at the entry of a call."""
COUNTER_SHIFT = 13
"""Bits for the number of a CPU in COUNTER_EVENTS: x86-64 has at most 8 192 (NR_CPUS)."""


class CpuLoad(IntEnum):
    """
    The offsets of the fields of a CPU_LOAD entry (``bpf.lower.hits.hit_limits``); times are in nanoseconds.

    Additions are not atomic: other hits on the CPU may undo one. That is rare, and no count depends on these fields.

    ::

         0 u64 traps       time that hits have taken so far besides their handlers
         8 u64 handlers    time that handlers have taken: that of the measured runs, times MEASURED_EVERY
        16 u64 runs        handler runs so far
        24 u64 since       when the present window began
        32 u64 mark        the value of ``handlers`` at that time
        40 u64 braked      the time until which no handler runs; 0: handlers run
    """

    TRAPS = 0
    HANDLERS = 8
    RUNS = 16
    SINCE = 24
    MARK = 32
    BRAKED = 40


CPU_LOAD_SIZE = 64

LOAD_WINDOW = 500_000_000
"""Length in nanoseconds of a window of the overload guard. A limit is the time that handlers may take in a window."""

LOAD_LIMIT = 2 * LOAD_WINDOW
"""
Nanoseconds that handlers may take in a window, for a budget of one whole CPU.

So the brake acts at twice the budget, without user space. It never acts if the budget is half a CPU or more.
"""


class ProbeLoad(IntEnum):
    """
    The offsets of the fields of a PROBE_LOAD entry.

    ::

         0 u64 skipped     hits that ran no handler because of the overload guard
         8 u64 time        nanoseconds in handlers: those of the measured runs, times MEASURED_EVERY
        16 u64 foreign     hits of threads that are not in scope, which cost a trap as well
        24 u64 turn        hits while ``thinning`` was above 1: if it divides the number, the next hit runs the handler
        32 u32 thinning    one of this many hits runs the handler; 0 and 1: every hit
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
"""Flag in ``disabled``, with the id of the thread whose hit may still turn out not to count."""

PROBE_MAX = 1 << 20
"""Maximum number of probepoints of a table."""


class Status(IntEnum):
    """
    The offsets of the words of STATUS.

    ::

         0 u64 waiting     1: the reader sleeps until it is woken; a handler that sees 1 resets it and wakes the reader
         8 u64 alive       the number of processes in SCOPE that have not ended
        16 u64 unfollowed  processes that should be in SCOPE, but for which it had no room
        24 u64 unseen      SIGNAL entries for which the ring had no room
        32 u64 late        processes that continued before their watchpoints were attached
        40 u64 switch_over the state of this program in a switch-over (``SwitchOver``)
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
    The states of a program while one replaces another (``bpf.lower.hits.hit_prologue``): they select its hits.

    Each program reads the word of its own STATUS.
    """

    OURS = 0
    """All hits are the program's: no other program is involved."""
    NOT_OURS = 1
    """No hit belongs to the program yet, or none belongs to it any more."""
    CROSSING = 2
    """All hits from now on are the program's, and it sets the bit of the hit thread in CROSSED."""
    REPLACED = 3
    """Only hits of threads without a bit in the other program's CROSSED are the program's."""


CROSSED_SIZE = (1 << 22) // 8
"""
Size of CROSSED in bytes: thread ids are below PID_MAX_LIMIT (include/linux/threads.h), whatever kernel.pid_max is.
"""


class Entry(IntEnum):
    """
    The kinds of ring entry.

    An entry is a head and a body::

        u32 probe (low 24 bits) and kind (high 8 bits) | u32 thread id, or 0 where it is not requested | body

    The thread id is of the initial namespace.
    """

    RECORD = 0
    """A record of ``record.log_record``. A process name takes ``NAME_SIZE`` bytes, padded with zeros."""
    TRACE = 1
    """A record with a stack trace, in the format of RECORD."""
    ENDED = 2
    """Request to remove the probepoint: u32 exit code, or ``LIMIT`` or ``REMOVE``; u32 process id."""
    SIGNAL = 3
    """
    A signal to the thread for a fault of its instruction.

    u64 ip, u32 signal (low 8 bits) and the number of tickets that were returned (above), u32 code. Records of a
    probepoint that returns tickets (NOTES) are affected only if that number is not 0.
    """
    PROCESS = 4
    """A process left the scope: u32 process id. The entry wakes the reader, which ignores its contents."""
    SNAPSHOT = 5
    """
    Data from which a call stack is unwound, before the record to which it belongs.

    It consists of ``SNAPSHOT``, ``SNAPSHOT_REGISTERS`` words of ``struct pt_regs``, and memory from the stack pointer
    on, up to SNAPSHOT_STACK_MAX bytes.
    """
    TALLY = 6
    """
    A value for a table with call stacks in its key.

    ``TALLY``, the key without the stacks, and the value if it is not a number (``keyed.table_layout``). The SNAPSHOT
    before it has the stack, unless the first address of the stack in the key is a ``StackEnd``.
    """
    UNTALLY = 7
    """The removal of a key from such a table: ``TALLY`` and the key, as above."""
    STACKED = 8
    """A record, followed by the data from which its call stacks are unwound, in the format of ``STACK_COPY``."""


ENTRY_HEAD = struct.Struct("=II")
KIND_SHIFT = 24
"""Bit position of the kind in the first word of an entry."""
TICKETS_SHIFT = 8
"""Bit position of the number of tickets in a SIGNAL entry's word for the signal."""

NAME_SIZE = 16

SAMPLE_SIZE = 64

ARRIVAL = struct.Struct("=IxxxxQ")
"""An entry of ARRIVALS: process id and load bias."""

SNAPSHOT = struct.Struct("=IIII")
"""
Head of a SNAPSHOT entry.

It has the process id, the number of the handler's state plus one, the position in the log for the stack, and the size
of a word in bytes. In the log, the first word of that item is the number of the state plus one; the others are 0.
"""

TALLY = struct.Struct("=IIq")
"""Head of a TALLY entry: number of the table, number of the handler's state plus one, and a numeric value."""

STACK_COPY = struct.Struct("=IIII")
"""
End of a STACKED entry, and of a TALLY entry that has no SNAPSHOT (``Abilities.copies_stacks``).

It has the process id, the position of the log's last call stack plus one, the number of bytes before the copy, and the
number of bytes of the stack.

::

    bytes before the copy, filled up to 8 | SNAPSHOT_REGISTERS words | the stack, filled up to 8 | STACK_COPY

In the log, the first word of each call stack is the position of the previous one plus one; the others are 0.
"""

STACK_COPY_MAX = 120 << 10
"""Maximum bytes of a stack in such a copy. A handler in the process makes it, without the limits of the kernel."""

HEAD_CELLS = 1
"""Number of cells before a value in a table without keys."""

KEY_POSITION = 0xFFFF_FFFF
"""The position in a SNAPSHOT entry whose stack is part of a key and not of the log."""

SNAPSHOT_REGISTERS = 21
"""Number of words of ``struct pt_regs`` (arch/x86/include/asm/ptrace.h)."""

SNAPSHOT_STACK_MAX = 12 << 10

INLINE_ENDING, SKIPPED = 120, 0x100
"""
Offset in the context of a handler in a process at which its ending is stored, and the value for a skipped function.

The offset is that of ``orig_ax`` in ``struct pt_regs``, which is no register. The other values are codes of ``exit``.
"""

LIMIT, REMOVE = 0x100, 0x101
"""Reasons in an ENDED entry: ``maxhits`` was reached, the instruction ``remove`` was executed."""


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least ``count``, and at least 1."""
    return 1 << max(0, count - 1).bit_length()


# The table of pending calls of one process, where handlers run in the process: its layout and addressing.
#
# The table is memory of that process alone, which its children do not inherit; its name is ``MapName.ENTRIES``. It
# consists of slots of one size, a power of two, and is addressed by hashing::
#
#      0 u64 key         the address of the return address, and from bit 48 on the probepoint; 0: the slot is free
#      8 u64 time        when the call began; 0 while the slot is free, or being filled
#     16 u64 ...         registers
#
# A call is in one of the CALL_WINDOW slots that begin at its hash. No two pending calls of a function have the same
# key, so only their own threads write to their slots. A free slot is taken by an atomic exchange. A call that ends
# without a return leaves its slot occupied. The slot is reused when the same key is entered again, or when another call
# finds no room and takes the slot with the oldest time.


CALL_KEY, TIME, REGISTERS = 0, 8, 16
PROBE_SHIFT = 48
"""
Shift of the probepoint in a key. Addresses of programs have less than 48 bits.

Source: Documentation/arch/x86/x86_64/mm.rst in the kernel.
"""
SLOTS_SHIFT = 15
CALL_WINDOW = 16
CALL_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio: it spreads keys that are close together (Knuth, volume 3, 6.4)."""
_WORD, _MASK, _LINE = 8, (1 << 64) - 1, 64


def call_key(probe: int, frame: int) -> int:
    """
    Return the key in a ``CallTable`` of a call of probe ``probe``.

    ``frame`` is the address of its return address.
    """
    return (frame | probe << PROBE_SHIFT) & _MASK


class CallTable(NamedTuple):
    """
    Table of pending calls. ``slot`` is the size of a slot in bytes.

    It has ``1 << SLOTS_SHIFT`` slots, and those by which the last window extends beyond them.
    """

    slot: int

    @classmethod
    def of(cls, registers: int) -> CallTable:
        """Return a table whose slots have room for ``registers`` registers."""
        return cls(max(_LINE, power_of_two(REGISTERS + _WORD * registers)))

    @property
    def size(self) -> int:
        """The size of the table in bytes."""
        return ((1 << SLOTS_SHIFT) + CALL_WINDOW) * self.slot

    def window(self, key: int) -> range:
        """Return the byte offsets in the table of the slots that a call with this key may occupy."""
        first = (key * CALL_MULTIPLIER & _MASK) >> 64 - SLOTS_SHIFT
        return range(first * self.slot, (first + CALL_WINDOW) * self.slot, self.slot)
