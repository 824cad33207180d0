"""
Hits of watchpoints: handlers run behind the access, and the hits count at once.

The trap of an access may come while its thread is stepped from a breakpoint, between two rounds of a repeated string
instruction. So what the breakpoint's handlers have done is kept meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.hits.handlerruns import HandlerRunner
from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import RESUME_FLAG, Register

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.tracer.hitcounter import HitCounter
    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.engines.ptrace.tracer.threadcontext import ThreadContext
    from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters

__all__ = ["WatchpointHits"]

_RIP, _EFLAGS = int(Register.RIP), int(Register.EFLAGS)


class WatchpointHits:
    """The handling of watchpoints that a stopped thread has hit."""

    def __init__(self, context: ThreadContext, debug_registers: DebugRegisters, counter: HitCounter) -> None:
        self._context = context
        self._debug_registers = debug_registers
        self._counter = counter
        self._handlers = HandlerRunner(context)
        self._registers = ptracecalls.Registers()

    def take(self, thread: Thread, outer: ctypes.Array[ctypes.c_ulong]) -> bool:
        """
        Take the watchpoints that a stopped thread has hit; return False if its trap has another reason as well.

        ``outer`` are the registers of which the context speaks afterwards.
        """
        hits, foreign = self._debug_registers.take_hits(thread)
        if not hits:
            return False
        registers = self._registers
        ptracecalls.get_registers(thread.tid, registers)
        place = registers[_RIP]
        slot = thread.space.slots.holding(place)
        if slot is not None:  # of a repeated string instruction: any other has left its slot
            registers[_RIP] = slot.site if place == slot.address else slot.following
        elif (displaced := thread.space.patches.original_of(place)) is not None:
            registers[_RIP] = displaced[1].original
        outer_written = self._context.written  # of a breakpoint that the thread is just being stepped from
        self._context.select(thread, registers)
        owners = sorted(((hit.probe, hit.point) for hit in hits), key=lambda owner: owner[0].program.rank)
        self._counter.count_at_once(thread, self._handlers.run(owners))
        if written := self._context.written:
            if Register.RIP in written:
                registers[_EFLAGS] &= ~RESUME_FLAG  # it was meant for the instruction at the old place
            else:
                registers[_RIP] = place
            ptracecalls.set_registers(thread.tid, registers)
        self._context.select(thread, outer)
        self._context.written = outer_written
        return not foreign
