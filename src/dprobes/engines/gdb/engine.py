"""The engine: it probes what a stub stands for, whose files are on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines import interface
from dprobes.engines.gdb.processors import processor_of
from dprobes.engines.gdb.session import StubSession
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.options import EngineOptions
    from dprobes.resolve.localmodule import Compiled

__all__ = ["GdbEngine"]


class GdbEngine(interface.Engine):
    """Run handlers at hits of a target that the stub at the endpoint of the scope stops."""

    name = "gdb"

    def __init__(self, options: EngineOptions, scope: interface.Scope) -> None:  # noqa: ARG002 - as the registry asks
        assert scope.endpoint is not None, "the registry says that this engine takes endpoints only"
        self._endpoint, self._command = scope.endpoint, scope.command

    def prepare(self, compiled: Compiled) -> None:
        """Take the places; raise ``EngineError`` if the module is not on this machine, or of no processor for it."""
        if compiled.resolved is None:
            raise EngineError(f"the gdb engine needs the module '{compiled.program.name}' on this machine")
        if processor_of(compiled.architecture) is None:
            raise EngineError(f"the gdb engine does not know how stubs describe {compiled.architecture.name}")
        self._resolved = compiled.resolved

    def run(self, job: interface.Job) -> StubSession:
        """Return the session; entering it connects to the stub, and stops the target until probepoints are there."""
        return StubSession(job, self._resolved, self._endpoint, self._command)
