"""The engine of a run, as the command line asks for it and says which one it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.engines.selection import NAMES, EngineOptions, Selection, scope_problem

if TYPE_CHECKING:
    from dprobes.engines.base import Engine, Scope
    from dprobes.engines.selection import Checked

__all__ = ["NAMES", "EngineOptions", "Selection", "check_scope", "settle"]


def check_scope(name: str, scope: Scope, options: EngineOptions) -> None:
    """Raise a usage error if the engine cannot be asked for with a scope and options."""
    if (problem := scope_problem(name, scope, options)) is not None:
        raise click.UsageError(problem)


def settle(selection: Selection, compiled: Checked) -> Engine:
    """Return the engine that can insert a compiled program, and say why ``auto`` takes it."""
    engine = selection.settle(compiled)
    if selection.reason is not None:
        console.note(f"engine {engine.name}: {selection.reason}")
    return engine
