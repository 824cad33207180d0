"""Jobs for engines, and what engines make of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dprobes.arch import host_architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Job
from dprobes.resolve.local_module import ResolvedProgram

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.engine_interface import Attachment, Engine, Scope
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Program


def job_of(program: Program, scope: Scope, *, resolved: ResolvedModule | None = None, **more: Any) -> Job:
    """Return the job of a program, whose module may have been found."""
    architecture = host_architecture() if resolved is None else resolved.architecture
    return Job(ResolvedProgram(program, architecture, resolved, Diagnostics()), scope, **more)


def attach(engine: Engine, job: Job) -> Attachment:
    """Return what an engine makes of a job."""
    return engine.attach(engine.plan(job))


@contextlib.contextmanager
def attached(engine: Engine, job: Job) -> Iterator[Attachment]:
    """Give what an engine makes of a job, and close it in the end."""
    with contextlib.closing(attach(engine, job)) as attachment:
        yield attachment
