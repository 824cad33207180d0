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
        program = job.program
        has_state = program.vars or program.gvars or program.cvars or program.tvars or program.tables
        why_not = None
        if job.principal is not None and has_state:
            why_not = "its variables and tables are those of another program"
        elif job.globals is not None and program.gvars:
            why_not = "its global variables are those of other programs as well"
        session.use_native(InlineHandlers(program, job.items, why_not))
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
