"""
Hits whose instruction is executed without a stop behind it.

Most instructions that touch memory complete, and a stop only to see that costs as much as the hit itself. So the
thread runs on from the slot, and its next stop shows what became of the instruction: a fault there finds the thread
still at the slot's start, and then it was no hit. A thread that does not stop by itself is looked at after some
milliseconds.

What does not work so: limits (passcount, maxhits) that must be exact at the next hit of another thread, and whatever
has to happen right behind the instruction.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import system_call_of
from dprobes.engines.linux.ptracecalls import Register, StopKind
from dprobes.engines.ptrace.tracer.heldsignals import FAULTS
from dprobes.engines.ptrace.tracer.processes import PendingHit, ThreadState
from dprobes.engines.ptrace.tracer.stepper import COMPLETED, Completion, CompletionKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.hits.emission import Emitter
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import Handled

__all__ = ["PendingHits"]

_FAULTED = Completion(CompletionKind.FAULTED)

_PATIENCE = 0.005
"""Seconds after which to look what became of a hit."""

_ORDERLY = 0.05
"""Seconds after which records of other hits no longer wait for a thread that sleeps, or is stopped."""

_RIP = int(Register.RIP)


class PendingHits:
    """Hold the threads with a pending hit."""

    def __init__(self, emitter: Emitter, count: Callable[[Thread, PendingHit, Completion], None]) -> None:
        self._emitter = emitter
        self._count = count
        self._threads: dict[int, Thread] = {}
        self._registers = ptracecalls.Registers()
        self._info = ptracecalls.SignalInfo()

    def add(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> None:
        """Note that a thread is about to execute the instruction of a hit in its slot."""
        slot = thread.space.slots.by_site[breakpoint_.address, breakpoint_.site.original]
        assert slot is not None
        thread.pending = PendingHit(breakpoint_, handled, slot, self._emitter.take_turn(), time.monotonic())
        self._threads[thread.tid] = thread

    def resolve(self, thread: Thread, kind: StopKind, number: int) -> None:
        """Find out at a stop of a thread, which is none for SIGTRAP, what became of its pending hit."""
        pending = thread.pending
        assert pending is not None
        if kind is StopKind.EXITED:
            self.complete(thread)
            return
        if self._is_past(thread):
            self.complete(thread)
        elif kind is StopKind.SIGNAL and number in FAULTS and ptracecalls.get_signal_info(thread.tid, self._info) > 0:
            self.complete(thread, _FAULTED)

    def complete(self, thread: Thread, completion: Completion = COMPLETED) -> None:
        """Count a hit whose instruction was executed, or faulted."""
        pending = thread.pending
        assert pending is not None
        thread.pending = thread.written = None
        self._threads.pop(thread.tid, None)
        # Also if a probepoint has gone meanwhile: its handler ran before.
        self._count(thread, pending, completion)

    def let_go(self, thread: Thread) -> None:
        """Count the pending hit of a stopped thread that is about to be detached, if its instruction was executed."""
        if thread.pending is None:
            return
        with contextlib.suppress(OSError):
            if self._is_past(thread):
                self.complete(thread)
        self.drop(thread)

    def drop(self, thread: Thread) -> None:
        """Forget a hit whose instruction was not executed, if there is one."""
        if (pending := thread.pending) is not None:
            thread.pending = None
            self._threads.pop(thread.tid, None)
            self._emitter.emit([], pending.turn)

    def forget(self, thread: Thread) -> None:
        """Count the pending hit of a thread that is gone, because another one has executed a program."""
        if thread.pending is not None:
            self.complete(thread)

    def look_after(self) -> float | None:
        """
        See to it that no hit pends for long; return in how many seconds to ask again, None if no thread runs with one.

        A thread that sleeps in a system call is past the instruction, one that sleeps otherwise is not (a page has to
        come); one that runs is stopped for a moment to see.
        """
        if not self._threads:
            return None
        now = time.monotonic()
        again = False
        for tid, thread in list(self._threads.items()):
            pending = thread.pending
            if pending is None or thread.state is ThreadState.ENDED:
                self.drop(thread)
                self._threads.pop(tid, None)
                continue
            if now - pending.since >= _PATIENCE and thread.state is ThreadState.RUNNING:
                self._look_at(thread)
            if now - pending.since >= _ORDERLY and thread.pending is pending:
                self._emitter.skip(pending.turn)
            again = again or (
                thread.pending is not None and (thread.state is ThreadState.RUNNING or pending.turn.is_queued)
            )
        return _PATIENCE if again else None

    def _is_past(self, thread: Thread) -> bool:
        """Return whether a stopped thread has executed the instruction: it is elsewhere, or has hit once more."""
        assert thread.pending is not None
        if thread.trapped:
            return True
        ptracecalls.get_registers(thread.tid, self._registers)
        return bool(self._registers[_RIP] != thread.pending.slot.address)

    def _look_at(self, thread: Thread) -> None:
        where = system_call_of(thread.tid)
        if where is None:
            with contextlib.suppress(OSError):
                ptracecalls.interrupt(thread.tid)
        elif where >= 0:
            self.complete(thread)
