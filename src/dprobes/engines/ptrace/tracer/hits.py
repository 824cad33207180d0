"""
What happens at a hit: the handler, the original instruction, the record; and at traps that are none of ours.

A thread that has stopped with SIGTRAP is put onto the probed instruction, the handlers of all programs that probe it
run on its registers and memory, the instruction is carried out, and only then the hits count and their records are
emitted.
"""

from __future__ import annotations

import signal
from itertools import groupby
from typing import TYPE_CHECKING

from dprobes.engines.hits.emission import Emitter
from dprobes.engines.hits.handlerruns import HandlerRunner, hands_over
from dprobes.engines.hits.lifecycle import AFTER, HitEvent, HitState
from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import RESUME_FLAG, TRAP_FLAG, Register
from dprobes.engines.ptrace.sites import Role
from dprobes.engines.ptrace.tracer.breakpoints import heal
from dprobes.engines.ptrace.tracer.detachment import give_back_pages
from dprobes.engines.ptrace.tracer.pendinghits import PendingHits, Settler
from dprobes.engines.ptrace.tracer.processes import ThreadState
from dprobes.engines.ptrace.tracer.returns import Returns
from dprobes.engines.ptrace.tracer.stepper import COMPLETED, Completion, CompletionKind
from dprobes.engines.ptrace.tracer.watchpoints import UnwatchedMemory
from dprobes.engines.x86.emulation import emulate, uses_return_addresses
from dprobes.vm import Ending

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.hits.emission import Turn
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.handlerexits import Exits
    from dprobes.engines.ptrace.tracer.modulebreakpoints import ModuleWatcher
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.programs import Handled, Probe
    from dprobes.engines.ptrace.tracer.removal import Remover
    from dprobes.engines.ptrace.tracer.returns import Hit
    from dprobes.engines.ptrace.tracer.stepper import Stepper
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.ptrace.tracer.threadcontext import ThreadContext
    from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters

__all__ = ["HitHandler"]

_ARRIVED, _CAME_BACK, _COMPLETED, _FAULTED = (
    HitEvent.ARRIVED,
    HitEvent.CAME_BACK,
    HitEvent.COMPLETED,
    HitEvent.FAULTED,
)

# Plain numbers: to look a register up by an enum member takes longer, and this runs at each hit.
_RIP, _EFLAGS = int(Register.RIP), int(Register.EFLAGS)


class HitHandler:
    """Handle the traps of all threads."""

    def __init__(
        self,
        connection: Connection,
        context: ThreadContext,
        modules: ModuleWatcher,
        stopper: Stopper,
        stepper: Stepper,
        remover: Remover,
        debug_registers: DebugRegisters,
        exits: Exits,
    ) -> None:
        self._connection = connection
        self._context = context
        self._modules = modules
        self._stopper = stopper
        self._stepper = stepper
        self._remover = remover
        self._debug_registers = debug_registers
        self._exits = exits
        self._returns = Returns(connection, context)
        self._handlers = HandlerRunner(context)
        self._registers = ptracecalls.Registers()
        self._registers_at_watchpoint = ptracecalls.Registers()
        self._info = ptracecalls.SignalInfo()
        self._emitter = Emitter(connection)
        self.pending = PendingHits(self._emitter, self._count_pending)
        self.settler = Settler(stopper, stepper, self.pending, self._count)
        self._emptied: list[int] = []
        """Where breakpoints were taken away in the memory of the thread that is being handled."""
        stepper.on_watchpoint = self._on_watchpoint
        stepper.drop_pending = self.pending.drop

    def finish(self) -> None:
        """Send the records that wait for others."""
        self._emitter.finish()

    def on_trap(self, thread: Thread) -> None:
        """Handle another stop with SIGTRAP: a watchpoint, the late end of a step, or the program's own trap."""
        registers = self._registers
        ptracecalls.get_registers(thread.tid, registers)
        if thread.hit.state is HitState.PENDING and registers[_RIP] != thread.hit.slot.address:
            self.pending.complete(thread)
        code = ptracecalls.get_signal_info(thread.tid, self._info)
        if code == ptracecalls.SI_KERNEL:
            address = registers[_RIP] - 1
            slot = thread.space.slots.holding(address)
            if slot is not None and slot.trap == address and thread.hit.is_late:
                self._on_late_step(thread)
                return
            if thread.space.breakpoints and heal(thread, address, self._modules.inherit):
                # A hit if it is a probepoint now.
                ptracecalls.set_instruction_pointer(thread.tid, address)
                self._stopper.resume(thread)
                return
        elif code == ptracecalls.TRAP_TRACE and thread.hit.is_late:
            self._on_late_step(thread)
            return
        elif code == ptracecalls.TRAP_HWBKPT:
            thread.state = ThreadState.STOPPED
            if self._on_watchpoint(thread):
                self._go_on(thread)
                return
        self.deliver(thread, signal.SIGTRAP)

    def on_breakpoint(self, thread: Thread) -> None:
        """Handle the stop of a thread that has run into a breakpoint, and stands where it could go on (``Stopper``)."""
        address, thread.trapped = thread.trapped, 0
        space = thread.space
        if thread.hit.state is HitState.PENDING:
            self.pending.complete(thread)
        thread.state = ThreadState.STOPPED
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None:
            # It was taken away a moment ago.
            original = space.former.get(address)
            if original is not None:
                space.restore_byte(address, original)
            ptracecalls.set_instruction_pointer(thread.tid, address)
            self._stopper.resume(thread)
            return
        registers = self._stopper.take_registers(thread, self._registers)
        runs_natively = True
        if registers is None:
            registers = self._registers
            ptracecalls.get_registers(thread.tid, registers)
            runs_natively = ptracecalls.runs_as(registers, space.word_size)
            way_on = space.slots.way_on(address, breakpoint_.site) if runs_natively else address
            if registers[_RIP] != way_on:  # of another thread that hit here meanwhile
                ptracecalls.set_instruction_pointer(thread.tid, way_on)
        self._registers = registers
        registers[_RIP] = address
        if runs_natively:
            self._on_hit(thread, breakpoint_)
        else:
            self._skip(thread, breakpoint_)

    def _skip(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Let a thread execute code of the other word size, which is not the instruction that the probe is for."""
        for probe in breakpoint_.probes():
            other = 64 if thread.space.word_size == 4 else 32
            self._context.on_warning(
                probe.program,
                f"process {thread.pid} executes {other}-bit code at offset {breakpoint_.site.offset:#x} of a "
                f"{96 - other}-bit module: that is no hit",
                "only code of the file's own word size can be probed",
            )
        completion = self._stepper.step_plainly(thread, breakpoint_, self._registers)
        if completion.resumable:
            self._go_on(thread, completion.signal)

    def deliver(self, thread: Thread, number: int) -> None:
        """Let a thread run on with the signal that it has stopped for."""
        number_now = self._stepper.leave_slot(thread, self._registers, number)
        if thread.hit.state is HitState.PENDING:
            self.pending.complete(thread)
        self._stopper.resume(thread, number_now)

    def _on_late_step(self, thread: Thread) -> None:
        """Count the hit of a thread that went to sleep in its step, and has got past the instruction after all."""
        hit = thread.hit
        breakpoint_, is_counted = hit.breakpoint, hit.state is HitState.COUNTED
        hit.follow(HitEvent.COMPLETED)
        hit.written = None
        thread.state = ThreadState.STOPPED
        self._stepper.settle_late(thread, breakpoint_, self._registers)
        if not is_counted:
            self._count(thread, [each for each in hit.handled if each.probe.is_active], COMPLETED)
        if breakpoint_.exits:
            self._leave(thread, breakpoint_)
        if thread.debug.slots:
            self._on_watchpoint(thread)
        self._go_on(thread)

    def _on_hit(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        handled: tuple[Handled, ...] = ()
        hit = thread.hit
        if hit.state and (hit.breakpoint is not breakpoint_ or not hit.is_late):
            hit.follow(HitEvent.GIVEN_UP)
        repeated = hit.state is HitState.COUNTED or thread.restarting == breakpoint_.address
        known = hit.handled if hit.state is HitState.UNFINISHED else None
        if repeated and known is not None:
            hit.follow(HitEvent.GIVEN_UP)
        hit.state = AFTER[hit.state, _CAME_BACK if repeated else _ARRIVED]
        hit.breakpoint, hit.handled, thread.restarting = breakpoint_, (), 0
        self._context.select(thread, self._registers)
        try:
            if breakpoint_.own:
                self._on_own(thread, breakpoint_)
            if breakpoint_.waiting and not thread.is_outside:
                self._after(thread, self._returns.arrived(thread, breakpoint_, self._registers))
                if thread.leaving is not None:
                    hit.follow(HitEvent.GIVEN_UP)
                    self._go_on(thread)
                    return
            if repeated:
                pass  # it has been counted: a system call, say, that is made once more only because we interrupted it
            elif known is not None:
                self._context.written = hit.written
                handled = self._handlers.run(breakpoint_.handlers, known)
            elif breakpoint_.handlers:
                handled = self._handlers.run(breakpoint_.handlers)
        except BaseException:
            # Whatever ends the run here, the thread must not go on behind the breakpoint.
            ptracecalls.set_registers(thread.tid, self._registers)
            raise
        if hands_over(handled):
            # The records come first, then the probepoint goes, and the instruction is not carried out by us.
            ptracecalls.set_registers(thread.tid, self._registers)
            self._count(thread, handled, COMPLETED)
            self._exits.note(thread, handled)
            # Should the thread go on under our eyes, it comes by once more: that will be no other hit.
            hit.follow(HitEvent.COUNTED_EARLY if breakpoint_.is_needed else HitEvent.COMPLETED)
            self._go_on(thread)
            return
        completion = self._complete(thread, breakpoint_, handled)
        hit.written = None
        if completion.kind is CompletionKind.PENDING:
            if handled:
                hit.written = self._context.written
                self.pending.add(thread, handled)
            else:
                hit.follow(HitEvent.COMPLETED)
            self._stopper.resume(thread)
            return
        if completion.kind is CompletionKind.INTERRUPTED:
            hit.handled, hit.written = handled, self._context.written
            is_kept = not completion.signal and (repeated or breakpoint_.handlers or breakpoint_.exits)
            hit.follow(HitEvent.INTERRUPTED if is_kept else HitEvent.GIVEN_UP)
        else:
            hit.state = AFTER[hit.state, _FAULTED if completion.kind is CompletionKind.FAULTED else _COMPLETED]
            if handled:
                self._count(thread, handled, completion)
        if completion.kind is CompletionKind.COMPLETED and (thread.debug.slots or thread.debug.superseded):
            self._on_watchpoint(thread)
        if breakpoint_.exits and completion.kind is CompletionKind.COMPLETED:
            self._leave(thread, breakpoint_)
        if completion.resumable:
            self._go_on(thread, completion.signal)

    def _on_watchpoint(self, thread: Thread) -> bool:
        """Take the watchpoints that a stopped thread has hit; return False if its trap has another reason as well."""
        hits, foreign = self._debug_registers.take_hits(thread)
        if not hits:
            return False
        registers = self._registers_at_watchpoint
        ptracecalls.get_registers(thread.tid, registers)
        place = registers[_RIP]
        slot = thread.space.slots.holding(place)
        if slot is not None:  # of a repeated string instruction: any other has left its slot
            registers[_RIP] = slot.site if place == slot.address else slot.following
        outer = self._context.written  # of a breakpoint that the thread is just being stepped from
        self._context.select(thread, registers)
        owners = sorted(((hit.probe, hit.point) for hit in hits), key=lambda owner: owner[0].program.rank)
        handled = self._handlers.run(owners)
        self._count(thread, handled, COMPLETED)
        self._exits.note(thread, handled)
        if written := self._context.written:
            if Register.RIP in written:
                registers[_EFLAGS] &= ~RESUME_FLAG  # it was meant for the instruction at the old place
            else:
                registers[_RIP] = place
            ptracecalls.set_registers(thread.tid, registers)
        self._context.select(thread, self._registers)
        self._context.written = outer
        return not foreign

    def _go_on(self, thread: Thread, number: int = 0) -> None:
        """Let a thread run on after its hits, with a signal or 0, or hand its process over if a handler said so."""
        if thread.leaving is not None and self._exits.carry_out(thread):
            self._emptied.clear()  # the process goes, or goes on later: then its pages are given back at the end
            return
        if self._emptied:
            self._give_back(thread, number)
        self._stopper.resume(thread, number)

    def _on_own(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        if Role.LINKER in breakpoint_.own:
            self._modules.update(thread.space, thread)
        if Role.UNWINDING in breakpoint_.own:
            self._returns.unwinding(thread)

    def _leave(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Let the probes be hit whose function an instruction that was carried out has left."""
        if not thread.is_outside:
            ptracecalls.get_registers(thread.tid, self._registers)
            self._context.select(thread, self._registers)
            self._after(thread, self._returns.left(thread, breakpoint_, self._registers))

    def _after(self, thread: Thread, hits: list[Hit]) -> None:
        """Run handlers on the state after a return, or after several: those of one function on what others left."""
        for _, function in groupby(hits, key=lambda hit: (hit[0].file, hit[1].offset)):
            owners = [(probe, site.point) for probe, site in function if site.point is not None]
            handled = self._handlers.run(owners)
            ptracecalls.set_registers(thread.tid, self._registers)
            self._count(thread, handled, COMPLETED)
            self._exits.note(thread, handled)
            # What the handlers changed is done: it is not undone if the next instruction is interrupted.
            self._context.select(thread, self._registers)

    def _may_pend(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> bool:
        """Return whether nothing waits for the instruction: only counts and records come after it."""
        if breakpoint_.exits or thread.space.watchpoints:
            return False
        for probe, _ in breakpoint_.handlers:
            if probe.limits.maxhits or probe.limits.passcount:
                return False
        for _, outcome, _, _ in handled:
            if outcome is not None and (outcome.ending is Ending.REMOVE or outcome.exit_code):
                return False
        return True

    def _complete(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> Completion:
        """Carry the original instruction out, by emulation or by a step."""
        emulation = breakpoint_.site.emulation
        may_emulate = not (
            self._registers[_EFLAGS] & TRAP_FLAG
            or thread.debug.has_foreign
            or (thread.space.has_shadow_stack and uses_return_addresses(emulation))
        )
        space = thread.space
        memory = UnwatchedMemory(self._context, space) if space.watchpoints else self._context
        if may_emulate and emulate(emulation, self._registers, memory):
            ptracecalls.set_registers(thread.tid, self._registers)
            return COMPLETED
        may_pend = self._may_pend(thread, breakpoint_, handled)
        return self._stepper.step(thread, breakpoint_, self._registers, may_pend=may_pend)

    def _count(
        self, thread: Thread, handled: Iterable[Handled], completion: Completion, turn: Turn | None = None
    ) -> None:
        """Count the hits of an instruction and emit their records; ``turn`` is their place in the order."""
        has_faulted = completion.kind is CompletionKind.FAULTED
        for probe in self._emitter.count(handled, turn, has_faulted=has_faulted):
            self._withdraw(probe, thread)

    def _count_pending(self, thread: Thread, completion: Completion) -> None:
        self._count(thread, thread.hit.handled, completion, thread.hit.turn)

    def _withdraw(self, probe: Probe, thread: Thread) -> None:
        """Take a probe away everywhere: it is disabled or removed."""
        for space, addresses in self._remover.withdraw(probe):
            if space is thread.space:
                self._emptied += addresses

    def _give_back(self, thread: Thread, number: int) -> None:
        """Let a stopped thread drop the pages of its space that have no breakpoints any more."""
        addresses, self._emptied = self._emptied, []
        # A thread that makes system calls for us leaves its stop, and a signal could no longer be delivered from there.
        if not number:
            with self._stopper.others_stopped(thread.space, thread):
                give_back_pages(thread.space, thread, addresses)
