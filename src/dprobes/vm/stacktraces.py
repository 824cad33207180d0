"""
The stack traces that a handler takes of itself, in the layout of ``tracebuffer``.

What does not fit is refused, and the trace is cut there: the part that stands once, the four words of a trace with its
number of frames, and each word or prefix behind them are stored whole or not at all. A trace is counted if at least its
four words are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.rpn.isa import RPN_STACK_CELLS, Token
from dprobes.vm.tracebuffer import FullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.vm.machine import Frame, Machine

__all__ = ["take_trace"]


def take_trace(machine: Machine) -> None:
    """Add a trace of a machine's present state to its buffer."""
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
    # 65536 variables are one more than the prefix can say, and more than any buffer can hold.
    _write(machine, _prefix(machine, token, min(len(values), 0xFFFF)))
    for value in values:
        _write(machine, machine.words([value]))


def _prefix(machine: Machine, token: Token, length: int) -> bytes:
    return bytes([token]) + length.to_bytes(2, machine.architecture.byte_order)


def _slice(values: Sequence[int], bounds: tuple[int, int]) -> Sequence[int]:
    first, count = bounds
    return [values[n] for n in range(first, min(first + count, len(values)))]
