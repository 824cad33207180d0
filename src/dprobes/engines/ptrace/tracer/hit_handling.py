"""
What happens at a hit: the handler, the original instruction, the record; and at traps that are none of ours.

A thread that has stopped with SIGTRAP is put onto the probed instruction, the handlers of all programs that probe it
run on its registers and memory, the instruction is carried out, and only then the hits count and their records are
emitted.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.hits.handler_runs import HandlerRunner, diverts, hands_over, skipping
from dprobes.engines.hits.hit_lifecycle import AFTER, HitEvent, HitState
from dprobes.engines.hits.hit_probes import CORE_DUMP
from dprobes.engines.ptrace.breakpoint_sites import Role, Site
from dprobes.engines.ptrace.tracer.breakpoint_placement import note_placement
from dprobes.engines.ptrace.tracer.native.handler_memory import take_call
from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3, Breakpoint, Entry
from dprobes.engines.ptrace.tracer.probe_removal import give_back_pages
from dprobes.engines.ptrace.tracer.steps.held_signals import FAULTS, fix_up
from dprobes.engines.ptrace.tracer.steps.interrupted_calls import has_entered
from dprobes.engines.ptrace.tracer.steps.single_steps import COMPLETED, Completion, CompletionKind
from dprobes.engines.ptrace.tracer.thread_watchpoints import UnwatchedMemory
from dprobes.engines.ptrace.tracer.tracer_state import ExitRequest, PendingReturn, ThreadState
from dprobes.engines.ptrace.tracer_messages import Placed
from dprobes.errors import TargetError
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import TRAP_FLAG, Register
from dprobes.platform.x86.instruction_emulation import Action, emulate, plan, uses_return_addresses
from dprobes.platform.x86.instruction_relocation import copy_of
from dprobes.target.process_maps import PAGE_SIZE, mapping_at
from dprobes.vm import AddressFault, Ending

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.site_patches import NativeStop
    from dprobes.engines.ptrace.tracer.detachment import Detacher
    from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
    from dprobes.engines.ptrace.tracer.hit_counter import HitCounter, WatchpointHits
    from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.native.jump_absence import JumpWaits
    from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
    from dprobes.engines.ptrace.tracer.steps.single_steps import Stepper
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_core_dump import CoreDumps
    from dprobes.engines.ptrace.tracer.tracer_programs import Handled, Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState

__all__ = ["HitHandler"]

# Returns of functions: which probes are hit when an instruction that leaves their function was carried out.
#
# A return instruction is a hit at once. After a tail call the function has not returned yet: its return address, still
# on top of the stack, gets a breakpoint, and the hit comes when the same thread arrives there with the stack as high as
# the return leaves it. No return address is ever rewritten.
#
# A ``longjmp`` or an exception leaves such functions without a return. Nothing tells which they are, so what waits is
# only marked, and given up when the thread is seen above it on the stack.


_LONGEST = 15  # bytes of an instruction; Intel SDM, volume 2, 2.3.11
_LONGEST_CALL = 10
"""A call through memory with two prefixes, REX, ModRM, SIB and a displacement; more prefixes say nothing new."""

_SIGNAL_RETURNS = (
    bytes.fromhex("48c7c00f0000000f05"),  # mov $__NR_rt_sigreturn, %rax; syscall
    bytes.fromhex("b80f0000000f05"),  # mov $__NR_rt_sigreturn, %eax; syscall
    bytes.fromhex("b8ad000000cd80"),  # i386: mov $__NR_rt_sigreturn, %eax; int $0x80
    bytes.fromhex("58b877000000cd80"),  # i386: pop %eax; mov $__NR_sigreturn, %eax; int $0x80
)
"""Where signal handlers return to: no call stands before it. GDB knows them by their bytes, too."""

_ARGUMENTS = 255
"""Bytes of arguments that an i386 function that was tail-called may drop (``ret n``)."""

_RET_IMMEDIATE = b"\xc2"

_RIP, _RSP = int(Register.RIP), int(Register.RSP)


class Hit(NamedTuple):
    """Hold a return: the probepoint, where its function was left, and how the call began, if that is known."""

    probe: Probe
    site: Site
    entry: Entry | None = None


class Returns:
    """The returns of threads from functions; ``context`` speaks of the thread at hand."""

    def __init__(self, state: TracerState, context: ThreadContext, patcher: Patcher) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._context = context
        self._patcher = patcher

    def entered(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Keep what the returns of functions want to know of their entry, at which a thread stands."""
        context, frame = self._context, registers[_RSP]
        now = context.time()
        for probe, site in breakpoint_.entries:
            if not probe.concerns(thread.pid):
                continue
            try:
                kept = {
                    index: context.register(index, user=False)
                    if distance is None
                    else context.read_word(frame + distance, thread.space.word_size)
                    for index, distance in site.kept
                }
            except OSError:
                thread.space.entries.take(thread.pid, probe, frame)
                continue
            entry = Entry(now, kept)
            if not self._patcher.keep_call(thread, breakpoint_, probe, frame, entry):
                thread.space.entries.enter(thread.pid, probe, frame, entry)

    def left(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> list[Hit]:
        """Return the probes that are hit by an instruction that was carried out; ``registers`` are those after it."""
        hits: list[Hit] = []
        jumps: list[tuple[Probe, Site]] = []
        size = thread.space.word_size
        address, top = registers[_RIP], registers[_RSP]
        for probe, site in breakpoint_.exits:
            if not probe.concerns(thread.pid):
                continue
            if site.role is Role.RETURN:
                _give_up(thread, top)
                frame = top - size - _dropped(site.original)
                hits.append(Hit(probe, site, _take_entry(thread, probe, site, frame)))
                continue
            distance = address - breakpoint_.address
            stays = distance == len(site.original) or any(start <= distance < end for start, end in site.inside)
            if not stays:
                jumps.append((probe, site))
        for probe, site in reversed(jumps):  # as they are hit from the last one backwards
            self._await_return(thread, probe, site, top)
        return hits

    def arrived(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> list[Hit]:
        """Return the probes of the functions that have returned to a breakpoint's address, the inner ones first."""
        top = registers[_RSP]
        slack = 0 if thread.space.word_size == 8 else _ARGUMENTS
        found = _returned(thread, breakpoint_.address, top, slack)
        if not found:
            # The stack of a coroutine, which has made the tail call on another thread.
            others = (t for t in self._threads.in_space(thread.space) if t.returns and t is not thread)
            found = next(filter(None, (_returned(other, breakpoint_.address, top, slack) for other in others)), [])
        _give_up(thread, top)
        return [Hit(p.probe, p.site, p.entry) for p in reversed(found) if p.probe.concerns(thread.pid)]

    def unwinding(self, thread: Thread) -> None:
        """Note that functions are about to be left without a return."""
        for pending in thread.returns:
            pending.doubtful = True

    def _await_return(self, thread: Thread, probe: Probe, site: Site, top: int) -> None:
        size = thread.space.word_size
        entry = _take_entry(thread, probe, site, top)
        try:
            address = self._context.read_word(top, size)
        except OSError:
            return  # whoever was jumped to cannot return either
        placed = self._place(thread, probe, address)
        if placed:
            _give_up(thread, top + size)
            thread.returns.append(PendingReturn(address, top + size, probe, site, entry))
        elif placed is not None:
            probe.miss()

    def _place(self, thread: Thread, probe: Probe, address: int) -> bool | None:
        """
        See to it that there is a breakpoint at a return address; return False if it cannot be one.

        Return None if no code is there: that is after a jump to another stack, whose top holds anything.
        """
        space = thread.space
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None or not breakpoint_.waiting:
            self._patcher.give_way(space, address)
        if breakpoint_ is not None:
            if probe not in breakpoint_.waiting:
                breakpoint_.waiting.add(probe)
                space.register(breakpoint_)
            return True
        try:
            mapping = mapping_at(thread.tid, address)
            if mapping is None or not mapping.executable:
                return None
        except TargetError:
            return None
        site = self._site(thread, address)
        if site is None:
            return False
        breakpoint_ = Breakpoint(address, site.original[0], site, waiting={probe})
        self._connection.send(Placed(thread.pid, ((address, site.original[0]),)))
        try:
            space.place(breakpoint_)
        except OSError:
            return False
        return True

    def _site(self, thread: Thread, address: int) -> Site | None:
        """Describe the instruction at a return address; None if nothing says that an instruction begins there."""
        from iced_x86 import Decoder

        word_size = thread.space.word_size
        try:
            before, data = self._code_around(address)
        except AddressFault:
            return None
        if not _is_returned_to(before, data, word_size):
            return None
        instruction = Decoder(8 * word_size, data).decode()
        raw = data[: instruction.len]
        if instruction.is_invalid or raw[:1] == INT3:
            return None
        return Site(-1, -1, 0, raw, plan(raw, word_size), copy_of(raw, word_size))

    def _code_around(self, address: int) -> tuple[bytes, bytes]:
        """Return the bytes before and from an address on, of its page alone if the one next to it cannot be read."""
        page = address - address % PAGE_SIZE
        try:
            before = self._context.read(address - _LONGEST_CALL, _LONGEST_CALL)
        except AddressFault:
            before = self._context.read(page, address - page)
        try:
            data = self._context.read(address, _LONGEST)
        except AddressFault:
            data = self._context.read(address, page + PAGE_SIZE - address)
        return before, data


def _returned(thread: Thread, address: int, top: int, slack: int) -> list[PendingReturn]:
    """Return what a thread awaits at an address, with the stack as it is there; it is awaited no longer."""
    found = [p for p in thread.returns if p.address == address and 0 <= top - p.top <= slack]
    if found:
        thread.returns = [p for p in thread.returns if p not in found]
    return found


def _is_returned_to(before: bytes, data: bytes, word_size: int) -> bool:
    """Return whether the code at an address is returned to: a call stands before it, or signal handlers end there."""
    from iced_x86 import Decoder, FlowControl

    if data.startswith(_SIGNAL_RETURNS):
        return True
    for length in range(2, len(before) + 1):
        call = Decoder(8 * word_size, before[-length:]).decode()
        if call.len == length and call.flow_control in (FlowControl.CALL, FlowControl.INDIRECT_CALL):
            return True
    return False


def _take_entry(thread: Thread, probe: Probe, site: Site, frame: int) -> Entry | None:
    """Return how the call with a frame began, wherever that is kept; it is kept no longer."""
    entry = thread.space.entries.take(thread.pid, probe, frame)
    return take_call(thread.space, probe, frame, site.kept) if entry is None else entry


def _dropped(raw: bytes) -> int:
    """Return how many bytes a return instruction takes from the stack besides the return address."""
    return int.from_bytes(raw[-2:], "little") if raw[-3:-2] == _RET_IMMEDIATE else 0


def _give_up(thread: Thread, top: int) -> None:
    """Forget the doubtful returns below ``top``: the thread has left them."""
    if any(pending.doubtful for pending in thread.returns):
        thread.returns = [p for p in thread.returns if not (p.doubtful and p.top <= top)]


def functions_of(hits: Iterable[Hit]) -> Iterator[list[Hit]]:
    """Iterate over the returns of one function each: a probepoint has one of them."""
    function: list[Hit] = []
    for hit in hits:
        place = hit.probe.file, hit.site.offset
        if function and (
            place != (function[0].probe.file, function[0].site.offset)
            or any(other.probe is hit.probe for other in function)
        ):
            yield function
            function = []
        function.append(hit)
    if function:
        yield function


_ARRIVED, _CAME_BACK = HitEvent.ARRIVED, HitEvent.CAME_BACK
_COMPLETED, _FAULTED = HitEvent.COMPLETED, HitEvent.FAULTED

# Plain numbers: to look a register up by an enum member takes longer, and this runs at each hit.
_RAX, _HIT_RIP, _EFLAGS = int(Register.RAX), int(Register.RIP), int(Register.EFLAGS)

_NEAR_RETURN = 1
"""The length of the instruction ``ret``."""


class HitHandler:
    """The handling of all stops with SIGTRAP."""

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
        self._watchpoint_hits = watchpoint_hits
        self._stepper = stepper
        self._detacher = detacher
        self._dumps = dumps
        self._returns = Returns(state, context, patcher)
        self._handlers = HandlerRunner(context)
        self._registers = ptrace_calls.Registers()
        self._info = ptrace_calls.SignalInfo()

    def on_trap(self, thread: Thread) -> None:
        """Handle another stop with SIGTRAP: a watchpoint, the late end of a step, or the program's own trap."""
        registers = self._registers
        ptrace_calls.get_registers(thread.tid, registers)
        if thread.hit.state is HitState.PENDING and registers[_HIT_RIP] != thread.hit.slot.address:
            self._counter.complete(thread)
        code = ptrace_calls.get_signal_info(thread.tid, self._info)
        if code == ptrace_calls.SI_KERNEL:
            address = registers[_HIT_RIP] - 1
            slot = thread.space.slots.holding(address)
            if slot is not None and slot.trap == address and thread.hit.is_late:
                self._on_late_step(thread)
                return
            if thread.space.breakpoints and self._modules.heal(thread, address):
                # A hit if it is a probepoint now.
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
                self._go_on(thread)
                return
        self.deliver(thread, signal.SIGTRAP)

    def on_system_call(self, thread: Thread) -> None:
        """Let a thread run on that enters or leaves the kernel, which may be the late end of a step."""
        if has_entered(thread, self._registers):
            self._on_late_step(thread)
        else:
            self._stopper.resume(thread)

    def on_breakpoint(self, thread: Thread) -> None:
        """Handle the stop of a thread that has run into a breakpoint, and stands where it could go on (``Stopper``)."""
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
            # A jump has taken its place a moment ago: it leads to the handler.
            ptrace_calls.set_instruction_pointer(thread.tid, patch.way_on(address))
            self._stopper.resume(thread)
            return
        if breakpoint_ is None:
            # It was taken away a moment ago.
            original = space.former.get(address)
            if original is not None:
                space.restore_byte(address, original)
            ptrace_calls.set_instruction_pointer(thread.tid, space.patches.way_on(address))
            self._stopper.resume(thread)
            return
        registers = self._stopper.take_registers(thread, self._registers)
        runs_natively = True
        if registers is None:
            registers = self._registers
            ptrace_calls.get_registers(thread.tid, registers)
            runs_natively = ptrace_calls.runs_as(registers, space.word_size)
            way_on = space.slots.way_on(address, breakpoint_.site) if runs_natively else address
            if registers[_HIT_RIP] != way_on:  # of another thread that hit here meanwhile
                ptrace_calls.set_instruction_pointer(thread.tid, way_on)
        self._registers = registers
        registers[_HIT_RIP] = address
        if runs_natively:
            self._on_hit(thread, breakpoint_)
        else:
            self._skip(thread, breakpoint_)

    def _end_parking(self, thread: Thread, stop: NativeStop) -> None:
        """Do what a handler in the process has ended with, whose hit is counted; the thread stands at the site."""
        thread.parked = None
        program = self._programs.numbered(stop.program)
        probe = None if program is None else program.probes.get(stop.probe)
        if program is not None and probe is not None and probe.is_active:  # else another thread was faster
            thread.exit_request = ExitRequest(stop.exit_code, program)
            self._counter.withdraw(thread, probe)
        self._go_on(thread)

    def _skip(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Let a thread execute code of the other word size, which is not the instruction that the probe is for."""
        for probe in breakpoint_.probes():
            other = 64 if thread.space.word_size == 4 else 32
            self._connection.warn_once(
                f"process {thread.pid} executes {other}-bit code at offset {breakpoint_.site.offset:#x} of a "
                f"{96 - other}-bit module: that is no hit",
                "only code of the file's own word size can be probed",
                probe.program.number,
            )
        completion = self._stepper.step_in_place(thread, breakpoint_, self._registers, Action.STEP)
        if completion.resumable:
            self._go_on(thread, completion.signal)

    def deliver(self, thread: Thread, number: int) -> None:
        """Let a thread run on with the signal that it has stopped for, unless that is a fault of ours."""
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
        """Return whether a handler's access has failed only because the program checks alignment; read registers."""
        patches = thread.space.patches
        if not patches.starts:
            return False
        ptrace_calls.get_registers(thread.tid, self._registers)
        pc = self._registers[_HIT_RIP]
        found = patches.original_of(pc)
        return (
            (found is None or found[1].copy != pc)
            and patches.is_ours(pc)
            and ptrace_calls.get_signal_info(thread.tid, self._info) == ptrace_calls.BUS_ADRALN
        )

    def _on_late_step(self, thread: Thread) -> None:
        """Count the hit of a thread that went to sleep in its step, and has got past the instruction after all."""
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
                if thread.exit_request is not None:
                    hit.follow(HitEvent.GIVEN_UP)
                    self._go_on(thread)
                    return
            if breakpoint_.entries and not (repeated or thread.is_outside) and known is None:
                self._returns.entered(thread, breakpoint_, self._registers)
            if repeated:
                pass  # it has been counted: a system call, say, that is made once more only because we interrupted it
            elif known is not None:
                self._context.written = hit.written
                handled = self._handlers.run(breakpoint_.handlers, known)
            elif breakpoint_.handlers:
                handled = self._handlers.run(breakpoint_.handlers)
        except BaseException:
            # Whatever ends the run here, the thread must not go on behind the breakpoint.
            ptrace_calls.set_registers(thread.tid, self._registers)
            raise
        if diverts(handled) and self._divert(thread, breakpoint_, handled):
            self._go_on(thread)
            return
        completion = self._complete(thread, breakpoint_, handled)
        hit.written = None
        if completion.kind is CompletionKind.PENDING:
            if handled:
                hit.written = self._context.written
                self._counter.pend(thread, handled)
            else:
                hit.follow(HitEvent.COMPLETED)
            self._stopper.resume(thread)
            return
        if completion.kind is CompletionKind.INTERRUPTED:
            hit.handled, hit.written = handled, self._context.written
            is_kept = not completion.signal and (repeated or breakpoint_.handlers or breakpoint_.exits)
            hit.follow(HitEvent.INTERRUPTED if is_kept else HitEvent.GIVEN_UP)
            if not is_kept:
                for each in handled:
                    each.probe.give_back()
        else:
            has_faulted = completion.kind is CompletionKind.FAULTED
            hit.state = AFTER[hit.state, _FAULTED if has_faulted else _COMPLETED]
            if handled:
                self._counter.count(thread, handled, has_faulted=has_faulted)
        if completion.kind is CompletionKind.COMPLETED and (thread.debug.slots or thread.debug.superseded):
            self._watchpoint_hits.take(thread, self._registers)
        if breakpoint_.exits and completion.kind is CompletionKind.COMPLETED:
            self._leave(thread, breakpoint_)
        if completion.resumable:
            self._go_on(thread, completion.signal)

    def _divert(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> bool:
        """Do what handlers want instead of the probed instruction; return False if that is carried out after all."""
        hit = thread.hit
        if hands_over(handled):
            # The records come first, then the probepoint goes, and the instruction is not carried out by us.
            ptrace_calls.set_registers(thread.tid, self._registers)
            self._counter.count_at_once(thread, handled)
            # Should the thread go on under our eyes, it comes by once more: that will be no other hit.
            hit.follow(HitEvent.COUNTED_EARLY if breakpoint_.is_needed else HitEvent.COMPLETED)
            return True
        if (skip := skipping(handled)) is not None and self._leave_early(thread, skip):
            hit.written = None
            hit.follow(HitEvent.COMPLETED)
            self._counter.count(thread, handled)
            return True
        return False

    def _leave_early(self, thread: Thread, skip: Handled) -> bool:
        """Let a thread return at once from the function that it enters; say if that cannot be, and return False."""
        assert skip.outcome is not None
        registers, space = self._registers, thread.space
        problem = "the process has a shadow stack, which would not follow" if space.has_shadow_stack else None
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

    def _go_on(self, thread: Thread, number: int = 0) -> None:
        """Let a thread run on after its hits, with a signal or 0, or hand its process over if a handler said so."""
        if thread.exit_request is not None and self._carry_out_exit(thread):
            # It goes, or goes on later: then its pages are given back at the end.
            self._counter.emptied.clear()
            return
        if self._counter.emptied:
            self._give_back(thread, number)
        self._stopper.resume(thread, number)

    def _carry_out_exit(self, thread: Thread) -> bool:
        """Begin with what an ``exit`` says of the process of a stopped thread; return False if the thread goes on."""
        request, thread.exit_request = thread.exit_request, None
        assert request is not None
        if request.code == CORE_DUMP:
            return self._dumps.start(thread, request.program)
        return self._detacher.hand_to_debugger(thread, request.program)

    def _on_own(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        if Role.LINKER in breakpoint_.own:
            self._modules.begin_loaded(thread.space, thread)
            self._jump_waits.begin(thread)
        if Role.UNWINDING in breakpoint_.own:
            self._returns.unwinding(thread)

    def _leave(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Let the probes be hit whose function an instruction that was carried out has left."""
        if not thread.is_outside:
            ptrace_calls.get_registers(thread.tid, self._registers)
            self._context.select(thread, self._registers)
            self._after(thread, self._returns.left(thread, breakpoint_, self._registers))

    def _after(self, thread: Thread, hits: list[Hit]) -> None:
        """Run handlers on the state after a return, or after several: those of one function on what others left."""
        for function in functions_of(hits):
            owners = [(probe, site.point) for probe, site, _ in function if site.point is not None]
            self._context.entries = {probe: entry for probe, _, entry in function if entry is not None}
            handled = self._handlers.run(owners)
            ptrace_calls.set_registers(thread.tid, self._registers)
            self._counter.count_at_once(thread, handled)
            # What the handlers changed is done: it is not undone if the next instruction is interrupted.
            self._context.select(thread, self._registers)

    def _may_pend(self, thread: Thread, breakpoint_: Breakpoint, handled: tuple[Handled, ...]) -> bool:
        """Return whether nothing waits for the instruction: only counts and records come after it."""
        if breakpoint_.exits or thread.space.watchpoints:
            return False
        for probe, _ in breakpoint_.handlers:
            if probe.limits.maxhits or probe.limits.passcount:
                return False
        for _, outcome, *_ in handled:
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
            ptrace_calls.set_registers(thread.tid, self._registers)
            if not breakpoint_.is_noted:
                breakpoint_.is_noted = True
                note_placement(space, breakpoint_, breakpoint_.probes())
            return COMPLETED
        may_pend = self._may_pend(thread, breakpoint_, handled)
        return self._stepper.step(thread, breakpoint_, self._registers, may_pend=may_pend)

    def _give_back(self, thread: Thread, number: int) -> None:
        """Let a stopped thread drop the pages of its space that have no breakpoints any more."""
        addresses, self._counter.emptied = self._counter.emptied, []
        # A thread that makes system calls for us leaves its stop, and a signal could no longer be delivered from there.
        if not number:
            with self._stopper.others_stopped(thread.space, thread):
                give_back_pages(thread.space, thread, addresses)
