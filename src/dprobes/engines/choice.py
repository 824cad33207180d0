"""The engine of a run: the one that is named, or the one that ``auto`` chooses when the program is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dprobes.diagnostics import Severity
from dprobes.engines.auto import Choice, KernelSupport, choose, missing_privilege
from dprobes.engines.capabilities import ENGINES, refuse_unsupported, requirements
from dprobes.engines.linux.procfs import process_field
from dprobes.errors import NotSupportedError, PrivilegeError, SourceError
from dprobes.target.location import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.interface import Engine, Scope
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.program import Program
    from dprobes.target.location import SymbolProvider

__all__ = ["NAMES", "Checked", "EngineOptions", "Selection", "scope_problem"]

NAMES = ("auto", "ebpf", "ptrace")

MANY_PLACES = 500
"""From so many probepoints on it is asked who maps their file."""

MANY_BREAKPOINTS = 50_000
"""
So many breakpoints in processes that do not count are too many for a command alone.

To write one and to take it away took 4 us in processes that slept, and 77 us in those of a busy machine. Whoever runs
into one meanwhile has a hit that counts nowhere. With ptrace they are in the command only.
"""


class Checked(Protocol):
    """Hold a program that was checked, and where its probes are if its module was found."""

    @property
    def program(self) -> Program:
        """The program."""

    @property
    def architecture(self) -> Architecture:
        """The processor that it was checked for."""

    @property
    def resolved(self) -> ResolvedModule | None:
        """Its places."""

    @property
    def everywhere(self) -> Sequence[Probepoint]:
        """What is watched or sampled in every process."""

    @property
    def diagnostics(self) -> Diagnostics:
        """Where errors go."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Hold what the user says about engines; see the options of ``run``."""

    allow_write: bool = False
    symbols: SymbolProvider = OWN_SYMBOLS
    debugger: tuple[str, ...] | None = None
    core_directory: str = "."
    pid_namespace: bool = False
    exact: bool = False
    ring_size: int = 0
    replaceable: bool = False
    """Whether a program can be replaced by another one while it runs."""
    traces_already: bool = False
    """Whether the process in scope is traced by ourselves, for a program that is to be replaced."""
    tracers: frozenset[int] = frozenset()
    """The processes that trace others for programs beside which this one may be inserted."""
    features: Features | None = None
    """What is known of the kernel already."""


def scope_problem(name: str, scope: Scope, options: EngineOptions) -> str | None:
    """Return why the engine called ``name`` cannot be asked for with a scope and options."""
    if name != "ptrace":
        return None
    if not scope.is_tree:
        return "the ptrace engine needs a command (-c COMMAND) or a process (-p PID); other scopes need --engine ebpf"
    if options.pid_namespace:
        return "--pid-namespace needs --engine ebpf"
    return None


class Selection:
    """
    Select the engine of a run, in two steps.

    It is called when the program is parsed, and its engine decides what is refused. ``settle`` comes when the places of
    the probepoints are known: ``auto`` may take ptrace then.
    """

    def __init__(self, name: str, scope: Scope, options: EngineOptions) -> None:
        self._name = name
        self._scope = scope
        self._options = options
        self._choice: Choice | None = None
        self._engine: Engine | None = None

    def __call__(self, program: Program, architecture: Architecture) -> Engine:
        """Return the engine for a program."""
        name = self._name
        if name == "auto":
            needs = list(requirements(program, architecture))
            self._choice = choose(self._scope, needs, _kernel_support, traced_by=self._traced_by())
            name = self._choice.engine
        self._engine = self._make(name)
        return self._engine

    def refuse(self, program: Program, architecture: Architecture, diagnostics: Diagnostics) -> None:
        """Choose the engine for a program, and add an error for everything that it lacks."""
        engine = self(program, architecture)
        refuse_unsupported(program, architecture, engine.name, engine.capabilities, diagnostics)

    @property
    def reason(self) -> str | None:
        """Why ``auto`` takes the engine that it takes; None if the engine was named."""
        return self._choice.reason if self._choice is not None else None

    def settle(self, compiled: Checked) -> Engine:
        """Return the engine that can insert a program."""
        engine = self._engine
        assert engine is not None, "the program has not been compiled with this selection"
        if engine.name == "ebpf":
            engine = self._settle_ebpf(engine, compiled)
        elif self._scope.pid is not None and not self._options.traces_already:
            from dprobes.engines.refusals import check_traceable

            check_traceable(self._scope.pid, self._options.tracers)
        return engine

    def _settle_ebpf(self, engine: Engine, compiled: Checked) -> Engine:
        from dprobes.engines.ebpf.engine import EbpfEngine

        assert isinstance(engine, EbpfEngine)
        support = engine.support
        if support.problem is not None:
            remedy = support.remedy
            if self._choice is not None:
                remedy = f"{remedy}; for one command or process (-c, -p) there is an engine that needs neither"
            raise PrivilegeError(f"the ebpf engine cannot work here: {support.problem}", hint=remedy)
        if self._scope.is_tree and support.tree_problem is not None:
            raise NotSupportedError(
                f"the ebpf engine cannot follow the processes of -c and -p here: {support.tree_problem}",
                hint=f"use --engine ptrace, or {support.tree_remedy}",
            )
        if compiled.everywhere:
            engine.plan_everywhere(compiled.everywhere, compiled.diagnostics)
            return engine
        if compiled.resolved is None:
            if self._choice is None or not self._may_trace(compiled):
                return engine
            self._choice = Choice("ptrace", f"there is no module '{compiled.program.name}' on this machine yet")
            return self._make("ptrace")
        if self._choice is not None and self._may_trace(compiled):
            costly = self._cost_elsewhere(compiled.resolved)
            if costly is not None:
                self._choice = Choice("ptrace", costly)
                return self._make("ptrace")
        try:
            engine.plan(compiled.program, compiled.resolved, compiled.diagnostics)
        except SourceError as error:
            if self._choice is None or not self._may_trace(compiled):
                raise
            refusal = next(d for d in error.diagnostics if d.severity is Severity.ERROR)
            self._choice = Choice("ptrace", refusal.message)
            return self._make("ptrace")
        return engine

    def _cost_elsewhere(self, resolved: ResolvedModule) -> str | None:
        """Return why it costs too much to put the breakpoints for a command into all processes; None if it does not."""
        count = len(resolved.probes)
        if not self._scope.is_command or count < MANY_PLACES:
            return None
        from dprobes.engines.ebpf.attach.mappers import find_mappers

        mappers = len(find_mappers(resolved.module.path).found)
        if count * mappers < MANY_BREAKPOINTS:
            return None
        return (
            f"{count} breakpoints would be in each of {mappers} other processes that map the module as well, "
            "which takes longer than most commands run"
        )

    def _may_trace(self, compiled: Checked) -> bool:
        """Return whether the ptrace engine can take the place of the other one."""
        needs = requirements(compiled.program, compiled.architecture)
        able = all(need.capability in ENGINES["ptrace"] for need in needs)
        return able and self._scope.is_tree and self._traced_by() is None

    def _traced_by(self) -> str | None:
        if self._scope.pid is None or self._options.traces_already:
            return None
        tracer = int(process_field(self._scope.pid, "TracerPid") or 0)
        if not tracer or tracer in self._options.tracers:
            return None
        return f"process {tracer} ({process_field(tracer, 'Name')})"

    def _make(self, name: str) -> Engine:
        options = self._options
        if name == "ptrace":
            from dprobes.engines.ptrace.engine import PtraceEngine

            return PtraceEngine(
                allow_write=options.allow_write,
                symbols=options.symbols,
                debugger=options.debugger,
                core_directory=options.core_directory,
            )
        from dprobes.engines.ebpf.engine import EbpfEngine

        return EbpfEngine(
            allow_write=options.allow_write,
            symbols=options.symbols,
            debugger=options.debugger,
            core_directory=options.core_directory,
            pid_namespace=options.pid_namespace,
            exact=options.exact,
            command=self._scope.program or next(iter(self._scope.command), ""),
            ring_size=options.ring_size,
            replaceable=options.replaceable,
            features=options.features,
        )


def _kernel_support() -> KernelSupport:
    """Return what the kernel lets us do; without privileges nothing is tried, because all of it would fail."""
    if (missing := missing_privilege()) is not None:
        return KernelSupport(missing, "run dprobes as root")
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.ebpf.support import kernel_support

    return kernel_support(Features())
