"""How the probepoints of files are to be served: the plans of an engine, each made once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.handlers import basic_request, check_handlers
from dprobes.engines.ebpf.attach.siteplanner import plan_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.ebpf.attach.siteplan import FilePlan
    from dprobes.engines.ebpf.inkernel.plannedkernel import PlannedKernel
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.resolve.kernelplaces import ResolvedKernel
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.program import Program
    from dprobes.target.location import Module, SymbolProvider

__all__ = ["Planner"]


class Planner:
    """
    The maker of plans; any thread may use it.

    ``exact`` forbids to place a breakpoint at a cheaper neighbour. ``command`` is the program that the run is going to
    start.
    """

    def __init__(
        self, features: Features, symbols: SymbolProvider, *, allow_write: bool, exact: bool, command: str
    ) -> None:
        self.features = features
        self.symbols = symbols
        self.allow_write = allow_write
        self.exact = exact
        self._command = command
        self._plans: dict[tuple[int, frozenset[int]], FilePlan] = {}
        self._kernel_plans: dict[int, PlannedKernel] = {}

    def plan(
        self,
        program: Program,
        resolved: ResolvedModule,
        diagnostics: Diagnostics,
        kept: frozenset[int] = frozenset(),
        reached: str = "",
    ) -> FilePlan:
        """
        Return how the probepoints of a file are served; raise ``SourceError`` if one cannot be.

        What stands at one of the file offsets ``kept`` is not moved to a cheaper neighbour. ``reached`` leads to the
        file where its path may not any more.
        """
        key = (id(resolved), kept)
        plan = self._plans.get(key)
        if plan is None:
            request = replace(basic_request(self.features, program), symbols=dict(resolved.symbols))
            check_handlers(program, resolved.image, resolved.architecture, diagnostics, request)
            self._refuse_events(resolved.events, diagnostics, everywhere=False)
            hazard = partial(self._uretprobe_hazard, resolved.module, reached)
            plan = plan_file(program, resolved, diagnostics, exact=self.exact, kept=kept, uretprobe_hazard=hazard)
            self._plans[key] = plan
        return plan

    def _uretprobe_hazard(self, module: Module, reached: str) -> str | None:
        from dprobes.engines.ebpf.attach.uretprobes import uretprobe_hazard

        return uretprobe_hazard(module, command=self._command, reached=reached)

    def plan_kernel(self, program: Program, resolved: ResolvedKernel, diagnostics: Diagnostics) -> PlannedKernel:
        """Return how the probepoints in the kernel are served; raise ``SourceError`` if one cannot be."""
        from dprobes.engines.ebpf.inkernel.kernelskips import refuse_skips
        from dprobes.engines.ebpf.inkernel.plannedkernel import (
            plan_kernel,
            refuse_reading,
            refuse_waiting,
        )

        if (known := self._kernel_plans.get(id(resolved))) is not None:
            return known
        request = replace(basic_request(self.features, program), symbols=dict(resolved.symbols))
        check_handlers(program, resolved.image, resolved.architecture, diagnostics, request)
        self._refuse_events(resolved.events, diagnostics, everywhere=True)
        refuse_reading(program, resolved, self.features, diagnostics)
        refuse_waiting(resolved, self.features, diagnostics)
        refuse_skips(program, resolved, self.features, diagnostics)
        diagnostics.raise_if_errors()
        planned = plan_kernel(program, resolved, self.features, diagnostics)
        diagnostics.raise_if_errors()
        self._kernel_plans[id(resolved)] = planned
        return planned

    def forget(self) -> None:
        """Forget what was planned for runs that have ended."""
        self._plans.clear()
        self._kernel_plans.clear()

    def plan_everywhere(self, probes: Sequence[Probepoint], diagnostics: Diagnostics) -> None:
        """Raise ``SourceError`` if the probepoints of a program without a module cannot be served."""
        self._refuse_events(probes, diagnostics, everywhere=True)
        diagnostics.raise_if_errors()

    def _refuse_events(self, probes: Sequence[Probepoint], diagnostics: Diagnostics, *, everywhere: bool) -> None:
        if probes:
            from dprobes.engines.ebpf.attach.perfevents import refuse_events

            refuse_events(probes, self.features, diagnostics, everywhere=everywhere)
