"""The engine of a run, as the command line asks for it and says which one it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.engines.choice import scope_problem
from dprobes.engines.interface import ScopeKind
from dprobes.engines.registry import AUTO, engine_row, named_engine, names, rows
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from click.shell_completion import CompletionItem

    from dprobes.engines.interface import Scope
    from dprobes.engines.options import EngineOptions

__all__ = [
    "EngineName",
    "check_scope",
    "engine_option",
    "note_engine",
    "note_running_cpus",
    "note_uprobe_holders",
    "stop_cpus_option",
    "verbose_option",
]


class EngineName(click.ParamType[str]):
    """The name of an engine, or NAME=ARGUMENT; ``choices`` are those that are shown."""

    name = "engine"

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text if there is such an engine; else it is a usage error."""
        try:
            named_engine(value)
        except EngineError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        return value

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return what the help shows."""
        return f"[{'|'.join(self.choices)}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Return the names that begin with what is there."""
        from click.shell_completion import CompletionItem

        starts = (each.partition("=") for each in self.choices)
        return [CompletionItem(name + equals) for name, equals, _ in starts if name.startswith(incomplete)]


def engine_option(
    text: str, *, with_arguments: bool = False, managed: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return the option ``--engine``; its help says what the engines with an argument do, if they can be asked for.

    Those that are not for the manager are left out where a program is ``managed``.
    """
    left_out = {row.usage for row in rows() if managed and not row.is_managed}
    shown = [name for name in names() if (with_arguments or "=" not in name) and name not in left_out]
    text += "".join(f" {row.usage} {row.summary}." for row in rows() if row.summary and row.usage in shown)
    return click.option("--engine", "engine_name", type=EngineName(shown), default=AUTO, help=text)


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
            raise click.UsageError(f"--engine {text} says what is probed: leave out {left_out} and --uid")
        scope = replace(scope, endpoint=argument)
    if (problem := scope_problem(name, scope, options)) is not None:
        raise click.UsageError(problem)
    return name, scope


def note_engine(name: str, reason: str | None, *, verbose: bool) -> None:
    """Say why an engine was taken, if a user wants to know and has not asked for it."""
    if reason is not None and verbose:
        console.note(f"engine {name}: {reason}")


def note_uprobe_holders() -> None:
    """Name the processes of dprobes that hold uprobes: a CONFLICT with a breakpoint may be with one of theirs."""
    from dprobes.engines.breakpointowners import uprobe_holders

    for pid in uprobe_holders():
        console.note(f"process {pid} is a dprobes that holds uprobes: such a breakpoint may be one of its own")


def stop_cpus_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``--stop-cpus``, which the original has, to a command."""
    able = ", ".join(row.name for row in rows() if row.stops_all)
    help_ = f"Stop all processors at each hit ({able}, which does so anyway)."
    return click.option("--stop-cpus", is_flag=True, help=help_)(function)


def note_running_cpus(name: str) -> None:
    """Say that the processors are not stopped, unless the engine is one that does so."""
    if name == AUTO or not engine_row(name).stops_all:
        console.note("--stop-cpus has no effect: probepoints are inserted without stopping the processors")


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``-v`` to a command."""
    return click.option("-v", "--verbose", is_flag=True, help="Report which engine was chosen, and why.")(function)
