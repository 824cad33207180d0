"""
The giving back of memory of programs that have ended, while others go on.

A program's jumps are taken out when it ends; its memory goes once all threads of a process stand still and none can
come back into it. Where that is not so just then, it is looked again, ever more rarely, as long as it takes. A thread
that has just made a process has a copy of the memory that nobody knows yet: first that is to be heard of.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux.stops import NEW_TASK_EVENTS, Event, StopKind, classify_stop
from dprobes.engines.ptrace.restorerwire import MemoryUnmapped
from dprobes.engines.ptrace.tracer.injection import InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.heldprocess import process_held
from dprobes.engines.ptrace.tracer.native.nativeremoval import is_left, unmap_program
from dprobes.engines.ptrace.tracer.state import ThreadGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["Reclaimer"]

_PAUSE, _PAUSE_MAX = 0.01, 60.0
"""Seconds until it is looked again: at first, and at most, as each pause is twice the last one."""


class Reclaimer:
    """The returner of what programs had that have ended."""

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._programs = state.programs
        self._stopper = stopper
        self._due: float | None = None
        self._pause = _PAUSE

    def begin(self) -> None:
        """Take notice that a program may have ended."""
        self._due, self._pause = 0.0, _PAUSE

    def look_after(self) -> float | None:
        """Give back what can be; return in how many seconds to ask again, None if there is nothing more."""
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
        """Return the numbers of the programs that have memory in a space and are no more."""
        return [number for number in space.patches.memories if self._programs.numbered(number) is None]

    def _reclaim(self, space: AddressSpace, ended: Sequence[int]) -> None:
        pid = next((pid for pid in space.pids if self._threads.of_process(pid)), None)
        if pid is None:
            return
        with process_held(self._threads, self._stopper, pid) as held:
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
                pass  # its end is still to be reported

    def _is_changing(self, thread: Thread) -> bool:
        """Return whether a thread has a copy of its memory made, or another memory, and that is not handled yet."""
        status = self._stopper.deferred.get(thread.tid)
        if status is None:
            return False
        kind, number = classify_stop(status)
        return kind is StopKind.EVENT and (number in NEW_TASK_EVENTS or number == Event.EXEC)


def _is_free(space: AddressSpace, threads: Sequence[Thread], number: int) -> bool:
    """Return whether nothing leads to the code of a program any more, and no thread is in it."""
    patches = space.patches
    return not patches.is_used(space.memory, number) and is_left(space, threads, patches.code_of(number))
