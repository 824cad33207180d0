"""
Single steps: execution of the original instruction under a breakpoint, and events that interrupt it.

A step is made in a slot with the breakpoint in place and all other threads running. Without a slot, it is made in
place: then no other thread runs code of the address space while the breakpoint is removed. In both cases the step is
transparent to the program: no handler and no register of it ever sees a slot's address.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.tracer.call_injection import MMAP, MPROTECT, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.held_signals import FAULTS, HeldSignals, move_signal_address
from dprobes.engines.ptrace.tracer.placed_breakpoints import GRANULE, INT3, JUMP_SIZE, NOP, Slot, SlotArea
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError, ThreadState
from dprobes.engines.ptrace.tracer_messages import PagesMapped, PagesUnmapped, Placed, Removed
from dprobes.errors import TargetError
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import (
    ALIGNMENT_FLAG,
    RESUME_FLAG,
    TRAP_FLAG,
    Event,
    Register,
    StopKind,
    classify_stop,
)
from dprobes.platform.x86.debug_registers import STATUS, slots_hit
from dprobes.platform.x86.instruction_emulation import Action
from dprobes.platform.x86.instruction_relocation import relocated
from dprobes.target.process_maps import PAGE_SIZE, free_ranges, growth_of, mappings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.breakpoint_sites import Site
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.handler_context import ThreadContext
    from dprobes.engines.ptrace.tracer.hit_counter import HitCounter, WatchpointHits
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Slots
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["COMPLETED", "REACH", "Completion", "CompletionKind", "Stepper", "gap_near"]

REACH = 1 << 30
"""Maximum distance in bytes from the code to an area: well within the 2 GiB of a 32-bit distance."""

_GUARD = 16 * PAGE_SIZE
"""Bytes left free between an area and its neighbours, which may grow."""

_LOWEST = 1 << 16  # vm.mmap_min_addr

_PROT_READ_WRITE, _PROT_READ_EXEC = 0x3, 0x5
_MAP_PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 0x100022


class SlotMaker:
    """
    Allocator of out-of-line slots, in which threads execute copies of probed instructions.

    Slots are in a page that an injected mmap(2) provides, once for each module. If no call can be injected, or mmap(2)
    fails, they are in the padding after the module's code. If the padding is full or too far away, there is no slot,
    and the instruction is stepped in place with all other threads stopped.
    """

    def __init__(self, stopper: Stopper, connection: Connection) -> None:
        self._stopper = stopper
        self._connection = connection

    def may_make(self, thread: Thread, breakpoint_: Breakpoint) -> bool:
        """Return whether a slot is possible and no attempt to create one has been made yet."""
        key = (breakpoint_.address, breakpoint_.site.original)
        return breakpoint_.site.copy is not None and key not in thread.space.slots.by_site

    def make(self, thread: Thread, breakpoint_: Breakpoint) -> Slot | None:
        """
        Create a slot for the instruction under a breakpoint at which a thread has stopped; return None without memory.

        The first slot in a module may require system calls of the thread. Raise ``ThreadGoneError`` if it is killed
        meanwhile.
        """
        slots = thread.space.slots
        slot = self._make(thread, breakpoint_)
        slots.by_site[breakpoint_.address, breakpoint_.site.original] = slot
        if slot is not None:
            slots.by_address[slot.address] = slot
        return slot

    def _make(self, thread: Thread, breakpoint_: Breakpoint) -> Slot | None:
        size = _slot_size(breakpoint_.site)
        for area in self._areas(thread, breakpoint_.address, size):
            address = area.find(size)
            code = self._code(thread.space, breakpoint_, address) if address is not None else None
            if address is None or code is None:
                continue
            try:
                if os.pwrite(thread.space.memory, code, address) < len(code):
                    continue
            except OSError:
                continue
            area.take(address, size)
            return self._filled(area, address, breakpoint_, thread)
        return None

    def _filled(self, area: SlotArea, address: int, breakpoint_: Breakpoint, thread: Thread) -> Slot:
        site = breakpoint_.site
        assert site.copy is not None
        end = address + len(site.original)
        trap = 0
        if site.emulation[0] == Action.REPEAT:
            trap = end
            # If the tracer dies, the crash restorer replaces it by a nop; the jump follows it.
            self._connection.send(Placed(thread.pid, ((trap, NOP),)))
        return Slot(
            address,
            breakpoint_.address,
            end,
            Placement.PAGE if area.former is None else Placement.PADDING,
            is_free=site.copy.cannot_fault,
            leads_on=site.copy.leads_on and not trap,
            pushes_return=site.copy.pushes_return,
            trap=trap,
            size=_slot_size(site),
        )

    def _code(self, space: AddressSpace, breakpoint_: Breakpoint, slot: int) -> bytes | None:
        site, address = breakpoint_.site, breakpoint_.address
        assert site.copy is not None
        code = relocated(site.original, site.copy, address, slot)
        if code is None:
            return None
        if site.emulation[0] == Action.REPEAT:
            code += INT3
        distance = address + len(site.original) - (slot + len(code) + JUMP_SIZE)
        if space.word_size == 4:
            distance = (distance + (1 << 31)) % (1 << 32) - (1 << 31)
        if not -(1 << 31) <= distance < 1 << 31:
            return None
        return code + b"\xe9" + distance.to_bytes(4, "little", signed=True)

    def _areas(self, thread: Thread, address: int, size: int) -> list[SlotArea]:
        """Return areas with room for ``size`` bytes near an address; if there is none, map one or use padding."""
        slots = thread.space.slots
        found = _with_room(slots, address, size)
        region = address // REACH
        if not any(area.former is None for area in found) and region not in slots.refused:
            area = self._mapped_area(thread, address)
            if area is None:
                slots.refused.add(region)
            else:
                slots.areas.append(area)
        if not _with_room(slots, address, size):
            self._use_padding(thread.space, address)
        return sorted(_with_room(slots, address, size), key=lambda area: area.former is not None)

    def _mapped_area(self, thread: Thread, address: int) -> SlotArea | None:
        """Map an area near ``address`` by the thread, for all sites of its space without a slot; None if that fails."""
        space = thread.space
        wanted = sum(
            b.site.copy is not None
            and b.site.emulation[0] < Action.SKIP
            and (b.address, b.site.original) not in space.slots.by_site
            for b in space.breakpoints.values()
        )
        size = -(-max(1, wanted) * 2 * GRANULE // PAGE_SIZE) * PAGE_SIZE
        if not may_inject(thread):
            return None
        with self._stopper.others_stopped(space, thread):
            start = map_code(self._connection, thread, address, size)
        return SlotArea(start, start + size) if start else None

    def _use_padding(self, space: AddressSpace, address: int) -> None:
        """Create an area for slots from the unused end of a code page near ``address``."""
        for start, end in list(space.slots.padding):
            first = start + GRANULE - 1 & -GRANULE
            if abs(start - address) > REACH or end - first < GRANULE:
                continue
            space.slots.padding.remove((start, end))
            with contextlib.suppress(OSError):
                former = os.pread(space.memory, end - first, first)
                space.slots.areas.append(SlotArea(first, first + len(former), former))


def _slot_size(site: Site) -> int:
    code = len(site.original) + (1 if site.emulation[0] == Action.REPEAT else 0) + JUMP_SIZE
    return -(-code // GRANULE) * GRANULE


def _with_room(slots: Slots, address: int, size: int) -> list[SlotArea]:
    return [a for a in slots.areas if abs(a.start - address) < REACH and a.find(size) is not None]


def map_code(connection: Connection, thread: Thread, address: int, size: int, data: int = 0) -> int:
    """
    Map ``size`` bytes for code near an address by a thread at an event stop, the last ``data`` bytes for data.

    All other threads of its space must be stopped. Return the start of the memory, or 0 if it cannot be mapped.
    """
    space = thread.space
    start = gap_near(thread.tid, address, size, space.word_size)
    if not start:
        return 0
    for pid in space.pids:
        connection.send(PagesMapped(pid, ((start, start + size),)))
    found, is_usable = 0, True
    try:
        with injecting(thread) as call:
            flags = _MAP_PRIVATE_ANONYMOUS_FIXED_NOREPLACE
            found = start  # it may be mapped even if the call does not return
            found = call(MMAP[space.word_size], start, size, _PROT_READ_EXEC, flags, -1, 0)
            if found > 0 and found != start:
                call(MUNMAP[space.word_size], found, size)  # a kernel that treats the address as a hint
            elif found == start and data:
                call(MPROTECT[space.word_size], start + size - data, data, _PROT_READ_WRITE)
    except InjectionError:
        is_usable = False
    if found != start:
        # Memory that the program maps there later must not be taken for this.
        for pid in space.pids:
            connection.send(PagesUnmapped(pid, ((start, start + size),)))
        return 0
    return start if is_usable else 0


def gap_near(tid: int, address: int, size: int, word_size: int) -> int:
    """
    Return an address near ``address`` where ``size`` bytes can be mapped, or 0.

    A place below the code is preferred: mappings above it may need the room to grow. Mappings may grow downwards as
    well, so a gap's upper end is left free.
    """
    try:
        mappings = mappings_of(tid)
    except TargetError:
        return 0
    top = 1 << 47 if word_size == 8 else 0xC0000000
    best = (2 * REACH, 0)
    for low, high in free_ranges(mappings, growth_of(tid), _LOWEST, top):
        if high - low < size + 2 * _GUARD:
            continue
        start = high - _GUARD - size if high <= address else low + _GUARD
        # Prefer places below the code.
        distance = abs(start - address) + (REACH if high > address else 0)
        if abs(start - address) < REACH and distance < best[0]:
            best = (distance, start & ~(PAGE_SIZE - 1))
    return best[1]


_RIP = int(Register.RIP)
_EFLAGS = int(Register.EFLAGS)

_CODE = 2  # index of the word of siginfo_t that contains si_code


class CompletionKind(enum.Enum):
    """Outcome of the execution of a probed instruction."""

    COMPLETED = "completed"
    FAULTED = "raised a signal"
    INTERRUPTED = "not executed: something else comes first, and it will be hit again"
    PENDING = "about to be executed, without a stop after it"


@dataclass(frozen=True, slots=True)
class Completion:
    """
    Outcome of the execution of a probed instruction, and the signal with which the thread must be resumed.

    ``resumable`` is False if the thread's stop is not handled yet, or has not occurred yet.
    """

    kind: CompletionKind
    signal: int = 0
    resumable: bool = True


COMPLETED = Completion(CompletionKind.COMPLETED)
PENDING = Completion(CompletionKind.PENDING)


class _Step(NamedTuple):
    """A step in progress; ``traps`` means that the program single-steps itself."""

    thread: Thread
    breakpoint: Breakpoint
    registers: RegisterWords
    slot: Slot | None
    action: Action
    traps: bool
    signals: HeldSignals


class Stepper:
    """Executor of instructions under breakpoints, by single steps in place or in an out-of-line slot."""

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
        self._info = ptrace_calls.SignalInfo()

    def step(
        self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords, *, may_pend: bool = False
    ) -> Completion:
        """
        Let a thread execute the original instruction under a breakpoint; ``registers`` are those at its start.

        With ``may_pend`` the thread is only prepared to execute it, if that saves a stop. Raise ``ThreadGoneError`` if
        the thread ends in it.
        """
        tid = thread.tid
        slot = thread.space.slots.known(breakpoint_.address, breakpoint_.site)
        # Then the thread was moved to the slot already (``Slots.way_on``), and only handlers change registers.
        is_ready = slot is not None and not self._context.written and not breakpoint_.waiting
        if slot is None and self._slots.may_make(thread, breakpoint_):
            # If the tracer dies while memory for the slot is mapped, the thread continues here.
            ptrace_calls.set_registers(tid, registers)
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
            ptrace_calls.set_registers(tid, registers)
        if not registers[_EFLAGS] & TRAP_FLAG:
            if slot.is_free:
                return COMPLETED
            if may_pend and slot.leads_on:
                return PENDING
        return self._step_through(thread, breakpoint_, registers, slot, breakpoint_.site.emulation[0])

    def step_in_place(
        self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords, action: Action
    ) -> Completion:
        """Let a thread execute the instruction under a breakpoint in place, with all others of its space stopped."""
        space = thread.space
        address = breakpoint_.address
        with self._stopper.others_stopped(space, thread), space.patches.put_aside(space.memory, address):
            os.pwrite(space.memory, bytes([breakpoint_.original]), address)
            if space.watchpoints:
                registers[_EFLAGS] |= RESUME_FLAG  # an execute watchpoint here has been hit already
            try:
                ptrace_calls.set_registers(thread.tid, registers)
                if action == Action.REPEAT:
                    with self._temporary_breakpoint(thread, address + breakpoint_.site.emulation[1]):
                        return self._step_through(thread, breakpoint_, registers, None, action)
                return self._step_through(thread, breakpoint_, registers, None, action)
            finally:
                # After an exec the breakpoint no longer belongs to this space, or the space is closed.
                if space.breakpoints.get(address) is breakpoint_:
                    with contextlib.suppress(OSError):
                        os.pwrite(space.memory, INT3, address)

    @contextlib.contextmanager
    def _temporary_breakpoint(self, thread: Thread, address: int) -> Iterator[None]:
        """
        Return a context manager with a breakpoint at ``address``, after a repeated string instruction.

        It stops a thread that executes the instruction, which may take millions of single steps.
        """
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
        self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords, slot: Slot | None, action: Action
    ) -> Completion:
        traps = bool(registers[_EFLAGS] & TRAP_FLAG)
        if action == Action.REPEAT and traps:
            action = Action.STEP
        advance = {Action.SYSTEM_CALL: ptrace_calls.resume_to_syscall, Action.REPEAT: ptrace_calls.resume}.get(
            action, ptrace_calls.single_step
        )
        tid, signals = thread.tid, HeldSignals(thread)
        step = _Step(thread, breakpoint_, registers, slot, action, traps, signals)
        while True:
            if thread.debug.has_foreign:
                ptrace_calls.set_debug_register(tid, STATUS, 0)  # an older hit is not a trap of this instruction
            advance(tid, signals.take_unheld())
            status = self._stopper.wait_for_step(tid, may_leave=not signals, in_slot=slot is not None)
            if status is None:
                # It sleeps, in a page fault that perhaps another thread has to serve. When it wakes up it executes the
                # instruction (in place: it meets the breakpoint again, or has just passed it).
                thread.state = ThreadState.RUNNING
                return Completion(CompletionKind.INTERRUPTED, resumable=False)
            kind, number = classify_stop(status)
            match kind:
                case StopKind.EXITED:
                    raise ThreadGoneError(status)
                case StopKind.SYSCALL:
                    if slot is not None:
                        self._enter_from_site(thread, breakpoint_, registers)
                    return COMPLETED
                case StopKind.SIGNAL:
                    if (completion := self._after_signal(step, number)) is not None:
                        return completion
                case StopKind.GROUP_STOP if signals:
                    signals.hold_stop()
                case StopKind.GROUP_STOP | StopKind.EVENT:
                    if kind is StopKind.GROUP_STOP or number != Event.STOP:
                        signals.send_again()
                        self._set_back(thread, slot, registers)
                        self._stopper.defer(tid, status)
                        return Completion(CompletionKind.INTERRUPTED, resumable=False)
                case _:
                    assert_never(kind)

    def _after_signal(self, step: _Step, number: int) -> Completion | None:
        """Return the outcome of a step whose thread has stopped for a signal, or None if the step must continue."""
        thread, breakpoint_, registers, slot, action, _, signals = step
        code = ptrace_calls.get_signal_info(thread.tid, self._info)
        if number == signal.SIGTRAP:
            if code == ptrace_calls.TRAP_TRACE:
                return self._after_step(step)
            if action == Action.REPEAT and code == ptrace_calls.SI_KERNEL:
                ptrace_calls.get_registers(thread.tid, registers)
                registers[_RIP] = breakpoint_.address + breakpoint_.site.emulation[1]
                ptrace_calls.set_registers(thread.tid, registers)
                thread.trapped = 0
                return Completion(CompletionKind.COMPLETED, signals.give_back())
            if code == ptrace_calls.TRAP_HWBKPT and self._watchpoint_hits.take(thread, registers):
                return None  # between two iterations of a repeated string instruction
            if thread.trapped:
                # A step in place that executed two instructions, the second of which has a probe itself.
                ptrace_calls.set_instruction_pointer(thread.tid, thread.trapped)
                thread.trapped = 0
                return Completion(CompletionKind.COMPLETED, signals.give_back())
        start = breakpoint_.address if slot is None else slot.address
        if number in FAULTS and code > 0 and _stands_at(thread, start, registers):
            held = signals.give_back()
            if slot is not None:
                self._fault_at_site(thread, slot, registers, keep_info=bool(held))
            # A held signal is delivered first; the instruction is executed, and hit, again after its handler.
            return Completion(CompletionKind.INTERRUPTED, held) if held else Completion(CompletionKind.FAULTED, number)
        # Another signal arrived first. It is delivered after the instruction; a system call must not be entered with a
        # held signal, because it cannot be delivered from there.
        if action == Action.SYSTEM_CALL:
            self._set_back(thread, slot, registers)
            return Completion(CompletionKind.INTERRUPTED, number)
        signals.hold(number, self._info)
        return None

    def _after_step(self, step: _Step) -> Completion:
        """Complete a step whose trap has arrived. A debugger or the program itself may expect the trap, too."""
        thread, breakpoint_, registers, slot, _, traps, signals = step
        if slot is not None:
            self.settle(thread, slot, registers)
        if thread.debug.has_foreign and self._hits_foreign(thread, slot):
            return Completion(CompletionKind.COMPLETED, signals.give_back() or signal.SIGTRAP)
        if not traps:
            return Completion(CompletionKind.COMPLETED, signals.give_back())
        if not signals and slot is not None:
            self._set_back(thread, slot, registers)
            move_signal_address(self._info, slot.end, slot.following)
            move_signal_address(self._info, slot.address, slot.site)  # between two iterations of a repeated instruction
            ptrace_calls.set_signal_info(thread.tid, self._info)
        ptrace_calls.get_registers(thread.tid, registers)
        unfinished = registers[_RIP] == breakpoint_.address and breakpoint_.site.emulation[0] == Action.REPEAT
        kind = CompletionKind.INTERRUPTED if unfinished else CompletionKind.COMPLETED
        return Completion(kind, signals.give_back() or signal.SIGTRAP)

    def _hits_foreign(self, thread: Thread, slot: Slot | None) -> bool:
        """
        Return True if a step has hit a debugger's watchpoint. In this case, set the signal's code to TRAP_HWBKPT.

        The kernel reports a step and a watchpoint as one trap, with the code of a step.
        """
        if not any(s not in thread.debug.slots for s in slots_hit(ptrace_calls.get_debug_register(thread.tid, STATUS))):
            return False
        self._info[_CODE] = ptrace_calls.TRAP_HWBKPT
        if slot is not None:
            move_signal_address(self._info, slot.end, slot.following)
        ptrace_calls.set_signal_info(thread.tid, self._info)
        return True

    def step_unaligned(self, thread: Thread, registers: RegisterWords) -> Completion:
        """
        Let a thread execute, without alignment checks, an instruction of the engine that has failed because of them.

        If a signal arrives first, or the instruction raises another one, the result contains it. Raise
        ``ThreadGoneError`` if the thread ends in it.
        """
        tid = thread.tid
        registers[_EFLAGS] &= ~ALIGNMENT_FLAG
        ptrace_calls.set_registers(tid, registers)
        while True:
            ptrace_calls.single_step(tid, 0)
            status = self._stopper.wait_for_step(tid, may_leave=False, in_slot=True)
            assert status is not None
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is not StopKind.EVENT or number != Event.STOP:  # otherwise it is a stop that was requested before
                break
        ptrace_calls.get_registers(tid, registers)
        registers[_EFLAGS] |= ALIGNMENT_FLAG
        ptrace_calls.set_registers(tid, registers)
        if kind is not StopKind.SIGNAL:
            self._stopper.defer(tid, status)
            return Completion(CompletionKind.INTERRUPTED, resumable=False)
        if number == signal.SIGTRAP and ptrace_calls.get_signal_info(tid, self._info) == ptrace_calls.TRAP_TRACE:
            return COMPLETED
        return Completion(CompletionKind.INTERRUPTED, number)

    # Hiding that an instruction was executed in a slot

    def settle(self, thread: Thread, slot: Slot, registers: RegisterWords) -> None:
        """
        Move a thread that has executed the copy of an instruction in a slot to the address after the original.

        For a call, the return address that it has pushed is corrected instead.
        """
        ptrace_calls.get_registers(thread.tid, registers)
        if registers[_RIP] in (slot.end, slot.trap + 1):
            registers[_RIP] = slot.following
            ptrace_calls.set_registers(thread.tid, registers)
        elif slot.pushes_return:
            # The step may be an older one, and the context may be that of another thread by now.
            size, top = thread.space.word_size, registers[Register.RSP]
            with contextlib.suppress(OSError):
                if thread.space.read(top, size) == slot.end.to_bytes(size, "little"):
                    thread.space.write(top, slot.following.to_bytes(size, "little"))

    def settle_late(self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords) -> None:
        """Correct the registers of a thread after a step during which it slept in a system call."""
        slot = thread.space.slots.known(breakpoint_.address, breakpoint_.site)
        if slot is not None and breakpoint_.site.emulation[0] == Action.SYSTEM_CALL:
            self._enter_from_site(thread, breakpoint_, registers)
        elif slot is not None:
            self.settle(thread, slot, registers)

    def leave_slot(self, thread: Thread, registers: RegisterWords, number: int = 0) -> int:
        """
        Move a thread that stopped in a slot, with a signal to be delivered or 0, to the corresponding original address.

        Return the signal to resume it with. Raise ``ThreadGoneError`` if the thread ends in it.
        """
        slots = thread.space.slots
        if not slots.by_address:
            return number
        ptrace_calls.get_registers(thread.tid, registers)
        slot = slots.holding(registers[_RIP])
        if slot is None:
            return number
        if registers[_RIP] != slot.address:
            self.settle(thread, slot, registers)
            if number == signal.SIGTRAP:  # of a watchpoint
                ptrace_calls.get_signal_info(thread.tid, self._info)
                move_signal_address(self._info, slot.end, slot.following)
                ptrace_calls.set_signal_info(thread.tid, self._info)
        elif number and (slot.is_free or thread.hit.state is HitState.PENDING):
            # Its handler has run, so let the instruction be executed before the signal is delivered.
            return self._finish(thread, slot, registers, number)
        else:
            self._fault_at_site(thread, slot, registers, keep_info=not number)
        return number

    def _finish(self, thread: Thread, slot: Slot, registers: RegisterWords, number: int) -> int:
        tid = thread.tid
        signals = HeldSignals(thread)
        ptrace_calls.get_signal_info(tid, self._info)
        signals.hold(number, self._info)
        while True:
            ptrace_calls.single_step(tid, signals.take_unheld())
            status = self._stopper.wait_for_step(tid, may_leave=False, in_slot=True)
            assert status is not None
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is StopKind.GROUP_STOP:
                signals.hold_stop()
            if kind is not StopKind.SIGNAL:
                continue  # a stop that was requested when the thread had stopped for the signal already
            if number == signal.SIGTRAP:
                self.settle(thread, slot, registers)
                return signals.give_back()
            code = ptrace_calls.get_signal_info(tid, self._info)
            if number in FAULTS and code > 0:
                # The signal came first: the instruction is executed, and hit, again after its handler.
                self._counter.drop(thread)
                self._set_back(thread, slot, registers)
                return signals.give_back()
            signals.hold(number, self._info)

    def _set_back(self, thread: Thread, slot: Slot | None, registers: RegisterWords) -> None:
        """Move a thread that is still at the instruction in a slot back to the original instruction."""
        if slot is not None and _stands_at(thread, slot.address, registers):
            registers[_RIP] = slot.site
            ptrace_calls.set_registers(thread.tid, registers)

    def _fault_at_site(self, thread: Thread, slot: Slot, registers: RegisterWords, *, keep_info: bool) -> None:
        """Move a thread at an instruction in a slot to the site, and unless ``keep_info`` its fault's address, too."""
        registers[_RIP] = slot.site
        ptrace_calls.set_registers(thread.tid, registers)
        if keep_info:
            return
        ptrace_calls.get_signal_info(thread.tid, self._info)
        if self._info[2] > 0:
            move_signal_address(self._info, slot.address, slot.site)
            ptrace_calls.set_signal_info(thread.tid, self._info)

    def _enter_from_site(self, thread: Thread, breakpoint_: Breakpoint, registers: RegisterWords) -> None:
        """Set the return address of a thread that enters the kernel from a slot to that after the instruction."""
        ptrace_calls.get_registers(thread.tid, registers)
        registers[_RIP] = breakpoint_.address + len(breakpoint_.site.original)
        if breakpoint_.site.original == b"\x0f\x05":
            registers[Register.RCX] = registers[_RIP]  # register in which syscall leaves the return address
        ptrace_calls.set_registers(thread.tid, registers)


def _stands_at(thread: Thread, address: int, registers: RegisterWords) -> bool:
    """Read the thread's registers into ``registers``, and return whether the thread is at ``address``."""
    ptrace_calls.get_registers(thread.tid, registers)
    return bool(registers[_RIP] == address)
