"""The engine of a run, as the command line asks for it and says which one it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dprobes.cli import console
from dprobes.engines.auto import USUAL_REASON
from dprobes.engines.choice import NAMES, EngineOptions, Selection, scope_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.choice import Checked
    from dprobes.engines.interface import Engine, Scope

__all__ = [
    "NAMES",
    "EngineOptions",
    "Selection",
    "check_scope",
    "note_engine",
    "note_uprobe_holders",
    "settle",
    "verbose_option",
]


def check_scope(name: str, scope: Scope, options: EngineOptions) -> None:
    """Raise a usage error if the engine cannot be asked for with a scope and options."""
    if (problem := scope_problem(name, scope, options)) is not None:
        raise click.UsageError(problem)


def settle(selection: Selection, compiled: Checked, *, verbose: bool) -> Engine:
    """Return the engine that can insert a compiled program, and say why ``auto`` takes it."""
    engine = selection.settle(compiled)
    note_engine(engine.name, selection.reason, verbose=verbose)
    return engine


def note_engine(name: str, reason: str | None, *, verbose: bool) -> None:
    """Say why an engine was taken, unless it was asked for, or is what a user expects and ``verbose`` is not set."""
    if reason is not None and (verbose or reason != USUAL_REASON):
        console.note(f"engine {name}: {reason}")


def note_uprobe_holders() -> None:
    """Name the processes of dprobes that hold uprobes: a CONFLICT with a breakpoint may be with one of theirs."""
    from dprobes.engines.breakpointowners import uprobe_holders

    for pid in uprobe_holders():
        console.note(f"process {pid} is a dprobes that holds uprobes: such a breakpoint may be one of its own")


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``-v`` to a command."""
    return click.option("-v", "--verbose", is_flag=True, help="Say always which engine was taken, and why.")(function)
