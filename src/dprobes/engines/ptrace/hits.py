"""
What happens at a hit: the handler, the original instruction, the record; and at traps that are none of ours.

A thread that has stopped with SIGTRAP is put onto the probed instruction, the handler runs on its registers and memory,
the instruction is carried out, and only then the hit counts and its record is emitted.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.emission import Emitter
from dprobes.engines.ptrace.emulate import Action, emulate, uses_return_addresses
from dprobes.engines.ptrace.givingback import give_back_pages
from dprobes.engines.ptrace.pending import PendingHits
from dprobes.engines.ptrace.probes import CORE_DUMP, HANDING_OVER
from dprobes.engines.ptrace.processes import ThreadState, UnfinishedHit
from dprobes.engines.ptrace.returns import Returns
from dprobes.engines.ptrace.stepping import COMPLETED, Completion, CompletionKind
from dprobes.engines.ptrace.syscalls import RESUME_FLAG, TRAP_FLAG, Register, StopKind, classify_stop
from dprobes.engines.ptrace.watching import UnwatchedMemory
from dprobes.engines.ptrace.wire import Placed, Role
from dprobes.vm import Ending

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from dprobes.engines.ptrace.arming import Armer
    from dprobes.engines.ptrace.connection import Connection
    from dprobes.engines.ptrace.context import ThreadContext
    from dprobes.engines.ptrace.emission import Turn
    from dprobes.engines.ptrace.modules import ModuleWatcher
    from dprobes.engines.ptrace.probes import Probe
    from dprobes.engines.ptrace.processes import Breakpoint, PendingHit, Thread
    from dprobes.engines.ptrace.records import Header
    from dprobes.engines.ptrace.removing import Remover
    from dprobes.engines.ptrace.returns import Hit
    from dprobes.engines.ptrace.stepping import Stepper
    from dprobes.engines.ptrace.stopping import Stopper
    from dprobes.vm import Outcome, Point

__all__ = ["HitHandler", "WaysOut"]

# Plain numbers: to look a register up by an enum member takes longer, and this runs at each hit.
_RIP, _EFLAGS = int(Register.RIP), int(Register.EFLAGS)


@dataclass(frozen=True, slots=True)
class WaysOut:
    """Hold what ``exit 1`` and ``exit 3`` do with a stopped thread; both return False if it is to go on."""

    hand_over: Callable[[Thread, ctypes.Array[ctypes.c_ulong]], bool]
    dump: Callable[[Thread], bool]


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
        armer: Armer,
        ways_out: WaysOut,
    ) -> None:
        self._connection = connection
        self._context = context
        self._modules = modules
        self._stopper = stopper
        self._stepper = stepper
        self._remover = remover
        self._armer = armer
        self._ways_out = ways_out
        self._returns = Returns(connection, context)
        self._registers = syscalls.Registers()
        self._registers_at_watchpoint = syscalls.Registers()
        self._info = syscalls.SignalInfo()
        self._emitter = Emitter(connection)
        self.pending = PendingHits(self._emitter, self._count_pending)
        self._emptied: list[int] = []
        """Where breakpoints were taken away in the memory of the thread that is being handled."""
        context.on_rewrite = self._on_rewrite
        stepper.on_watchpoint = self._on_watchpoint
        stepper.drop_pending = self.pending.drop

    def finish(self) -> None:
        """Send the records that wait for others."""
        self._emitter.finish()

    def settle(self, thread: Thread, status: int | None) -> None:
        """
        Bring a hit to its end whose instruction a stopped thread may not have executed; ``status`` is what it reports.

        If it has not, the hit is given up: the thread is put back onto the instruction, and will hit again.
        """
        registers = self._registers
        if thread.pending is not None:
            slot = thread.pending.slot
            kind, number = (StopKind.EVENT, 0) if status is None else classify_stop(status)
            self.pending.resolve(thread, kind, number)
            if thread.pending is not None:
                self.pending.drop(thread)
                self._give_up(thread, slot.site)
        elif thread.unfinished is not None and not thread.unfinished.is_counted:
            breakpoint_ = thread.unfinished.breakpoint
            syscalls.get_registers(thread.tid, registers)
            if registers[_RIP] in (breakpoint_.address, self._stepper.way_on(thread, breakpoint_)):
                self._give_up(thread, breakpoint_.address)
            else:
                self.count_now(thread)  # the trap that says so is still to come

    def _give_up(self, thread: Thread, address: int) -> None:
        self._stopper.give_up_hit(thread)
        syscalls.get_registers(thread.tid, self._registers)
        self._registers[_RIP] = address
        syscalls.set_registers(thread.tid, self._registers)

    def count_now(self, thread: Thread) -> None:
        """Count the hit of a thread that cannot be stopped in the instruction: it will execute that by itself."""
        if thread.pending is not None:
            self.pending.complete(thread)
        elif thread.unfinished is not None and not thread.unfinished.is_counted:
            breakpoint_, outcome, header, _ = thread.unfinished
            thread.unfinished = thread.unfinished._replace(is_counted=True)
            if breakpoint_.probe is not None and breakpoint_.probe.is_active:
                self._count(thread, breakpoint_.probe, outcome, header, COMPLETED)

    def on_trap(self, thread: Thread) -> None:
        """Handle a stop with SIGTRAP: a breakpoint, a watchpoint, the late end of a step, or the program's own trap."""
        registers = self._registers
        syscalls.get_registers(thread.tid, registers)
        if thread.pending is not None and registers[_RIP] != thread.pending.slot.address:
            self.pending.complete(thread)
        code = syscalls.get_signal_info(thread.tid, self._info)
        if code == syscalls.SI_KERNEL:
            address = registers[_RIP] - 1
            breakpoint_ = thread.space.breakpoints.get(address)
            if breakpoint_ is not None:
                registers[_RIP] = address
                thread.state = ThreadState.STOPPED
                # Should we be killed now, the thread goes on, without the signal. Not in the middle of the instruction.
                syscalls.set_instruction_pointer(thread.tid, self._stepper.way_on(thread, breakpoint_))
                self._on_hit(thread, breakpoint_)
                return
            original = thread.space.former.get(address)
            if original is not None:
                # The thread ran into a breakpoint that was taken away a moment ago.
                thread.space.restore_byte(address, original)
                registers[_RIP] = address
                syscalls.set_registers(thread.tid, registers)
                self._stopper.resume(thread)
                return
            slot = thread.space.slots.holding(address)
            if slot is not None and slot.trap == address and thread.unfinished is not None:
                self._on_late_step(thread)
                return
        elif code == syscalls.TRAP_TRACE and thread.unfinished is not None:
            self._on_late_step(thread)
            return
        elif code == syscalls.TRAP_HWBKPT:
            thread.state = ThreadState.STOPPED
            if self._on_watchpoint(thread):
                self._go_on(thread)
                return
        self.deliver(thread, signal.SIGTRAP)

    def deliver(self, thread: Thread, number: int) -> None:
        """Let a thread run on with the signal that it has stopped for."""
        number_now = self._stepper.leave_slot(thread, self._registers, number)
        if number_now is not None:
            if thread.pending is not None:
                self.pending.complete(thread)
            self._stopper.resume(thread, number_now)

    def _on_late_step(self, thread: Thread) -> None:
        """Count the hit of a thread that went to sleep in its step, and has got past the instruction after all."""
        assert thread.unfinished is not None
        breakpoint_, outcome, header, is_counted = thread.unfinished
        thread.unfinished = thread.written = None
        thread.state = ThreadState.STOPPED
        self._stepper.settle_late(thread, breakpoint_, self._registers)
        if breakpoint_.probe is not None and breakpoint_.probe.is_active and not is_counted:
            self._count(thread, breakpoint_.probe, outcome, header, COMPLETED)
        if breakpoint_.exits:
            self._leave(thread, breakpoint_)
        if thread.debug.slots:
            self._on_watchpoint(thread)
        self._go_on(thread)

    def _on_hit(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        probe = None if thread.is_outside else breakpoint_.probe
        outcome: Outcome | None = None
        header = None
        unfinished = thread.unfinished
        if unfinished is not None and unfinished.breakpoint is not breakpoint_:
            unfinished = None
        repeated = thread.restarting == breakpoint_.address or (unfinished is not None and unfinished.is_counted)
        thread.unfinished, thread.restarting = None, 0
        self._context.select(thread, self._registers)
        try:
            if breakpoint_.own:
                self._on_own(thread, breakpoint_)
            if breakpoint_.waiting and not thread.is_outside:
                self._after(thread, self._returns.arrived(thread, breakpoint_, self._registers))
                if thread.debug.exit_code:
                    self._go_on(thread)
                    return
            if probe is None or repeated:
                pass  # it has been counted: a system call, say, that is made once more only because we interrupted it
            elif unfinished is not None:
                outcome, header = unfinished.outcome, unfinished.header
                self._context.written = thread.written
            elif probe.is_active and probe.runs_handler:
                assert breakpoint_.site.point is not None
                outcome, header = self._run_handler(thread, probe, breakpoint_.site.point, self._registers)
        except BaseException:
            # Whatever ends the run here, the thread must not go on behind the breakpoint.
            syscalls.set_registers(thread.tid, self._registers)
            raise
        if probe is not None and outcome is not None and outcome.exit_code in HANDING_OVER:
            # The record comes first, then the probepoint goes, and the instruction is not carried out by us.
            syscalls.set_registers(thread.tid, self._registers)
            self._count(thread, probe, outcome, header, COMPLETED)
            thread.debug.exit_code = outcome.exit_code
            self._go_on(thread)
            return
        completion = self._complete(thread, breakpoint_, may_pend=self._may_pend(thread, breakpoint_, outcome))
        thread.written = None
        if completion.kind is CompletionKind.PENDING:
            if probe is not None and probe.is_active and not repeated:
                thread.written = self._context.written
                self.pending.add(thread, breakpoint_, probe, outcome, header)
            self._stopper.resume(thread)
            return
        if completion.kind is CompletionKind.INTERRUPTED:
            thread.written = self._context.written
            if (probe is not None or breakpoint_.exits) and not repeated and not completion.signal:
                thread.unfinished = UnfinishedHit(breakpoint_, outcome, header)
            elif repeated and not completion.signal:
                thread.restarting = breakpoint_.address
        elif probe is not None and probe.is_active and not repeated:
            self._count(thread, probe, outcome, header, completion)
        if completion.kind is CompletionKind.COMPLETED and (thread.debug.slots or thread.debug.superseded):
            self._on_watchpoint(thread)
        if breakpoint_.exits and completion.kind is CompletionKind.COMPLETED:
            self._leave(thread, breakpoint_)
        if completion.resumable:
            self._go_on(thread, completion.signal)

    def _on_watchpoint(self, thread: Thread) -> bool:
        """Take the watchpoints that a stopped thread has hit; return False if its trap has another reason as well."""
        hits, foreign = self._armer.take_hits(thread)
        if not hits:
            return False
        registers = self._registers_at_watchpoint
        syscalls.get_registers(thread.tid, registers)
        place = registers[_RIP]
        slot = thread.space.slots.holding(place)
        if slot is not None:  # of a repeated string instruction: any other has left its slot
            registers[_RIP] = slot.site if place == slot.address else slot.following
        outer = self._context.written  # of a breakpoint that the thread is just being stepped from
        self._context.select(thread, registers)
        for watchpoint in hits:
            probe = watchpoint.probe
            if not probe.is_active:
                continue
            outcome = header = None
            if probe.runs_handler:
                outcome, header = self._run_handler(thread, probe, watchpoint.point, registers)
            self._count(thread, probe, outcome, header, COMPLETED)
            if outcome is not None and outcome.exit_code in HANDING_OVER:
                thread.debug.exit_code = outcome.exit_code
        if written := self._context.written:
            if Register.RIP in written:
                registers[_EFLAGS] &= ~RESUME_FLAG  # it was meant for the instruction at the old place
            else:
                registers[_RIP] = place
            syscalls.set_registers(thread.tid, registers)
        self._context.select(thread, self._registers)
        self._context.written = outer
        return not foreign

    def _go_on(self, thread: Thread, number: int = 0) -> None:
        """Let a thread run on after its hits, with a signal or 0, or hand its process over if a handler said so."""
        if code := thread.debug.exit_code:
            thread.debug.exit_code = 0
            syscalls.get_registers(thread.tid, self._registers)
            if self._leave_to(code, thread):
                self._emptied.clear()  # the process goes, or goes on later: then its pages are given back at the end
                return
        if self._emptied:
            self._give_back(thread, number)
        self._stopper.resume(thread, number)

    def _leave_to(self, exit_code: int, thread: Thread) -> bool:
        """Begin what ``exit`` says of a stopped thread's process; return False if the thread is to go on."""
        if exit_code == CORE_DUMP:
            return self._ways_out.dump(thread)
        return self._ways_out.hand_over(thread, self._registers)

    def _run_handler(
        self, thread: Thread, probe: Probe, point: Point, registers: ctypes.Array[ctypes.c_ulong]
    ) -> tuple[Outcome, Header | None]:
        """Run the handler on the thread that the context has selected."""
        word_size = thread.space.word_size
        program = self._modules.program
        program.ledger.reset_if_asked()
        self._context.symbols = thread.space.symbols.get(probe.file, {})
        outcome = program.handlers[word_size].run(probe.definition, point, self._context)
        if outcome.ending is Ending.ABORT:
            return outcome, None
        return outcome, program.records.header(self._context, registers, word_size, keep_ip=probe.limits.keep_ip)

    def _on_own(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        if Role.LINKER in breakpoint_.own:
            self._modules.update(thread.space, thread)
        if Role.UNWINDING in breakpoint_.own:
            self._returns.unwinding(thread)

    def _leave(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Let the probes be hit whose function an instruction that was carried out has left."""
        if not thread.is_outside:
            syscalls.get_registers(thread.tid, self._registers)
            self._context.select(thread, self._registers)
            self._after(thread, self._returns.left(thread, breakpoint_, self._registers))

    def _after(self, thread: Thread, hits: list[Hit]) -> None:
        """Run handlers on the state after a return."""
        for probe, site in hits:
            if not probe.is_active:
                continue
            outcome = header = None
            if probe.runs_handler:
                assert site.point is not None
                outcome, header = self._run_handler(thread, probe, site.point, self._registers)
                if outcome.exit_code in HANDING_OVER:
                    thread.debug.exit_code = outcome.exit_code
            syscalls.set_registers(thread.tid, self._registers)
            self._count(thread, probe, outcome, header, COMPLETED)
        if hits:
            # What the handlers changed is done: it is not undone if the next instruction is interrupted.
            self._context.select(thread, self._registers)

    def _may_pend(self, thread: Thread, breakpoint_: Breakpoint, outcome: Outcome | None) -> bool:
        """Return whether nothing waits for the instruction: only its count and its record come after it."""
        probe = breakpoint_.probe
        if breakpoint_.exits or thread.space.watchpoints:
            return False
        if probe is not None and (probe.limits.maxhits or probe.limits.passcount):
            return False
        return outcome is None or (outcome.ending is not Ending.REMOVE and not outcome.exit_code)

    def _complete(self, thread: Thread, breakpoint_: Breakpoint, *, may_pend: bool) -> Completion:
        """Carry the original instruction out, by emulation or by a step."""
        emulation = breakpoint_.site.emulation
        may_emulate = not self._registers[_EFLAGS] & TRAP_FLAG and not (
            thread.space.has_shadow_stack and uses_return_addresses(emulation)
        )
        space = thread.space
        memory = UnwatchedMemory(self._context, space) if space.watchpoints else self._context
        if may_emulate and emulate(emulation, self._registers, memory):
            syscalls.set_registers(thread.tid, self._registers)
            return COMPLETED
        return self._stepper.step(thread, breakpoint_, self._registers, may_pend=may_pend)

    def _on_rewrite(self, thread: Thread, breakpoints: list[Breakpoint]) -> None:
        """Take notice of instructions under our breakpoints that a handler changed."""
        space = thread.space
        for breakpoint_ in breakpoints:
            # What was decided about the old instruction does not hold for the new one.
            emulation = (Action.STEP, len(breakpoint_.site.original))
            breakpoint_.site = replace(breakpoint_.site, emulation=emulation, copy=None)
        for pid in space.pids:
            self._connection.send(Placed(pid, tuple((b.address, b.original) for b in breakpoints)))

    def _count(
        self,
        thread: Thread,
        probe: Probe,
        outcome: Outcome | None,
        header: Header | None,
        completion: Completion,
        turn: Turn | None = None,
    ) -> None:
        """Count a hit and emit its records; ``turn`` is their place in the order, if not the last."""
        records: list[tuple[Probe, bytes]] = []
        was_active = probe.is_active
        if completion.kind is not CompletionKind.FAULTED or probe.limits.keep_on_fault:
            probe.count_hit(outcome)
            if outcome is not None and header is not None:
                builder = self._modules.program.records
                records.append((probe, builder.record(header, outcome)))
                if outcome.trace:
                    records.append((probe, builder.stack_trace(header, outcome)))
        self._emitter.emit(records, turn)
        if was_active and not probe.is_active:
            self._withdraw(probe, thread)

    def _count_pending(self, thread: Thread, hit: PendingHit, completion: Completion) -> None:
        self._count(thread, hit.probe, hit.outcome, hit.header, completion, hit.turn)

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
