"""
The engine: a tracer places breakpoints, and jumps to handlers in the process take their place where that is possible.

So it can do whatever the ptrace engine can, which serves what no jump is good for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.inline.handlers import InlineHandlers
from dprobes.engines.overhead import UNLIMITED
from dprobes.engines.ptrace.engine import PtraceEngine

if TYPE_CHECKING:
    from dprobes.engines.interface import Job, Scope
    from dprobes.engines.options import EngineOptions
    from dprobes.engines.ptrace.engine import PtraceSession

__all__ = ["InlineEngine", "engine_for"]


class InlineEngine(PtraceEngine):
    """The engine that runs handlers in the probed process."""

    name = "inline"

    def run(self, job: Job) -> PtraceSession:
        """Return the session; entering it starts the tracer and the command, or attaches to the process."""
        session = super().run(job)
        session.use_native(InlineHandlers(job.program, job.items))
        return session


def engine_for(options: EngineOptions, scope: Scope) -> InlineEngine:  # noqa: ARG001 - the registry's signature
    """Return the engine for what a user says."""
    return InlineEngine(
        allow_write=options.allow_write,
        symbols=options.symbols,
        debugger=options.debugger,
        core_directory=options.core_directory,
        overhead=UNLIMITED if options.overhead is None else options.overhead,
    )
