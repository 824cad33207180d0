"""
Checks of the order in which instructions are executed, and of what the RPN stack holds then: warnings and notes only.

What is certain follows from ``cfg``; where its bounds are open, nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.rpn import controlflow
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, LOG_WIDTHS, ExceptionCode, Flow

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.rpn.program import Code, Instruction, Program

__all__ = ["check_flow"]


def check_flow(program: Program, architecture: Architecture, diagnostics: Diagnostics) -> None:
    """Add to ``diagnostics`` what is doubtful about the order in which a program's instructions are executed."""
    gains = controlflow.procedure_gains(program, architecture)
    writes_below = any(_writes_below_top(i) for code in program.bodies() for i in code.instructions)
    for definition in program.definitions:
        code = definition.handler
        _check_unreachable(code, diagnostics)
        depths, underflows = controlflow.depths(code, architecture, gains, tables=program.tables)
        for index, depth in sorted(depths.items()):
            instruction = code.instructions[index]
            if instruction.row.flow is Flow.RETURN:
                message = "'ret' in a handler always raises CALL_MAX: there is no procedure to return from"
                diagnostics.warning(instruction.span, message, hint="write 'exit'")
            if not writes_below:
                _check_cell(instruction, depth, diagnostics)
        if not definition.exception_mask & ExceptionCode.LOG_OVERFLOW:
            _check_room(program.logmax, code, architecture.word_size, diagnostics)
        for underflow in underflows:
            instruction = code.instructions[underflow.index]
            cells = instruction.row.effect.partition("--")[0].strip()
            needed = f"{underflow.needed} cell{'s' if underflow.needed > 1 else ''} ({cells})"
            pushed = f"at most {underflow.depth} {'were' if underflow.depth > 1 else 'was'}"
            pushed = pushed if underflow.depth else "none was"
            diagnostics.warning(instruction.span, f"'{instruction}' needs {needed}, but {pushed} pushed")
        if not code.instructions:
            diagnostics.note(definition.span("offset"), "the handler is empty: a hit gives a record without data")
        elif controlflow.runs_off_end(code):
            span = code.instructions[-1].span
            diagnostics.note(span, "the handler has no 'exit' at its end; it acts as if it had one")
    for procedure in program.procedures:
        _check_unreachable(procedure.code, diagnostics)
        if controlflow.runs_off_end(procedure.code):
            diagnostics.warning(procedure.span, f"procedure '{procedure.name}' has no 'ret' at its end; one is added")


def _writes_below_top(instruction: Instruction) -> bool:
    """Return whether an instruction may write a cell that was not pushed, or move SBP or TSP."""
    return instruction.row.operator in ("copy", "restore") or instruction.row.syntax.startswith(
        ("pop sbp", "pop tsp", "callk")
    )


def _check_cell(instruction: Instruction, depth: int, diagnostics: Diagnostics) -> None:
    """
    Warn of a read of a cell that nothing has written, or that was popped (language.md, "Values").

    ``depth`` is an upper bound: the cells TSP+0 to TSP+depth-1 may be written, and in a handler, where SBP is the end
    of the stack, SBP-depth to SBP-1.
    """
    displacement = instruction.operand
    if not isinstance(displacement, int) or depth >= controlflow.UNKNOWN:
        return
    match instruction.row.syntax:
        case "push tsp, <n>":
            written = range(depth)
        case "push sbp, <n>":
            written = range(-depth, 0)
        case _:
            return
    if displacement not in written:
        cells = f"{depth} cell{'s' * (depth != 1)}"
        has = f"at most {cells} {'are' if depth != 1 else 'is'} on the stack" if depth else "the stack is empty"
        message = f"'{instruction}' reads a cell that nothing has written, or that was popped: {has}"
        diagnostics.warning(instruction.operand_place, message)


def _check_room(logmax: int, code: Code, word_size: int, diagnostics: Diagnostics) -> None:
    """Warn of the first instruction that logs more than there is room for, whatever is found at the hit."""
    least: dict[int, int] = {}
    todo = [(0, 0)] if code.instructions else []
    while todo:
        index, logged = todo.pop()
        if least.get(index, logged + 1) <= logged:
            continue
        least[index] = logged
        instruction = code.instructions[index]
        if instruction.row.syntax == "pop lp" or instruction.row.flow is Flow.CALL:
            return
        after = logged + _least_logged(instruction, word_size)
        todo += [(target, after) for target in controlflow.successors(code, index)]
    for index, logged in sorted(least.items()):
        instruction = code.instructions[index]
        needed = logged + _least_logged(instruction, word_size)
        if needed > logmax:
            message = (
                f"'{instruction}' has no room: the log has {_bytes(logmax)}, and at least {_bytes(needed)} are needed"
            )
            diagnostics.warning(instruction.span, message, hint="write a larger 'logmax' in the file header")
            return


def _least_logged(instruction: Instruction, word_size: int) -> int:
    """Return how many bytes an instruction logs at least, if there is room."""
    row = instruction.row
    if row.operator != "log" or row.syntax == "log st":
        return 0
    if row.syntax not in LOG_WIDTHS or not isinstance(instruction.operand, int):
        return ITEM_PREFIX_SIZE
    return (LOG_WIDTHS[row.syntax] or word_size) * instruction.operand


def _bytes(count: int) -> str:
    return f"{count} byte{'s' * (count != 1)}"


def _check_unreachable(code: Code, diagnostics: Diagnostics) -> None:
    for run in controlflow.unreachable(code):
        first = code.instructions[run.start]
        if first.row.flow in (Flow.END, Flow.RETURN) and len(run) == 1:
            continue  # an "exit" or "ret" behind a jump or another "exit" is a habit, not a mistake
        diagnostics.warning(first.span, f"'{first}' is never reached")
