"""
The state of the RPN virtual machine during one hit, and the operations that many instructions share.

What each instruction does is in the ``rules_*`` modules; the loop that runs them is in ``interpreter``.

An instruction that raises an exception has popped its operands before, and pushed nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple
from dprobes.rpn.isa import CALL_DEPTH_MAX, RPN_STACK_CELLS, ExceptionCode
from dprobes.rpn.point import Point
from dprobes.vm.heap import Heap
from dprobes.vm.tracebuffer import TraceBuffer

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.vm.context import Context

__all__ = ["Ending", "Frame", "LogFull", "Machine", "Outcome", "Point", "Raised", "read_string"]

_CELL_MASK = RPN_STACK_CELLS - 1
_PAGE = 4096


class Ending(enum.Enum):
    """Say how a handler ended."""

    EXIT = "exit"
    ABORT = "abort"
    REMOVE = "remove"
    SKIP = "skip"


class Outcome(NamedTuple):
    """
    Hold the result of one run of a handler.

    ``log`` is the log buffer up to LP, ``trace`` the stack-trace buffer up to STP; both are empty after ``abort``.
    ``exit_code`` is the operand of ``exit 1|2|3``, else 0. ``unhandled`` is the exception that ended the
    handler, if ``rx`` has not raised it, else 0. ``value`` is what the function is to return after ``skip``, else 0.
    ``is_cut`` says that the buffer had no room for what the handler logged after ``log``.
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
    """Carry an RPN exception from an instruction to the interpreter's loop."""

    def __init__(self, code: int, parm1: int = 0, parm2: int = 0) -> None:
        super().__init__(code, parm1, parm2)
        self.code = code
        self.parm1 = parm1
        self.parm2 = parm2


class LogFull(Raised):
    """The exception LOG_OVERFLOW of an item that the log buffer has no room for."""


@dataclass(slots=True)
class Frame:
    """
    Hold one call: where it was called, what to restore, its exception handler, and what traces of it show.

    Ranges are (first index, count).
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
    Hold the state of a run.

    ``tsp`` and ``sbp`` are plain integers; a cell's index is taken modulo 1024, so their value modulo the word is
    what counts. A cell that this hit has not written is 0; one that it has popped is unspecified.
    ``ip`` is a byte offset in the encoded program.
    """

    # A machine is made for every hit: no dataclass, and what few handlers need (trace, heap) is made when it is used.
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
        """Where the log ends, once an item had no room and the handler went on; LP is at the end of the buffer then."""
        self.jumps = 0
        self.frames = [Frame()]
        self.dispatches = 0
        self.last_exception = (0, 0, 0)
        self.ending: Ending | None = None
        self.exit_code = 0
        self.unhandled = 0
        self.value = 0
        self.elapsed: int | None = None
        """Nanoseconds since the entry of the call, once a handler has asked for them: it gets the same ones again."""
        self._trace: TraceBuffer | None = None
        self._heap: Heap | None = None

    def outcome(self) -> Outcome:
        """Return what came of the run; only once it has ended."""
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
        """Pop a cell."""
        tsp = self.tsp
        self.tsp = tsp + 1
        return self.cells[tsp & _CELL_MASK]

    def peek(self, index: int = 0) -> int:
        """Return the cell ``index`` below the top."""
        return self.cells[(self.tsp + index) & _CELL_MASK]

    def poke(self, value: int, index: int = 0) -> None:
        """Change the cell ``index`` below the top."""
        self.cells[(self.tsp + index) & _CELL_MASK] = value & self.mask

    def push_wide(self, value: int, bits: int) -> None:
        """Push a value of ``bits`` bits in as many cells as it takes, least significant on top."""
        for cell in reversed(range(-(-bits // self.bits))):
            self.push(value >> (cell * self.bits))

    # Control

    def charge_jump(self) -> None:
        """Take one from the jump budget, or raise JMP_MAX."""
        if self.jumps == self.point.jmpmax:
            raise Raised(ExceptionCode.JMP_MAX, self.point.jmpmax)
        self.jumps += 1

    def enter(self, target: int) -> None:
        """Call the procedure at ``target``."""
        if len(self.frames) > CALL_DEPTH_MAX:
            raise Raised(ExceptionCode.CALL_MAX, CALL_DEPTH_MAX)
        self.frames.append(Frame(target, self.ip, self.sbp))
        self.ip = target

    def leave(self) -> None:
        """Return to the caller."""
        if len(self.frames) == 1:
            raise Raised(ExceptionCode.CALL_MAX, 0)
        frame = self.frames.pop()
        self.ip, self.sbp = frame.return_offset, frame.saved_sbp

    # The log buffer

    @property
    def room(self) -> int:
        """How many bytes fit in the log buffer."""
        return self.point.logmax - self.lp

    def append(self, data: bytes) -> None:
        """Write at LP and advance it; the caller has checked that there is room."""
        end = self.lp + len(data)
        self.log[self.lp : end] = data
        self.lp = end

    def close_log(self) -> None:
        """Let nothing more be logged: what follows an item that has no room would be taken for that item."""
        if self.cut_at is None:
            self.cut_at, self.lp = self.lp, self.point.logmax

    def move_lp(self, position: int) -> None:
        """Set LP, after which there is room again; bytes between that nothing wrote are zero."""
        self.cut_at = None
        self.log.extend(bytes(max(0, position - len(self.log))))
        self.lp = position

    # Stack traces and the heap

    @property
    def trace(self) -> TraceBuffer:
        """The stack-trace buffer of this hit, made when it is first used."""
        if self._trace is None:
            self._trace = TraceBuffer()
        return self._trace

    @property
    def heap(self) -> Heap:
        """The heap of this hit, made when it is first used."""
        if self._heap is None:
            self._heap = Heap(self.point.heap, self.word_size)
        return self._heap

    def words(self, values: list[int]) -> bytes:
        """Return values, modulo the word, as consecutive words in the target's byte order."""
        order, mask = self.architecture.byte_order, self.mask
        return b"".join([(value & mask).to_bytes(self.word_size, order) for value in values])


def read_string(context: Context, address: int, limit: int, mask: int) -> bytes:
    """
    Return the bytes up to a NUL, which is kept, or ``limit`` bytes; no page behind the NUL is touched.

    ``mask`` is the largest address; behind it comes 0.
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
