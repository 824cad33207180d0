"""
Blocks that dprobes itself executes, ``begin``, ``every`` and ``end``, and the restrictions on their contents.

They are executed without a hit, so neither they nor the functions that they call can use registers or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed_program, typed_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typedtree.typed_program import TypedBlock, TypedFunction
    from dprobes.source_text import Span
    from dprobes.tree_nodes import Node

__all__ = ["SYSTEM", "ToolProgram", "check_block"]

SYSTEM = ("pid", "tid", "uid", "procid", "time")
"""The system variables that blocks of the tool can use."""

_ELSEWHERE = {
    typed_values.VariableKind.PER_CPU: "a variable of each CPU",
    typed_values.VariableKind.THREAD: "a variable of each thread",
}


@dataclass(frozen=True, slots=True)
class ToolProgram:
    """
    ``begin``, ``every`` and ``end`` blocks of a program, which dprobes itself executes, with the functions they call.

    ``tables`` has the names of tables by number. ``word_size`` is in bytes. ``jmpmax`` is the maximum number of jumps
    of one execution.
    """

    blocks: tuple[TypedBlock, ...]
    functions: Mapping[str, TypedFunction]
    tables: tuple[str, ...]
    word_size: int
    jmpmax: int

    @property
    def shown(self) -> frozenset[str]:
        """The tables that the program itself prints, by ``print``."""
        return frozenset(
            statement.table
            for block in self.blocks
            for statement in typed_program.statements_in(block.body)
            if isinstance(statement, typed_program.Show)
        )


def check_block(block: TypedBlock, functions: Mapping[str, TypedFunction], diagnostics: Diagnostics) -> None:
    """Add an error for each statement of a block of the tool that needs registers or memory of a hit."""
    for span, problem in _problems(block.body, functions, set()):
        hint = "'begin', 'every' and 'end' run in the tool: they have variables and tables"
        diagnostics.error(span, f"'{block.block.written}' has no hit, and so cannot use {problem}", hint=hint)


def _problems(
    body: typed_program.Statement, functions: Mapping[str, TypedFunction], seen: set[str]
) -> Iterator[tuple[Span, str]]:
    for statement in typed_program.statements_in(body):
        if isinstance(statement, typed_program.Steps | typed_program.Skip):
            continue
        for value in statement.children():
            if isinstance(value, typed_values.Argument) and (problem := _problem(value, functions, seen)) is not None:
                yield statement.span, problem
                break


def _problem(value: Node, functions: Mapping[str, TypedFunction], seen: set[str]) -> str | None:
    """Return the reason why a value or a part of it needs a hit; None if it needs none."""
    match value:
        case typed_values.Memory() | typed_values.BitField() | typed_values.TextTest() | typed_values.Text():
            return "memory of a process"
        case typed_values.Bytes() | typed_values.Symbol():
            return "memory of a process"
        case typed_values.Register():
            return "a register"
        case typed_values.StackTrace():
            return "a call stack"
        case typed_values.NetworkAddress(_, size):
            return "network addresses" if size is None else "memory of a process"
        case typed_values.System(name) if name not in SYSTEM:
            return "a value of a hit"
        case typed_values.Variable(kind) if kind in _ELSEWHERE:
            return _ELSEWHERE[kind]
        case typed_values.TextChoice():
            return "a choice between strings"
    found = next((p for each in value.children() if (p := _problem(each, functions, seen)) is not None), None)
    if found is None and isinstance(value, typed_values.FunctionCall):
        return _problem_of_function(value.name, functions, seen)
    return found


def _problem_of_function(name: str, functions: Mapping[str, TypedFunction], seen: set[str]) -> str | None:
    if name in seen or name not in functions:
        return None
    seen.add(name)
    problem = next(iter(_problems(functions[name].body, functions, seen)), None)
    return None if problem is None else f"a call of '{name}', which uses {problem[1]}"
