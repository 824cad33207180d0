"""
Engine of programs without probes: only the tool executes their blocks, and no process is probed.

The variables and tables of the program are in the memory of this process.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING

from dprobes.engines import engine_interface
from dprobes.engines.engine_interface import Counts, apply_changes, make_changes
from dprobes.keyed.table_entries import stores_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import EngineOptions, Job, Scope
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint

__all__ = ["ToolEngine"]


class ToolEngine(engine_interface.Engine):
    """Engine that inserts nothing."""

    name = "tool"

    def __init__(self, options: EngineOptions, scope: Scope) -> None:
        """Create the engine with the arguments of all engines, of which it needs none."""

    def attach(self, plan: engine_interface.Plan) -> ToolSession:
        """Return the attachment for a job."""
        return ToolSession(plan.job)


class ToolSession(engine_interface.Attachment):
    """Variables and tables of a program without probes, until its target ends or the run is stopped."""

    probes: Sequence[Probepoint] = ()
    left_out: Sequence[LeftOutProbe] = ()

    def __init__(self, job: Job) -> None:
        self._pid = job.scope.pid
        self._locals = [0] * job.program.vars
        self._tables = stores_of(job.program.tables)
        self._stopped, self._stopping = os.pipe2(os.O_CLOEXEC)

    def poll(self) -> Iterator[engine_interface.Event]:
        """Wait until the process in scope ends, or, without one, until the run is stopped."""
        yield engine_interface.Begun()
        with contextlib.ExitStack() as stack:
            awaited = [self._stopped]
            if self._pid is not None:
                try:
                    awaited.append(os.pidfd_open(self._pid))
                    stack.callback(os.close, awaited[-1])
                except ProcessLookupError:
                    awaited.clear()
            if awaited:
                select.select(awaited, (), ())
        yield engine_interface.Finished(())

    def close(self) -> None:
        """Release the descriptors; a second call has no effect."""
        for descriptor in (self._stopped, self._stopping):
            if descriptor >= 0:
                os.close(descriptor)
        self._stopped = self._stopping = -1

    def stop(self) -> None:
        """End the run."""
        if self._stopping >= 0:
            os.write(self._stopping, b"s")

    def counts(self) -> tuple[Counts, ...]:
        """Return no counts: there are no probepoints."""
        return ()

    def remove(self, probes: Sequence[int]) -> None:
        """Do nothing: there are no probepoints."""

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self._locals)

    def cpu_variables(self) -> list[list[int]]:
        """Return no CPU variables, which only handlers have."""
        return []

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the keyed tables."""
        return tuple(store.contents() for store in self._tables)

    def change(self, changes: Sequence[engine_interface.Change]) -> None:
        """Make changes of variables and tables in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[engine_interface.ValueChange]) -> None:
        """Change local variables and tables."""
        apply_changes(changes, self._locals, self._tables)

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set the local variables from ``first`` to ``last``, included, to zero; None: to the last one."""
        count = len(self._locals[first : None if last is None else last + 1])
        self._locals[first : first + count] = [0] * count
