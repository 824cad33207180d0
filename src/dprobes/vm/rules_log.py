"""
What the logging instructions do.

PLP is set to LP when a log instruction starts, and to the new LP only when it succeeds. What fits is kept with its true
length, then LOG_OVERFLOW is raised; a string is kept whole or not at all (language.md, "The log buffer"). If that is
ignored, nothing more is logged until ``pop lp``, and the record is marked.
"""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.rpn.isa import ITEM_PREFIX_SIZE, KERNEL_FRAMES_MAX, USER_FRAMES_MAX, ExceptionCode, Token
from dprobes.vm.context import AddressFault, SelectorFault
from dprobes.vm.machine import LogFull, Machine, Raised, read_string

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Rule = Callable[[Machine, Any], None]

__all__ = ["RULES"]


def _logging(body: Rule) -> Rule:
    """Return a rule that keeps PLP around ``body``."""

    def rule(machine: Machine, operand: int) -> None:
        machine.plp = machine.lp
        body(machine, operand)
        machine.plp = machine.lp

    return rule


def _overflow(machine: Machine) -> Raised:
    return LogFull(ExceptionCode.LOG_OVERFLOW, machine.point.logmax)


def _prefixed(machine: Machine, token: int, length: int, data: bytes) -> None:
    machine.append(bytes([token]) + length.to_bytes(2, machine.architecture.byte_order) + data)


def _log_fault(machine: Machine, token: Token, value: int) -> None:
    if machine.room >= ITEM_PREFIX_SIZE + machine.word_size:
        _prefixed(machine, token, machine.word_size, machine.words([value]))


def _cells(width: int) -> Rule:
    """Return the rule of ``log <count>`` (width 0: the word) and of ``log b|w|d, <count>``."""

    def rule(machine: Machine, count: int) -> None:
        size = width or machine.word_size
        low_bytes = (1 << (8 * size)) - 1
        order = machine.architecture.byte_order
        kept = min(count, machine.room // size)
        machine.append(b"".join([(machine.peek(n) & low_bytes).to_bytes(size, order) for n in range(kept)]))
        machine.tsp += count
        if kept < count:
            raise _overflow(machine)

    return _logging(rule)


def _log_popped_count(machine: Machine, operand: int) -> None:
    count = machine.pop()
    if machine.room < ITEM_PREFIX_SIZE:
        machine.tsp += count
        raise _overflow(machine)
    kept = min(count, (machine.room - ITEM_PREFIX_SIZE) // machine.word_size, 0xFFFF)
    _prefixed(machine, Token.STACK_COUNT, kept, machine.words([machine.peek(n) for n in range(kept)]))
    machine.tsp += count
    if kept < count:
        raise _overflow(machine)


def _memory(machine: Machine, address: int, length: int) -> None:
    _bytes(machine, address, length, machine.context.read)


def _physical_memory(machine: Machine, address: int, length: int) -> None:
    _bytes(machine, address, length, machine.context.read_physical)


def _bytes(machine: Machine, address: int, length: int, read: Callable[[int, int], bytes]) -> None:
    if machine.room < ITEM_PREFIX_SIZE:
        raise _overflow(machine)
    kept = min(length, machine.room - ITEM_PREFIX_SIZE)
    try:
        data = read(address, kept) if kept else b""
    except AddressFault as fault:
        _log_fault(machine, Token.ADDRESS_FAULT, fault.address)
        raise
    _prefixed(machine, Token.MEMORY, kept, data)
    if kept < length:
        raise _overflow(machine)


def _string(machine: Machine, address: int, maximum: int, check_length: Callable[[int], None] | None = None) -> None:
    if machine.room < ITEM_PREFIX_SIZE:
        raise _overflow(machine)
    room = machine.room - ITEM_PREFIX_SIZE
    try:
        # One byte more than fits tells whether the string ends there.
        data = read_string(machine.context, address, min(maximum, room + 1), machine.mask)
    except AddressFault as fault:
        _log_fault(machine, Token.ADDRESS_FAULT, fault.address)
        raise
    if check_length is not None:
        check_length(len(data))
    data = data.removesuffix(b"\0")
    if len(data) > room:
        raise _overflow(machine)
    _prefixed(machine, Token.STRING, len(data), data)


def _flat(body: Callable[[Machine, int, int], None]) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        address, length = machine.pop(), machine.pop()
        body(machine, address, length)

    return _logging(rule)


def _segmented(body: Callable[[Machine, int, int, int], None]) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        offset, selector, length = machine.pop(), machine.pop(), machine.pop()
        try:
            body(machine, selector, offset, length)
        except SelectorFault as fault:
            _log_fault(machine, Token.SELECTOR_FAULT, fault.selector)
            raise

    return _logging(rule)


def _memory_of_segment(machine: Machine, selector: int, offset: int, length: int) -> None:
    kept = max(0, min(length, machine.room - ITEM_PREFIX_SIZE))
    _memory(machine, machine.context.linear_address(selector, offset, kept), length)


def _string_of_segment(machine: Machine, selector: int, offset: int, maximum: int) -> None:
    def check_length(length: int) -> None:
        machine.context.linear_address(selector, offset, length)

    _string(machine, machine.context.linear_address(selector, offset, min(maximum, 1)), maximum, check_length)


def _variables(token: Token, kind: int, values_of: Callable[[Machine], Sequence[int]]) -> Rule:
    """Return the rule of ``log lv|gv|cv|tv``; an index is checked before there is known to be room for its entry."""

    def rule(machine: Machine, operand: int) -> None:
        count, start = machine.pop(), machine.pop()
        if machine.room < ITEM_PREFIX_SIZE:
            raise _overflow(machine)
        values = values_of(machine)
        existing = max(0, len(values) - start)
        fitting = (machine.room - ITEM_PREFIX_SIZE) // machine.word_size
        kept = min(count, existing, fitting)
        _prefixed(machine, token, kept, machine.words([values[start + n] for n in range(kept)]))
        if kept == count:
            return
        if existing <= fitting:
            raise Raised(ExceptionCode.INVALID_OPERAND, kind, start + existing)
        raise _overflow(machine)

    return _logging(rule)


def _stack(token: Token, stack_of: Callable[[Machine, int], Sequence[int]], frames_max: int = 0) -> Rule:
    """Return the rule of ``log kstack|ustack``; ``frames_max`` takes the place of an operand that is not there."""

    def rule(machine: Machine, frames: int) -> None:
        if machine.room < ITEM_PREFIX_SIZE:
            raise _overflow(machine)
        room = min(frames_max or frames, (machine.room - ITEM_PREFIX_SIZE) // machine.word_size)
        kept = list(stack_of(machine, room)[:room])
        _prefixed(machine, token, len(kept), machine.words(kept))

    return _logging(rule)


def _kernel_stack(machine: Machine, frames: int) -> Sequence[int]:
    return machine.context.kernel_stack()


def _user_stack(machine: Machine, frames: int) -> Sequence[int]:
    return machine.context.user_stack(frames)


def _setmin(machine: Machine, minor: int) -> None:
    machine.minor = minor


def _setmin_popped(machine: Machine, operand: int) -> None:
    machine.minor = machine.pop() & 0xFFFF


def _setmaj(machine: Machine, major: int) -> None:
    machine.major = major


def _setmaj_popped(machine: Machine, operand: int) -> None:
    machine.major = machine.pop() & 0xFFFF


def _push_lp(machine: Machine, operand: int) -> None:
    machine.push(machine.lp)


def _push_plp(machine: Machine, operand: int) -> None:
    machine.push(machine.plp)


def _pop_lp(machine: Machine, operand: int) -> None:
    position = machine.pop()
    if position > machine.point.logmax:
        raise Raised(ExceptionCode.LOG_OVERFLOW, machine.point.logmax)
    machine.move_lp(position)


RULES: dict[str, Rule] = {
    "setmin <minor>": _setmin,
    "setmin": _setmin_popped,
    "setmaj <major>": _setmaj,
    "setmaj": _setmaj_popped,
    "log str": _flat(_string),
    "log mrf": _flat(_memory),
    "log ars": _segmented(_string_of_segment),
    "log mrs": _segmented(_memory_of_segment),
    "log mrp": _flat(_physical_memory),
    "log b, <count>": _cells(1),
    "log w, <count>": _cells(2),
    "log d, <count>": _cells(4),
    "log <count>": _cells(0),
    "log": _logging(_log_popped_count),
    "log lv": _variables(Token.LOCAL_VARIABLES, 1, lambda machine: machine.context.local_variables),
    "log gv": _variables(Token.GLOBAL_VARIABLES, 2, lambda machine: machine.context.global_variables),
    "log cv": _variables(Token.CPU_VARIABLES, 5, lambda machine: machine.context.cpu_variables()),
    "log tv": _variables(Token.THREAD_VARIABLES, 7, lambda machine: machine.context.thread_variables()),
    "log kstack, <frames>": _stack(Token.KERNEL_STACK, _kernel_stack),
    "log kstack": _stack(Token.KERNEL_STACK, _kernel_stack, KERNEL_FRAMES_MAX),
    "log ustack, <frames>": _stack(Token.USER_STACK, _user_stack),
    "log ustack": _stack(Token.USER_STACK, _user_stack, USER_FRAMES_MAX),
    "push lp": _push_lp,
    "push plp": _push_plp,
    "pop lp": _pop_lp,
}
