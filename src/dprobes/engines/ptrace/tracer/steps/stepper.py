"""
Single steps: how a thread executes the original instruction under a breakpoint, and what may come in between.

A step is made in a slot (``slots``) with the breakpoint in place and all other threads running, or, where there is no
slot, in place: then nobody else runs code of the address space while the breakpoint is away. Either way the program
cannot tell: no handler and no register of it ever sees a slot's address.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
from typing import TYPE_CHECKING

from dprobes.engines.hits.lifecycle import HitState
from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import ALIGNMENT_FLAG, RESUME_FLAG, TRAP_FLAG, Register
from dprobes.engines.linux.stops import Event, StopKind, classify_stop
from dprobes.engines.ptrace.reports import Placed, Removed
from dprobes.engines.ptrace.tracer.breakpoints import INT3
from dprobes.engines.ptrace.tracer.state import ThreadGoneError, ThreadState
from dprobes.engines.ptrace.tracer.steps.heldsignals import FAULTS, HeldSignals, move_signal_address
from dprobes.engines.ptrace.tracer.steps.slotmemory import SlotMaker
from dprobes.engines.ptrace.tracer.steps.slots import Placement
from dprobes.engines.x86.debugregs import STATUS, slots_hit
from dprobes.engines.x86.emulation import Action
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.hitcounter import HitCounter
    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.engines.ptrace.tracer.steps.slots import Slot
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.ptrace.tracer.threadcontext import ThreadContext
    from dprobes.engines.ptrace.tracer.watchpointhits import WatchpointHits

__all__ = ["COMPLETED", "PENDING", "Completion", "CompletionKind", "Stepper"]

_RIP = int(Register.RIP)
_EFLAGS = int(Register.EFLAGS)

_CODE = 2  # the word of siginfo_t that holds si_code


class CompletionKind(enum.Enum):
    """How the probed instruction ended."""

    COMPLETED = "completed"
    FAULTED = "raised a signal"
    INTERRUPTED = "not executed: something else comes first, and it will be hit again"
    PENDING = "about to be executed, without a stop behind it"


@dataclass(frozen=True, slots=True)
class Completion:
    """
    How the probed instruction ended, and the signal with which the thread is to be resumed.

    ``resumable`` is false where the thread's stop is still to be handled, or still to come.
    """

    kind: CompletionKind
    signal: int = 0
    resumable: bool = True


COMPLETED = Completion(CompletionKind.COMPLETED)
PENDING = Completion(CompletionKind.PENDING)


class Stepper:
    """The execution of instructions under breakpoints."""

    def __init__(
        self,
        connection: Connection,
        stopper: Stopper,
        context: ThreadContext,
        counter: HitCounter,
        watchpoint_hits: WatchpointHits,
    ) -> None:
        self._connection = connection
        self._stopper = stopper
        self._context = context
        self._counter = counter
        self._watchpoint_hits = watchpoint_hits
        self._slots = SlotMaker(stopper, connection)
        self._info = ptracecalls.SignalInfo()

    def step(
        self,
        thread: Thread,
        breakpoint_: Breakpoint,
        registers: ctypes.Array[ctypes.c_ulong],
        *,
        may_pend: bool = False,
    ) -> Completion:
        """
        Let a thread execute the original instruction under a breakpoint; ``registers`` stand at its start.

        Where it ``may_pend``, the thread is only made ready to execute it, if that spares a stop. Raise
        ``ThreadGoneError`` if the thread ends in it.
        """
        tid = thread.tid
        slot = thread.space.slots.known(breakpoint_.address, breakpoint_.site)
        # Then the thread has been put there already (``Slots.way_on``), and only handlers change registers.
        is_ready = slot is not None and not self._context.written and not breakpoint_.waiting
        if slot is None and self._slots.may_make(thread, breakpoint_):
            # Should we die while memory for the slot is got, the thread goes on here.
            ptracecalls.set_registers(tid, registers)
            slot = self._slots.make(thread, breakpoint_)
            if slot is not None:
                for probe in breakpoint_.probes():
                    probe.counts.note(slot.placement)
        if slot is None:
            for probe in breakpoint_.probes():
                probe.counts.note(Placement.IN_PLACE)
            return self.step_in_place(thread, breakpoint_, registers, breakpoint_.site.emulation[0])
        registers[_RIP] = slot.address
        if not is_ready:
            ptracecalls.set_registers(tid, registers)
        if not registers[_EFLAGS] & TRAP_FLAG:
            if slot.is_free:
                return COMPLETED
            if may_pend and slot.leads_on:
                return PENDING
        return self._step_through(thread, breakpoint_, registers, slot, breakpoint_.site.emulation[0])

    def step_in_place(
        self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong], action: Action
    ) -> Completion:
        """Let a thread execute what is under a breakpoint where it is, with all other threads of its space stopped."""
        space = thread.space
        address = breakpoint_.address
        with self._stopper.others_stopped(space, thread), space.patches.put_aside(space.memory, address):
            os.pwrite(space.memory, bytes([breakpoint_.original]), address)
            if space.watchpoints:
                registers[_EFLAGS] |= RESUME_FLAG  # an execute watchpoint here has been hit already
            try:
                ptracecalls.set_registers(thread.tid, registers)
                if action == Action.REPEAT:
                    with self._temporary_breakpoint(thread, address + breakpoint_.site.emulation[1]):
                        return self._step_through(thread, breakpoint_, registers, None, action)
                return self._step_through(thread, breakpoint_, registers, None, action)
            finally:
                # After an exec the breakpoint is no longer one of this space, or the space is closed.
                if space.breakpoints.get(address) is breakpoint_:
                    with contextlib.suppress(OSError):
                        os.pwrite(space.memory, INT3, address)

    @contextlib.contextmanager
    def _temporary_breakpoint(self, thread: Thread, address: int) -> Iterator[None]:
        """Stop the stepping thread behind a repeated string instruction, which may take millions of single steps."""
        space = thread.space
        original = os.pread(space.memory, 1, address)
        if original != INT3:
            self._connection.send(Placed(thread.pid, ((address, original[0]),)))
            space.former[address] = original[0]
        os.pwrite(space.memory, INT3, address)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.pwrite(space.memory, original, address)
            if original != INT3:
                self._connection.send(Removed(thread.pid, (address,)))

    def _step_through(
        self,
        thread: Thread,
        breakpoint_: Breakpoint,
        registers: ctypes.Array[ctypes.c_ulong],
        slot: Slot | None,
        action: Action,
    ) -> Completion:
        tid = thread.tid
        length = breakpoint_.site.emulation[1]
        start = breakpoint_.address if slot is None else slot.address
        traps = bool(registers[_EFLAGS] & TRAP_FLAG)
        if action == Action.REPEAT and traps:
            action = Action.STEP
        advance = {Action.SYSTEM_CALL: ptracecalls.resume_to_syscall, Action.REPEAT: ptracecalls.resume}.get(
            action, ptracecalls.single_step
        )
        signals = HeldSignals(thread)
        while True:
            if thread.debug.has_foreign:
                ptracecalls.set_debug_register(tid, STATUS, 0)  # an older hit is no trap of this instruction
            advance(tid, signals.take_unheld())
            status = self._stopper.wait_for_step(tid, may_leave=not signals, in_slot=slot is not None)
            if status is None:
                # It sleeps, in a page fault that perhaps another thread has to answer. When it wakes up it executes the
                # instruction (in place: it finds the breakpoint again, or has just got past it).
                thread.state = ThreadState.RUNNING
                return Completion(CompletionKind.INTERRUPTED, resumable=False)
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is StopKind.SYSCALL:
                if slot is not None:
                    self._enter_from_site(thread, breakpoint_, registers)
                return COMPLETED
            if kind is StopKind.SIGNAL:
                code = ptracecalls.get_signal_info(tid, self._info)
                if number == signal.SIGTRAP and code == ptracecalls.TRAP_TRACE:
                    if slot is not None:
                        self.settle(thread, slot, registers)
                    if thread.debug.has_foreign and self._hits_foreign(thread, slot):
                        return Completion(CompletionKind.COMPLETED, signals.give_back() or signal.SIGTRAP)
                    if traps:
                        return self._trap_of_its_own(thread, breakpoint_, slot, registers, signals)
                    return Completion(CompletionKind.COMPLETED, signals.give_back())
                if action == Action.REPEAT and number == signal.SIGTRAP and code == ptracecalls.SI_KERNEL:
                    ptracecalls.get_registers(tid, registers)
                    registers[_RIP] = breakpoint_.address + length
                    ptracecalls.set_registers(tid, registers)
                    thread.trapped = 0
                    return Completion(CompletionKind.COMPLETED, signals.give_back())
                is_watchpoint = number == signal.SIGTRAP and code == ptracecalls.TRAP_HWBKPT
                if is_watchpoint and self._watchpoint_hits.take(thread, registers):
                    continue  # in the middle of a repeated string instruction
                if number == signal.SIGTRAP and thread.trapped:
                    # A step in place that took in two instructions, the second of which carries a probe itself.
                    ptracecalls.set_instruction_pointer(tid, thread.trapped)
                    thread.trapped = 0
                    return Completion(CompletionKind.COMPLETED, signals.give_back())
                if number in FAULTS and code > 0 and _stands_at(thread, start, registers):
                    held = signals.give_back()
                    if slot is not None:
                        self._fault_at_site(thread, slot, registers, keep_info=bool(held))
                    if held:
                        # That came first; the instruction will be tried, and hit, again after its handler.
                        return Completion(CompletionKind.INTERRUPTED, held)
                    return Completion(CompletionKind.FAULTED, number)
                # Some other signal came first. It is delivered when the instruction is done; a system call must not be
                # entered with it in hand, because there is no way to deliver it from there.
                if action == Action.SYSTEM_CALL:
                    self._set_back(thread, slot, registers)
                    return Completion(CompletionKind.INTERRUPTED, number)
                signals.hold(number, self._info)
            elif kind is StopKind.GROUP_STOP and signals:
                signals.hold_stop()
            elif kind is StopKind.GROUP_STOP or number != Event.STOP:
                signals.send_again()
                self._set_back(thread, slot, registers)
                self._stopper.defer(tid, status)
                return Completion(CompletionKind.INTERRUPTED, resumable=False)

    def _hits_foreign(self, thread: Thread, slot: Slot | None) -> bool:
        """
        Return whether a debugger's watchpoint was hit by a step, and make the signal one for that.

        The kernel reports a step and a watchpoint as one trap, which says that it is a step.
        """
        if not any(s not in thread.debug.slots for s in slots_hit(ptracecalls.get_debug_register(thread.tid, STATUS))):
            return False
        self._info[_CODE] = ptracecalls.TRAP_HWBKPT
        if slot is not None:
            move_signal_address(self._info, slot.end, slot.following)
        ptracecalls.set_signal_info(thread.tid, self._info)
        return True

    def _trap_of_its_own(
        self,
        thread: Thread,
        breakpoint_: Breakpoint,
        slot: Slot | None,
        registers: ctypes.Array[ctypes.c_ulong],
        signals: HeldSignals,
    ) -> Completion:
        """Complete a step of a program that steps itself: the trap is its own as well."""
        if not signals and slot is not None:
            self._set_back(thread, slot, registers)
            move_signal_address(self._info, slot.end, slot.following)
            move_signal_address(self._info, slot.address, slot.site)  # between two turns of a repeated instruction
            ptracecalls.set_signal_info(thread.tid, self._info)
        ptracecalls.get_registers(thread.tid, registers)
        unfinished = registers[_RIP] == breakpoint_.address and breakpoint_.site.emulation[0] == Action.REPEAT
        kind = CompletionKind.INTERRUPTED if unfinished else CompletionKind.COMPLETED
        return Completion(kind, signals.give_back() or signal.SIGTRAP)

    def step_unaligned(self, thread: Thread, registers: ctypes.Array[ctypes.c_ulong]) -> Completion:
        """
        Let a thread execute an instruction of ours that failed because the program checks alignment, without checks.

        If a signal comes first, or the instruction raises another one, that is in the result. Raise ``ThreadGoneError``
        if the thread ends in it.
        """
        tid = thread.tid
        registers[_EFLAGS] &= ~ALIGNMENT_FLAG
        ptracecalls.set_registers(tid, registers)
        while True:
            ptracecalls.single_step(tid, 0)
            status = self._stopper.wait_for_step(tid, may_leave=False, in_slot=True)
            assert status is not None
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is not StopKind.EVENT or number != Event.STOP:  # else it is one that we asked for before
                break
        ptracecalls.get_registers(tid, registers)
        registers[_EFLAGS] |= ALIGNMENT_FLAG
        ptracecalls.set_registers(tid, registers)
        if kind is not StopKind.SIGNAL:
            self._stopper.defer(tid, status)
            return Completion(CompletionKind.INTERRUPTED, resumable=False)
        if number == signal.SIGTRAP and ptracecalls.get_signal_info(tid, self._info) == ptracecalls.TRAP_TRACE:
            return COMPLETED
        return Completion(CompletionKind.INTERRUPTED, number)

    # What must not show that an instruction was executed in a slot

    def settle(self, thread: Thread, slot: Slot, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Put a thread that has executed the instruction in a slot where the original would have left it."""
        ptracecalls.get_registers(thread.tid, registers)
        if registers[_RIP] in (slot.end, slot.trap + 1):
            registers[_RIP] = slot.following
            ptracecalls.set_registers(thread.tid, registers)
        elif slot.pushes_return:
            # The step may be an older one's, and the context be about another thread by now.
            size, top = thread.space.word_size, registers[Register.RSP]
            with contextlib.suppress(OSError):
                if thread.space.read(top, size) == slot.end.to_bytes(size, "little"):
                    thread.space.write(top, slot.following.to_bytes(size, "little"))

    def settle_late(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Put a thread that went to sleep in its step where it belongs, now that it has executed the instruction."""
        slot = thread.space.slots.known(breakpoint_.address, breakpoint_.site)
        if slot is not None and breakpoint_.site.emulation[0] == Action.SYSTEM_CALL:
            self._enter_from_site(thread, breakpoint_, registers)
        elif slot is not None:
            self.settle(thread, slot, registers)

    def leave_slot(self, thread: Thread, registers: ctypes.Array[ctypes.c_ulong], number: int = 0) -> int:
        """
        Put a thread that stopped in a slot, with a signal to be delivered or 0, where the original would have it.

        Return the signal to go on with. Raise ``ThreadGoneError`` if the thread ends in it.
        """
        slots = thread.space.slots
        if not slots.by_address:
            return number
        ptracecalls.get_registers(thread.tid, registers)
        slot = slots.holding(registers[_RIP])
        if slot is None:
            return number
        if registers[_RIP] != slot.address:
            self.settle(thread, slot, registers)
            if number == signal.SIGTRAP:  # of a watchpoint
                ptracecalls.get_signal_info(thread.tid, self._info)
                move_signal_address(self._info, slot.end, slot.following)
                ptracecalls.set_signal_info(thread.tid, self._info)
        elif number and (slot.is_free or thread.hit.state is HitState.PENDING):
            # Its handler has run; so let it be executed before the signal is delivered.
            return self._finish(thread, slot, registers, number)
        else:
            self._fault_at_site(thread, slot, registers, keep_info=not number)
        return number

    def _finish(self, thread: Thread, slot: Slot, registers: ctypes.Array[ctypes.c_ulong], number: int) -> int:
        tid = thread.tid
        signals = HeldSignals(thread)
        ptracecalls.get_signal_info(tid, self._info)
        signals.hold(number, self._info)
        while True:
            ptracecalls.single_step(tid, signals.take_unheld())
            status = self._stopper.wait_for_step(tid, may_leave=False, in_slot=True)
            assert status is not None
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is StopKind.GROUP_STOP:
                signals.hold_stop()
            if kind is not StopKind.SIGNAL:
                continue  # a stop that we asked for, when the thread had stopped for the signal already
            if number == signal.SIGTRAP:
                self.settle(thread, slot, registers)
                return signals.give_back()
            code = ptracecalls.get_signal_info(tid, self._info)
            if number in FAULTS and code > 0:
                # The signal came first: the instruction will be tried, and hit, again after its handler.
                self._counter.drop(thread)
                self._set_back(thread, slot, registers)
                return signals.give_back()
            signals.hold(number, self._info)

    def _set_back(self, thread: Thread, slot: Slot | None, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        """Put a thread that has not executed the instruction in a slot onto the original."""
        if slot is not None and _stands_at(thread, slot.address, registers):
            registers[_RIP] = slot.site
            ptracecalls.set_registers(thread.tid, registers)

    def _fault_at_site(
        self, thread: Thread, slot: Slot, registers: ctypes.Array[ctypes.c_ulong], *, keep_info: bool
    ) -> None:
        """Make the instruction at which a thread stands in a slot, and its fault, that at the site."""
        registers[_RIP] = slot.site
        ptracecalls.set_registers(thread.tid, registers)
        if keep_info:
            return
        ptracecalls.get_signal_info(thread.tid, self._info)
        if self._info[2] > 0:
            move_signal_address(self._info, slot.address, slot.site)
            ptracecalls.set_signal_info(thread.tid, self._info)

    def _enter_from_site(
        self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]
    ) -> None:
        """Let a thread that is entering the kernel from a slot come back behind the original instruction."""
        ptracecalls.get_registers(thread.tid, registers)
        registers[_RIP] = breakpoint_.address + len(breakpoint_.site.original)
        if breakpoint_.site.original == b"\x0f\x05":
            registers[Register.RCX] = registers[_RIP]  # where syscall leaves the return address
        ptracecalls.set_registers(thread.tid, registers)


def _stands_at(thread: Thread, address: int, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
    """Read ``registers`` anew, and return whether the thread is at ``address``."""
    ptracecalls.get_registers(thread.tid, registers)
    return bool(registers[_RIP] == address)
