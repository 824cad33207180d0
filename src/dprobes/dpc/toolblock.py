"""
Blocks that the tool executes, ``begin``, ``every`` and ``end``: what they are, and what they cannot see.

They have no hit: no registers and no memory, neither themselves nor in the functions that they call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed, typedstatement
from dprobes.dpc.typedtree.valueproperties import operands_of
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typedtree.typedprogram import TypedBlock, TypedFunction
    from dprobes.source import Span

__all__ = ["SYSTEM", "ToolProgram", "check_block"]

SYSTEM = ("pid", "tid", "uid", "procid", "time")
"""What the tool knows of the system where it has no hit."""

_ELSEWHERE = {
    typed.VariableKind.PER_CPU: "a variable of each CPU",
    typed.VariableKind.THREAD: "a variable of each thread",
}


@dataclass(frozen=True, slots=True)
class ToolProgram:
    """
    All that the tool executes of a program.

    ``tables`` names its tables in the order of their numbers; a word of its modules has ``word_size`` bytes.
    """

    blocks: tuple[TypedBlock, ...]
    functions: Mapping[str, TypedFunction]
    tables: tuple[str, ...]
    word_size: int
    jmpmax: int

    @property
    def shown(self) -> frozenset[str]:
        """The tables that the program prints itself."""
        return frozenset(
            statement.table
            for block in self.blocks
            for statement in typedstatement.statements_in(block.body)
            if isinstance(statement, typedstatement.Show)
        )


def check_block(block: TypedBlock, functions: Mapping[str, TypedFunction], diagnostics: Diagnostics) -> None:
    """Add an error for each statement of a block that needs a hit."""
    for span, problem in _problems(block.body, functions, set()):
        hint = "'begin', 'every' and 'end' run in the tool: they have variables and tables"
        diagnostics.error(span, f"'{block.block.written}' has no hit, and so cannot use {problem}", hint=hint)


def _problems(
    body: typedstatement.Statement, functions: Mapping[str, TypedFunction], seen: set[str]
) -> Iterator[tuple[Span, str]]:
    for statement in typedstatement.statements_in(body):
        if isinstance(statement, typedstatement.Steps):
            continue
        for value in _values(statement):
            problem = _problem(value, functions, seen)
            if problem is not None:
                yield statement.span, problem
                break


def _values(statement: typedstatement.Statement) -> Iterator[typed.Argument]:
    match statement:
        case typedstatement.Evaluate(value) | typedstatement.Switch(value):
            yield value
        case typedstatement.Log(_, items):
            yield from items
        case typedstatement.Tally(_, keys, tallied):
            yield from keys
            if tallied is not None:
                yield tallied
        case typedstatement.Untally(_, keys):
            yield from keys
        case typedstatement.Select(condition):
            yield condition
        case typedstatement.Loop(test, step):
            yield from (each for each in (test, step) if each is not None)
        case typedstatement.Result(result) if result is not None:
            yield result


def _problem(value: typed.Argument, functions: Mapping[str, TypedFunction], seen: set[str]) -> str | None:
    """Return what a value needs a hit for; None if it does not."""
    match value:
        case typed.Memory() | typed.BitField() | typed.TextTest() | typed.Text() | typed.Bytes() | typed.Symbol():
            return "memory of a process"
        case typed.Register():
            return "a register"
        case typed.StackTrace():
            return "a call stack"
        case typed.NetworkAddress(_, size) if size is not None:
            return "memory of a process"
        case typed.NetworkAddress():
            return "network addresses"
        case typed.System(name) if name not in SYSTEM:
            return "a value of a hit"
        case typed.Variable(kind) | typed.Step(typed.Variable(kind)) | typed.Assign(typed.Variable(kind)) if (
            kind in _ELSEWHERE
        ):
            return _ELSEWHERE[kind]
        case typed.Assign(typed.Memory() | typed.BitField()) | typed.Step(typed.Memory() | typed.BitField()):
            return "memory of a process"
        case typed.Assign(typed.Register()) | typed.Step(typed.Register()):
            return "a register"
        case typed.FunctionCall(name, arguments):
            found = next((p for each in arguments if (p := _problem(each, functions, seen)) is not None), None)
            return found or _problem_of_function(name, functions, seen)
        case typed.KeptTest(typed.Kept(_, keys)) | typed.TableValue(_, keys) | typed.Kept(_, keys):
            return next((p for each in keys if (p := _problem(each, functions, seen)) is not None), None)
        case typed.CommName() | typed.Literal():
            return None
        case typed.TextChoice():
            return "a choice between strings"
    inner = (*operands_of(value), *_indices(value))
    return next((p for each in inner if (p := _problem(each, functions, seen)) is not None), None)


def _indices(value: typed.Value) -> tuple[typed.Value, ...]:
    match value:
        case typed.Variable(_, _, _, index) | typed.Assign(typed.Variable(_, _, _, index)) if index is not None:
            return (index,)
        case typed.Step(typed.Variable(_, _, _, index)) if index is not None:
            return (index,)
    return ()


def _problem_of_function(name: str, functions: Mapping[str, TypedFunction], seen: set[str]) -> str | None:
    if name in seen or name not in functions:
        return None
    seen.add(name)
    problem = next(iter(_problems(functions[name].body, functions, seen)), None)
    return None if problem is None else f"a call of '{name}', which uses {problem[1]}"
