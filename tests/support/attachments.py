"""Jobs for engines, and their attachments."""

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
    """
    Return the job of inserting a program; without ``resolved`` its probepoints are found first.

    ``more`` are other fields of the job.
    """
    architecture = host_architecture() if resolved is None else resolved.architecture
    return Job(ResolvedProgram(program, architecture, resolved, Diagnostics()), scope, **more)


def attach(engine: Engine, job: Job) -> Attachment:
    """Plan a job with an engine and attach it; return the attachment."""
    return engine.attach(engine.plan(job))


@contextlib.contextmanager
def attached(engine: Engine, job: Job) -> Iterator[Attachment]:
    """Attach a job with an engine for the context, and close the attachment at the end."""
    with contextlib.closing(attach(engine, job)) as attachment:
        yield attachment
