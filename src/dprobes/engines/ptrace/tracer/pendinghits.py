"""
Hits whose instruction is executed without a stop behind it, and hits that have to be brought to their end at once.

Most instructions that touch memory complete, and a stop only to see that costs as much as the hit itself. So the
thread runs on from the slot, and its next stop shows what became of the instruction: a fault there finds the thread
still at the slot's start, and then it was no hit. A thread that does not stop by itself is looked at after some
milliseconds. What does not work so: limits (passcount, maxhits) that must be exact at the next hit of another thread,
and whatever has to happen right behind the instruction.

When a program ends or is replaced while others go on, a hit whose instruction was executed is counted, and one whose
instruction was not is given up as far as it is the program's: the results of other programs' handlers are kept, so that
these need not run once more.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import system_call_of
from dprobes.engines.linux.ptracecalls import Register, StopKind, classify_stop
from dprobes.engines.ptrace.tracer.heldsignals import FAULTS
from dprobes.engines.ptrace.tracer.processes import PendingHit, ThreadState, UnfinishedHit
from dprobes.engines.ptrace.tracer.stepper import COMPLETED, Completion, CompletionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.engines.hits.emission import Emitter
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import Handled, InsertedProgram
    from dprobes.engines.ptrace.tracer.stepper import Stepper
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["PendingHits", "Settler", "has_hit_of"]

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


class Settler:
    """Settle hits of threads; ``count`` counts those whose instruction was executed."""

    def __init__(
        self,
        stopper: Stopper,
        stepper: Stepper,
        pending: PendingHits,
        count: Callable[[Thread, Iterable[Handled], Completion], None],
    ) -> None:
        self._stopper = stopper
        self._stepper = stepper
        self._pending = pending
        self._count = count
        self._registers = ptracecalls.Registers()

    def repeat(self, thread: Thread, status: int | None, program: InsertedProgram) -> None:
        """
        Settle the hit of a stopped thread, which reports ``status``, for a program that another one replaces.

        If the instruction was not executed, the thread is put back onto it, and will hit again.
        """
        pending, unfinished = thread.pending, thread.unfinished
        if pending is not None:
            self._resolve(thread, status)
            if thread.pending is not None:
                self._pending.drop(thread)
                self._give_up(thread, pending.breakpoint, _of_others(pending.handled, program))
        elif unfinished is not None and not unfinished.is_counted:
            breakpoint_ = unfinished.breakpoint
            ptracecalls.get_registers(thread.tid, self._registers)
            if self._registers[_RIP] in (breakpoint_.address, thread.space.slots.way_on(breakpoint_)):
                self._give_up(thread, breakpoint_, _of_others(unfinished.handled, program))
            else:
                self.count_now(thread)  # the trap that says so is still to come

    def drop(self, thread: Thread, status: int | None, program: InsertedProgram) -> None:
        """Settle the hit of a stopped thread, which reports ``status``, for a program that ends."""
        if thread.pending is not None:
            self._resolve(thread, status)
        self.forget(thread, program)

    @staticmethod
    def forget(thread: Thread, program: InsertedProgram) -> None:
        """Let a hit of a thread that is not counted yet be none of a program."""
        if (pending := thread.pending) is not None:
            thread.pending = pending._replace(handled=_of_others(pending.handled, program))
        if (unfinished := thread.unfinished) is not None:
            thread.unfinished = unfinished._replace(handled=_of_others(unfinished.handled, program))

    def count_now(self, thread: Thread) -> None:
        """Count the hit of a thread that cannot be stopped in the instruction: it will execute that by itself."""
        if thread.pending is not None:
            self._pending.complete(thread)
        elif (unfinished := thread.unfinished) is not None and not unfinished.is_counted:
            thread.unfinished = unfinished._replace(is_counted=True)
            self._count(thread, [each for each in unfinished.handled if each.probe.is_active], COMPLETED)

    def _resolve(self, thread: Thread, status: int | None) -> None:
        kind, number = (StopKind.EVENT, 0) if status is None else classify_stop(status)
        self._pending.resolve(thread, kind, number)

    def _give_up(self, thread: Thread, breakpoint_: Breakpoint, others: tuple[Handled, ...]) -> None:
        self._stopper.give_up_hit(thread)
        ptracecalls.get_registers(thread.tid, self._registers)
        self._registers[_RIP] = breakpoint_.address
        ptracecalls.set_registers(thread.tid, self._registers)
        if others:
            thread.unfinished = UnfinishedHit(breakpoint_, others)


def has_hit_of(thread: Thread, program: InsertedProgram) -> bool:
    """Return whether a thread has a hit of a program that is not counted yet, or a return of it to come."""
    if thread.pending is not None:
        return any(each.probe.program is program for each in thread.pending.handled)
    if (unfinished := thread.unfinished) is not None and not unfinished.is_counted:
        probes = [each.probe for each in unfinished.handled] + [probe for probe, _ in unfinished.breakpoint.exits]
        return any(probe.program is program for probe in probes)
    return False


def _of_others(handled: tuple[Handled, ...], program: InsertedProgram) -> tuple[Handled, ...]:
    return tuple(each for each in handled if each.probe.program is not program)
