"""
Bringing hits of one program to their end, while hits of others go on.

A hit whose instruction may or may not have been executed is counted if it was, and else given up as far as it is the
program's: the results of other programs' handlers are kept, so that these need not run once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import Register, StopKind, classify_stop
from dprobes.engines.ptrace.tracer.processes import UnfinishedHit
from dprobes.engines.ptrace.tracer.stepper import COMPLETED, Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.pendinghits import PendingHits
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import Handled, InsertedProgram
    from dprobes.engines.ptrace.tracer.stepper import Stepper
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["Settler", "has_hit_of"]

_RIP = int(Register.RIP)


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
