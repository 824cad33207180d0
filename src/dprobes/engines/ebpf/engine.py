"""The eBPF engine as the command line sees it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from dprobes.engines.capabilities import ENGINES
from dprobes.engines.ebpf.attach.handlers import basic_request, check_handlers
from dprobes.engines.ebpf.attach.siteplan import plan_file
from dprobes.engines.ebpf.attach.uretprobes import uretprobe_hazard
from dprobes.engines.ebpf.kernel.features import Features
from dprobes.engines.ebpf.support import kernel_support
from dprobes.target.location import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.auto import KernelSupport
    from dprobes.engines.capabilities import Capability
    from dprobes.engines.ebpf.attach.siteplan import FilePlan
    from dprobes.engines.ebpf.read.session import EbpfSession
    from dprobes.engines.interface import Job
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.program import Program
    from dprobes.target.location import SymbolProvider

__all__ = ["RING_SIZE", "EbpfEngine"]

RING_SIZE = 16 << 20
"""Bytes of records that wait to be taken, if nothing else is said."""


class _Capabilities:
    """Hold the capabilities of an engine; what depends on the kernel is found out only if it is asked for."""

    def __init__(self, engine: EbpfEngine) -> None:
        self._engine = engine

    def __contains__(self, capability: object) -> bool:
        return capability in ENGINES[self._engine.name] or capability in self._engine.support.capabilities


class EbpfEngine:
    """
    Probe files, whoever maps them, with handlers that are compiled to eBPF and run in the kernel.

    ``pid_namespace`` gives process ids as the namespace of the processes numbers them. ``exact`` forbids to place a
    breakpoint at a cheaper neighbour. ``command`` is the program that the run is going to start. ``ring_size`` is in
    bytes, a power of two. ``replaceable`` programs can be replaced by others (``Job.replaces``), which costs each hit a
    nanosecond. Any thread may use an engine, and sessions may share it.
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
        features: Features | None = None,
    ) -> None:
        self.allow_write = allow_write
        self.symbols = symbols
        self.debugger = debugger
        self.core_directory = core_directory
        self.pid_namespace = pid_namespace
        self.exact = exact
        self.command = command
        self.ring_size = 1 << (ring_size - 1).bit_length()
        self.replaceable = replaceable
        self.features = features or Features()
        self._plans: dict[tuple[int, frozenset[int]], FilePlan] = {}

    @cached_property
    def support(self) -> KernelSupport:
        """What this kernel lets the engine do."""
        return kernel_support(self.features)

    @property
    def capabilities(self) -> Container[Capability]:
        """What the engine can on this kernel."""
        return _Capabilities(self)

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
            self._refuse_events((*resolved.samplers, *resolved.watchpoints), diagnostics, everywhere=False)
            hazard = partial(uretprobe_hazard, resolved.module, command=self.command, reached=reached)
            plan = plan_file(program, resolved, diagnostics, exact=self.exact, kept=kept, uretprobe_hazard=hazard)
            self._plans[key] = plan
        return plan

    def forget_plans(self) -> None:
        """Forget what was planned for runs that have ended."""
        self._plans.clear()

    def plan_everywhere(self, probes: Sequence[Probepoint], diagnostics: Diagnostics) -> None:
        """Raise ``SourceError`` if the probepoints of a program without a module cannot be served."""
        self._refuse_events(probes, diagnostics, everywhere=True)
        diagnostics.raise_if_errors()

    def _refuse_events(self, probes: Sequence[Probepoint], diagnostics: Diagnostics, *, everywhere: bool) -> None:
        if probes:
            from dprobes.engines.ebpf.attach.perfevents import refuse_events

            refuse_events(probes, self.features, diagnostics, everywhere=everywhere)

    def run(self, job: Job) -> EbpfSession:
        """Return the session; entering it attaches the program, and starts the command if there is one."""
        from dprobes.engines.ebpf.read.session import EbpfSession

        return EbpfSession(self, job)
