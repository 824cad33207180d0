"""
The stack-trace buffer of one hit.

Its bytes are those of section 1.8 of the recovered reference::

    once       01 | u16 n | module name      s64 offset | u16 program id | u16 major | u16 minor
               02 | u16 number of traces
    per trace  word code | word handler or -1 | word parm1 | word parm2
               03 | u16 number of frames
    per frame  word called address | word return address          innermost first, the outermost one left out
               04 | u16 n | n RPN stack words
               05 | u16 n | n local variables
               06 | u16 n | n global variables

Numbers are in the target's byte order. What does not fit is refused, and the trace is cut there: the part that stands
once, the four words of a trace with its number of frames, and each word or prefix behind them are stored whole or not
at all. A trace is counted if at least its four words are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.rpn.isa import RPN_STACK_CELLS, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.vm.machine import Frame, Machine

__all__ = ["TraceBuffer"]


class _FullError(Exception):
    pass


class TraceBuffer:
    """Collect the stack traces of one hit."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.position = 0
        self._count_at: int | None = None
        self._count = 0

    def contents(self) -> bytes:
        """Return the bytes up to STP."""
        return bytes(self._data[: self.position])

    def purge(self) -> None:
        """Empty the buffer; the next trace starts with the header again."""
        self.position = 0
        self._count_at = None

    def move(self, position: int) -> None:
        """Set STP; bytes that nothing wrote are zero."""
        self._data.extend(bytes(max(0, position - len(self._data))))
        self.position = position

    def take(self, machine: Machine) -> None:
        """Add a trace of the machine's present state."""
        try:
            if self._count_at is None:
                self._header(machine)
            self._trace(machine)
        except _FullError:
            return

    def _write(self, machine: Machine, *parts: bytes) -> None:
        data = b"".join(parts)
        if self.position + len(data) > machine.point.ex_logmax:
            raise _FullError
        self._data[self.position : self.position + len(data)] = data
        self.position += len(data)

    def _header(self, machine: Machine) -> None:
        point, order = machine.point, machine.architecture.byte_order
        name = point.module.encode("utf-8", "surrogateescape")[:0xFFFF]
        self._write(
            machine,
            _prefix(Token.STRING, len(name), order),
            name,
            (point.offset & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, order),
            *(number.to_bytes(2, order) for number in (point.program_id, machine.major, machine.minor)),
            _prefix(Token.STACK_TRACE, 0, order),
        )
        self._count_at, self._count = self.position - 2, 0

    def _count_trace(self, machine: Machine) -> None:
        self._count += 1
        at = self._count_at
        assert at is not None
        self._data[at : at + 2] = (self._count & 0xFFFF).to_bytes(2, machine.architecture.byte_order)

    def _trace(self, machine: Machine) -> None:
        order = machine.architecture.byte_order
        code, parm1, parm2 = machine.last_exception
        handler = machine.frames[-1].handler
        words = [code, machine.mask if handler is None else handler, parm1, parm2]
        frames = machine.frames[:0:-1]
        self._write(machine, machine.words(words), _prefix(Token.FRAMES, len(frames), order))
        self._count_trace(machine)
        for frame in frames:
            self._frame(machine, frame)

    def _frame(self, machine: Machine, frame: Frame) -> None:
        context = machine.context
        first, count = frame.cells
        cells = [machine.cells[(first + n) % RPN_STACK_CELLS] for n in range(count)]
        self._write(machine, machine.words([frame.called]))
        self._write(machine, machine.words([frame.return_offset]))
        self._range(machine, Token.STACK_ENTRIES, cells)
        self._range(machine, Token.LOCAL_VARIABLES, _slice(context.local_variables, frame.local_variables))
        self._range(machine, Token.GLOBAL_VARIABLES, _slice(context.global_variables, frame.global_variables))

    def _range(self, machine: Machine, token: Token, values: Sequence[int]) -> None:
        # 65536 variables are one more than the prefix can say, and more than any buffer can hold.
        self._write(machine, _prefix(token, min(len(values), 0xFFFF), machine.architecture.byte_order))
        for value in values:
            self._write(machine, machine.words([value]))


def _prefix(token: Token, length: int, order: str) -> bytes:
    return bytes([token]) + length.to_bytes(2, "little" if order == "little" else "big")


def _slice(values: Sequence[int], bounds: tuple[int, int]) -> Sequence[int]:
    first, count = bounds
    return [values[n] for n in range(first, min(first + count, len(values)))]
