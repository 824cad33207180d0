"""The eBPF engine as the command line sees it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.engines.capabilities import ENGINES
from dprobes.engines.ebpf.attach.planner import Planner
from dprobes.engines.ebpf.kernel.features import Features
from dprobes.engines.ebpf.settings import Settings
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
    """The capabilities of an engine; what depends on the kernel is found out only if it is asked for."""

    def __init__(self, engine: EbpfEngine) -> None:
        self._engine = engine

    def __contains__(self, capability: object) -> bool:
        return capability in ENGINES[self._engine.name] or capability in self._engine.support.capabilities


class EbpfEngine:
    """
    Probe files, whoever maps them, with handlers that are compiled to eBPF and run in the kernel.

    ``exact``, ``command`` are those of the ``Planner``, the others those of ``Settings``. Any thread may use an engine,
    and sessions may share it.
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
        )

    @cached_property
    def support(self) -> KernelSupport:
        """What this kernel lets the engine do."""
        return kernel_support(self.features)

    @property
    def capabilities(self) -> Container[Capability]:
        """What the engine can on this kernel."""
        return _Capabilities(self)

    def plan(self, program: Program, resolved: ResolvedModule, diagnostics: Diagnostics) -> FilePlan:
        """Return how the probepoints of a file are served; raise ``SourceError`` if one cannot be."""
        return self._planner.plan(program, resolved, diagnostics)

    def plan_everywhere(self, probes: Sequence[Probepoint], diagnostics: Diagnostics) -> None:
        """Raise ``SourceError`` if the probepoints of a program without a module cannot be served."""
        self._planner.plan_everywhere(probes, diagnostics)

    def run(self, job: Job) -> EbpfSession:
        """Return the session; entering it attaches the program, and starts the command if there is one."""
        from dprobes.engines.ebpf.read.session import EbpfSession

        return EbpfSession(self._settings, job)
