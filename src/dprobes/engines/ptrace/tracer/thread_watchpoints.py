"""
Watchpoints of address spaces, and the debug registers of the threads that run in them.

All threads that run in an address space are stopped while its watchpoints change. Every thread has its own registers,
which are empty when it is created and after an exec. The kernel keeps them when a tracer detaches. So the registers of
each thread are programmed before it runs the first time, or at its next stop if it could not be stopped. They are
cleared before it is detached.

Only the tracer's own slots are changed. Hits of a slot that others have set are delivered to the program.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.tracer.tracer_state import ThreadState
from dprobes.engines.ptrace.tracer_messages import ProbeStatus, Watched
from dprobes.errors import reason_of
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.x86.debug_registers import (
    CONTROL,
    SLOTS,
    STATUS,
    assign,
    control_bits,
    is_enabled,
    slot_mask,
    slots_hit,
)
from dprobes.resolve.codeless_probes import length_problem
from dprobes.resolve.probepoints import ProbeState, impossible_address
from dprobes.rpn.rpn_program import Access

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.breakpoint_sites import FileKey
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Watchpoint
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState
    from dprobes.platform.x86.instruction_emulation import StackMemory

__all__ = ["DebugRegisters", "Refusal", "UnwatchedMemory", "Watchpoints"]


class Watchpoints:
    """Watchpoints of programs in each address space, and their transfer to the debug registers of threads."""

    def __init__(self, state: TracerState, stopper: Stopper, debug_registers: DebugRegisters) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper
        self._debug_registers = debug_registers

    def update(
        self, space: AddressSpace, pid: int, program: InsertedProgram, file: FileKey, wanted: list[Watchpoint]
    ) -> None:
        """
        Set the watchpoints of a program for a file in ``space``, replacing former ones.

        ``pid`` is a process that runs in it.
        """
        mine = {
            (w.probe.number, w.watch): w for w in space.watchpoints if w.file == file and w.probe.program is program
        }
        kept = [mine.get((w.probe.number, w.watch), w) for w in wanted]
        watchpoints = (*(w for w in space.watchpoints if w not in mine.values()), *kept)
        if watchpoints != space.watchpoints:
            self._change(space, pid, watchpoints)

    def pass_on(self, space: AddressSpace, program: InsertedProgram, wanted: list[Watchpoint]) -> set[Probe]:
        """
        Replace the watchpoints of ``program`` in ``space`` by those of its successor.

        Return the probepoints of watchpoints that were present already. These keep their registers, and hits that are
        not handled yet count for the successor.
        """
        former = [w for w in space.watchpoints if w.probe.program is program]
        others = [w for w in space.watchpoints if w.probe.program is not program]
        watchpoints = []
        kept = set()
        has_new = False
        for watchpoint in wanted:
            same = next((w for w in former if (w.watch, w.file) == (watchpoint.watch, watchpoint.file)), None)
            if same is None:
                watchpoints.append(watchpoint)
                has_new = True
                continue
            former.remove(same)
            same.probe, same.point = watchpoint.probe, watchpoint.point
            kept.add(same.probe)
            watchpoints.append(same)
        if former or has_new:
            self._change(space, None, (*others, *watchpoints))
        return kept

    def withdraw(self, probe: Probe) -> None:
        """Remove a probepoint's watchpoints from all address spaces."""
        for space in self._threads.spaces():
            left = tuple(w for w in space.watchpoints if w.probe is not probe)
            if left != space.watchpoints:
                self._change(space, None, left)

    def withdraw_program(self, space: AddressSpace, program: InsertedProgram) -> None:
        """Remove a program's watchpoints from one address space."""
        left = tuple(w for w in space.watchpoints if w.probe.program is not program)
        if left != space.watchpoints:
            self._change(space, None, left)

    def _change(self, space: AddressSpace, pid: int | None, watchpoints: tuple[Watchpoint, ...]) -> None:
        before, space.watchpoints = space.watchpoints, watchpoints
        protected = [w for w in before if w.by_page]  # another program may take the register of the others of "before"
        for watchpoint in watchpoints:
            watch = watchpoint.watch
            if watch.access is Access.WRITE and length_problem(watch.access, watch.address, watch.length) is not None:
                watchpoint.by_page = True
        pids = space.pids if pid is None else {pid, *space.pids}
        self._announce(space, pids)
        threads = self._threads.in_space(space)
        with self._stopper.holding(threads):
            refused = self._program(threads)
            while _move_to_pages(watchpoints, refused):
                self._announce(space, pids)
                refused = self._program(threads)
            if refused:
                # Set them in all threads or in none: a watchpoint in some threads only would give wrong counts.
                space.watchpoints = tuple(w for w in watchpoints if w not in refused)
                self._program(threads)
                self._announce(space, pids)
            space.release_pages()
            space.awaits_pages = any(w.by_page and w not in protected for w in space.watchpoints) or space.awaits_pages
            for thread in threads:
                if space.awaits_pages and thread.state is ThreadState.RUNNING:
                    with contextlib.suppress(OSError):
                        ptrace_calls.interrupt(thread.tid)
        first = min(pids, default=0)
        for watchpoint, (state, reason) in refused.items():
            probe = watchpoint.probe
            status = ProbeStatus(probe.program.number, (probe.number,), pid or first, state, reason=reason)
            self._connection.send(status)
        placed: dict[int, list[int]] = {}
        for watchpoint in space.watchpoints:
            if watchpoint not in before and not watchpoint.by_page:
                probe = watchpoint.probe
                probe.counts.note(Placement.DEBUG_REGISTER)
                probe.state = ProbeState.ACTIVE
                placed.setdefault(probe.program.number, []).append(probe.number)
        for number, probes in placed.items():
            self._connection.send(ProbeStatus(number, tuple(probes), pid or first, ProbeState.ACTIVE))

    def _program(self, threads: list[Thread]) -> dict[Watchpoint, Refusal]:
        refused: dict[Watchpoint, Refusal] = {}
        for thread in threads:
            if thread.state is ThreadState.STOPPED or thread.tid in self._stopper.deferred:
                with contextlib.suppress(ProcessLookupError):
                    refused.update(self._debug_registers.program(thread))
        return refused

    def _announce(self, space: AddressSpace, pids: set[int]) -> None:
        """Report watchpoints before they are set, so that the crash restorer never misses a register."""
        for pid in pids:
            self._connection.send(Watched(pid, tuple(w.watch for w in space.watchpoints if not w.by_page)))


def _move_to_pages(watchpoints: tuple[Watchpoint, ...], refused: dict[Watchpoint, Refusal]) -> bool:
    """
    Let watchpoints for writes use protected pages, in place of ``refused`` ones that have no debug register.

    Return whether there was any.
    """
    moved = False
    for watchpoint, (state, _) in refused.items():
        if state is not ProbeState.DEBUGREG_UNAVAIL:
            continue
        candidates = [watchpoint, *(w for w in reversed(watchpoints) if w not in refused)]
        found = next((w for w in candidates if w.watch.access is Access.WRITE and not w.by_page), None)
        if found is not None:
            found.by_page = moved = True
    return moved


class UnwatchedMemory:
    """
    Stack memory for emulation that refuses watched words.

    Debug registers do not detect the tracer's own accesses. So an emulation that accesses a watched word fails, and the
    thread makes the access itself, in a step.
    """

    def __init__(self, memory: StackMemory, space: AddressSpace) -> None:
        self._memory = memory
        self._space = space

    def read_word(self, address: int, size: int) -> int:
        """Return a word of memory; raise OSError also if a watchpoint covers reads of it."""
        self._refuse_watched(address, size, writes=False)
        return self._memory.read_word(address, size)

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a word in memory; raise OSError also if a watchpoint covers writes of it."""
        self._refuse_watched(address, size, writes=True)
        self._memory.write_word(address, size, value)

    def _refuse_watched(self, address: int, size: int, *, writes: bool) -> None:
        if any(w.watch.is_touched(address, size, writes=writes) for w in self._space.watchpoints):
            raise PermissionError("the word is watched")
        if writes and self._space.pages is not None and self._space.pages.covers(address, size):
            raise PermissionError("the page is protected")


Refusal = tuple[ProbeState, str]
"""State to report for a watchpoint without debug register, and the reason."""


class DebugRegisters:
    """Debug registers of stopped threads; ``report`` sends statuses to the client."""

    def __init__(self, report: Callable[[ProbeStatus], None]) -> None:
        self._report = report

    def program(self, thread: Thread) -> dict[Watchpoint, Refusal]:
        """Program the watchpoints of its address space into a stopped thread; return those that were refused."""
        watchpoints = thread.space.watchpoints
        wanted = tuple(w for w in watchpoints if not w.by_page and thread.pid in w.probe.program.reach.pids)
        refused = self._set(thread, wanted)
        thread.debug.programmed = watchpoints
        return refused

    def program_and_report(self, thread: Thread) -> None:
        """Program the debug registers of a thread that is about to run, and report refused watchpoints."""
        for watchpoint, (state, reason) in self.program(thread).items():
            missed = f"{reason}; accesses by thread {thread.tid} are not seen"
            probe = watchpoint.probe
            self._report(ProbeStatus(probe.program.number, (probe.number,), thread.pid, state, reason=missed))

    def clear(self, thread: Thread) -> None:
        """Remove the tracer's watchpoints from the registers of a stopped thread."""
        if thread.debug.slots:
            self._set(thread, ())

    def take_hits(self, thread: Thread) -> tuple[list[Watchpoint], bool]:
        """
        Return the watchpoints that a stopped thread has hit since the last call.

        A watchpoint that was removed while its trap was pending is included. The second result is True if the thread
        has also hit a watchpoint that is not the tracer's.
        """
        hit = slots_hit(ptrace_calls.get_debug_register(thread.tid, STATUS))
        if not hit:
            return [], False
        ptrace_calls.set_debug_register(thread.tid, STATUS, 0)  # the processor never clears bits
        debug = thread.debug
        found = []
        foreign = False
        for slot in hit:
            watchpoint = debug.superseded.get(slot) or debug.slots.get(slot)
            if watchpoint is None:
                foreign = True
            else:
                found.append(watchpoint)
        debug.superseded.clear()
        return found, foreign

    def _set(self, thread: Thread, wanted: tuple[Watchpoint, ...]) -> dict[Watchpoint, Refusal]:
        tid, debug = thread.tid, thread.debug
        control = before = ptrace_calls.get_debug_register(tid, CONTROL)
        # A new thread shows its parent's DR7 but no addresses: nothing is watched there.
        watching = {s for s in SLOTS if is_enabled(control, s) and ptrace_calls.get_debug_register(tid, s)}
        foreign = watching - debug.slots.keys()
        slots, without = assign(debug.slots, wanted, foreign)
        dropped = {slot: old for slot, old in debug.slots.items() if slots.get(slot) is not old}
        if dropped:
            hit = slots_hit(ptrace_calls.get_debug_register(tid, STATUS))
            debug.superseded.update((slot, old) for slot, old in dropped.items() if slot in hit)
        for slot in SLOTS:
            if slot in dropped or slot not in watching:
                control &= ~slot_mask(slot)
        # The old length is cleared before the new address is set, since the address may not fit it.
        if control != before:
            ptrace_calls.set_debug_register(tid, CONTROL, control)
        refused = {w: _all_in_use(tid, by_others=bool(foreign)) for w in without}
        for slot, watchpoint in slots.items():
            if debug.slots.get(slot) is watchpoint:
                continue
            bits = control_bits(slot, watchpoint.watch)
            try:
                ptrace_calls.set_debug_register(tid, slot, watchpoint.watch.address)
                ptrace_calls.set_debug_register(tid, CONTROL, control | bits)
            except ProcessLookupError:
                raise
            except OSError as error:
                refused[watchpoint] = _refusal(error, watchpoint)
            else:
                control |= bits
        debug.slots = {slot: w for slot, w in slots.items() if w not in refused}
        return refused


def _all_in_use(tid: int, *, by_others: bool) -> Refusal:
    reason = "the programs for this process watch with all four debug registers already"
    if by_others:
        reason = f"another debugger has left the debug registers of thread {tid} in use"
    return ProbeState.DEBUGREG_UNAVAIL, reason


def _refusal(error: OSError, watchpoint: Watchpoint) -> Refusal:
    if error.errno == errno.EINVAL:
        return ProbeState.INVALID_OFFSET, impossible_address(watchpoint.watch.address)
    if error.errno == errno.ENOSPC:
        return ProbeState.DEBUGREG_UNAVAIL, "perf has the debug registers in use"
    reason = reason_of(error)
    return ProbeState.DEBUGREG_UNAVAIL, f"the kernel refuses the debug register ({reason})"
