"""
What the instructions of control flow, exceptions, stack traces and the call of extensions do.

A rule is a function of the machine and the operand; ``RULES`` maps a row's syntax to its rule. When a rule runs,
``machine.ip`` is already that of the next instruction.
"""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.rpn.arithmetic import signed
from dprobes.rpn.isa import RPN_STACK_CELLS, ExceptionCode
from dprobes.vm.machine import Ending, Machine, Raised
from dprobes.vm.stacktraces import take_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    Rule = Callable[[Machine, Any], None]

__all__ = ["RULES"]


def _nop(machine: Machine, operand: int) -> None:
    pass


def _jmp(machine: Machine, target: int) -> None:
    machine.charge_jump()
    machine.ip = target


def _branch(condition: Callable[[int], bool]) -> Rule:
    """Return the rule of a conditional jump: the budget is charged only when the jump is taken."""

    def rule(machine: Machine, target: int) -> None:
        if condition(signed(machine.peek(), machine.bits)):
            machine.charge_jump()
            machine.ip = target

    return rule


def _loop(machine: Machine, target: int) -> None:
    machine.charge_jump()
    machine.poke(machine.peek() - 1)
    if machine.peek():
        machine.ip = target


def _call(machine: Machine, target: int) -> None:
    machine.charge_jump()
    machine.enter(target)


def _ret(machine: Machine, operand: int) -> None:
    machine.leave()


def _end(ending: Ending) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        machine.ending = ending

    return rule


def _exit_code(machine: Machine, code: int) -> None:
    if code not in (1, 2, 3):
        raise Raised(ExceptionCode.INVALID_OPERAND, 4, code)
    machine.exit_code = code
    machine.ending = Ending.EXIT


def _skip(machine: Machine, operand: int) -> None:
    machine.value = machine.pop()
    machine.ending = Ending.SKIP


def _callk(machine: Machine, operand: int) -> None:
    machine.context.call_extension(None, machine)


def _callk_name(machine: Machine, name: str) -> None:
    machine.context.call_extension(name, machine)


# Exceptions


def _sx(machine: Machine, target: int) -> None:
    machine.frames[-1].handler = target


def _ux(machine: Machine, operand: int) -> None:
    machine.frames[-1].handler = None


def _rx(machine: Machine, operand: int) -> None:
    raise Reraised(machine.peek(0), machine.peek(1), machine.peek(2))


class Reraised(Raised):
    """Carry an exception that ``rx`` raises: whatever the mask, and with its three cells on the stack already."""


def _push_x(machine: Machine, operand: int) -> None:
    for value in reversed(machine.last_exception):
        machine.push(value)


# Stack traces


def _log_st(machine: Machine, operand: int) -> None:
    take_trace(machine)


def _purge_st(machine: Machine, operand: int) -> None:
    machine.trace.purge()


def _push_stp(machine: Machine, operand: int) -> None:
    machine.push(machine.trace.position)


def _pop_stp(machine: Machine, operand: int) -> None:
    position = machine.pop()
    if position > machine.point.ex_logmax:
        raise Raised(ExceptionCode.LOG_OVERFLOW, machine.point.ex_logmax)
    machine.trace.move(position)


def _trace_pv(machine: Machine, operand: int) -> None:
    count, index = machine.pop(), machine.pop()
    machine.frames[-1].cells = (index, min(count, RPN_STACK_CELLS))


def _trace_lv(machine: Machine, operand: int) -> None:
    count, index = machine.pop(), machine.pop()
    _check_range(index, count, len(machine.context.local_variables), 1)
    machine.frames[-1].local_variables = (index, count)


def _trace_gv(machine: Machine, operand: int) -> None:
    count, index = machine.pop(), machine.pop()
    _check_range(index, count, len(machine.context.global_variables), 2)
    machine.frames[-1].global_variables = (index, count)


def _check_range(index: int, count: int, limit: int, kind: int) -> None:
    if count and index + count > limit:
        raise Raised(ExceptionCode.INVALID_OPERAND, kind, max(index, limit))


RULES: dict[str, Rule] = {
    "nop": _nop,
    "jmp <label>": _jmp,
    "jlt <label>": _branch(lambda x: x < 0),
    "jle <label>": _branch(lambda x: x <= 0),
    "jgt <label>": _branch(lambda x: x > 0),
    "jge <label>": _branch(lambda x: x >= 0),
    "jz <label>": _branch(lambda x: x == 0),
    "jnz <label>": _branch(lambda x: x != 0),
    "loop <label>": _loop,
    "call <procname>": _call,
    "ret": _ret,
    "abort": _end(Ending.ABORT),
    "remove": _end(Ending.REMOVE),
    "exit": _end(Ending.EXIT),
    "exit <code>": _exit_code,
    "skip": _skip,
    "callk": _callk,
    "callk <name>": _callk_name,
    "sx <label>": _sx,
    "ux": _ux,
    "rx": _rx,
    "push x": _push_x,
    "log st": _log_st,
    "purge st": _purge_st,
    "push stp": _push_stp,
    "pop stp": _pop_stp,
    "trace pv": _trace_pv,
    "trace lv": _trace_lv,
    "trace gv": _trace_gv,
}
