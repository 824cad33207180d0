"""
The ends of handlers in processes that are under way, which are waited for.

Whoever looks then at what a program has counted and recorded, or what its handlers have left, finds all of it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.reports import MemoryReleased
from dprobes.engines.ptrace.tracer.native.nativeremoval import is_outside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.engines.ptrace.requests import ReleaseMemory
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper

    Code = dict[AddressSpace, list[tuple[int, int]]]

__all__ = ["HandlerEnds"]

_TRIES = 20
"""How often threads are looked at that may be in handlers: of a program that does little else many are."""
_HANDLER_PAUSE, _HANDLER_PAUSE_MAX = 0.0002, 0.05
"""Seconds for which a thread in a handler is let run before it is looked at again: at first, and at most."""
_HOLD_PATIENCE = 0.1
"""Seconds for which threads are looked at that may be in handlers, while others stand still for that."""
_HANDLER_PATIENCE = 2.0
"""Seconds for which handlers are let end: a thread may have to wait for a processor."""


class HandlerEnds:
    """The waits for the ends of handlers."""

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper

    def let_end(self, go_on: Callable[[], int], program: int | None = None) -> int:
        """
        Let the handlers end that are under way, all or a program's; return how many threads are still in theirs.

        There must be no jumps meanwhile.

        ``go_on`` handles stops, and returns how many: a thread may have stopped in its handler for a signal, or at a
        breakpoint in the program's signal handler, and leaves that only when somebody sees to it.
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
            # A thread that has to wait for a processor gets nowhere if it is stopped whenever it has one.
            pause = min(2 * pause, _HANDLER_PAUSE_MAX)
            present = [thread for thread in waiting if self._threads.get(thread.tid) is thread]
            waiting = self._in_handlers([thread for thread in present if thread.space in code], code)
        return len(waiting)

    def hold_outside(self, spaces: Sequence[AddressSpace], go_on: Callable[[], int]) -> list[Thread] | None:
        """
        Hold all threads of spaces outside of handlers, and return them; None if one is in its handler all the time.

        Those that are outside are held already while others come to the end of their handlers; jumps may stay. As with
        ``let_end`` stops are handled meanwhile.
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
            for thread in [thread for thread in new if thread in inside] + (held if is_late else []):
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.release(thread)
            if is_late:
                return None
            if not go_on():
                signal.sigtimedwait([signal.SIGCHLD], _HANDLER_PAUSE)

    def _in_handlers(self, threads: list[Thread], code: Code) -> list[Thread]:
        """Return those of some threads that may be in a handler just now, which is in the code of their space."""
        held = self._stopper.stop(threads)
        try:
            return [thread for thread in threads if not is_outside(thread.space, thread, code[thread.space])]
        finally:
            for thread in held:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.release(thread)

    def release(self, message: ReleaseMemory) -> None:
        """
        Release what handlers of a program have left without an end, and say whether that could be done.

        A handler that was under way has ended, or was left, once its thread has been seen elsewhere. The words may be
        taken again meanwhile: they need a moment in which no thread is in a handler.
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
        """Return the threads that may be in a handler just now; if there are none, the words of a message become 0."""
        threads = {space: list(self._threads.in_space(space)) for space in spaces}
        held = self._stopper.stop([thread for mine in threads.values() for thread in mine])
        try:
            inside = {t.tid for space, mine in threads.items() for t in mine if not is_outside(space, t)}
            for space in spaces[:1] if not inside else ():
                region = space.patches.memories[message.program].region
                for offset, size in message.words:
                    with contextlib.suppress(OSError):
                        space.write(region + offset, bytes(size))
            return inside
        finally:
            for thread in held:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.release(thread)
