"""The engine of a run, as the command line asks for it and says which one it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.cli.usageerror import usage_error
from dprobes.engines.choice import scope_problem
from dprobes.engines.interface import ScopeKind
from dprobes.engines.registry import AUTO, engine_row, named_engine

if TYPE_CHECKING:
    from dprobes.engines.interface import Scope
    from dprobes.engines.options import EngineOptions

__all__ = ["check_scope", "note_engine", "note_process", "note_running_cpus", "note_uprobe_holders"]


def check_scope(text: str, scope: Scope, options: EngineOptions) -> tuple[str, Scope]:
    """
    Return the name of the engine that a user asks for, and the scope, which what stands behind the name is part of.

    Raise a usage error if the engine cannot be asked for with the scope and options.
    """
    name, argument = named_engine(text)
    if argument is not None:
        row = engine_row(name)
        is_possible = (bool(scope.command) and row.starts_commands) or (scope.pid is not None and row.has_processes)
        if scope.kind is not ScopeKind.EVERYWHERE and not is_possible:
            possible = {"-c": row.starts_commands, "-p": row.has_processes, "--cgroup": False}
            left_out = ", ".join(option for option, is_there in possible.items() if not is_there)
            raise usage_error(f"--engine {text} says what is probed: leave out {left_out} and --uid")
        scope = replace(scope, endpoint=argument)
    if (problem := scope_problem(name, scope, options)) is not None:
        raise usage_error(problem)
    return name, scope


def note_engine(name: str, reason: str | None, *, verbose: bool) -> None:
    """Say why an engine was taken, if a user wants to know and has not asked for it."""
    if reason is not None and verbose:
        console.note(f"engine {name}: {reason}")


def note_process(asked: Scope, scope: Scope) -> None:
    """Name the process that is probed where ``asked`` has the number of another thread."""
    if asked.pid != scope.pid:
        console.note(f"{asked.pid} is a thread of process {scope.pid}, which is probed as a whole")


def note_uprobe_holders() -> None:
    """Name the processes of dprobes that hold uprobes: a CONFLICT with a breakpoint may be with one of theirs."""
    from dprobes.engines.breakpointowners import uprobe_holders

    for pid in uprobe_holders():
        console.note(f"process {pid} is a dprobes that holds uprobes: such a breakpoint may be one of its own")


def note_running_cpus(name: str) -> None:
    """Say that the processors are not stopped, unless the engine is one that does so."""
    if name == AUTO or not engine_row(name).stops_all:
        console.note("--stop-cpus has no effect: probepoints are inserted without stopping the processors")
