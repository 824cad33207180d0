"""The attachment to a process that runs already: its threads are seized, and its jumps awaited while it runs on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dprobes.engines.linux.procfs import living_thread
from dprobes.engines.ptrace.reports import Attached, Failed
from dprobes.engines.ptrace.tracer.processtree import Seizer, SharingError
from dprobes.errors import reason_of

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.modulebreakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["Attachment"]

_PATIENCE = 30.0
"""Seconds for which jumps are awaited, before breakpoints are written instead."""


class Attachment:
    """The attachment to the process that the client names."""

    def __init__(self, state: TracerState, stopper: Stopper, modules: ModuleBreakpoints) -> None:
        self._connection = state.connection
        self._programs = state.programs
        self._threads = state.threads
        self._stopper = stopper
        self._modules = modules
        self._seizer = Seizer(state.threads, stopper)
        self._pending: tuple[int, float] | None = None
        """The process for which jumps are awaited, and until when."""

    def begin(self, pid: int, *, launching: bool) -> None:
        """Seize all threads in the memory of a process; say so once its jumps are there, or say why it cannot be."""
        held: list[Thread] = []
        try:
            if not launching:
                # What takes time comes first, while the process runs.
                self._modules.learn(living_thread(pid))
            held = self._seizer.seize_all(pid)
            if not launching:
                held += self._seizer.seize_sharing(pid)
            for program in self._programs:
                program.reach.pids |= {thread.pid for thread in self._threads.values() if not thread.is_outside}
            if not launching:
                leader = next(iter(self._threads.values()))
                self._modules.begin(leader.space, leader)
        except OSError as error:
            self._connection.send(Failed(pid, reason_of(error), error.errno or 0))
            return
        except SharingError as failure:
            number = failure.error.errno or 0
            self._connection.send(Failed(failure.pid, reason_of(failure.error), number, shares_with=pid))
            return
        finally:
            for thread in held:
                self._stopper.release(thread)
        self._pending = pid, time.monotonic() + _PATIENCE
        self.look_after()

    def look_after(self) -> float | None:
        """Say that a process is attached once its jumps are there; return in how many seconds to look again."""
        if self._pending is None:
            return None
        pid, until = self._pending
        remaining = until - time.monotonic()
        if remaining > 0 and any(space.unwritten for space in self._threads.spaces() if pid in space.pids):
            return remaining
        for space in self._threads.spaces():
            threads = self._threads.in_space(space)
            if threads and not any(thread.awaits_jumps for thread in threads):
                self._modules.write_late(space, threads[0])
        self._pending = None
        self._connection.send(Attached(pid))
        return None
