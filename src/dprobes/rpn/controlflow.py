"""
Control flow of one piece of code, and what follows from it: reachability and stack depth.

Depths are upper bounds, counted in cells that the current hit has written: where even the upper bound is too small,
a pop certainly reads a cell that nothing wrote. UNKNOWN is no bound at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.rpn.effects import stack_effect
from dprobes.rpn.isa import Flow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.program import Code, Instruction, Program
    from dprobes.rpn.tables import Table

__all__ = ["UNKNOWN", "Underflow", "depths", "procedure_gains", "successors", "unreachable"]

UNKNOWN = 1 << 30
"""The depth about which nothing is known."""

_ENDS = (Flow.RETURN, Flow.RAISE, Flow.END)


@dataclass(frozen=True, slots=True)
class Underflow:
    """Say that the instruction at ``index`` pops ``needed`` cells where at most ``depth`` were pushed."""

    index: int
    needed: int
    depth: int


def successors(code: Code, index: int) -> Iterator[int]:
    """Iterate over the instructions to which control may go from the one at ``index``, exception handlers excluded."""
    instruction = code.instructions[index]
    flow = instruction.row.flow
    if flow in (Flow.JUMP, Flow.BRANCH):
        target = code.labels.get(str(instruction.operand))
        if target is not None and target < len(code.instructions):
            yield target
    if flow in (Flow.NEXT, Flow.BRANCH, Flow.CALL) and index + 1 < len(code.instructions):
        yield index + 1


def _exception_handler(code: Code, index: int) -> int | None:
    """Return the instruction that an ``sx`` at ``index`` names."""
    instruction = code.instructions[index]
    if instruction.row.syntax != "sx <label>":
        return None
    target = code.labels.get(str(instruction.operand))
    return target if target is not None and target < len(code.instructions) else None


def unreachable(code: Code) -> list[range]:
    """Return the runs of instructions that control never reaches."""
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
    Return the stack depth before each reachable instruction, and the certain underflows.

    ``gains`` gives for each procedure how many cells a call leaves more than it found; ``entry`` is the depth at the
    start, and ``tables`` are those of the program.
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
    """Return for each procedure how many cells a call leaves more than it found; UNKNOWN for recursive ones."""
    procedures = {procedure.name: procedure.code for procedure in program.procedures}
    gains: dict[str, int] = {}

    # A procedure is measured from a base so high that its pops never reach 0.
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
    """Return whether control can run off the end of the code."""
    if not code.instructions:
        return True
    last = len(code.instructions) - 1
    return _runs_off(code, last) and not any(last in run for run in unreachable(code))
