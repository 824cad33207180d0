"""The effects of instructions on the depth of the RPN stack, as numbers."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.rpn.isa import PROCESS_NAME_SIZE, Group, OperandKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.program import Instruction
    from dprobes.rpn.tables import Table

__all__ = ["StackEffect", "stack_effect"]


@dataclass(frozen=True, slots=True)
class StackEffect:
    """
    Count the cells that an instruction pops and pushes.

    ``popped`` counts those that it certainly reads; ``exact`` is False if it pops or pushes a number of cells, or moves
    TSP to a place, that only the running program knows.
    """

    popped: int
    pushed: int
    exact: bool = True


_EFFECTS = 4096
"""Effects are kept for so many instructions and numbers: of the rows there are some hundreds."""

# Instructions that move TSP to a place that the program computes, or that an extension chooses.
_MOVES_TSP = frozenset({"restore tsp", "callk", "callk <name>"})


def stack_effect(instruction: Instruction, architecture: Architecture, tables: Sequence[Table] = ()) -> StackEffect:
    """Return the effect of ``instruction`` on a processor; ``tables`` are those of the program."""
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
    from dprobes.rpn.tables import table_of

    table = table_of(instruction.operand, tables)
    if table is None:  # unknown: the checker reports it, and it is an exception
        return StackEffect(0, 0)
    keys = table.key_cells(word_size)
    match instruction.row.operator:
        case "tally":
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
    """Return how many cells a value of the width in ``syntax`` takes; 64 bits where none is written."""
    if syntax == "push comm":
        return -(-PROCESS_NAME_SIZE // word_size)
    width = re.search(r"u(8|16|32|64)\b", syntax)
    return -(-int(width.group(1) if width else 64) // (8 * word_size))
