"""
Waits for the end of running handlers in processes, and changes of programs while no jumps lead to handlers.

The counts and records of handlers are complete only after the handlers have ended. Locks and ring entries of a handler
that was left before its end can be released only when no handler runs.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.restorer_messages import MemoryUnmapped
from dprobes.engines.ptrace.tracer.breakpoint_placement import end_joining, write_unwritten
from dprobes.engines.ptrace.tracer.call_injection import InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.thread_places import is_left, is_outside, unmap_program
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError, ThreadState
from dprobes.engines.ptrace.tracer_messages import MemoryReleased
from dprobes.platform.linux.ptrace_calls import NEW_TASK_EVENTS, Event, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dprobes.engines.ptrace.site_patches import SitePatch
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadTable, TracerState
    from dprobes.engines.ptrace.tracer_messages import ReleaseMemory

__all__ = ["HandlerEnds", "JumpAbsence", "JumpWaits", "Reclaimer"]

if TYPE_CHECKING:
    Code = dict[AddressSpace, list[tuple[int, int]]]

_TRIES = 20
"""Number of checks of threads that may be in handlers: in a program that does little else there are many."""
_HANDLER_PAUSE, _HANDLER_PAUSE_MAX = 0.0002, 0.05
"""Seconds between two checks of a thread in a handler: the first pause, and the maximum."""
_HOLD_PATIENCE = 0.1
"""Seconds to wait for threads that may be in handlers, while others are stopped for that."""
_HANDLER_PATIENCE = 2.0
"""Maximum number of seconds to wait for handlers to end: a thread may have to wait for a CPU."""


class HandlerEnds:
    """Waits until no thread of a process is in a handler any more."""

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper

    def let_end(self, go_on: Callable[[], int], program: int | None = None) -> int:
        """
        Wait until all running handlers, or those of one program, have ended. Return the number of threads still in one.

        There must be no jumps meanwhile. The wait ends after ``_HANDLER_PATIENCE`` seconds. ``go_on`` handles stops,
        and returns their number. A thread may have stopped in its handler for a signal, or at a breakpoint in the
        program's signal handler; it continues only when that stop is handled.
        """
        code: Code = {}
        for space in self._threads.spaces():
            patches = space.patches
            ranges = patches.code_ranges() if program is None else patches.code_of(program)
            if space.is_open and ranges:
                code[space] = ranges
        waiting = self._in_handlers([thread for space in code for thread in self._threads.in_space(space)], code)
        pause, until = _HANDLER_PAUSE, time.monotonic() + _HANDLER_PATIENCE
        while waiting and time.monotonic() < until:
            look = time.monotonic() + pause
            while (left := look - time.monotonic()) > 0:
                if not go_on():
                    signal.sigtimedwait([signal.SIGCHLD], left)
            # A thread that waits for a CPU makes no progress if it is stopped whenever it gets one.
            pause = min(2 * pause, _HANDLER_PAUSE_MAX)
            present = [thread for thread in waiting if self._threads.get(thread.tid) is thread]
            waiting = self._in_handlers([thread for thread in present if thread.space in code], code)
        return len(waiting)

    def hold_outside(self, spaces: Sequence[AddressSpace], go_on: Callable[[], int]) -> list[Thread] | None:
        """
        Stop all threads of spaces outside of handlers, and return them, or None if at each check one is in a handler.

        Threads outside are held while others finish their handlers, for ``_HOLD_PATIENCE`` seconds. Jumps may stay. As
        in ``let_end``, stops are handled meanwhile.
        """
        held: list[Thread] = []
        until = time.monotonic() + _HOLD_PATIENCE
        while True:
            threads = [thread for space in spaces for thread in self._threads.in_space(space)]
            new = self._stopper.stop(threads)
            known = set(held)
            inside = {t for t in threads if t not in known and not is_outside(t.space, t)}
            held += [thread for thread in new if thread not in inside]
            if not inside:
                return held
            is_late = time.monotonic() > until
            self._stopper.release_all([thread for thread in new if thread in inside] + (held if is_late else []))
            if is_late:
                return None
            if not go_on():
                signal.sigtimedwait([signal.SIGCHLD], _HANDLER_PAUSE)

    def _in_handlers(self, threads: list[Thread], code: Code) -> list[Thread]:
        """Return the members of ``threads`` that may be in a handler at the moment, in the ``code`` of their space."""
        with self._stopper.holding(threads):
            return [thread for thread in threads if not is_outside(thread.space, thread, code[thread.space])]

    def release(self, message: ReleaseMemory) -> None:
        """
        Clear the words of a message, which handlers of a program have left before their end; report the result.

        A handler has ended, or was left, when its thread was seen outside of it. Other handlers may use the words
        meanwhile: so they are cleared at a moment when no thread is in a handler.
        """
        spaces = [s for s in self._threads.spaces() if s.is_open and message.program in s.patches.memories]
        waiting: set[int] | None = None
        for _ in range(_TRIES):
            inside = self._inside(message, spaces)
            waiting = inside if waiting is None else waiting & inside
            if not waiting and not (inside and message.words):
                break
        self._connection.send(MemoryReleased(message.program, not waiting))

    def _inside(self, message: ReleaseMemory, spaces: Sequence[AddressSpace]) -> set[int]:
        """Return the threads that may be in a handler at the moment; if there are none, clear the message's words."""
        threads = {space: list(self._threads.in_space(space)) for space in spaces}
        with self._stopper.holding([thread for mine in threads.values() for thread in mine]):
            inside = {t.tid for space, mine in threads.items() for t in mine if not is_outside(space, t)}
            for space in spaces[:1] if not inside else ():
                region = space.patches.memories[message.program].region
                for offset, size in message.words:
                    with contextlib.suppress(OSError):
                        space.write(region + offset, bytes(size))
            return inside


_PAUSE, _PAUSE_MAX = 0.01, 60.0
"""Seconds until the next attempt: the first pause, and the maximum, as each pause is twice the previous one."""


class Reclaimer:
    """
    Unmapping of the memory of programs that have ended, while others continue.

    A program's jumps are removed when it ends. Its memory is unmapped when all threads of a process are stopped and
    none can return into it. If that is not possible, it is retried at growing intervals, without limit. A thread that
    has just created a process has a copy of the memory that is not recorded yet, so its event must be handled first.
    """

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._programs = state.programs
        self._stopper = stopper
        self._due: float | None = None
        self._pause = _PAUSE

    def begin(self) -> None:
        """Schedule an attempt to unmap the memory of ended programs."""
        self._due, self._pause = 0.0, _PAUSE

    def look_after(self) -> float | None:
        """Unmap memory of ended programs if an attempt is due; return the seconds until the next, None without one."""
        if self._due is None:
            return None
        now = time.monotonic()
        if now < self._due:
            return self._due - now
        for space in self._threads.spaces():
            if (ended := self._ended_in(space)) and space.is_open and not space.shared_with:
                self._reclaim(space, ended)
        if not any(self._ended_in(space) for space in self._threads.spaces()):
            self._due = None
            return None
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSE_MAX)
        self._due = time.monotonic() + pause
        return pause

    def _ended_in(self, space: AddressSpace) -> list[int]:
        """Return the numbers of the programs that have memory in a space and have ended."""
        return [number for number in space.patches.memories if self._programs.numbered(number) is None]

    def _reclaim(self, space: AddressSpace, ended: Sequence[int]) -> None:
        pid = next((pid for pid in space.pids if self._threads.of_process(pid)), None)
        if pid is None:
            return
        with self._stopper.process_held(pid) as held:
            threads = self._threads.in_space(space)
            if not held or not may_inject(held[0]) or any(map(self._is_changing, threads)):
                return
            free = [number for number in ended if _is_free(space, threads, number)]
            if not free:
                return
            try:
                with contextlib.suppress(InjectionError), injecting(held[0]) as call:
                    for number in free:
                        region = space.patches.memories[number].region
                        unmap_program(space, call, number)
                        for each in space.pids:
                            self._connection.tell_restorer(MemoryUnmapped(each, region))
            except ThreadGoneError as gone:
                self._stopper.defer(held[0].tid, gone.status)
            except ProcessLookupError:
                pass  # its end is not reported yet

    def _is_changing(self, thread: Thread) -> bool:
        """Return whether a thread has an unhandled event of a new process or an exec, which change its memory."""
        status = self._stopper.deferred.get(thread.tid)
        if status is None:
            return False
        kind, number = classify_stop(status)
        return kind is StopKind.EVENT and (number in NEW_TASK_EVENTS or number == Event.EXEC)


def _is_free(space: AddressSpace, threads: Sequence[Thread], number: int) -> bool:
    """Return whether no jump leads to the code of a program, and no thread is in it."""
    patches = space.patches
    return not patches.is_used(space.memory, number) and is_left(space, threads, patches.code_of(number))


_PATIENCE = 10.0
"""
Seconds of the client's processor time for which a thread waits, before breakpoints are written instead.

The wait also ends after so many seconds in which the client does not run at all. A busy machine thus makes the wait
longer, instead of making the jumps late.
"""
_PATIENCE_OF_ALL = 0.5
"""Seconds for which all threads of a process wait together: they are in the middle of their work."""


class JumpWaits:
    """
    Threads that wait for jumps, so that no thread executes code before its jumps are written.

    A thread waits after an exec, and when the program's loader reports a mapped library whose code no thread uses yet.
    The thread is asked to stop as it is resumed; breakpoints that jumps will replace are not written meanwhile. All
    threads of a space wait, for a shorter time, when one program has replaced another one.
    """

    def __init__(self, threads: ThreadTable, stopper: Stopper, client: int) -> None:
        self._threads = threads
        self._client = client
        self._stopper = stopper
        self._until: dict[Thread, float] = {}
        """End of the wait of each thread, in seconds of the monotonic clock."""
        self._work: dict[Thread, tuple[float, float]] = {}
        """The client's CPU time at the beginning and at the last check, by thread that waits on its own."""
        self._held: set[Thread] = set()
        """Threads that have stopped to wait."""
        self._spaces: dict[AddressSpace, float] = {}
        """End of the wait of all threads of a space, including those that are created later."""

    def begin(self, thread: Thread) -> None:
        """Let a stopped thread wait when it is resumed, if there are jumps to wait for."""
        if thread.space.unwritten and not thread.space.shared_with:
            thread.awaits_jumps = True
            self._until[thread] = time.monotonic() + _PATIENCE
            work = _processor_time(self._client)
            self._work[thread] = work, work

    def hold(self, space: AddressSpace, held: Iterable[Thread]) -> None:
        """
        Let all threads of a space wait, if there are jumps to wait for. ``held`` has the threads stopped for that.

        If another thread can run on, breakpoints are written at once.
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
        """Return whether a thread is stopped, or stops before it runs on."""
        has_stopped = thread in still or thread.tid in self._stopper.deferred or thread.state is ThreadState.ENDED
        return has_stopped or thread.awaits_jumps

    def holds(self, thread: Thread) -> bool:
        """Return whether a thread is stopped because it waits for jumps to be written."""
        return thread in self._held

    def take(self, thread: Thread) -> bool:
        """Return whether a thread that has stopped on request must stay stopped until its jumps are written."""
        until = self._spaces.get(thread.space) if thread.space.unwritten else None
        if until is not None and not thread.awaits_jumps:
            thread.awaits_jumps, self._until[thread] = True, until  # it was created after the wait began
        if not thread.awaits_jumps:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._stopper.waits.hide_interruption(thread)
        self._held.add(thread)
        return True

    def look_after(self) -> float | None:
        """
        Resume threads whose jumps are written.

        Return the seconds until the next check, or None if no thread waits.
        """
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
        """
        Return whether the client is still preparing the jumps for which a thread waits, by its use of CPU time.

        It must have run since the last check, and for less than ``_PATIENCE`` seconds in all.
        """
        if thread not in self._work:
            return False  # it waits with all others of its process
        began, last = self._work[thread]
        work = _processor_time(self._client)
        self._work[thread] = began, work
        return last < work < began + _PATIENCE


def _processor_time(pid: int) -> float:
    """Return the CPU time of a process in seconds, or 0 if it has ended (clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


class JumpAbsence:
    """
    Periods without jumps in which programs are changed; afterwards jumps are written again where possible.

    All threads of the address space are stopped meanwhile. So none of them meets a breakpoint, which would kill it if
    the tracer were killed before handling the stop.
    """

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
        """Return whether all threads of a space are stopped, and can wait for jumps then."""
        return space in self._still

    def end_joining(self, space: AddressSpace) -> None:
        """Replace jumps that lack handlers of a new program by breakpoints, unless jumps with these were written."""
        self._patcher.end_joining(space)

    @contextlib.contextmanager
    def in_space(self, space: AddressSpace, sites: Collection[int] | None = None) -> Iterator[None]:
        """Remove the jumps in a space for the block: all of them, or those at some ``sites`` and their groups."""
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
        Remove the jumps in all spaces for the block; with ``go_on``, which handles stops, no handler runs either.

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
        """Stop all threads of spaces, and remove the jumps; return both."""
        held = None if go_on is None else self._handler_ends.hold_outside(spaces, go_on)
        if held is None and go_on is None:
            held = self._stopper.stop([thread for space in spaces for thread in self._threads.in_space(space)])
        taken = [(space, self._patcher.restore(space)) for space in spaces]
        if held is None and go_on is not None:
            # A thread was in a handler at every check: without jumps it does not enter one again.
            self._handler_ends.let_end(go_on)
            held = self._stopper.stop([thread for space in spaces for thread in self._threads.in_space(space)])
        return held or [], taken
