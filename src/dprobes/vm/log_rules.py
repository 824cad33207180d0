"""
Rules of the instructions that log, and of those that use keyed tables.

A log instruction sets PLP to LP when it starts, and to the new LP only if it succeeds. If data does not fit, the
instruction keeps the part that fits, with its true length, and raises LOG_OVERFLOW. A string is kept whole or not at
all (docs/reference/rpn.md, "Log buffer"). If the handler ignores the exception, nothing more is logged until ``pop
lp``, and the record is marked as cut.
"""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, assert_never

from dprobes.rpn.instruction_set import (
    ITEM_PREFIX_SIZE,
    KERNEL_FRAMES_MAX,
    PROCESS_NAME_SIZE,
    USER_FRAMES_MAX,
    ExceptionCode,
    Token,
)
from dprobes.rpn.keyed_tables import KeyKind
from dprobes.rpn.word_arithmetic import signed
from dprobes.vm.rpn_machine import LogFull, Machine, Raised, read_string
from dprobes.vm.world_context import AddressFault, SelectorFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.rpn.keyed_tables import Key

__all__ = ["LOG_RULES", "TABLE_RULES"]

if TYPE_CHECKING:
    Rule = Callable[[Machine, Any], None]


def _logging(body: Rule) -> Rule:
    """
    Return a rule that runs ``body`` and updates PLP, the previous log pointer.

    PLP is LP before ``body``, and after its success the new LP.
    """

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
    """Return the rule of ``log b|w|d, <count>``, with ``width`` in bytes, or of ``log <count>``, whose width is 0."""

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
        # One byte more than fits shows whether the string ends there.
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
    """
    Return the rule of ``log lv|gv|cv|tv``; ``kind`` is parameter 1 of INVALID_OPERAND.

    The index of a variable is checked before the room for its value.
    """

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
    """Return the rule of ``log kstack|ustack``. Unless ``frames_max`` is 0, it replaces the operand."""

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


def _pop_lp(machine: Machine, operand: int) -> None:
    position = machine.pop()
    if position > machine.point.logmax:
        raise Raised(ExceptionCode.LOG_OVERFLOW, machine.point.logmax)
    machine.move_lp(position)


LOG_RULES: dict[str, Rule] = {
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
    "push lp": lambda machine, _: machine.push(machine.lp),
    "push plp": lambda machine, _: machine.push(machine.plp),
    "pop lp": _pop_lp,
}


# The rules of the instructions of keyed tables.
#
# All operands are popped before a key is built. So if a string cannot be read, the stack is as after every exception,
# and the table is unchanged.


def _pop_key(machine: Machine, store: KeyedStore) -> bytes:
    """Pop the cells of all parts of a key, the last part first, and return the key as the table stores it."""
    keys = store.table.keys
    popped = [_popped(machine, key) for key in reversed(keys)]
    return b"".join([_part(machine, key, cells) for key, cells in zip(keys, reversed(popped), strict=True)])


def _popped(machine: Machine, key: Key) -> list[int]:
    """Pop the cells of one part of a table's key, and return them in the order of their removal."""
    return [machine.pop() for _ in range(key.popped(machine.word_size))]


def _part(machine: Machine, key: Key, cells: Sequence[int]) -> bytes:
    """Return one part of a key, or a value to be kept, as bytes. ``cells`` has its popped cells, the top first."""
    match key.kind:
        case KeyKind.STRING | KeyKind.CUT_STRING:
            text = read_string(machine.context, cells[0], key.size, machine.mask).removesuffix(b"\0")
            return text.ljust(key.bytes, b"\0")
        case KeyKind.BYTES:
            return machine.context.read(cells[0], key.size).ljust(key.bytes, b"\0")
        case KeyKind.TEXT | KeyKind.CUT_TEXT:
            return b"".join([cell.to_bytes(machine.word_size, "little") for cell in cells])
        case KeyKind.LONG | KeyKind.SIGNED_LONG | KeyKind.FRAMES | KeyKind.USER_FRAMES:
            return _words(_wide_numbers(machine, cells), key)
        case KeyKind.COMM:
            return machine.context.process_name()[: PROCESS_NAME_SIZE - 1].ljust(PROCESS_NAME_SIZE, b"\0")
        case KeyKind.USER_STACK:
            return _words([machine.context.pid(), *machine.context.user_stack(key.size)[: key.size]], key)
        case KeyKind.KERNEL_STACK:
            return _words(machine.context.kernel_stack()[: key.size], key)
        case KeyKind.SIGNED:
            return signed(cells[0], machine.bits).to_bytes(8, sys.byteorder, signed=True)
        case KeyKind.WORD | KeyKind.ADDRESS:
            return (cells[0] & machine.mask).to_bytes(8, sys.byteorder)
        case _:
            assert_never(key.kind)


def _wide_numbers(machine: Machine, cells: Sequence[int]) -> list[int]:
    """Return the 64-bit numbers in ``cells``; with words of 4 bytes each has two cells, the low word first."""
    if machine.word_size == 8:
        return list(cells)
    return [low | high << machine.bits for low, high in zip(cells[::2], cells[1::2], strict=True)]


def _words(addresses: Sequence[int], key: Key) -> bytes:
    return b"".join([address.to_bytes(8, sys.byteorder) for address in addresses]).ljust(key.bytes, b"\0")


def _tally(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    kept = store.table.value
    if kept is None:
        value = signed(machine.pop(), machine.bits) if store.table.kind.takes_value else 0
        store.tally(_pop_key(machine, store), value)
        return
    cells = _popped(machine, kept)
    key = _pop_key(machine, store)
    if kept.kind is KeyKind.LONG:
        store.tally(key, signed(_wide_numbers(machine, cells)[0], 64))
    else:
        store.keep(key, _part(machine, kept, cells))


def _add_to_table(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    if store.table.value is None:
        value = signed(machine.pop(), machine.bits)
    else:
        value = signed(_wide_numbers(machine, _popped(machine, store.table.value))[0], 64)
    store.add(_pop_key(machine, store), value)


def _push_table(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    key, kept = _pop_key(machine, store), store.table.value
    if kept is None:
        machine.push(store.value(key))
    elif kept.kind.is_string:
        found, size = store.kept(key), machine.word_size
        for place in reversed(range(0, len(found), size)):
            machine.push(int.from_bytes(found[place : place + size], "little"))
    elif store.table.keeps_bytes:
        for address in reversed(memoryview(store.kept(key)).cast("Q").tolist()):
            machine.push_wide(address, 64)
    else:
        machine.push_wide(store.value(key), 64)


def _delete(machine: Machine, number: int) -> None:
    store = machine.context.keyed_tables[number]
    store.delete(_pop_key(machine, store))


TABLE_RULES: dict[str, Rule] = {
    "tally <table>": _tally,
    "push table, <table>": _push_table,
    "add table, <table>": _add_to_table,
    "delete <table>": _delete,
}
