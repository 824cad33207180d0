"""
RPN stack inside a block of code: known numbers, and the places of cells in registers and in memory.

Positions are relative to TSP at the start of the block: a push goes to -1, then to -2. If the depth is known, the cell
at a position has a constant address. Otherwise TSP is in R8, and the position is masked::

    r0 = r8;  r0 += position;  r0 &= 1023;  r0 <<= 3;  r0 += r7;  r1 = *(u64 *)(r0 + 0)

A cell is written to memory before other code may read it there: at the end of a block, before an exception, and before
the call of a helper clobbers the registers. Cells that are popped earlier are never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Alu, Register
from dprobes.bpf.map_layouts import ENTRY_HEAD, SNAPSHOT, SNAPSHOT_REGISTERS, SNAPSHOT_STACK_MAX, TALLY, power_of_two
from dprobes.rpn.instruction_set import RPN_STACK_CELLS
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX
from dprobes.rpn.word_arithmetic import mask_of

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembler

__all__ = [
    "ABORT",
    "CELLS",
    "EXIT",
    "EXIT_WITH",
    "FRAMES",
    "FRAME_COUNT",
    "FRAME_SIZE",
    "KEPT",
    "KEPT_MAX",
    "KEY_HEAD",
    "LOG",
    "RANGES",
    "RANGE_SIZE",
    "RECORD_SPACE",
    "REMOVE_PROBE",
    "SCRATCH",
    "SKIP",
    "TSP",
    "Field",
    "Frame",
    "Operand",
    "StateLayout",
    "VirtualStack",
    "store_number",
]

# The state of one running handler: an element of the SCRATCH map.
#
# ::
#
#          0  cells    the RPN stack, 1024 * 8 bytes
#       8192  fields   ``Field``, 8 bytes each
#       8768  frames   64 * 32 bytes: called address | return address | saved SBP | exception handler + 1, or 0
#      10816  ranges   64 * 64 bytes: what traces of a frame show: first | count of cells, local and global variables
#      14912  entry    data of the call's entry for the handler of its return: the time, registers
#      15264  record   the header of a record, which ends where the log buffer begins
#      15392  log      twice the next power of two above logmax, then a copy of the program's stack
#       ...   trace    likewise for ex_logmax, with a record header before it
#       ...   heap     blocks and data
#       ...   snapshot the ring entry with a copy of the program's stack, for 'log ustack'
#       ...   keys     the ring entry with a key, the key of a table, and room for a position or a copy after it
# A position in the log buffer is masked to one half of it and a length to the other. So the verifier need not prove
# anything about their sum. Frames and cells are masked in the same way.


CELLS = 0
FIELDS = CELLS + 8 * RPN_STACK_CELLS
FRAME_COUNT = 64
FRAME_SIZE = 32
FRAMES = FIELDS + 8 * 72
RANGE_SIZE = 64
RANGES = FRAMES + FRAME_COUNT * FRAME_SIZE
KEPT = RANGES + FRAME_COUNT * RANGE_SIZE
"""Offset of the entry data for a handler of a return: the time, or 0 if the entry was not seen, and registers."""
KEPT_MAX = 44
"""Maximum number of words of this data: as many also fit on a program's stack."""
RECORD_SPACE = 128
LOG = KEPT + 8 * KEPT_MAX + RECORD_SPACE

_SNAPSHOT_SIZE = ENTRY_HEAD.size + SNAPSHOT.size + 8 * SNAPSHOT_REGISTERS + 2 * power_of_two(SNAPSHOT_STACK_MAX)
"""Room for the entry with a masked position and a masked length in the stack."""

_SLACK = 64
"""Bytes after the largest position that a store of a few words may touch."""


KEY_HEAD = ENTRY_HEAD.size + TALLY.size
KEY_SLACK = 2 * power_of_two(STRING_SIZE_MAX)
"""Room after a key for a position in a string, which is masked."""

EXIT, ABORT, REMOVE_PROBE, SKIP, EXIT_WITH = 0, 1, 2, 3, 16
"""Values of ``Field.ENDING``, the way in which a handler ended. ``exit N`` is EXIT_WITH + N."""


class Field(IntEnum):
    """Offsets in bytes of the fixed fields of a handler's state, its memory during a hit."""

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
    """Position of the number of traces in the trace buffer, plus 1, or 0 before the first trace."""
    TRACES = FIELDS + 136
    RESUME = FIELDS + 144
    """The step at which a handler that runs in steps continues (``LoopForm.CALLBACK``)."""
    NUMBER = FIELDS + 152
    """The number of this state."""
    PROBE = FIELDS + 160
    IS_LAST = FIELDS + 168
    """0 if this hit is the last one that ``maxhits`` allows."""
    LAST_CODE = FIELDS + 176
    LAST_PARM1 = FIELDS + 184
    LAST_PARM2 = FIELDS + 192
    RETURN = FIELDS + 200
    """The number of the place to which a routine returns."""
    HEAP_END = FIELDS + 208
    MOVED = FIELDS + 216
    """The distance of this hit's breakpoint from the specified place."""
    IP = FIELDS + 224
    PID = FIELDS + 232
    TID = FIELDS + 240
    BIAS = FIELDS + 248
    """The load bias of the module that a sample interrupted, or that is watched."""
    PLACE = FIELDS + 256
    """The file offset of a sample in its module."""
    WORK = FIELDS + 264
    """32 words for temporary use by the current instruction."""
    LOGGED = FIELDS + 520
    """The end of this hit's part of the log buffer, where ``pop lp`` is used: LP may be greater."""
    TRACED = FIELDS + 528
    """The end of this hit's part of the trace buffer, where ``pop stp`` is used: STP may be greater."""
    BEGAN = FIELDS + 536
    """Time at which the handler began if the overload guard measures it, or 0."""
    VALUE = FIELDS + 544
    """The return value of the function after SKIP."""
    STACKS = FIELDS + 552
    """Position of the last call stack in the log plus one, or 0 if the entry gets no copy of the stack."""
    CUT_AT = FIELDS + 560
    """End of the log plus one, after an item had no room and the handler continued. LP is then at the buffer's end."""
    THREAD = FIELDS + 568
    """The address of the thread's variables, in code that no verifier checks."""


class Frame(IntEnum):
    """Offsets in bytes of the fields of a frame, which a called RPN procedure has."""

    CALLED = 0
    RETURN = 8
    SBP = 16
    HANDLER = 24


class StateLayout(NamedTuple):
    """Layout of the areas that depend on the program. The size of an unused area is 0."""

    logmax: int
    ex_logmax: int = 0
    heap: int = 0
    has_snapshot: bool = False
    stack_copy: int = 0
    """The bytes of a copy of the stack in the entry itself."""
    keys: int = 0
    entry_words: int = 0

    @property
    def log_mask(self) -> int:
        """The mask of positions and lengths in the log buffer."""
        return power_of_two(self.logmax + 1) - 1

    @property
    def trace(self) -> int:
        """The offset of the trace buffer."""
        return LOG + 2 * (self.log_mask + 1) + _SLACK + self.stack_copy + RECORD_SPACE

    @property
    def trace_mask(self) -> int:
        """The mask of positions in the trace buffer."""
        return power_of_two(self.ex_logmax + 1) - 1

    @property
    def heap_start(self) -> int:
        """The offset of the heap."""
        return self.trace + (2 * (self.trace_mask + 1) + _SLACK if self.ex_logmax else 0)

    @property
    def heap_mask(self) -> int:
        """The mask of positions in the heap."""
        return power_of_two(self.heap + 1) - 1

    @property
    def snapshot(self) -> int:
        """The offset at which the entry of a snapshot is built."""
        return self.heap_start + (2 * (self.heap_mask + 1) + _SLACK if self.heap else 0)

    @property
    def key(self) -> int:
        """The offset at which the key of a table is built, after the head of a ring entry."""
        before = self.snapshot + (_SNAPSHOT_SIZE if self.has_snapshot else 0)
        return -(-before // 8) * 8 + (KEY_HEAD if self.keys else 0)

    @property
    def size(self) -> int:
        """The size of a state in bytes."""
        return -(-(self.key + (self.keys + KEY_SLACK + self.stack_copy if self.keys else 0)) // 64) * 64


ADDRESS = Register.R0
"""Register for calculated addresses of cells. Nothing else is in it across an instruction."""
SCRATCH = Register.R7
"""The register that points to the state."""
TSP = Register.R8
"""The register that holds TSP where the depth is not known."""

_POOL = (Register.R1, Register.R2, Register.R3, Register.R4, Register.R5)

Operand = Register | int
"""The value of a cell: in a register, or a number."""


@dataclass(slots=True)
class _Cell:
    value: Operand
    is_stored: bool


def store_number(asm: Assembler, base: Register, offset: int, value: Operand) -> None:
    """Store a 64-bit register or unsigned number at ``base + offset``. A large number is loaded to R9 first."""
    if isinstance(value, Register) or value < 1 << 31:
        asm.store(base, offset, value)
    elif value >= (1 << 64) - (1 << 31):
        asm.store(base, offset, value - (1 << 64))
    else:
        asm.mov(Register.R9, value)
        asm.store(base, offset, Register.R9)


class VirtualStack:
    """
    The RPN stack at one point of a block, and the allocation of R1-R5.

    ``tsp`` is TSP at the start of the block, None where it is in R8.
    """

    def __init__(self, asm: Assembler, word_size: int, tsp: int | None) -> None:
        self._asm = asm
        self._word_size = word_size
        self._mask = mask_of(8 * word_size)
        self._cells: dict[int, _Cell] = {}
        self._held: list[Register] = []
        self.tsp = tsp
        self.top = 0
        """The position of the top cell."""

    # Registers

    def take(self) -> Register:
        """Allocate a free register until ``release``, and return it; spill the oldest cell if none is free."""
        used = {cell.value for cell in self._cells.values() if isinstance(cell.value, Register)}
        free = next((r for r in _POOL if r not in used and r not in self._held), None)
        if free is None:
            free = self._spill()
        self._held.append(free)
        return free

    def _spill(self) -> Register:
        """Write the cell that was first put in a register to memory, and return that register."""
        for position, cell in self._cells.items():
            if isinstance(cell.value, Register) and cell.value not in self._held:
                self._store(position)
                del self._cells[position]
                return cell.value
        raise AssertionError("an instruction takes all registers")

    def release(self) -> None:
        """Free, after an instruction, the registers from ``take`` that it has not pushed on the RPN stack."""
        self._held.clear()

    # Cells

    def push(self, value: Operand) -> None:
        """Push a number, or a register from ``take``, on the RPN stack."""
        self.top -= 1
        self._put(self.top, value)

    def set(self, index: int, value: Operand) -> None:
        """Set the cell ``index`` below the top to a number, or to a register that was taken."""
        self._put(self.top + index, value)

    def _put(self, position: int, value: Operand) -> None:
        if isinstance(value, Register):
            self._held.remove(value)
        else:
            value &= self._mask
        self._cells[position % RPN_STACK_CELLS] = _Cell(value, is_stored=False)

    def peek(self, index: int = 0) -> Operand:
        """Return the cell ``index`` below the top. The caller must not change the register, if it is one."""
        position = (self.top + index) % RPN_STACK_CELLS
        cell = self._cells.get(position)
        if cell is None:
            register = self.take()
            self._load(register, position)
            self._held.remove(register)
            cell = self._cells[position] = _Cell(register, is_stored=True)
        if isinstance(cell.value, Register) and cell.value not in self._held:
            self._held.append(cell.value)  # so that it is not taken until the instruction is done
        return cell.value

    def pop(self) -> Operand:
        """Pop a cell and return it. The caller may change the register, if it is one."""
        value = self.peek()
        self._cells.pop(self.top % RPN_STACK_CELLS, None)
        self.top += 1
        return value

    def pop_register(self) -> Register:
        """Pop a cell into a register that the caller may change."""
        return self.in_register(self.pop())

    def in_register(self, value: Operand) -> Register:
        """Return a register with ``value``: the same one if it is a register, or a new one with the number."""
        if isinstance(value, Register):
            return value
        register = self.take()
        self._asm.mov(register, value)
        return register

    def copy(self, value: Operand) -> Register:
        """Return a new register from ``take`` that is set to ``value``."""
        register = self.take()
        self._asm.mov(register, value)
        return register

    def drop(self, count: int) -> None:
        """Remove the top ``count`` cells of the RPN stack."""
        for position in range(self.top, self.top + min(count, RPN_STACK_CELLS)):
            self._cells.pop(position % RPN_STACK_CELLS, None)
        self.top += count

    # Memory

    def flush(self) -> None:
        """Write all cells that are not in memory yet. They stay in their registers, too."""
        for position, cell in self._cells.items():
            if not cell.is_stored:
                self._store(position)
                cell.is_stored = True

    def settle(self) -> None:
        """Write all cells to memory, forget their values and free all registers."""
        self.flush()
        self._cells.clear()
        self._held.clear()

    def address(self, register: Register, position: int) -> int:
        """
        Write the address calculation for the cell at ``position``, if needed.

        Return the cell's offset from ``base``.
        """
        if self.tsp is not None:
            return CELLS + 8 * ((self.tsp + position) % RPN_STACK_CELLS)
        asm = self._asm
        asm.mov(register, TSP)
        if position:
            asm.alu(Alu.ADD, register, position)
        asm.alu(Alu.AND, register, RPN_STACK_CELLS - 1)
        asm.alu(Alu.LSH, register, 3)
        asm.alu(Alu.ADD, register, SCRATCH)
        return CELLS

    def base(self, register: Register) -> Register:
        """Return the register to which the offset of ``address`` is relative."""
        return SCRATCH if self.tsp is not None else register

    def store_tsp(self) -> None:
        """Write TSP to its field. R8 is unchanged."""
        if self.tsp is not None:
            self._asm.store(SCRATCH, Field.TSP, self.tsp + self.top)
        elif self.top:
            self._asm.add(ADDRESS, TSP, self.top)
            self._asm.store(SCRATCH, Field.TSP, ADDRESS)
        else:
            self._asm.store(SCRATCH, Field.TSP, TSP)

    def tsp_value(self) -> Operand:
        """Return TSP as a number, or in a register that was taken."""
        if self.tsp is not None:
            return (self.tsp + self.top) & self._mask
        register = self.take()
        self._asm.mov(register, TSP)
        if self.top:
            self._asm.alu(Alu.ADD, register, self.top)
        if self._word_size == 4:
            self._asm.mov(register, register, wide=False)
        return register

    def _load(self, register: Register, position: int) -> None:
        offset = self.address(ADDRESS, position)
        self._asm.load(register, self.base(ADDRESS), offset)

    def _store(self, position: int) -> None:
        cell = self._cells[position]
        if cell.is_stored:
            return
        offset = self.address(ADDRESS, position)
        store_number(self._asm, self.base(ADDRESS), offset, cell.value)
