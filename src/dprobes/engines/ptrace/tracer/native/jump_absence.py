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

from dprobes.engines.ptrace.tracer.breakpoint_placement import end_joining, write_unwritten
from dprobes.engines.ptrace.tracer.tracer_state import ThreadState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dprobes.engines.ptrace.site_patches import SitePatch
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.native.handler_ends import HandlerEnds
    from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadTable, TracerState

__all__ = ["JumpAbsence", "JumpWaits"]

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


# The absence of jumps while programs come and go: breakpoints are what changes, and jumps come back where they can.
#
# All threads of the address space stand still meanwhile. So none of them meets a breakpoint, at which it would end if
# we were killed before we had heard of it.


class JumpAbsence:
    """The times without jumps."""

    def __init__(
        self, state: TracerState, stopper: Stopper, patcher: Patcher, handler_ends: HandlerEnds, jump_waits: JumpWaits
    ) -> None:
        self._threads = state.threads
        self._stopper = stopper
        self._patcher = patcher
        self._handler_ends = handler_ends
        self._jump_waits = jump_waits
        self._still: set[AddressSpace] = set()

    def is_still(self, space: AddressSpace) -> bool:
        """Return whether all threads of a space stand still, and can wait for jumps then."""
        return space in self._still

    def end_joining(self, space: AddressSpace) -> None:
        """Let breakpoints take the place of jumps that lack probepoints for which no others have come."""
        self._patcher.end_joining(space)

    @contextlib.contextmanager
    def in_space(self, space: AddressSpace, sites: Collection[int] | None = None) -> Iterator[None]:
        """Have no jumps in a space, at all or at some ``sites`` and what they belong to."""
        patches = space.patches
        may_change = patches.known_at(sites) or patches.bound_to(patches.by_site if sites is None else sites)
        if not space.is_open or not may_change:
            yield
            return
        with self._stopper.holding(self._threads.in_space(space)):
            taken = self._patcher.restore(space, sites)
            yield
            self._patcher.bring_back(space, taken, sites)

    @contextlib.contextmanager
    def everywhere(self, go_on: Callable[[], int] | None = None) -> Iterator[None]:
        """
        Have no jumps in any space; with ``go_on``, which handles stops, no handler is under way either.

        Then threads also wait for the jumps of breakpoints that are ``unwritten`` at the end.
        """
        spaces = [space for space in self._threads.spaces() if space.is_open and space.patches.memories]
        held, taken = self._hold(spaces, go_on)
        self._still = set() if go_on is None else set(spaces)
        try:
            yield
            for space, jumps in taken:
                self._patcher.bring_back(space, jumps)
                end_joining(space, [site for site in space.joining if site not in space.patches.by_site])
            for space in self._threads.spaces() if go_on is not None else ():
                self._jump_waits.hold(space, held)
        finally:
            self._still = set()
            self._stopper.release_all(thread for thread in held if not self._jump_waits.holds(thread))

    def _hold(
        self, spaces: list[AddressSpace], go_on: Callable[[], int] | None
    ) -> tuple[list[Thread], list[tuple[AddressSpace, list[SitePatch]]]]:
        """Hold all threads of spaces, and take the jumps out; return both."""
        held = None if go_on is None else self._handler_ends.hold_outside(spaces, go_on)
        if held is None and go_on is None:
            held = self._stopper.stop([thread for space in spaces for thread in self._threads.in_space(space)])
        taken = [(space, self._patcher.restore(space)) for space in spaces]
        if held is None and go_on is not None:
            # A thread never was outside when it was looked at: without jumps it does not come back.
            self._handler_ends.let_end(go_on)
            held = self._stopper.stop([thread for space in spaces for thread in self._threads.in_space(space)])
        return held or [], taken
