"""eBPF engine as an ``Engine``: it makes plans, and attaches them as sessions."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.site_planner import Planner
from dprobes.engines.ebpf.ebpf_options import RING_SIZE, Settings
from dprobes.engines.ebpf.feature_support import kernel_support
from dprobes.engines.ebpf.kernel.kernel_features import Features
from dprobes.engines.engine_interface import Engine, Plan
from dprobes.engines.engine_registry import engine_row
from dprobes.errors import NotSupportedError, PrivilegeError, SourceError
from dprobes.rpn.program_needs import counters_read, counters_sampled
from dprobes.target.probed_module import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.attach.site_spec import FilePlan
    from dprobes.engines.ebpf.read.ebpf_session import EbpfSession
    from dprobes.engines.engine_capabilities import Capability
    from dprobes.engines.engine_interface import EngineOptions, Job, Scope
    from dprobes.engines.engine_registry import KernelSupport
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.probed_module import SymbolProvider

__all__ = ["EbpfEngine", "engine_for"]

MANY_PLACES = 500
"""Minimum number of probepoints for which the processes that map their file are counted."""

MANY_BREAKPOINTS = 50_000
"""
Number of breakpoints in other processes above which the ptrace engine is preferred for one command.

To write and remove a breakpoint took 4 us in sleeping processes, and 77 us on a busy machine. A hit by one of these
processes meanwhile is not counted. The ptrace engine inserts breakpoints only in the command.
"""


class EbpfEngine(Engine):
    """
    Engine that probes files in all processes that map them, with handlers compiled to eBPF that run in the kernel.

    ``symbols``, ``allow_write``, ``exact`` and ``command`` are passed to the ``Planner``, other arguments to
    ``Settings``. An engine may be used by several threads, and can have several sessions.
    """

    name = "ebpf"

    def __init__(
        self,
        *,
        allow_write: bool = False,
        symbols: SymbolProvider = OWN_SYMBOLS,
        debugger: Sequence[str] | None = None,
        core_directory: str = ".",
        pid_namespace: bool = False,
        exact: bool = False,
        command: str = "",
        ring_size: int = RING_SIZE,
        replaceable: bool = False,
        overhead: float | None = None,
        features: Features | None = None,
    ) -> None:
        self.features = features or Features()
        self._planner = Planner(self.features, symbols, allow_write=allow_write, exact=exact, command=command)
        self._settings = Settings(
            self.features,
            self._planner,
            debugger,
            core_directory,
            pid_namespace,
            1 << (ring_size - 1).bit_length(),
            replaceable,
            overhead,
        )

    @cached_property
    def support(self) -> KernelSupport:
        """This kernel's support for the engine."""
        return kernel_support(self.features)

    @property
    def found_capabilities(self) -> Container[Capability]:
        """Further capabilities on this kernel. A look-up tests the kernel."""
        return self.support.capabilities

    def check(self, scope: Scope, options: EngineOptions) -> None:  # noqa: ARG002 - the protocol's signature
        """
        Raise ``PrivilegeError`` or ``NotSupportedError`` if the engine cannot work on this machine.

        The latter is also raised for a scope whose processes the kernel does not allow to follow.
        """
        support = self.support
        if support.problem is not None:
            raise PrivilegeError(f"the ebpf engine cannot work here: {support.problem}", hint=support.remedy)
        if scope.is_tree and support.tree_problem is not None:
            raise NotSupportedError(
                f"the ebpf engine cannot follow the processes of -c and -p here: {support.tree_problem}",
                hint=f"use --engine ptrace, or {support.tree_remedy}",
            )

    def plan(self, job: Job) -> Plan:
        """Return the plan for a job; raise ``SourceError`` if a resolved probepoint is not supported."""
        compiled = job.compiled
        if counters_read(job.program) or counters_sampled(job.program):
            from dprobes.engines.counter_events import check_counters

            check_counters(job.program)
        if compiled.everywhere:
            self.plan_everywhere(compiled.everywhere, compiled.diagnostics)
        elif compiled.obstacle is not None:
            raise compiled.obstacle
        elif compiled.kernel is not None:
            self._planner.plan_kernel(compiled.program, compiled.kernel, compiled.diagnostics)
        elif compiled.resolved is not None:
            self.plan_file(compiled.program, compiled.resolved, compiled.diagnostics)
        return Plan(self, job)

    def drawback(self, job: Job) -> str | None:
        """
        Return the reason not to insert uprobes, which affect all processes, for a job with one process or command.

        None: nothing speaks against it.
        """
        compiled, scope = job.compiled, job.scope
        if compiled.resolved is None or not scope.is_tree:
            return None
        if (cost := _cost(compiled, scope)) is not None:
            return cost
        from dprobes.diagnostics import Diagnostics
        from dprobes.engines.ebpf.attach.code_mappers import conflict_outside
        from dprobes.engines.ebpf.attach.file_spec import places_of
        from dprobes.engines.ebpf.attach.run_scope import processes_of

        diagnostics = Diagnostics()
        try:
            plan = self.plan_file(compiled.program, compiled.resolved, diagnostics)
        except SourceError:
            return None  # "plan" reports the error
        conflict = conflict_outside(str(compiled.resolved.module.path), places_of(plan), processes_of(scope))
        if conflict is None:
            compiled.diagnostics.extend(diagnostics)  # the plan is kept
        return conflict

    def plan_file(self, program: Program, resolved: ResolvedModule, diagnostics: Diagnostics) -> FilePlan:
        """Return the plan for the probepoints of a file; raise ``SourceError`` if a probepoint is not supported."""
        return self._planner.plan(program, resolved, diagnostics)

    def plan_everywhere(self, probes: Sequence[Probepoint], diagnostics: Diagnostics) -> None:
        """Raise ``SourceError`` if a probepoint of a program without a module is not supported."""
        self._planner.plan_everywhere(probes, diagnostics)

    def attach(self, plan: Plan) -> EbpfSession:
        """Attach the planned program, start the job's command if any, and return the session that reads records."""
        from dprobes.engines.ebpf.read.ebpf_session import EbpfSession

        session = EbpfSession(self._settings, plan.job)
        session.begin()
        return session


def engine_for(options: EngineOptions, scope: Scope) -> EbpfEngine:
    """Return the engine for a user's options."""
    own = engine_row(EbpfEngine.name).own_options(options.own)
    return EbpfEngine(
        allow_write=options.allow_write,
        symbols=options.symbols,
        debugger=options.debugger,
        core_directory=options.core_directory,
        pid_namespace=own.pid_namespace,
        exact=own.exact,
        command=scope.program or next(iter(scope.command), ""),
        ring_size=own.ring_size,
        replaceable=options.replaceable,
        overhead=options.overhead,
        features=options.knowledge.recall(Features),
    )


def _cost(compiled: ResolvedProgram, scope: Scope) -> str | None:
    """Return the reason why breakpoints for a command, in all processes, would take too long, or None."""
    assert compiled.resolved is not None
    count = len(compiled.resolved.in_code)
    if not scope.is_command or count < MANY_PLACES:
        return None
    from dprobes.engines.ebpf.attach.code_mappers import find_mappers

    mappers = len(find_mappers(compiled.resolved.module.path))
    if count * mappers < MANY_BREAKPOINTS:
        return None
    return (
        f"{count} breakpoints would be in each of {mappers} other processes that map the module as well, "
        "which takes longer than most commands run"
    )
