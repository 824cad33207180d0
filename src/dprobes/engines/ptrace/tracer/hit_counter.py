"""
Counting of hits: most are counted when they are handled, others when the outcome of their instruction is known.

Most instructions that access memory complete, and a stop to verify this takes as long as the hit itself. So the thread
continues from the slot with a *pending* hit, and its next stop shows the outcome of the instruction. After a fault, the
thread is still at the slot's start, and the hit does not count. A thread that does not stop by itself is checked after
some milliseconds. Hits cannot be pending with limits (passcount, maxhits), which must be exact at the next hit of
another thread, or if an action must follow the instruction immediately.

When a program ends or is replaced while others continue, a hit whose instruction was executed is counted. A hit whose
instruction was not executed is given up for the program. The results of other programs' handlers are kept, so that
these do not run again.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from dprobes.engines.hits.hit_lifecycle import AFTER, HitEvent, HitState
from dprobes.engines.hits.probe_hits import HANDING_OVER, Emitter, HandlerRunner
from dprobes.engines.ptrace.tracer.held_signals import FAULTS
from dprobes.engines.ptrace.tracer.tracer_state import ExitRequest, ThreadState
from dprobes.engines.ptrace.tracer_messages import Warned
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.procfs import system_call_of
from dprobes.platform.linux.ptrace_calls import RESUME_FLAG, Register, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.engines.hits.probe_hits import QueuedRecords
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Watchpoint
    from dprobes.engines.ptrace.tracer.probe_removal import Remover
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.thread_watchpoints import DebugRegisters
    from dprobes.engines.ptrace.tracer.tracer_programs import Handled, InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["HitCounter", "Settler", "WatchpointHits", "has_hit_of"]

_COMPLETED, _FAULTED = HitEvent.COMPLETED, HitEvent.FAULTED

_PATIENCE = 0.005
"""Seconds after which the outcome of a pending hit is checked."""

_ORDERLY = 0.05
"""Seconds after which records of other hits no longer wait for a thread that sleeps, or is stopped."""

_RIP, _EFLAGS = int(Register.RIP), int(Register.EFLAGS)


class HitCounter:
    """Counter of hits, which emits their records, and removes probes after their last hit."""

    def __init__(self, connection: Connection, remover: Remover) -> None:
        self._connection = connection
        self._remover = remover
        self.emitter = Emitter(connection)
        """Counter of hits that cannot be the last one of their probepoint."""
        self._pending: dict[int, Thread] = {}
        self._registers = ptrace_calls.Registers()
        self._info = ptrace_calls.SignalInfo()
        self.emptied: list[int] = []
        """Addresses of breakpoints that were removed from the memory of the thread whose hit was counted."""

    def count(
        self,
        thread: Thread,
        handled: Iterable[Handled],
        queued: QueuedRecords | None = None,
        *,
        has_faulted: bool = False,
    ) -> None:
        """
        Count the hits of an instruction, and emit their records. Remove breakpoints that no probepoint needs any more.

        ``queued`` is the place that was reserved for the records; if it is None, they come last. ``has_faulted`` is
        True if the instruction faulted.
        """
        self.take_away(thread, self.emitter.count(handled, queued, has_faulted=has_faulted))

    def take_away(self, thread: Thread, probes: Iterable[Probe]) -> None:
        """Remove probepoints that have become inactive by hits of a stopped thread."""
        for probe in probes:
            for space, addresses in self._remover.withdraw(probe):
                if space is thread.space:
                    self.emptied += addresses

    def count_at_once(self, thread: Thread, handled: Sequence[Handled]) -> None:
        """
        Count hits whose instruction need not be awaited, and record the ``exit`` request of a handler.

        The first request counts; each further one causes a warning.
        """
        self.count(thread, handled)
        for each in handled:
            probe, outcome = each.probe, each.outcome
            if outcome is None or outcome.exit_code not in HANDING_OVER:
                continue
            if thread.exit_request is None:
                thread.exit_request = ExitRequest(outcome.exit_code, probe.program)
                continue
            text = f"'exit {outcome.exit_code}' was not carried out in process {thread.pid}: another handler"
            text += f" ended with 'exit {thread.exit_request.code}' at the same moment"
            self._connection.send(Warned(text, program=probe.program.number))

    def finish(self) -> None:
        """Send all known records. Records of pending hits are not awaited."""
        self.emitter.finish()

    # Pending hits

    def pend(self, thread: Thread, handled: tuple[Handled, ...]) -> None:
        """
        Record that a thread is about to execute the instruction of its hit in a slot, and continues afterwards.

        The hit is counted at the thread's next stop.
        """
        hit, site = thread.hit, thread.hit.breakpoint.site
        slot = thread.space.slots.by_site[hit.breakpoint.address, site.original]
        assert slot is not None
        hit.state = AFTER[hit.state, HitEvent.LET_RUN]
        hit.handled, hit.slot, hit.queued = handled, slot, self.emitter.queue()
        hit.since = hit.looked_at = time.monotonic()
        self._pending[thread.tid] = thread

    def resolve(self, thread: Thread, kind: StopKind, number: int) -> None:
        """
        Count the thread's pending hit, at a stop other than SIGTRAP, if its instruction has completed or faulted.

        Otherwise the hit stays pending. ``number`` is the signal of a SIGNAL stop.
        """
        if kind is StopKind.EXITED:
            self.complete(thread)
            return
        if self._is_past(thread):
            self.complete(thread)
        elif kind is StopKind.SIGNAL and number in FAULTS and ptrace_calls.get_signal_info(thread.tid, self._info) > 0:
            self.complete(thread, has_faulted=True)

    def complete(self, thread: Thread, *, has_faulted: bool = False) -> None:
        """Count the pending hit of a thread, whose instruction was executed, or with ``has_faulted`` has faulted."""
        hit = thread.hit
        hit.state = AFTER[hit.state, _FAULTED if has_faulted else _COMPLETED]
        hit.written = None
        self._pending.pop(thread.tid, None)
        # Count it even if a probepoint was removed meanwhile: its handler ran before.
        self.count(thread, hit.handled, hit.queued, has_faulted=has_faulted)

    def before_detachment(self, thread: Thread) -> None:
        """Count the pending hit of a stopped thread that is about to be detached, if its instruction was executed."""
        if thread.hit.state is not HitState.PENDING:
            return
        with contextlib.suppress(OSError):
            if self._is_past(thread):
                self.complete(thread)
        self.drop(thread)

    def drop(self, thread: Thread) -> None:
        """Discard the thread's pending hit, if it has one: the instruction was not executed."""
        if thread.hit.state is HitState.PENDING:
            thread.hit.follow(HitEvent.GIVEN_UP)
            self._pending.pop(thread.tid, None)
            self.emitter.emit([], thread.hit.queued)

    def forget(self, thread: Thread) -> None:
        """End the hit of a thread that another thread's execve has ended. A pending hit is counted."""
        if thread.hit.state is HitState.PENDING:
            self.complete(thread)
        thread.hit.end()

    def look_after(self) -> float | None:
        """
        Check pending hits. Return the seconds until the next check, or None if no running thread has one.

        A thread that sleeps in a system call is past the instruction. A thread that sleeps otherwise is not, because it
        waits for a page. A running thread is stopped for a moment to check.
        """
        if not self._pending:
            return None
        now = time.monotonic()
        again = False
        for tid, thread in list(self._pending.items()):
            hit = thread.hit
            if hit.state is not HitState.PENDING or thread.state is ThreadState.ENDED:
                self.drop(thread)
                self._pending.pop(tid, None)
                continue
            if now - hit.looked_at >= _PATIENCE and thread.state is ThreadState.RUNNING:
                # Not more often: a thread that waits for a CPU executes nothing between two stops.
                hit.looked_at = now
                self._look_at(thread)
            if now - hit.since >= _ORDERLY and tid in self._pending:
                self.emitter.skip(hit.queued)
            again = again or (tid in self._pending and (thread.state is ThreadState.RUNNING or hit.queued.is_queued))
        return _PATIENCE if again else None

    def _is_past(self, thread: Thread) -> bool:
        """Return True if a stopped thread has executed the instruction: it is elsewhere, or has hit again."""
        if thread.trapped:
            return True
        ptrace_calls.get_registers(thread.tid, self._registers)
        return bool(self._registers[_RIP] != thread.hit.slot.address)

    def _look_at(self, thread: Thread) -> None:
        where = system_call_of(thread.tid)
        if where is None:
            with contextlib.suppress(OSError):
                ptrace_calls.interrupt(thread.tid)
        elif where >= 0:
            self.complete(thread)


class Settler:
    """Settlement of hits that are not counted yet when their program is replaced or removed."""

    def __init__(self, stopper: Stopper, counter: HitCounter) -> None:
        self._stopper = stopper
        self._counter = counter
        self._registers = ptrace_calls.Registers()

    def finish(self) -> None:
        """Send the records of hits that were settled."""
        self._counter.finish()

    def repeat(self, thread: Thread, status: int | None, program: InsertedProgram) -> None:
        """
        Settle the hit of a stopped thread, which reports ``status``, for a program that is replaced by another one.

        If the instruction was not executed, the thread is moved back to it, and hits again.
        """
        hit = thread.hit
        if hit.state is HitState.PENDING:
            self._resolve(thread, status)
            if hit.state is HitState.PENDING:
                self._counter.drop(thread)
                self._give_up(thread, program)
        elif hit.state is HitState.UNFINISHED:
            ptrace_calls.get_registers(thread.tid, self._registers)
            if self._registers[_RIP] in (
                hit.breakpoint.address,
                thread.space.slots.way_on(hit.breakpoint.address, hit.breakpoint.site),
            ):
                self._give_up(thread, program)
            else:
                self.count_now(thread)  # the trap that reports this has not arrived yet

    def drop(self, thread: Thread, status: int | None, program: InsertedProgram) -> None:
        """Settle the hit of a stopped thread, which reports ``status``, for a program that ends."""
        if thread.hit.state is HitState.PENDING:
            self._resolve(thread, status)
        self.forget(thread, program)

    @staticmethod
    def forget(thread: Thread, program: InsertedProgram) -> None:
        """Remove a program's results from the hit of a thread that is not counted yet."""
        thread.hit.handled = _of_others(thread.hit.handled, program)

    def count_now(self, thread: Thread) -> None:
        """Count the hit of a thread that cannot stop now; it will complete the instruction without a stop."""
        hit = thread.hit
        if hit.state is HitState.PENDING:
            self._counter.complete(thread)
        elif hit.state is HitState.UNFINISHED:
            hit.follow(HitEvent.COUNTED_EARLY)
            self._counter.count(thread, [each for each in hit.handled if each.probe.counts_late])

    def _resolve(self, thread: Thread, status: int | None) -> None:
        kind, number = (StopKind.EVENT, 0) if status is None else classify_stop(status)
        self._counter.resolve(thread, kind, number)

    def _give_up(self, thread: Thread, program: InsertedProgram) -> None:
        hit = thread.hit
        kept = _of_others(hit.handled, program)
        hit.handled = tuple(each for each in hit.handled if each.probe.program is program)
        self._stopper.give_up_hit(thread)
        ptrace_calls.get_registers(thread.tid, self._registers)
        self._registers[_RIP] = hit.breakpoint.address
        ptrace_calls.set_registers(thread.tid, self._registers)
        hit.handled = kept
        if hit.handled:
            hit.follow(HitEvent.KEPT)


def has_hit_of(thread: Thread, program: InsertedProgram) -> bool:
    """Return whether a thread has a hit of a program that is not counted yet, or a pending return of it."""
    hit = thread.hit
    if hit.state is HitState.PENDING:
        return any(each.probe.program is program for each in hit.handled)
    if hit.state is HitState.UNFINISHED:
        probes = [each.probe for each in hit.handled] + [probe for probe, _ in hit.breakpoint.exits]
        return any(probe.program is program for probe in probes)
    return False


def _of_others(handled: tuple[Handled, ...], program: InsertedProgram) -> tuple[Handled, ...]:
    return tuple(each for each in handled if each.probe.program is not program)


class WatchpointHits:
    """
    Handling of watchpoints that a stopped thread has hit.

    The trap of an access may arrive while its thread is stepped from a breakpoint, between two iterations of a repeated
    string instruction. So the changes made by the breakpoint's handlers are preserved.
    """

    def __init__(self, context: ThreadContext, debug_registers: DebugRegisters, counter: HitCounter) -> None:
        self._context = context
        self._debug_registers = debug_registers
        self._counter = counter
        self._handlers = HandlerRunner(context)
        self._registers = ptrace_calls.Registers()

    def take(self, thread: Thread, outer: RegisterWords, others: Iterable[Watchpoint] = ()) -> bool:
        """
        Handle the watchpoints that a stopped thread has hit. Return False if its trap has another reason, too.

        ``outer`` has the registers that the context uses again afterwards. ``others`` are hit, too, and have no debug
        registers.
        """
        hits, foreign = self._debug_registers.take_hits(thread)
        hits += others
        if not hits:
            return False
        registers = self._registers
        ptrace_calls.get_registers(thread.tid, registers)
        place = registers[_RIP]
        slot = thread.space.slots.holding(place)
        if slot is not None:  # in a repeated string instruction: after any other the thread has left its slot
            registers[_RIP] = slot.site if place == slot.address else slot.following
        elif (displaced := thread.space.patches.original_of(place)) is not None:
            registers[_RIP] = displaced[1].original
        outer_written = self._context.written  # of a breakpoint from which the thread is being stepped
        self._context.select(thread, registers)
        owners = sorted(((hit.probe, hit.point) for hit in hits), key=lambda owner: owner[0].program.rank)
        self._counter.count_at_once(thread, self._handlers.run(owners))
        if written := self._context.written:
            if Register.RIP in written:
                registers[_EFLAGS] &= ~RESUME_FLAG  # it was set for the instruction at the old address
            else:
                registers[_RIP] = place
            ptrace_calls.set_registers(thread.tid, registers)
        self._context.select(thread, outer)
        self._context.written = outer_written
        return not foreign
