"""
Control flow of one piece of code, and the results of its analysis: reachability and stack depth.

Depths are upper bounds, counted in cells that the current hit has written. If even the upper bound is too small, a pop
certainly reads a cell that was never written. UNKNOWN means that there is no bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, Flow, Group, OperandKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Code, Instruction, Program

__all__ = ["UNKNOWN", "StackEffect", "depths", "procedure_gains", "stack_effect", "successors", "unreachable"]


class StackEffect(NamedTuple):
    """
    Numbers of cells that an instruction pops and pushes.

    ``popped`` is the number of cells that are certainly read. ``exact`` is False if the number of cells, or the new
    value of TSP, is known only at run time.
    """

    popped: int
    pushed: int
    exact: bool = True


_EFFECTS = 4096
"""Maximum number of cached effects: the table has hundreds of rows, and operands vary."""

# Instructions that set TSP to a value that the program computes or an extension chooses.
_MOVES_TSP = frozenset({"restore tsp", "callk", "callk <name>"})


def stack_effect(instruction: Instruction, architecture: Architecture, tables: Sequence[Table] = ()) -> StackEffect:
    """
    Return the numbers of cells that an instruction pops from and pushes onto the RPN stack of a processor.

    ``tables`` are the keyed tables of the program, whose keys ``tally`` pops.
    """
    row, operand = instruction.row, instruction.operand
    if row.group is Group.TABLE:
        return _effect_on_table(instruction, architecture.word_size, tables)
    if row.operand_kind is OperandKind.REGISTER and row.operator == "push":
        register = architecture.register(operand) if isinstance(operand, (str, int)) else None
        if register is None:  # unknown: the checker reports it
            return StackEffect(0, 1)
        return StackEffect(register.selector_cells, register.cells(architecture.word_size))
    is_heap = row.operand_kind is OperandKind.HEAP_COUNT and row.operator in ("push", "pop")
    times = operand if isinstance(operand, int) and (is_heap or "*n" in row.effect) else 0
    if is_heap:
        moved = times * _memory_cells(row.syntax, architecture.word_size)
        return StackEffect(2 + moved, 0) if row.operator == "pop" else StackEffect(2, moved)
    return _written_effect(row.syntax, row.effect, times, architecture.word_size)


@lru_cache(_EFFECTS)
def _written_effect(syntax: str, effect: str, times: int, word_size: int) -> StackEffect:
    before, _, after = effect.partition("--")
    cells = _memory_cells(syntax, word_size)
    popped, popped_exact = _count(before, times, cells)
    pushed, pushed_exact = _count(after, times, cells)
    return StackEffect(popped, pushed, popped_exact and pushed_exact and syntax not in _MOVES_TSP)


def _effect_on_table(instruction: Instruction, word_size: int, tables: Sequence[Table]) -> StackEffect:
    from dprobes.rpn.keyed_tables import operated_table

    table = operated_table(instruction.row, instruction.operand, tables)
    if table is None:  # the checker reports it, and it is an exception
        return StackEffect(0, 0)
    keys = table.key_cells(word_size)
    match instruction.row.operator:
        case "tally" | "add":
            return StackEffect(keys + table.tallied_cells(word_size), 0)
        case "push":
            return StackEffect(keys, table.shown_cells(word_size))
        case _:
            return StackEffect(keys, 0)


def _count(side: str, times: int, cells: int) -> tuple[int, bool]:
    total, exact = 0, True
    for item in side.split():
        match item.rpartition("*")[2] if "*" in item else "":
            case "n":
                total += times
            case "cells":
                total += cells
            case "?":
                exact = False
            case _:
                total += 1
    return total, exact


@cache
def _memory_cells(syntax: str, word_size: int) -> int:
    """
    Return the number of cells of the value that an instruction pushes.

    ``syntax`` contains the value's width as ``u8`` to ``u64``. Without a width, the value has 64 bits.
    """
    if syntax == "push comm":
        return -(-PROCESS_NAME_SIZE // word_size)
    width = re.search(r"u(8|16|32|64)\b", syntax)
    return -(-int(width.group(1) if width else 64) // (8 * word_size))


UNKNOWN = 1 << 30
"""Marker for a stack depth that has no known bound."""

_ENDS = (Flow.RETURN, Flow.RAISE, Flow.END)


@dataclass(frozen=True, slots=True)
class Underflow:
    """Certain underflow: the instruction at ``index`` pops ``needed`` cells, but there are at most ``depth``."""

    index: int
    needed: int
    depth: int


def successors(code: Code, index: int) -> Iterator[int]:
    """Iterate over the indices of the instructions that may follow the one at ``index``, without exception handlers."""
    instruction = code.instructions[index]
    flow = instruction.row.flow
    if flow in (Flow.JUMP, Flow.BRANCH):
        target = code.labels.get(str(instruction.operand))
        if target is not None and target < len(code.instructions):
            yield target
    if flow in (Flow.NEXT, Flow.BRANCH, Flow.CALL) and index + 1 < len(code.instructions):
        yield index + 1


def _exception_handler(code: Code, index: int) -> int | None:
    """
    Return the index of the exception handler that an ``sx`` at ``index`` sets.

    Return None for other instructions, and for a label that does not exist.
    """
    instruction = code.instructions[index]
    if instruction.row.syntax != "sx <label>":
        return None
    target = code.labels.get(str(instruction.operand))
    return target if target is not None and target < len(code.instructions) else None


def unreachable(code: Code) -> list[range]:
    """Return the index ranges of consecutive instructions that control never reaches."""
    seen: set[int] = set()
    todo = [0] if code.instructions else []
    while todo:
        index = todo.pop()
        if index in seen:
            continue
        seen.add(index)
        todo += successors(code, index)
        if (handler := _exception_handler(code, index)) is not None:
            todo.append(handler)
    runs: list[range] = []
    for index in range(len(code.instructions)):
        if index in seen:
            continue
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def depths(
    code: Code, architecture: Architecture, gains: Mapping[str, int], entry: int = 0, tables: Sequence[Table] = ()
) -> tuple[dict[int, int], list[Underflow]]:
    """
    Return an upper bound of the stack depth before each reachable instruction, and the certain underflows.

    The first result is keyed by the index of the instruction. ``gains`` maps a procedure to the number of cells that a
    call adds to the stack. ``entry`` is the depth in cells at the start. ``tables`` are those of the program.
    """
    before: dict[int, int] = {}
    rounds: dict[int, int] = {}
    todo = [(0, entry)] if code.instructions else []
    while todo:
        index, depth = todo.pop()
        if before.get(index, -1) >= depth:
            continue
        # A depth that keeps growing belongs to a loop that pushes: it has no bound.
        rounds[index] = rounds.get(index, 0) + 1
        before[index] = depth = UNKNOWN if rounds[index] > 8 else depth
        after = _depth_after(code.instructions[index], depth, architecture, gains, tables)
        todo += [(target, after) for target in successors(code, index)]
        if (handler := _exception_handler(code, index)) is not None:
            todo.append((handler, UNKNOWN))
    underflows = []
    for index, depth in sorted(before.items()):
        needed = stack_effect(code.instructions[index], architecture, tables).popped
        if needed > depth:
            underflows.append(Underflow(index, needed, depth))
    return before, underflows


def _depth_after(
    instruction: Instruction, depth: int, architecture: Architecture, gains: Mapping[str, int], tables: Sequence[Table]
) -> int:
    if depth >= UNKNOWN:
        return UNKNOWN
    if instruction.row.flow is Flow.CALL:
        gain = gains.get(str(instruction.operand), UNKNOWN)
        return UNKNOWN if gain >= UNKNOWN else max(0, depth + gain)
    effect = stack_effect(instruction, architecture, tables)
    if not effect.exact:
        return UNKNOWN
    return max(0, depth - effect.popped) + effect.pushed


def procedure_gains(program: Program, architecture: Architecture) -> dict[str, int]:
    """Return the number of cells that a call of each procedure adds to the stack; UNKNOWN for recursive procedures."""
    procedures = {procedure.name: procedure.code for procedure in program.procedures}
    gains: dict[str, int] = {}

    # A procedure is analysed with an initial depth so high that its pops never reach 0.
    base = UNKNOWN // 2

    def measure(name: str, pending: tuple[str, ...]) -> int:
        if name in gains:
            return gains[name]
        if name in pending or name not in procedures or len(pending) > 64:
            return UNKNOWN
        code = procedures[name]
        called = {str(i.operand) for i in code.instructions if i.row.flow is Flow.CALL}
        inner = {callee: measure(callee, (*pending, name)) for callee in called}
        before, _ = depths(code, architecture, inner, base, program.tables)
        ends = [
            _depth_after(code.instructions[index], depth, architecture, inner, program.tables)
            for index, depth in before.items()
            if code.instructions[index].row.flow is Flow.RETURN or _runs_off(code, index)
        ]
        gains[name] = max((UNKNOWN if end >= UNKNOWN else end - base for end in ends), default=0)
        return gains[name]

    for name in procedures:
        measure(name, ())
    return gains


def _runs_off(code: Code, index: int) -> bool:
    return index + 1 == len(code.instructions) and code.instructions[index].row.flow not in (*_ENDS, Flow.JUMP)


def runs_off_end(code: Code) -> bool:
    """Return whether execution can continue past the last instruction of the code."""
    if not code.instructions:
        return True
    last = len(code.instructions) - 1
    return _runs_off(code, last) and not any(last in run for run in unreachable(code))
