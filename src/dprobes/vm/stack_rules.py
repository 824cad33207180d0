"""The rules of arithmetic, the RPN stack, variables and the heap."""

# ruff: noqa: ARG001 - all rules have the same two parameters

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dprobes.rpn.instruction_set import RPN_STACK_CELLS, ExceptionCode
from dprobes.rpn.word_arithmetic import BINARY, COMPARISONS, DIVISIONS, FILLS, SHIFTS, complement, mask_of
from dprobes.vm.rpn_machine import HeapExhaustedError, Machine, Raised
from dprobes.vm.world_context import SharedCells

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

    from dprobes.rpn.word_arithmetic import Comparison, Division

__all__ = ["RULES", "add_to_variable", "store_variable"]

if TYPE_CHECKING:
    Rule = Callable[[Machine, Any], None]
    Sized = Callable[[int, int, int], int]
    """An operation on two numbers; the third argument is the width of the word in bits."""


# Arithmetic and logic


def _binary(operation: Callable[[int, int], int]) -> Rule:
    """Return the rule that pops val1 (the top) and val2, and pushes ``operation(val1, val2)``."""

    def rule(machine: Machine, operand: int) -> None:
        val1 = machine.pop()
        machine.poke(operation(val1, machine.peek()))

    return rule


def _comparison(comparison: Comparison) -> Rule:
    def rule(machine: Machine, operand: int) -> None:
        val1 = machine.pop()
        machine.poke(comparison.of_words(val1, machine.peek(), machine.bits))

    return rule


def _division(operation: Division) -> Rule:
    """Return the rule that pops divisor and dividend, and pushes the remainder, then the quotient."""
    function, is_signed = operation

    def rule(machine: Machine, operand: int) -> None:
        divisor, dividend = machine.pop(), machine.pop()
        if divisor == 0:
            raise Raised(ExceptionCode.DIVIDE_BY_ZERO)
        if is_signed:
            sign = 1 << (machine.bits - 1)
            divisor, dividend = (divisor ^ sign) - sign, (dividend ^ sign) - sign
        quotient, remainder = function(dividend, divisor)
        machine.push(remainder)
        machine.push(quotient)

    return rule


def _shift(operation: Sized) -> tuple[Rule, Rule]:
    """Return the rules of a shift's two forms: with the count as operand, and with the count below the value."""

    def immediate(machine: Machine, count: int) -> None:
        machine.poke(operation(machine.peek(), count, machine.bits))

    def popped(machine: Machine, operand: int) -> None:
        value = machine.pop()
        machine.poke(operation(value, machine.peek(), machine.bits))

    return immediate, popped


def _fill(operation: Sized) -> tuple[Rule, Rule]:
    """Return the rules of the two forms of ``pbl`` and similar: with n as operand, and with n on top of the value."""

    def apply(machine: Machine, value: int, n: int) -> None:
        if not 1 <= n <= machine.bits:
            raise Raised(ExceptionCode.INVALID_OPERAND, 3, n)
        machine.push(operation(value, n, machine.bits))

    def immediate(machine: Machine, n: int) -> None:
        apply(machine, machine.pop(), n)

    def popped(machine: Machine, operand: int) -> None:
        n, value = machine.pop(), machine.pop()
        apply(machine, value, n)

    return immediate, popped


_COUNTED = {
    **{name: _shift(operation) for name, operation in SHIFTS.items()},
    **{name: _fill(operation) for name, operation in FILLS.items()},
}
"""The two rules, with operand and without, of each instruction that has both forms."""


# The RPN stack


def _xchg(machine: Machine, operand: int) -> None:
    top, below = machine.peek(0), machine.peek(1)
    machine.poke(below, 0)
    machine.poke(top, 1)


def _dup(machine: Machine, times: int) -> None:
    value = machine.peek()
    for _ in range(times):
        machine.push(value)


def _dup_popped(machine: Machine, operand: int) -> None:
    value, count = machine.pop(), machine.pop()
    # More than 1024 pushes fill the stack with the value; the others only move TSP.
    written = min(count + 1, RPN_STACK_CELLS)
    machine.tsp -= count + 1 - written
    for _ in range(written):
        machine.push(value)


def _ros(machine: Machine, cells: int) -> None:
    machine.tsp += cells


def _cell(machine: Machine, position: int) -> int:
    return machine.cells[position % RPN_STACK_CELLS]


def _set_cell(machine: Machine, position: int, value: int) -> None:
    machine.cells[position % RPN_STACK_CELLS] = value


def _pointer_rules(name: str) -> dict[str, Rule]:
    """Return the rules of the stack pointer ``name``, tsp or sbp, and of the cells at a distance from it."""
    pointer = attrgetter(name)

    def push(machine: Machine, n: int) -> None:
        machine.push(_cell(machine, pointer(machine) + n))

    def pop(machine: Machine, n: int) -> None:
        position = pointer(machine) + n  # before the pop
        _set_cell(machine, position, machine.pop())

    def pop_popped(machine: Machine, operand: int) -> None:
        value, n = machine.pop(), machine.pop()
        _set_cell(machine, pointer(machine) + n, value)

    def copy(machine: Machine, n: int) -> None:
        _set_cell(machine, pointer(machine) + n, machine.peek())

    return {
        f"push {name}, <n>": push,
        f"push {name}": lambda machine, _: push(machine, machine.pop()),
        f"pop {name}, <n>": pop,
        f"pop {name}": pop_popped,
        f"copy {name}, <n>": copy,
        f"copy {name}": lambda machine, _: copy(machine, machine.pop()),
        f"save {name}": lambda machine, _: machine.push(pointer(machine)),
        f"restore {name}": lambda machine, _: setattr(machine, name, machine.pop()),
    }


# Variables


def store_variable(values: MutableSequence[int], index: int, value: int, word_size: int) -> None:
    """Set the variable ``index`` to ``value`` modulo the word; a word of 4 bytes leaves its upper half unchanged."""
    mask = mask_of(8 * word_size)
    if isinstance(values, SharedCells):
        values.store(index, value & mask, word_size)
    else:
        values[index] = values[index] & ~mask | value & mask


def add_to_variable(values: MutableSequence[int], index: int, amount: int, word_size: int) -> None:
    """Add ``amount`` to the variable ``index``, modulo the word; in shared cells the addition is atomic."""
    if isinstance(values, SharedCells):
        values.add(index, amount, word_size)
    else:
        store_variable(values, index, values[index] + amount, word_size)


def _variable_rules(name: str, kind: int, values_of: Callable[[Machine], MutableSequence[int]]) -> dict[str, Rule]:
    """Return the rules of variables ``name``: lv, gv, cv or tv; ``kind`` is parameter 1 of INVALID_OPERAND."""

    def checked(machine: Machine, index: int) -> MutableSequence[int]:
        values = values_of(machine)
        if index >= len(values):
            raise Raised(ExceptionCode.INVALID_OPERAND, kind, index)
        return values

    def load(machine: Machine, index: int) -> None:
        machine.push(checked(machine, index)[index])

    def store(machine: Machine, index: int, value: int) -> None:
        store_variable(checked(machine, index), index, value, machine.word_size)

    def add(machine: Machine, index: int, amount: int) -> None:
        add_to_variable(checked(machine, index), index, amount, machine.word_size)

    def pop(machine: Machine, index: int) -> None:
        store(machine, index, machine.pop())

    def pop_popped(machine: Machine, operand: int) -> None:
        value, index = machine.pop(), machine.pop()
        store(machine, index, value)

    def move_popped(machine: Machine, operand: int) -> None:
        index = machine.pop()
        store(machine, index, machine.peek())

    return {
        f"push {name}, <{name}>": load,
        f"push {name}": lambda machine, _: load(machine, machine.pop()),
        f"pop {name}, <{name}>": pop,
        f"pop {name}": pop_popped,
        f"move {name}, <{name}>": lambda machine, index: store(machine, index, machine.peek()),
        f"move {name}": move_popped,
        f"inc {name}, <{name}>": lambda machine, index: add(machine, index, 1),
        f"inc {name}": lambda machine, _: add(machine, machine.pop(), 1),
        f"dec {name}, <{name}>": lambda machine, index: add(machine, index, -1),
        f"dec {name}": lambda machine, _: add(machine, machine.pop(), -1),
    }


# The heap


def _malloc(machine: Machine, operand: int) -> None:
    size = machine.pop()
    try:
        machine.push(machine.heap.allocate(size))
    except HeapExhaustedError:
        raise Raised(ExceptionCode.HEAP_NOMEM, size) from None


def _free(machine: Machine, operand: int) -> None:
    handle = machine.pop()
    if not machine.heap.release(handle):
        raise Raised(ExceptionCode.HEAP_INVALID_HANDLE, handle)


def _heap_range(machine: Machine, handle: int, offset: int, length: int) -> int:
    """
    Return the position in the heap's memory of ``length`` bytes at byte ``offset`` of a block.

    Raise HEAP_INVALID_HANDLE if no block has this handle, HEAP_INVALID_OFFSET if the range is not within the block.
    """
    size = machine.heap.block_size(handle)
    if size is None:
        raise Raised(ExceptionCode.HEAP_INVALID_HANDLE, handle, offset)
    if offset + length > size:
        raise Raised(ExceptionCode.HEAP_INVALID_OFFSET, handle, offset)
    return handle + offset


def _push_heap(width: int) -> Rule:
    def rule(machine: Machine, count: int) -> None:
        offset, handle = machine.pop(), machine.pop()
        start = _heap_range(machine, handle, offset, count * width)
        memory = machine.heap.memory
        for n in reversed(range(count)):
            value = memory[start + n * width : start + (n + 1) * width]
            machine.push_wide(int.from_bytes(value, machine.architecture.byte_order), 8 * width)

    return rule


def _pop_heap(width: int) -> Rule:
    def rule(machine: Machine, count: int) -> None:
        offset, handle = machine.pop(), machine.pop()
        cells = -(-width // machine.word_size)
        values = [sum(machine.peek(n * cells + c) << (c * machine.bits) for c in range(cells)) for n in range(count)]
        machine.tsp += count * cells
        start = _heap_range(machine, handle, offset, count * width)
        for n, value in enumerate(values):
            data = (value & ((1 << 8 * width) - 1)).to_bytes(width, machine.architecture.byte_order)
            machine.heap.memory[start + n * width : start + (n + 1) * width] = data

    return rule


RULES: dict[str, Rule] = {
    **{name: _binary(operation.function) for name, operation in BINARY.items()},
    **{name: _comparison(comparison) for name, comparison in COMPARISONS.items()},
    "neg": lambda machine, _: machine.poke(complement(machine.peek())),
    **{name: _division(operation) for name, operation in DIVISIONS.items()},
    **{f"{name} <bits>": immediate for name, (immediate, _) in _COUNTED.items()},
    **{name: popped for name, (_, popped) in _COUNTED.items()},
    "push <value>": lambda machine, value: machine.push(value),
    "xchg": _xchg,
    "dup <times>": _dup,
    "dup": _dup_popped,
    "ros <cells>": _ros,
    **_pointer_rules("sbp"),
    **_pointer_rules("tsp"),
    **_variable_rules("lv", 1, lambda machine: machine.context.local_variables),
    **_variable_rules("gv", 2, lambda machine: machine.context.global_variables),
    **_variable_rules("cv", 5, lambda machine: machine.context.cpu_variables()),
    **_variable_rules("tv", 7, lambda machine: machine.context.thread_variables()),
    "malloc": _malloc,
    "free": _free,
    **{f"push h, u{8 << n}, <values>": _push_heap(1 << n) for n in range(4)},
    **{f"pop h, u{8 << n}, <values>": _pop_heap(1 << n) for n in range(4)},
}
