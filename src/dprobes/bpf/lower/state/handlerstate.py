"""
The state of one running handler: an element of the SCRATCH map.

::

         0  cells    the RPN stack, 1024 * 8 bytes
      8192  fields   ``Field``, 8 bytes each
      8760  frames   64 * 32 bytes: called address | return address | saved SBP | exception handler + 1, or 0
     10808  ranges   64 * 64 bytes: what traces of a frame show: first | count of cells, local and global variables
     14904  entry    what a return knows of the entry: the time, registers
     15256  record   the header of a record, which ends where the log buffer begins
     15384  log      twice the next power of two above logmax, then a copy of the program's stack
      ...   trace    likewise for ex_logmax, with a record header before it
      ...   heap     blocks and data
      ...   snapshot the ring entry with a copy of the program's stack, for 'log ustack'
      ...   keys     the ring entry with a key, the key of a table, and room for a position or a copy behind it

A position in the log buffer is masked to one half of it and a length to the other, so that the verifier has nothing to
prove about their sum. Frames and cells are masked in the same way.
"""

from __future__ import annotations

from dprobes.bpf.layout import ENTRY_HEAD, SNAPSHOT, SNAPSHOT_REGISTERS, SNAPSHOT_STACK_MAX, TALLY, power_of_two
from dprobes.lazydataclass import dataclass
from dprobes.quickenum import IntEnum
from dprobes.rpn.isa import RPN_STACK_CELLS
from dprobes.rpn.tables import STRING_SIZE_MAX

__all__ = [
    "ABORT",
    "CELLS",
    "EXIT",
    "EXIT_WITH",
    "FIELDS",
    "FRAMES",
    "FRAME_COUNT",
    "FRAME_SIZE",
    "KEPT",
    "KEPT_MAX",
    "KEY_HEAD",
    "KEY_SLACK",
    "LOG",
    "RANGES",
    "RANGE_SIZE",
    "RECORD_SPACE",
    "REMOVE_PROBE",
    "SKIP",
    "Field",
    "Frame",
    "StateLayout",
]

CELLS = 0
FIELDS = CELLS + 8 * RPN_STACK_CELLS
FRAME_COUNT = 64
FRAME_SIZE = 32
FRAMES = FIELDS + 8 * 71
RANGE_SIZE = 64
RANGES = FRAMES + FRAME_COUNT * FRAME_SIZE
KEPT = RANGES + FRAME_COUNT * RANGE_SIZE
"""Where there is what a return knows of the entry: the time, 0 if nobody has seen it, and registers."""
KEPT_MAX = 44
"""What a program has room for on its stack as well."""
RECORD_SPACE = 128
LOG = KEPT + 8 * KEPT_MAX + RECORD_SPACE

_SNAPSHOT_SIZE = ENTRY_HEAD.size + SNAPSHOT.size + 8 * SNAPSHOT_REGISTERS + 2 * power_of_two(SNAPSHOT_STACK_MAX)
"""Room for the entry with a position and a length in the stack, each of which is masked."""

_SLACK = 64
"""Bytes behind the largest position that a store of a few words may touch."""


KEY_HEAD = ENTRY_HEAD.size + TALLY.size
KEY_SLACK = 2 * power_of_two(STRING_SIZE_MAX)
"""Room behind a key for a position in a string, which is masked."""

EXIT, ABORT, REMOVE_PROBE, SKIP, EXIT_WITH = 0, 1, 2, 3, 16
"""How a handler ended, in ``Field.ENDING``; ``exit N`` is EXIT_WITH + N."""


class Field(IntEnum):
    """Give the offsets of the fields."""

    TSP = FIELDS
    SBP = FIELDS + 8
    LP = FIELDS + 16
    PLP = FIELDS + 24
    JUMPS = FIELDS + 32
    DEPTH = FIELDS + 40
    """The number of calls that have not returned."""
    DISPATCHES = FIELDS + 48
    CODE = FIELDS + 56
    PARM1 = FIELDS + 64
    PARM2 = FIELDS + 72
    RAISED = FIELDS + 80
    """The exception that is being dispatched, 0 if ``rx`` raised it."""
    MAJOR = FIELDS + 88
    MINOR = FIELDS + 96
    ENDING = FIELDS + 104
    UNHANDLED = FIELDS + 112
    STP = FIELDS + 120
    TRACE_COUNT_AT = FIELDS + 128
    """Where in the trace buffer the number of traces stands, plus 1; 0 before the first trace."""
    TRACES = FIELDS + 136
    RESUME = FIELDS + 144
    """Where a handler goes on that runs in steps (``LoopForm.CALLBACK``)."""
    NUMBER = FIELDS + 152
    """The number of this state."""
    PROBE = FIELDS + 160
    IS_LAST = FIELDS + 168
    """Whether this hit is the one that ``maxhits`` allows last."""
    LAST_CODE = FIELDS + 176
    LAST_PARM1 = FIELDS + 184
    LAST_PARM2 = FIELDS + 192
    RETURN = FIELDS + 200
    """Where a routine returns to."""
    HEAP_END = FIELDS + 208
    MOVED = FIELDS + 216
    """How far the breakpoint of this hit is from the written place."""
    IP = FIELDS + 224
    PID = FIELDS + 232
    TID = FIELDS + 240
    BIAS = FIELDS + 248
    """The load bias of the module that a sample lies in, or that is watched."""
    PLACE = FIELDS + 256
    """The file offset of a sample in its module."""
    WORK = FIELDS + 264
    """32 words for the instruction that is being carried out."""
    LOGGED = FIELDS + 520
    """The end of the part of the log buffer that is of this hit, where ``pop lp`` is used: LP may be further on."""
    TRACED = FIELDS + 528
    """The same of the trace buffer, STP and ``pop stp``."""
    BEGAN = FIELDS + 536
    """When the handler began, if the overload guard measures it; else 0."""
    VALUE = FIELDS + 544
    """What the function is to return after SKIP."""
    STACKS = FIELDS + 552
    """Where in the log the last call stack stands plus one, if the entry gets a copy of the stack; 0: there is none."""
    CUT_AT = FIELDS + 560
    """Where the log ends plus one, once an item had no room and the handler went on; LP is at the buffer's end then."""


class Frame(IntEnum):
    """Give the offsets in a frame."""

    CALLED = 0
    RETURN = 8
    SBP = 16
    HANDLER = 24


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Lay out what depends on the program: ``logmax`` and so on are 0 where a program has no use for the area."""

    logmax: int
    ex_logmax: int = 0
    heap: int = 0
    has_snapshot: bool = False
    stack_copy: int = 0
    """The bytes of a copy of the stack that stands in the entry itself."""
    keys: int = 0
    entry_words: int = 0

    @property
    def log_mask(self) -> int:
        """The mask of positions and lengths in the log buffer."""
        return power_of_two(self.logmax + 1) - 1

    @property
    def trace(self) -> int:
        """Where the trace buffer starts."""
        return LOG + 2 * (self.log_mask + 1) + _SLACK + self.stack_copy + RECORD_SPACE

    @property
    def trace_mask(self) -> int:
        """The mask of positions in the trace buffer."""
        return power_of_two(self.ex_logmax + 1) - 1

    @property
    def heap_start(self) -> int:
        """Where the heap starts."""
        return self.trace + (2 * (self.trace_mask + 1) + _SLACK if self.ex_logmax else 0)

    @property
    def heap_mask(self) -> int:
        """The mask of positions in the heap."""
        return power_of_two(self.heap + 1) - 1

    @property
    def snapshot(self) -> int:
        """Where the entry of a snapshot is put together."""
        return self.heap_start + (2 * (self.heap_mask + 1) + _SLACK if self.heap else 0)

    @property
    def key(self) -> int:
        """Where the key of a table is put together, behind the head of a ring entry."""
        before = self.snapshot + (_SNAPSHOT_SIZE if self.has_snapshot else 0)
        return -(-before // 8) * 8 + (KEY_HEAD if self.keys else 0)

    @property
    def size(self) -> int:
        """The size of a state in bytes."""
        return -(-(self.key + (self.keys + KEY_SLACK + self.stack_copy if self.keys else 0)) // 64) * 64
