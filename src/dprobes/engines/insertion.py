"""
The insertion of a program: what the command line, the Python API and the manager have in common.

Four steps, each of which may refuse: look around (``insertion``), find the probepoints (``prepare``), settle the engine
(``Prepared.engine``), and enter the session (``Prepared.session``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from dprobes.engines.engine_choice import Selection, scope_problem
from dprobes.engines.engine_interface import Job
from dprobes.engines.engine_registry import AUTO, engine_row
from dprobes.errors import EngineError
from dprobes.resolve.local_module import resolve_here

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.engine_interface import ControlledSession, Engine, Scope
    from dprobes.engines.engine_options import EngineOptions
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.record.log_record import Item
    from dprobes.resolve.local_module import Compiled
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.probed_module import SymbolProvider
    from dprobes.target.process_images import ProcessImages

__all__ = ["Insertion", "Prepared", "Vantage", "insertion", "look_around"]


@dataclass(frozen=True, slots=True)
class Vantage:
    """From whose point of view a module is looked for: a thread's, or that of a command; else this process's."""

    tid: int | None = None
    command: str | None = None


def look_around(scope: Scope, *, allow_self: bool = False) -> Vantage:
    """
    Return the point of view of a scope; raise an error of ours if no engine can take its process or command.

    ``allow_self`` allows a process of dprobes, which one that is about to execute a program may be.
    """
    if scope.command:
        from dprobes.target.loader_search import executable_of

        executable_of(scope.command[0])
        return Vantage(command=scope.command[0])
    if scope.pid is None or scope.endpoint is not None:
        return Vantage()  # a process behind an endpoint is none of this machine
    from dprobes.engines.refusals import check_process
    from dprobes.platform.linux.procfs import living_thread
    from dprobes.target.module_lookup import root_of

    check_process(scope.pid, allow_self=allow_self or scope.program is not None)
    if scope.program is not None and not root_of(scope.pid):
        return Vantage(command=scope.program)  # what the process has mapped now says nothing about that
    return Vantage(tid=living_thread(scope.pid))


class Present(Protocol):
    """A program that its owner has inserted already."""

    engine: str
    """The name of its engine."""

    @property
    def session(self) -> ControlledSession:
        """Its session."""


def members_of(session: ControlledSession) -> Sequence[ControlledSession]:
    """Return the sessions of single programs that a session consists of."""
    from dprobes.engines.companion_session import CompanionSession

    return session.members if isinstance(session, CompanionSession) else (session,)


def insertion(
    engine: str,
    scope: Scope,
    options: EngineOptions,
    *,
    allow_self: bool = False,
    replaces: Present | None = None,
    beside: Iterable[ControlledSession] = (),
) -> Insertion:
    """
    Return an insertion into a scope; raise an error of ours if no engine can be asked for that.

    ``replaces`` is the program whose place the new one takes, by the same engine unless one is named. ``beside`` are
    the sessions of the same owner. ``allow_self`` is that of ``look_around``. A thread stands for its process.
    """
    if scope.pid is not None and scope.endpoint is None:
        from dprobes.platform.linux.procfs import process_of

        scope = replace(scope, pid=process_of(scope.pid))
    if engine == AUTO and replaces is not None:
        engine = replaces.engine
    if (problem := scope_problem(engine, scope, options)) is not None:
        raise EngineError(problem)
    present = tuple(member for session in beside for member in members_of(session))
    if replaces is not None and len(members_of(replaces.session)) > 1:
        raise EngineError(
            "a program for several modules cannot be replaced by another one", hint="remove the other one first"
        )
    options = replace(
        options,
        traces_already=replaces is not None and engine_row(replaces.engine).is_tracer,
        present=present,
        tracers=frozenset(session.tracer for session in present if session.tracer is not None),
    )
    vantage = look_around(scope, allow_self=allow_self)
    return Insertion(engine, scope, options, vantage, replaces.session if replaces is not None else None, present)


@dataclass(frozen=True, slots=True)
class Insertion:
    """A scope that was looked at, for one program."""

    engine: str
    scope: Scope
    options: EngineOptions
    vantage: Vantage
    replaces: ControlledSession | None = None
    beside: tuple[ControlledSession, ...] = ()

    def prepare(
        self,
        program: Program,
        diagnostics: Diagnostics,
        symbols: SymbolProvider,
        *,
        allow_write: bool = False,
        filters: Sequence[str] = (),
    ) -> Prepared:
        """
        Find a program's module and resolve its probes; raise ``SourceError`` with everything that is wrong.

        ``allow_write`` allows what the options do not. Handlers are executed for the hits that all ``filters`` hold
        for.
        """
        if filters:
            from dprobes.filters.handler_filter import check_words, with_filters

            program = with_filters(program, filters, diagnostics)
        options = replace(self.options, symbols=symbols, allow_write=allow_write or self.options.allow_write)
        selection = Selection(self.engine, self.scope, options)
        compiled = resolve_here(
            program,
            diagnostics,
            allow_write=options.allow_write,
            symbols=symbols,
            pid=self.vantage.tid,
            command=self.vantage.command,
            refuse=selection.refuse,
            kernel=selection.kernel,
            processor=selection.processor,
        )
        if filters:
            check_words(filters, compiled.architecture)
        return Prepared(self, compiled, selection)


class Prepared:
    """A program that is checked and resolved, and its engine."""

    def __init__(self, owner: Insertion, compiled: Compiled, selection: Selection) -> None:
        self._insertion = owner
        self.compiled = compiled
        self._selection = selection

    @cached_property
    def engine(self) -> Engine:
        """The engine that can insert it; raises an error of ours if there is none."""
        return self._selection.settle(self.compiled)

    @property
    def reason(self) -> str | None:
        """Why ``auto`` takes the engine that it takes; None if the engine was named."""
        return self._selection.reason

    def session(
        self, items: Item, globals_: GlobalVariables | None = None, images: ProcessImages | None = None
    ) -> ControlledSession:
        """
        Return the session, which inserts the program when it is entered; records carry the header items.

        ``images`` are told what processes map.
        """
        return self.engine.run(self.job(items, globals_, images))

    def job(self, items: Item, globals_: GlobalVariables | None = None, images: ProcessImages | None = None) -> Job:
        """Return what the engine is to run."""
        owner = self._insertion
        return Job(
            self.compiled.program,
            owner.scope,
            items,
            self.compiled.resolved,
            self.compiled.kernel,
            globals_,
            owner.replaces,
            owner.beside,
            images,
        )
