"""From a program and the processes in scope to the engine and the job that insert it: refusals come first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.engines.choice import Selection
from dprobes.resolve.localmodule import resolve_here

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.choice import EngineOptions
    from dprobes.engines.interface import Engine, Scope
    from dprobes.resolve.localmodule import Compiled
    from dprobes.rpn.program import Program

__all__ = ["Prepared", "Vantage", "look_around", "prepare"]


@dataclass(frozen=True, slots=True)
class Vantage:
    """Say from whose point of view a module is looked for: a thread's, or that of a command; else this process's."""

    tid: int | None = None
    command: str | None = None


def look_around(scope: Scope, *, allow_self: bool = False) -> Vantage:
    """
    Return the point of view of a scope; raise an error of ours if no engine can take its process or command.

    ``allow_self`` allows a process of dprobes, which one that is about to execute a program may be.
    """
    if scope.command:
        from dprobes.target.executables import executable_of

        executable_of(scope.command[0])
        return Vantage(command=scope.command[0])
    if scope.pid is None:
        return Vantage()
    from dprobes.engines.linux.procfs import living_thread
    from dprobes.engines.refusals import check_process
    from dprobes.target.modules import root_of

    check_process(scope.pid, allow_self=allow_self or scope.program is not None)
    if scope.program is not None and not root_of(scope.pid):
        return Vantage(command=scope.program)  # what the process has mapped now says nothing about that
    return Vantage(tid=living_thread(scope.pid))


@dataclass(frozen=True)
class Prepared:
    """Hold a program that is checked and resolved, and the selection of its engine."""

    compiled: Compiled
    selection: Selection

    def engine(self) -> Engine:
        """Return the engine that can insert it; raise an error of ours if there is none."""
        return self.selection.settle(self.compiled)


def prepare(
    program: Program,
    diagnostics: Diagnostics,
    scope: Scope,
    vantage: Vantage,
    *,
    engine: str,
    options: EngineOptions,
) -> Prepared:
    """Find a program's module and resolve its probes; raise ``SourceError`` with everything that is wrong."""
    selection = Selection(engine, scope, options)
    compiled = resolve_here(
        program,
        diagnostics,
        allow_write=options.allow_write,
        symbols=options.symbols,
        pid=vantage.tid,
        command=vantage.command,
        refuse=selection.refuse,
    )
    return Prepared(compiled, selection)
