"""
State of the RPN virtual machine during one hit, and the operations that many instructions share.

The instructions themselves are in ``log_rules``, ``stack_rules`` and ``world_rules``. The loop that runs them is in
``interpreter``. An instruction that raises an exception has already popped its operands, and has pushed nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.instruction_set import CALL_DEPTH_MAX, RPN_STACK_CELLS, ExceptionCode, Token
from dprobes.rpn.rpn_program import Point

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture, ByteOrder
    from dprobes.vm.world_context import Context

__all__ = [
    "Ending",
    "Frame",
    "Heap",
    "HeapExhaustedError",
    "LogFull",
    "Machine",
    "Outcome",
    "Point",
    "Raised",
    "read_string",
    "take_trace",
]

# The byte heap of one hit.
#
# Blocks lie one after the other from the start of the heap; each is a header of one word and its data::
#
#     | header | data, a multiple of the word | header | data ...
#              ^ handle: the offset of the data from the start of the heap
#
# A block is allocated first-fit, and the rest of a larger one is split off if a header and a word fit into it. Free
# neighbours are joined at once. Fresh data is zero.


class HeapExhaustedError(Exception):
    """Error that no free block of the heap is large enough."""


@dataclass(slots=True)
class _Block:
    handle: int
    size: int
    used: bool


class Heap:
    """Byte heap of ``size`` bytes; the size of a block is a multiple of ``word_size`` bytes."""

    def __init__(self, size: int, word_size: int) -> None:
        self._word = word_size
        self.memory = bytearray(size)
        usable = (size - word_size) // word_size * word_size
        self._blocks = [_Block(word_size, usable, used=False)] if usable > 0 else []

    def allocate(self, size: int) -> int:
        """Return the handle of a new block of at least ``size`` bytes; raise ``HeapExhaustedError`` if none fits."""
        size = max(-(-size // self._word), 1) * self._word
        for position, block in enumerate(self._blocks):
            if block.used or block.size < size:
                continue
            rest = block.size - size
            if rest >= 2 * self._word:
                following = _Block(block.handle + size + self._word, rest - self._word, used=False)
                self._blocks.insert(position + 1, following)
                block.size = size
            block.used = True
            self.memory[block.handle : block.handle + block.size] = bytes(block.size)
            return block.handle
        raise HeapExhaustedError

    def release(self, handle: int) -> bool:
        """Free a block; return False if ``handle`` is not the handle of an allocated block."""
        for position, block in enumerate(self._blocks):
            if block.handle == handle and block.used:
                block.used = False
                self._join(position)
                self._join(position - 1)
                return True
        return False

    def block_size(self, handle: int) -> int | None:
        """Return the size in bytes of a block, rounded up to words, or None if no allocated block has this handle."""
        for block in self._blocks:
            if block.handle == handle and block.used:
                return block.size
        return None

    def _join(self, position: int) -> None:
        if position < 0 or position + 1 >= len(self._blocks):
            return
        block, following = self._blocks[position], self._blocks[position + 1]
        if not block.used and not following.used:
            block.size += self._word + following.size
            del self._blocks[position + 1]


# The stack-trace buffer of one hit.
#
# Its bytes are those of section 1.8 of the recovered reference::
#
#     once       01 | u16 n | module name      s64 offset | u16 program id | u16 major | u16 minor
#                02 | u16 number of traces
#     per trace  word code | word handler or -1 | word parm1 | word parm2
#                03 | u16 number of frames
#     per frame  word called address | word return address          innermost first, the outermost one left out
#                04 | u16 n | n RPN stack words
#                05 | u16 n | n local variables
#                06 | u16 n | n global variables
#
# Numbers are in the target's byte order. ``take_trace`` writes them.


class FullError(Exception):
    """Error that data does not fit into the stack-trace buffer."""


class TraceBuffer:
    """The stack-trace buffer of one hit; ``count_at`` is the offset of the number of traces, None before the first."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.position = 0
        self.count_at: int | None = None
        self._count = 0

    def contents(self) -> bytes:
        """Return the bytes from the start of the buffer up to STP, the stack-trace pointer."""
        return bytes(self._data[: self.position])

    def purge(self) -> None:
        """Discard all stack traces in the buffer; the next trace starts with the header again."""
        self.position = 0
        self.count_at = None

    def move(self, position: int) -> None:
        """Set STP to ``position``; bytes that were never written are zero."""
        self._data.extend(bytes(max(0, position - len(self._data))))
        self.position = position

    def append(self, data: bytes, limit: int) -> None:
        """Write at STP and advance STP; raise ``FullError`` if the buffer would be larger than ``limit``."""
        if self.position + len(data) > limit:
            raise FullError
        self._data[self.position : self.position + len(data)] = data
        self.position += len(data)

    def start_counting(self) -> None:
        """Use the two bytes before STP for the number of traces, which is 0."""
        self.count_at, self._count = self.position - 2, 0

    def count(self, byte_order: ByteOrder) -> None:
        """Add 1 to the number of traces in the buffer."""
        self._count += 1
        at = self.count_at
        assert at is not None
        self._data[at : at + 2] = (self._count & 0xFFFF).to_bytes(2, byte_order)


_CELL_MASK = RPN_STACK_CELLS - 1
_PAGE = 4096


class Ending(enum.Enum):
    """The way in which a handler ends, named after the instruction."""

    EXIT = "exit"
    ABORT = "abort"
    REMOVE = "remove"
    SKIP = "skip"


class Outcome(NamedTuple):
    """
    Result of one run of a handler.

    ``log`` is the log buffer up to LP, ``trace`` the stack-trace buffer up to STP; both are empty after ``abort``.
    ``exit_code`` is the operand of ``exit 1|2|3``, or 0. ``unhandled`` is the code of the exception that ended the
    handler, or 0 if none did, or if ``rx`` raised it. ``value`` is the probed function's return value after ``skip``,
    or 0. ``is_cut`` is True if the log buffer had no room for data that the handler logged after ``log``.
    """

    ending: Ending
    log: bytes
    trace: bytes
    major: int
    minor: int
    exit_code: int = 0
    unhandled: int = 0
    value: int = 0
    is_cut: bool = False


class Raised(Exception):  # noqa: N818 - not an error of DProbes: an event in the life of a handler
    """Python exception with which an instruction raises an RPN exception. The interpreter's loop catches it."""

    def __init__(self, code: int, parm1: int = 0, parm2: int = 0) -> None:
        super().__init__(code, parm1, parm2)
        self.code = code
        self.parm1 = parm1
        self.parm2 = parm2


class LogFull(Raised):
    """LOG_OVERFLOW of an item for which the log buffer has no room."""


@dataclass(slots=True)
class Frame:
    """
    Frame of a call: its place, the state to restore, its exception handler, and the ranges that stack traces show.

    ``called``, ``return_offset`` and ``handler`` are byte offsets in the image; ``handler`` is None without an
    exception handler. A range is (first index, count).
    """

    called: int = 0
    return_offset: int = 0
    saved_sbp: int = 0
    handler: int | None = None
    cells: tuple[int, int] = (0, 0)
    local_variables: tuple[int, int] = (0, 0)
    global_variables: tuple[int, int] = (0, 0)


class Machine:
    """
    State of one run of a handler.

    ``tsp`` and ``sbp`` are plain integers. A cell's index is taken modulo 1024, so only their values modulo the word
    matter. A cell that the run has not written is 0; a cell that it has popped is unspecified. ``ip`` is a byte offset
    in the image. ``ending`` is None until the handler ends.
    """

    # A machine is made for every hit. So it is no dataclass, and parts that few handlers need (trace, heap) are made at
    # their first use.
    __slots__ = (
        "_heap",
        "_trace",
        "architecture",
        "bits",
        "cells",
        "context",
        "cut_at",
        "dispatches",
        "elapsed",
        "ending",
        "exit_code",
        "frames",
        "ip",
        "jumps",
        "last_exception",
        "log",
        "lp",
        "major",
        "mask",
        "minor",
        "plp",
        "point",
        "sbp",
        "tsp",
        "unhandled",
        "value",
        "word_size",
    )

    def __init__(self, architecture: Architecture, point: Point, context: Context, start: int) -> None:
        self.architecture = architecture
        self.word_size = word_size = architecture.word_size
        self.bits = 8 * word_size
        self.mask = architecture.word_mask
        self.point = point
        self.context = context
        self.major = point.major
        self.minor = point.minor
        self.ip = start
        self.cells = [0] * RPN_STACK_CELLS
        self.tsp = RPN_STACK_CELLS
        self.sbp = RPN_STACK_CELLS
        self.log = bytearray()
        self.lp = 0
        self.plp = 0
        self.cut_at: int | None = None
        """
        Length in bytes of the log's data, if an item had no room and the handler continued; None otherwise.

        LP is at the end of the log buffer then.
        """
        self.jumps = 0
        self.frames = [Frame()]
        self.dispatches = 0
        self.last_exception = (0, 0, 0)
        self.ending: Ending | None = None
        self.exit_code = 0
        self.unhandled = 0
        self.value = 0
        self.elapsed: int | None = None
        """Nanoseconds since the entry of the call, kept for later reads; None before the first read."""
        self._trace: TraceBuffer | None = None
        self._heap: Heap | None = None

    def outcome(self) -> Outcome:
        """Return the outcome of the run; the handler must have ended."""
        assert self.ending is not None
        if self.ending is Ending.ABORT:
            return Outcome(self.ending, b"", b"", self.major, self.minor)
        trace = b"" if self._trace is None else self._trace.contents()
        log = bytes(self.log[: self.lp if self.cut_at is None else self.cut_at])
        is_cut = self.cut_at is not None or self.unhandled == ExceptionCode.LOG_OVERFLOW
        codes = self.major, self.minor, self.exit_code, self.unhandled
        return Outcome(self.ending, log, trace, *codes, self.value, is_cut)

    # The RPN stack

    def push(self, value: int) -> None:
        """Push a cell; ``value`` is taken modulo the word."""
        self.tsp = tsp = self.tsp - 1
        self.cells[tsp & _CELL_MASK] = value & self.mask

    def pop(self) -> int:
        """Remove the top cell of the stack, and return its value."""
        tsp = self.tsp
        self.tsp = tsp + 1
        return self.cells[tsp & _CELL_MASK]

    def peek(self, index: int = 0) -> int:
        """Return the cell ``index`` cells below the top."""
        return self.cells[(self.tsp + index) & _CELL_MASK]

    def poke(self, value: int, index: int = 0) -> None:
        """Set the cell ``index`` cells below the top; ``value`` is taken modulo the word."""
        self.cells[(self.tsp + index) & _CELL_MASK] = value & self.mask

    def push_wide(self, value: int, bits: int) -> None:
        """Push a value of ``bits`` bits in as many cells as necessary; the least significant word is on top."""
        for cell in reversed(range(-(-bits // self.bits))):
            self.push(value >> (cell * self.bits))

    # Control

    def charge_jump(self) -> None:
        """Charge one jump to the jump budget; raise JMP_MAX if it is used up."""
        if self.jumps == self.point.jmpmax:
            raise Raised(ExceptionCode.JMP_MAX, self.point.jmpmax)
        self.jumps += 1

    def enter(self, target: int) -> None:
        """
        Call the procedure at ``target``: push a frame with the return address, and set the instruction pointer.

        Raise CALL_MAX if calls are nested too deeply.
        """
        if len(self.frames) > CALL_DEPTH_MAX:
            raise Raised(ExceptionCode.CALL_MAX, CALL_DEPTH_MAX)
        self.frames.append(Frame(target, self.ip, self.sbp))
        self.ip = target

    def leave(self) -> None:
        """Return from a procedure to the instruction after its call; raise CALL_MAX outside of a procedure."""
        if len(self.frames) == 1:
            raise Raised(ExceptionCode.CALL_MAX, 0)
        frame = self.frames.pop()
        self.ip, self.sbp = frame.return_offset, frame.saved_sbp

    # The log buffer

    @property
    def room(self) -> int:
        """Number of bytes that still fit into the log buffer."""
        return self.point.logmax - self.lp

    def append(self, data: bytes) -> None:
        """Write at LP and advance LP; ``data`` must not be longer than ``room``."""
        end = self.lp + len(data)
        self.log[self.lp : end] = data
        self.lp = end

    def close_log(self) -> None:
        """Close the log after an item without room: a reader must not take data after it for that item."""
        if self.cut_at is None:
            self.cut_at, self.lp = self.lp, self.point.logmax

    def move_lp(self, position: int) -> None:
        """Set LP to ``position``, and reopen a closed log; skipped bytes that were never written are zero."""
        self.cut_at = None
        self.log.extend(bytes(max(0, position - len(self.log))))
        self.lp = position

    # Stack traces and the heap

    @property
    def trace(self) -> TraceBuffer:
        """The stack-trace buffer of this hit, made at its first use."""
        if self._trace is None:
            self._trace = TraceBuffer()
        return self._trace

    @property
    def heap(self) -> Heap:
        """The heap of this hit, made at its first use."""
        if self._heap is None:
            self._heap = Heap(self.point.heap, self.word_size)
        return self._heap

    def words(self, values: list[int]) -> bytes:
        """Return values, modulo the word, as consecutive words in the target's byte order."""
        order, mask = self.architecture.byte_order, self.mask
        return b"".join([(value & mask).to_bytes(self.word_size, order) for value in values])


def read_string(context: Context, address: int, limit: int, mask: int) -> bytes:
    """
    Return a C string with its NUL, or its first ``limit`` bytes.

    Raise ``AddressFault`` if a byte before that is unreadable. No page after the page with the NUL is accessed.
    ``mask`` is the largest address; the address after it is 0.
    """
    found = b""
    while len(found) < limit:
        position = (address + len(found)) & mask
        chunk = context.read(position, min(limit - len(found), _PAGE - position % _PAGE))
        end = chunk.find(0)
        if end >= 0:
            return found + chunk[: end + 1]
        found += chunk
    return found


# Stack traces of the RPN call frames, in the layout above.
#
# A trace ends before data that does not fit. These parts are stored whole or not at all: the header, which is written
# once; the first four words of a trace with its number of frames; and each later word or prefix. A trace is counted if
# at least its four words are stored.


def take_trace(machine: Machine) -> None:
    """Append a trace of a machine's present state to its stack-trace buffer, as far as it fits."""
    try:
        if machine.trace.count_at is None:
            _header(machine)
        _trace(machine)
    except FullError:
        return


def _write(machine: Machine, *parts: bytes) -> None:
    machine.trace.append(b"".join(parts), machine.point.ex_logmax)


def _header(machine: Machine) -> None:
    point, order = machine.point, machine.architecture.byte_order
    name = point.module.encode("utf-8", "surrogateescape")[:0xFFFF]
    _write(
        machine,
        _prefix(machine, Token.STRING, len(name)),
        name,
        (point.offset & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, order),
        *(number.to_bytes(2, order) for number in (point.program_id, machine.major, machine.minor)),
        _prefix(machine, Token.STACK_TRACE, 0),
    )
    machine.trace.start_counting()


def _trace(machine: Machine) -> None:
    code, parm1, parm2 = machine.last_exception
    handler = machine.frames[-1].handler
    words = [code, machine.mask if handler is None else handler, parm1, parm2]
    frames = machine.frames[:0:-1]
    _write(machine, machine.words(words), _prefix(machine, Token.FRAMES, len(frames)))
    machine.trace.count(machine.architecture.byte_order)
    for frame in frames:
        _frame(machine, frame)


def _frame(machine: Machine, frame: Frame) -> None:
    context = machine.context
    first, count = frame.cells
    cells = [machine.cells[(first + n) % RPN_STACK_CELLS] for n in range(count)]
    _write(machine, machine.words([frame.called]))
    _write(machine, machine.words([frame.return_offset]))
    _range(machine, Token.STACK_ENTRIES, cells)
    _range(machine, Token.LOCAL_VARIABLES, _slice(context.local_variables, frame.local_variables))
    _range(machine, Token.GLOBAL_VARIABLES, _slice(context.global_variables, frame.global_variables))


def _range(machine: Machine, token: Token, values: Sequence[int]) -> None:
    # 65536 variables are one more than the prefix can express, and do not fit into any buffer.
    _write(machine, _prefix(machine, token, min(len(values), 0xFFFF)))
    for value in values:
        _write(machine, machine.words([value]))


def _prefix(machine: Machine, token: Token, length: int) -> bytes:
    return bytes([token]) + length.to_bytes(2, machine.architecture.byte_order)


def _slice(values: Sequence[int], bounds: tuple[int, int]) -> Sequence[int]:
    first, count = bounds
    return [values[n] for n in range(first, min(first + count, len(values)))]
