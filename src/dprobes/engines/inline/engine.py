"""
The engine: a tracer places breakpoints, and jumps to handlers in the process take their place where that is possible.

So it can do whatever the ptrace engine can, which serves what no jump is good for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.inline.borrowed import Borrowed
from dprobes.engines.inline.handlers import InlineHandlers
from dprobes.engines.inline.sharedstate import SharedState
from dprobes.engines.overhead import UNLIMITED
from dprobes.engines.ptrace.engine import PtraceEngine, PtraceSession
from dprobes.rpn.needs import takes_user_stacks
from dprobes.target.processimages import ProcessImages

if TYPE_CHECKING:
    from dprobes.engines.interface import Job, Scope
    from dprobes.engines.options import EngineOptions

__all__ = ["InlineEngine", "engine_for"]


class InlineEngine(PtraceEngine):
    """The engine that runs handlers in the probed process."""

    name = "inline"

    def run(self, job: Job) -> PtraceSession:
        """Return the session; entering it starts the tracer and the command, or attaches to the process."""
        if job.images is None and takes_user_stacks(job.program):
            job = replace(job, images=ProcessImages())  # what has ended is followed by the files that it had mapped
        session = super().run(job)
        program, principal, why_not = job.program, None, None
        if job.principal is not None and (program.vars or program.cvars or program.tvars or program.tables):
            principal = _state_of(job.principal)
            if principal is None:
                why_not = "its variables and tables are those of a program that is not in the process"
        borrowed = Borrowed(principal, job.globals if program.gvars else None)
        session.use_native(InlineHandlers(program, job.items, borrowed, why_not, job.images))
        return session


def _state_of(session: object) -> SharedState | None:
    """Return what handlers in processes have of a session's variables and tables."""
    native = session.native if isinstance(session, PtraceSession) else None
    state = None if native is None else native.state
    return state if isinstance(state, SharedState) else None


def engine_for(options: EngineOptions, scope: Scope) -> InlineEngine:  # noqa: ARG001 - the registry's signature
    """Return the engine for what a user says."""
    return InlineEngine(
        allow_write=options.allow_write,
        symbols=options.symbols,
        debugger=options.debugger,
        core_directory=options.core_directory,
        overhead=UNLIMITED if options.overhead is None else options.overhead,
    )
