"""
The waits of threads for jumps: until they are there, nobody executes code that a thread has just mapped.

That is so after an exec, and while the program's loader says that a library is mapped, which nobody has been told of
yet. The thread is asked to stop as it runs on; the breakpoints for which jumps come are not written meanwhile. All
threads of a space wait, for a shorter time, when one program has taken the place of another one.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.placement import write_unwritten
from dprobes.engines.ptrace.tracer.state import ThreadState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread, ThreadTable
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["JumpWaits"]

_PATIENCE = 10.0
"""
Seconds for which a thread waits, before breakpoints are written instead: of the client's processor time.

Or for which the client does not run at all. So a busy machine makes the wait longer, and not the jumps late.
"""
_PATIENCE_OF_ALL = 0.5
"""The same of all threads of a process: they are in the middle of something."""


class JumpWaits:
    """The threads that wait for jumps."""

    def __init__(self, threads: ThreadTable, stopper: Stopper, client: int) -> None:
        self._threads = threads
        self._client = client
        self._stopper = stopper
        self._until: dict[Thread, float] = {}
        """By thread, when it waits no more."""
        self._work: dict[Thread, tuple[float, float]] = {}
        """By thread that waits on its own, the client's processor time when that began, and when it was looked at."""
        self._held: set[Thread] = set()
        """Those that have stopped for it."""
        self._spaces: dict[AddressSpace, float] = {}
        """The spaces of which all threads wait, also those that are yet to begin, and until when."""

    def begin(self, thread: Thread) -> None:
        """Let a stopped thread wait, once it is let run, if there are jumps to wait for."""
        if thread.space.unwritten and not thread.space.shared_with:
            thread.awaits_jumps = True
            self._until[thread] = time.monotonic() + _PATIENCE
            work = _processor_time(self._client)
            self._work[thread] = work, work

    def hold(self, space: AddressSpace, held: Iterable[Thread]) -> None:
        """
        Let all threads of a space wait, if there are jumps to wait for; ``held`` are those that stand still for that.

        If another one can run on, breakpoints are written at once.
        """
        if not space.unwritten:
            return
        threads = self._threads.in_space(space)
        still = {*held, *self._held}
        if space.shared_with or any(not self._can_wait(thread, still) for thread in threads):
            write_unwritten(space)
            return
        until = self._spaces.setdefault(space, time.monotonic() + _PATIENCE_OF_ALL)
        for thread in threads:
            thread.awaits_jumps = True
            self._until.setdefault(thread, until)
            if thread in still:
                self.take(thread)

    def _can_wait(self, thread: Thread, still: set[Thread]) -> bool:
        """Return whether a thread stands still, or stops before it runs on."""
        has_stopped = thread in still or thread.tid in self._stopper.deferred or thread.state is ThreadState.ENDED
        return has_stopped or thread.awaits_jumps

    def holds(self, thread: Thread) -> bool:
        """Return whether a thread has stopped to wait."""
        return thread in self._held

    def take(self, thread: Thread) -> bool:
        """Return whether a thread that has stopped because it was asked to stays where it is."""
        until = self._spaces.get(thread.space) if thread.space.unwritten else None
        if until is not None and not thread.awaits_jumps:
            thread.awaits_jumps, self._until[thread] = True, until  # it has just begun
        if not thread.awaits_jumps:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._stopper.waits.hide_interruption(thread)
        self._held.add(thread)
        return True

    def look_after(self) -> float | None:
        """Let threads run whose jumps are there; return in how many seconds to look again, None if nobody waits."""
        if not self._until:
            return None
        now = time.monotonic()
        for thread, until in list(self._until.items()):
            is_there = self._threads.get(thread.tid) is thread
            if is_there and thread.awaits_jumps and thread.space.unwritten:
                if now < until:
                    continue
                if self._is_worked_on(thread):
                    self._until[thread] = now + _PATIENCE
                    continue
            del self._until[thread]
            self._work.pop(thread, None)
            is_held = thread in self._held
            self._held.discard(thread)
            thread.awaits_jumps = False
            if is_there:
                write_unwritten(thread.space)
                if is_held and thread.state is ThreadState.STOPPED:
                    self._stopper.release(thread)
        self._spaces = {space: until for space, until in self._spaces.items() if space.unwritten and now < until}
        return min((until - now for until in self._until.values()), default=None)

    def _is_worked_on(self, thread: Thread) -> bool:
        """Return whether the client has worked since this was asked last, and for less than it may take in all."""
        if thread not in self._work:
            return False  # it waits with all others of its process
        began, last = self._work[thread]
        work = _processor_time(self._client)
        self._work[thread] = began, work
        return last < work < began + _PATIENCE


def _processor_time(pid: int) -> float:
    """Return the processor time that a process has had, in seconds, 0 if it is gone (clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0
