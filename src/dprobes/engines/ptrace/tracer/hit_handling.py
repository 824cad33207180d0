"""
Handling of stops with SIGTRAP: hits, with their handlers, the probed instruction and the records, and other traps.

A thread that has stopped with SIGTRAP is moved to the probed instruction. The handlers of all programs that probe this
instruction run on the thread's registers and memory. Then the instruction is executed. After that the hits are counted,
and their records are emitted.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, assert_never

from dprobes.engines.hits.hit_lifecycle import AFTER, HitEvent, HitState
from dprobes.engines.hits.probe_hits import CORE_DUMP, HandlerRunner, diverts, hands_over, skipping
from dprobes.engines.ptrace.breakpoint_sites import Role
from dprobes.engines.ptrace.tracer.breakpoint_placement import note_placement
from dprobes.engines.ptrace.tracer.function_returns import Returns, functions_of
from dprobes.engines.ptrace.tracer.held_signals import FAULTS, fix_up
from dprobes.engines.ptrace.tracer.interrupted_calls import has_entered
from dprobes.engines.ptrace.tracer.probe_removal import give_back_pages
from dprobes.engines.ptrace.tracer.single_steps import COMPLETED, Completion, CompletionKind
from dprobes.engines.ptrace.tracer.thread_watchpoints import UnwatchedMemory
from dprobes.engines.ptrace.tracer.tracer_state import ExitRequest, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import TRAP_FLAG, Register
from dprobes.platform.x86.instruction_emulation import Action, emulate, uses_return_addresses
from dprobes.resolve.probepoints import ProbeState
from dprobes.vm import Ending

if TYPE_CHECKING:
    from dprobes.engines.ptrace.site_patches import NativeStop
    from dprobes.engines.ptrace.tracer.detachment import CoreDumps, Detacher
    from dprobes.engines.ptrace.tracer.function_returns import ReturnHit
    from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
    from dprobes.engines.ptrace.tracer.hit_counter import HitCounter, WatchpointHits
    from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.native.handler_ends import JumpWaits
    from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.single_steps import Stepper
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_programs import Handled
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState

__all__ = ["HitHandler"]

_ARRIVED, _CAME_BACK, _COMPLETED = HitEvent.ARRIVED, HitEvent.CAME_BACK, HitEvent.COMPLETED

# Plain integers: looking a register up by an enum member takes longer, and this runs at each hit.
_RAX, _RIP, _EFLAGS = int(Register.RAX), int(Register.RIP), int(Register.EFLAGS)

_NEAR_RETURN = 1
"""Size of the instruction ``ret`` in bytes."""


class HitHandler:
    """Handler of all stops with SIGTRAP: breakpoints, single steps, watchpoints, and traps of the program itself."""

    def __init__(
        self,
        state: TracerState,
        modules: ModuleBreakpoints,
        stopper: Stopper,
        context: ThreadContext,
        counter: HitCounter,
        watchpoint_hits: WatchpointHits,
        stepper: Stepper,
        detacher: Detacher,
        dumps: CoreDumps,
        patcher: Patcher,
        jump_waits: JumpWaits,
    ) -> None:
        self._patcher = patcher
        self._jump_waits = jump_waits
        self._connection = state.connection
        self._programs = state.programs
        self._modules = modules
        self._stopper = stopper
        self._context = context
        self._counter = counter
        self._emitter = counter.emitter
        self._watchpoint_hits = watchpoint_hits
        self._stepper = stepper
        self._detacher = detacher
        self._dumps = dumps
        self._returns = Returns(state, context, patcher)
        self._handlers = HandlerRunner(context)
        self._registers = ptrace_calls.Registers()
        self._info = ptrace_calls.SignalInfo()

    def on_trap(self, thread: Thread) -> None:
        """
        Handle a stop with SIGTRAP that no breakpoint of the tracer has caused.

        The cause is a watchpoint, the end of a step during which the thread slept in a system call, or a trap of the
        program.
        """
        registers = self._registers
        ptrace_calls.get_registers(thread.tid, registers)
        if thread.hit.state is HitState.PENDING and registers[_RIP] != thread.hit.slot.address:
            self._counter.complete(thread)
        code = ptrace_calls.get_signal_info(thread.tid, self._info)
        if code == ptrace_calls.SI_KERNEL:
            address = registers[_RIP] - 1
            slot = thread.space.slots.holding(address)
            if slot is not None and slot.trap == address and thread.hit.is_late:
                self._on_late_step(thread)
                return
            if thread.space.breakpoints and self._modules.heal(thread, address):
                # It is a hit if the address is a probepoint now.
                ptrace_calls.set_instruction_pointer(thread.tid, address)
                self._stopper.resume(thread)
                return
        elif code == ptrace_calls.TRAP_TRACE and thread.hit.is_late:
            self._on_late_step(thread)
            return
        elif code == ptrace_calls.TRAP_TRACE:
            thread.state = ThreadState.STOPPED
            if self._patcher.is_between_steps(thread, registers):
                self._stopper.resume(thread)
                return
        elif code == ptrace_calls.TRAP_HWBKPT:
            thread.state = ThreadState.STOPPED
            if self._watchpoint_hits.take(thread, registers):
                self.go_on(thread)
                return
        self.deliver(thread, signal.SIGTRAP)

    def on_system_call(self, thread: Thread) -> None:
        """
        Resume a thread that has stopped at the entry or exit of a system call.

        The call may be the probed instruction, in whose step the thread has slept.
        """
        if has_entered(thread, self._registers):
            self._on_late_step(thread)
        else:
            self._stopper.resume(thread)

    def on_breakpoint(self, thread: Thread) -> None:
        """Handle a thread that has run into a breakpoint, and whose instruction pointer ``Stopper`` has corrected."""
        address, thread.trapped = thread.trapped, 0
        is_left_to_us, thread.is_left_to_us = thread.is_left_to_us, False
        space = thread.space
        if thread.hit.state is HitState.PENDING:
            self._counter.complete(thread)
        thread.state = ThreadState.STOPPED
        breakpoint_ = space.breakpoints.get(address)
        if thread.parked is not None:
            self._end_parking(thread, thread.parked)
            return
        if is_left_to_us:
            self._patcher.make_way(thread, address, breakpoint_)
        elif (patch := space.patches.by_site.get(address)) is not None:
            # A jump has just replaced the breakpoint: it leads to the handler.
            ptrace_calls.set_instruction_pointer(thread.tid, patch.way_on(address))
            self._stopper.resume(thread)
            return
        if breakpoint_ is None:
            # The breakpoint has just been removed.
            original = space.former.get(address)
            if original is not None:
                space.restore_byte(address, original)
            ptrace_calls.set_instruction_pointer(thread.tid, space.patches.way_on(address))
            self._stopper.resume(thread)
            return
        stopper, registers, runs_natively = self._stopper, self._registers, True
        if stopper.registers_owner is thread:
            registers, stopper.registers, stopper.registers_owner = stopper.registers, registers, None
        else:
            ptrace_calls.get_registers(thread.tid, registers)
            runs_natively = ptrace_calls.runs_as(registers, space.word_size)
            way_on = space.slots.way_on(address, breakpoint_.site) if runs_natively else address
            if registers[_RIP] != way_on:  # changed by a hit of another thread here meanwhile
                ptrace_calls.set_instruction_pointer(thread.tid, way_on)
        self._registers = registers
        registers[_RIP] = address
        if runs_natively:
            self._on_hit(thread, breakpoint_)
        else:
            self._skip(thread, breakpoint_)

    def _end_parking(self, thread: Thread, stop: NativeStop) -> None:
        """
        Carry out the ``exit`` with which a handler in the process has ended, and resume the thread.

        The handler has counted the hit. The thread's registers are those at the probed instruction, ``stop`` has the
        exit code.
        """
        thread.parked = None
        program = self._programs.numbered(stop.program)
        probe = None if program is None else program.probes.get(stop.probe)
        if program is not None and probe is not None and probe.is_active:  # otherwise another thread was faster
            thread.exit_request = ExitRequest(stop.exit_code, program)
            probe.state = ProbeState.REMOVED
            self._counter.take_away(thread, [probe])
        self.go_on(thread)

    def _skip(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """
        Execute an instruction of code with the other word size under a breakpoint, without a hit.

        Warn the user, and resume the thread.
        """
        for probe in breakpoint_.probes():
            other = 64 if thread.space.word_size == 4 else 32
            self._connection.warn_once(
                f"process {thread.pid} executes {other}-bit code at offset {breakpoint_.site.offset:#x} of a "
                f"{96 - other}-bit module: that is not a hit",
                "only code of the file's own word size can be probed",
                probe.program.number,
            )
        completion = self._stepper.step_in_place(thread, breakpoint_, self._registers, Action.STEP)
        if completion.resumable:
            self.go_on(thread, completion.signal)

    def deliver(self, thread: Thread, number: int) -> None:
        """Resume a thread with the signal for which it has stopped, unless the engine's code has caused the signal."""
        if number == signal.SIGBUS and self._is_unaligned(thread):
            completion = self._stepper.step_unaligned(thread, self._registers)
            if not completion.resumable:
                return
            number = completion.signal
        if fix_up(thread, self._registers, number) or self._patcher.lead_on(thread, number):
            self._stopper.resume(thread)
            return
        if number in FAULTS:
            self._patcher.place_fault(thread)
        number_now = self._stepper.leave_slot(thread, self._registers, number)
        if thread.hit.state is HitState.PENDING:
            self._counter.complete(thread)
        self._stopper.resume(thread, number_now)

    def _is_unaligned(self, thread: Thread) -> bool:
        """Return whether a handler's access faulted only because the program has set EFLAGS.AC; read the registers."""
        patches = thread.space.patches
        if not patches.starts:
            return False
        ptrace_calls.get_registers(thread.tid, self._registers)
        pc = self._registers[_RIP]
        found = patches.original_of(pc)
        return (
            (found is None or found[1].copy != pc)
            and patches.is_ours(pc)
            and ptrace_calls.get_signal_info(thread.tid, self._info) == ptrace_calls.BUS_ADRALN
        )

    def _on_late_step(self, thread: Thread) -> None:
        """Count the hit of a thread that slept in its step, and has executed the instruction after all."""
        hit = thread.hit
        breakpoint_, is_counted = hit.breakpoint, hit.state is HitState.COUNTED
        hit.follow(HitEvent.COMPLETED)
        hit.written = None
        thread.state = ThreadState.STOPPED
        self._stepper.settle_late(thread, breakpoint_, self._registers)
        if not is_counted:
            self._counter.count(thread, [each for each in hit.handled if each.probe.counts_late])
        if breakpoint_.exits:
            self._leave(thread, breakpoint_)
        if thread.debug.slots:
            self._watchpoint_hits.take(thread, self._registers)
        self.go_on(thread)

    def _on_hit(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        hit = thread.hit
        if hit.state and (hit.breakpoint is not breakpoint_ or not hit.is_late):
            hit.follow(HitEvent.GIVEN_UP)
        # For example, a system call that is repeated only because the tracer interrupted it.
        is_repeated = hit.state is HitState.COUNTED or thread.restarting == breakpoint_.address
        known = hit.handled if hit.state is HitState.UNFINISHED else None
        if is_repeated and known is not None:
            hit.follow(HitEvent.GIVEN_UP)
        hit.state = AFTER[hit.state, _CAME_BACK if is_repeated else _ARRIVED]
        hit.breakpoint, hit.handled, thread.restarting = breakpoint_, (), 0
        self._context.select(thread, self._registers)
        handled: tuple[Handled, ...] = ()
        is_leaving = False
        handlers = breakpoint_.handlers
        if breakpoint_.is_checked:
            handlers = self._context.owners_of_access(handlers, breakpoint_.site.original)
        try:
            if breakpoint_.own or breakpoint_.waiting:
                is_leaving = self._on_arrival(thread, breakpoint_)
            if is_repeated or is_leaving:
                pass
            elif known is not None:
                self._context.written = hit.written
                handled = self._handlers.run(handlers, known)
            else:
                if breakpoint_.entries and not thread.is_outside:
                    self._returns.entered(thread, breakpoint_, self._registers)
                if handlers:
                    handled = self._handlers.run(handlers)
        except BaseException:
            # If an exception ends the run here, the thread must not continue in the middle of the instruction.
            ptrace_calls.set_registers(thread.tid, self._registers)
            raise
        if is_leaving:
            hit.follow(HitEvent.GIVEN_UP)
            self.go_on(thread)
        elif diverts(handled) and self._divert(thread, breakpoint_, handled):
            self.go_on(thread)
        else:
            self._complete(thread, breakpoint_, handled)

    def _complete(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> None:
        """Carry out the original instruction, count the hit according to the outcome, and resume the thread."""
        hit, completion = thread.hit, self._execute_original(thread, breakpoint_, handled)
        hit.written = None
        match completion.kind:
            case CompletionKind.COMPLETED:
                hit.state = AFTER[hit.state, _COMPLETED]
                if handled and (gone := self._emitter.count(handled)):
                    self._counter.take_away(thread, gone)
                if thread.debug.slots or thread.debug.superseded:
                    self._watchpoint_hits.take(thread, self._registers)
                if breakpoint_.exits:
                    self._leave(thread, breakpoint_)
            case CompletionKind.PENDING:
                if handled:
                    hit.written = self._context.written
                    self._counter.pend(thread, handled)
                else:
                    hit.follow(HitEvent.COMPLETED)
                self._stopper.resume(thread)
                return
            case CompletionKind.FAULTED:
                hit.state = AFTER[hit.state, HitEvent.FAULTED]
                self._counter.count(thread, handled, has_faulted=True)
            case CompletionKind.INTERRUPTED:
                is_awaited = hit.state is HitState.REPEATED or breakpoint_.handlers or breakpoint_.exits
                hit.handled, hit.written = handled, self._context.written
                hit.follow(HitEvent.INTERRUPTED if is_awaited and not completion.signal else HitEvent.GIVEN_UP)
            case _:
                assert_never(completion.kind)
        if thread.exit_request is None and not self._counter.emptied and completion.resumable:
            self._stopper.resume(thread, completion.signal)  # in most cases
        elif completion.resumable:
            self.go_on(thread, completion.signal)

    def _divert(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> bool:
        """
        Carry out a handler's ``exit`` or ``skip``, which replaces the probed instruction, and count the hit.

        Return False if there is none, or if the function cannot be skipped.
        """
        hit = thread.hit
        if hands_over(handled):
            # Send the records first, then remove the probepoint; the tracer does not carry out the instruction.
            ptrace_calls.set_registers(thread.tid, self._registers)
            self._counter.count_at_once(thread, handled)
            # If the thread stays traced, it arrives here again: that will not be another hit.
            hit.follow(HitEvent.COUNTED_EARLY if breakpoint_.is_needed else HitEvent.COMPLETED)
            return True
        if (skip := skipping(handled)) is not None and self._leave_early(thread, skip):
            hit.written = None
            hit.follow(HitEvent.COMPLETED)
            self._counter.count(thread, handled)
            return True
        return False

    def _leave_early(self, thread: Thread, skip: Handled) -> bool:
        """Make a thread return at once from the function that it enters; warn the user and return False on failure."""
        assert skip.outcome is not None
        registers, space = self._registers, thread.space
        problem = "the process has a shadow stack, which 'skip' cannot change" if space.has_shadow_stack else None
        if problem is None:
            before = registers[_RAX]
            registers[_RAX] = skip.outcome.value
            if emulate((Action.RETURN, _NEAR_RETURN, space.word_size, 0), registers, self._context):
                ptrace_calls.set_registers(thread.tid, registers)
                return True
            registers[_RAX] = before
            problem = "its return address cannot be used"
        self._connection.warn_once(
            f"'skip' was not carried out in process {thread.pid}: {problem}", None, skip.probe.program.number
        )
        return False

    def go_on(self, thread: Thread, number: int = 0) -> None:
        """Resume a thread after its hits with the signal ``number``, 0 for none; or carry out a handler's ``exit``."""
        if thread.exit_request is not None and self._carry_out_exit(thread):
            # It is detached or resumed later: then its pages are dropped at the end.
            self._counter.emptied.clear()
            return
        if self._counter.emptied:
            self._give_back(thread, number)
        self._stopper.resume(thread, number)

    def _carry_out_exit(self, thread: Thread) -> bool:
        """Begin to carry out an ``exit`` for the process of a stopped thread; return False if it must be resumed."""
        request, thread.exit_request = thread.exit_request, None
        assert request is not None
        if request.code == CORE_DUMP:
            return self._dumps.start(thread, request.program)
        return self._detacher.hand_to_debugger(thread, request.program)

    def _on_arrival(self, thread: Thread, breakpoint_: Breakpoint) -> bool:
        """
        Carry out the purposes of a breakpoint other than probepoints before instructions.

        It may be in the dynamic linker, in the unwinder, or at a return address, where the handlers of returns run.
        Return True if one of these has requested an exit of the process.
        """
        if Role.LINKER in breakpoint_.own:
            self._modules.begin_loaded(thread.space, thread)
            self._jump_waits.begin(thread)
        if Role.UNWINDING in breakpoint_.own:
            self._returns.unwinding(thread)
        if not breakpoint_.waiting or thread.is_outside:
            return False
        self._after(thread, self._returns.arrived(thread, breakpoint_, self._registers))
        return thread.exit_request is not None

    def _leave(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Run the handlers at returns of the functions that the instruction at a breakpoint, a RET, has left."""
        if not thread.is_outside:
            ptrace_calls.get_registers(thread.tid, self._registers)
            self._context.select(thread, self._registers)
            self._after(thread, self._returns.left(thread, breakpoint_, self._registers))

    def _after(self, thread: Thread, hits: list[ReturnHit]) -> None:
        """
        Run the handlers of returns.

        The handlers of each function see the registers that former handlers have set.
        """
        for function in functions_of(hits):
            owners = [(probe, site.point) for probe, site, _ in function if site.point is not None]
            self._context.entries = {probe: entry for probe, _, entry in function if entry is not None}
            handled = self._handlers.run(owners)
            ptrace_calls.set_registers(thread.tid, self._registers)
            self._counter.count_at_once(thread, handled)
            # The handlers' changes are final: they are not undone if the next instruction is interrupted.
            self._context.select(thread, self._registers)

    def _may_pend(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> bool:
        """Return whether only counts and records follow the instruction, so that the hit may be pending."""
        if breakpoint_.exits or thread.space.watchpoints:
            return False
        for probe, _ in breakpoint_.handlers:
            if probe.limits.maxhits or probe.limits.passcount:
                return False
        for each in handled:
            outcome = each.outcome
            if outcome is not None and (outcome.ending is Ending.REMOVE or outcome.exit_code):
                return False
        return True

    def _execute_original(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> Completion:
        """
        Execute the instruction under a breakpoint for a thread, by emulation or by a single step; return the outcome.

        ``handled`` are the results of the handlers.
        """
        emulation = breakpoint_.site.emulation
        may_emulate = not (
            self._registers[_EFLAGS] & TRAP_FLAG
            or thread.debug.has_foreign
            or (thread.space.has_shadow_stack and uses_return_addresses(emulation))
        )
        space = thread.space
        memory = UnwatchedMemory(self._context, space) if space.watchpoints else self._context
        if may_emulate and emulate(emulation, self._registers, memory):
            ptrace_calls.set_registers(thread.tid, self._registers)
            if not breakpoint_.is_noted:
                breakpoint_.is_noted = True
                note_placement(space, breakpoint_, breakpoint_.probes())
            return COMPLETED
        may_pend = self._may_pend(thread, breakpoint_, handled)
        return self._stepper.step(thread, breakpoint_, self._registers, may_pend=may_pend)

    def _give_back(self, thread: Thread, number: int) -> None:
        """
        Drop the private copies of pages without breakpoints in a stopped thread's memory, by injected calls.

        Do nothing if the thread is resumed with the signal ``number``, which injected calls would lose.
        """
        addresses, self._counter.emptied = self._counter.emptied, []
        # A thread that makes injected system calls leaves its stop; a signal could no longer be delivered from there.
        if not number:
            with self._stopper.others_stopped(thread.space, thread):
                give_back_pages(thread.space, thread, addresses)
