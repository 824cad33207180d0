"""
Detaching: every way out of the tracer leads through ``Detacher``, for all processes or for one.

All threads are stopped first, and the children that they were just making are taken in. Then the original bytes go
back, the threads that executed a breakpoint whose trap has not been delivered are set back onto the original
instruction, and everything is detached, each thread with the signal that it was about to receive.

What we changed or mapped in a process is given back. A page of code in which a breakpoint stood is a copy of the file's
page, and stays one when the byte is restored. madvise(MADV_DONTNEED), which the process itself has to call, makes it
the file's page again. Should it then show something else than before, somebody else had changed it too, and that is put
back.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import process_field
from dprobes.engines.linux.ptracecalls import NEW_TASK_EVENTS, Event, Register, StopKind, classify_stop
from dprobes.engines.ptrace.tracer.injection import MADVISE, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.processes import STRANGE, AddressSpace, Thread, ThreadGoneError, ThreadState
from dprobes.engines.ptrace.tracer.slots import Slots
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.ptrace.tracer.injection import Call
    from dprobes.engines.ptrace.tracer.processtree import ProcessTree
    from dprobes.engines.ptrace.tracer.stepper import Stepper
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters

__all__ = ["Detacher", "give_back_all", "give_back_pages"]

_ATTEMPTS = 100
"""How many stops a thread may report before its queued trap, which comes before other signals."""


class Detacher:
    """Restore and detach threads of the tracer's tables."""

    def __init__(self, tree: ProcessTree, stopper: Stopper, stepper: Stepper, debug_registers: DebugRegisters) -> None:
        self._tree = tree
        self._debug_registers = debug_registers
        self._stopper = stopper
        self._stepper = stepper
        self._registers = ptracecalls.Registers()
        self._info = ptracecalls.SignalInfo()
        self._signals: dict[int, int] = {}
        """For each thread that has stopped for a signal, that signal."""
        self.before_leaving: Callable[[Thread], None] = lambda _: None
        """What to do with a stopped thread that is about to be let go."""
        self._leaving: dict[int, Thread] = {}
        """Threads of a process that was let go, which could not stop yet."""

    def detach_all(self) -> None:
        """Leave every target as it would be without us."""
        threads = self._tree.threads
        self._stop(None)
        for space in self._tree.spaces():
            space.withdraw_all()
        self._detach(self._settle_all(list(threads.values()), give_back=True))
        threads.clear()

    def detach_process(self, pid: int, *, halted: bool = False) -> bool:
        """
        Let one process go on without probepoints; all others stay as they are.

        A ``halted`` process gets a SIGSTOP first: none of its threads runs code of its own before a SIGCONT or a
        debugger lets it. Processes that share its memory lose their breakpoints with it; the parent that a vfork child
        holds up gets them back when that ends. Return False, with nothing changed, if the process is just executing
        another program.
        """
        if not self._stop(pid):
            return False
        mine = [thread for thread in self._tree.threads.values() if thread.pid == pid]
        for space in {id(thread.space): thread.space for thread in mine}.values():
            self._tree.share_with_vfork(space, pid)
        busy = (ThreadState.RUNNING, ThreadState.VFORKING)
        self._leaving |= {thread.tid: thread for thread in mine if thread.state in busy}
        signals = self._settle_all([thread for thread in mine if thread.state not in busy], give_back=True)
        if halted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self._detach(signals)
        for thread in mine:
            self._tree.remove(thread)
        return True

    def let_go(self, tid: int, status: int) -> bool:
        """Detach a thread of a process that was let go before it could stop; return False if it is none of those."""
        thread = self._leaving.get(tid)
        if thread is None:
            return False
        kind, number = classify_stop(status)
        if kind is StopKind.EXITED:
            del self._leaving[tid]
            return True
        if kind is StopKind.EVENT and number in NEW_TASK_EVENTS:
            child = ptracecalls.event_message(tid)
            self._leaving[child] = Thread(child, thread.pid, thread.space, ThreadState.NEWBORN)
            self._tree.reconsider(child)
        del self._leaving[tid]
        self._signals[tid] = number if kind is StopKind.SIGNAL else 0
        self._detach(self._settle_all([thread]))
        return True

    def _stop(self, pid: int | None) -> bool:
        """
        Stop every thread, or those of one process; one that reports a new child has stopped, and so will its child.

        Return False if the process executes another program: the report of that is left in ``deferred``.
        """
        deferred = self._stopper.deferred
        while True:
            self._stopper.collect()
            threads = [t for t in self._tree.threads.values() if pid is None or t.pid == pid]
            for thread in threads:
                if thread.state is ThreadState.LISTENING:
                    # PTRACE_DETACH needs a real stop; an interrupt ends the listening, and the group stop lasts.
                    thread.state = ThreadState.RUNNING
            self._stopper.stop(threads)
            for thread in threads:
                if thread.state is ThreadState.NEWBORN and thread.tid not in deferred:
                    with contextlib.suppress(ChildProcessError, ProcessLookupError):
                        self._stopper.defer(thread.tid, self._stopper.await_stop(thread))
            ours = {pid, *(thread.tid for thread in threads)}
            reported = [tid for tid in deferred if pid is None or tid in ours]
            if pid is not None and any(classify_stop(deferred[t]) == (StopKind.EVENT, Event.EXEC) for t in reported):
                return False
            for tid in reported:
                self._note_stop(tid, deferred.pop(tid))
            if pid is None:
                self._tree.adopt_orphans()
            if not reported and (pid is not None or not deferred):
                return True

    def _note_stop(self, tid: int, status: int) -> None:
        thread = self._tree.threads.get(tid)
        kind, number = classify_stop(status)
        if thread is None:
            if not self.let_go(tid, status):
                self._tree.note_unreported(tid, status)
        elif kind is StopKind.EXITED:
            self._tree.remove(thread)
        else:
            thread.state = ThreadState.STOPPED
            if kind is StopKind.SIGNAL:
                self._signals[tid] = number
            elif kind is StopKind.SYSCALL or (kind is StopKind.EVENT and number != Event.STOP):
                with contextlib.suppress(OSError):
                    if kind is StopKind.SYSCALL:
                        self._stopper.waits.on_system_call(thread)
                    self._let_finish(thread, number)

    def _let_finish(self, thread: Thread, event: int) -> None:
        """Let a thread finish the system call in which it has stopped: until then it can make no other one for us."""
        if event in NEW_TASK_EVENTS:
            self._tree.add_child(thread, Event(event), ptracecalls.event_message(thread.tid))
        elif event == Event.EXEC:
            self._tree.leave_space(thread)
            thread.space = AddressSpace.closed(thread.space.word_size)
            thread.space.pids.add(thread.pid)
        self._stopper.resume(thread)
        if event == Event.VFORK:
            thread.state = ThreadState.VFORKING

    def _detach(self, signals: dict[Thread, int]) -> None:
        """Detach threads, each with a signal."""
        for thread, number in signals.items():
            with contextlib.suppress(OSError):
                ptracecalls.detach(thread.tid, number)

    def _settle_all(self, threads: list[Thread], *, give_back: bool = False) -> dict[Thread, int]:
        """Put stopped threads where the program itself would be; return the signals with which they are to go on."""
        signals: dict[Thread, int] = {}
        for thread in threads:
            number = self._signals.get(thread.tid, 0)
            try:
                signals[thread] = self._settle(thread)
            except (ProcessLookupError, ThreadGoneError):
                pass
            except STRANGE:
                # All others are still to be settled, and none may stay behind.
                signals[thread] = 0 if number == signal.SIGTRAP else number
        if give_back:
            for space in {id(t.space): t.space for t in threads}.values():
                self._give_back(space, signals)
        return signals

    def _give_back(self, space: AddressSpace, signals: dict[Thread, int]) -> None:
        """
        Let a thread drop what we changed in its address space, if all threads of that stand still.

        One that waits in the kernel for its vfork child does, and does not come back into a slot.
        """
        still = (ThreadState.VFORKING, ThreadState.ENDED)
        mine = [t for t in self._tree.threads.values() if t.space is space and t.state not in still]
        ready = [t for t in mine if signals.get(t) == 0 and t.state is ThreadState.STOPPED]
        if not all(t in signals for t in mine) or not space.shared_with <= {t.pid for t in mine}:
            return
        for thread in ready:
            with contextlib.suppress(*STRANGE, ThreadGoneError):
                if give_back_all(space, thread):
                    return

    def _settle(self, thread: Thread) -> int:
        """Put a stopped thread where the program itself would be; return the signal with which it is to go on."""
        self._debug_registers.clear(thread)
        number = self._signals.pop(thread.tid, 0)
        self.before_leaving(thread)
        if number == signal.SIGTRAP:
            number = 0 if self._set_back(thread) else number
        elif not number:
            if self._trap_is_queued(thread):
                number = self._await_trap(thread)
            else:
                self._stopper.waits.hide_interruption(thread)
        else:
            self._stopper.waits.hide_interruption(thread, number)
        return self._stepper.leave_slot(thread, self._registers, number)

    def _trap_is_queued(self, thread: Thread) -> bool:
        """Return whether a thread ran into a breakpoint or watchpoint of ours and the signal for it still waits."""
        ptracecalls.get_registers(thread.tid, self._registers)
        if self._registers[Register.RIP] - 1 not in thread.space.former and not thread.debug.superseded:
            return False
        pending = process_field(thread.tid, "SigPnd")
        return bool(pending) and bool(int(pending, 16) & 1 << (signal.SIGTRAP - 1))

    def _await_trap(self, thread: Thread) -> int:
        """Let a trap come before which the kernel reported our interrupt; return the signal to go on with."""
        for _ in range(_ATTEMPTS):
            ptracecalls.resume(thread.tid)
            kind, number = classify_stop(self._stopper.await_stop(thread))
            if kind is StopKind.EXITED:
                raise ProcessLookupError
            if kind is StopKind.SIGNAL:
                return 0 if number == signal.SIGTRAP and self._set_back(thread) else number
        return 0

    def _set_back(self, thread: Thread) -> bool:
        """Put a thread that trapped onto the original instruction; return False if the trap is the program's own."""
        if thread.trapped:
            ptracecalls.set_instruction_pointer(thread.tid, thread.trapped)
            thread.trapped = 0
            return True
        code = ptracecalls.get_signal_info(thread.tid, self._info)
        if code == ptracecalls.TRAP_TRACE and thread.hit.is_late:
            # The end of a step of ours.
            self._stepper.settle_late(thread, thread.hit.breakpoint, self._registers)
            return True
        if code == ptracecalls.TRAP_HWBKPT:
            hits, foreign = self._debug_registers.take_hits(thread)
            return bool(hits) and not foreign
        if code != ptracecalls.SI_KERNEL:
            return False
        ptracecalls.get_registers(thread.tid, self._registers)
        address = self._registers[Register.RIP] - 1
        slot = thread.space.slots.holding(address)
        if slot is not None and slot.trap == address:
            self._stepper.settle(thread, slot, self._registers)
            return True
        if address not in thread.space.former:
            return False
        ptracecalls.set_instruction_pointer(thread.tid, address)
        return True


_DONTNEED = 4


def give_back_pages(space: AddressSpace, thread: Thread, addresses: Iterable[int]) -> None:
    """
    Let ``thread`` drop our copies of the pages at ``addresses`` in which no breakpoint is any more.

    It must have stopped without a signal to be delivered, and all others of the space must be stopped. Where the
    process may not be made to do system calls, the copies stay.
    """
    kept = {address & -PAGE_SIZE for address in space.breakpoints}
    pages = {address & -PAGE_SIZE for address in addresses} - kept
    if not pages or not may_inject(thread):
        return
    with contextlib.suppress(InjectionError), injecting(thread) as call:
        _drop(space, call, pages)


def give_back_all(space: AddressSpace, thread: Thread) -> bool:
    """
    Let ``thread`` drop and unmap all that is ours, the slots included; no thread may be in one.

    Return False if another thread has to be asked.
    """
    pages = {address & -PAGE_SIZE for address in space.former}
    for area in space.slots.areas:
        if area.former is not None:
            with contextlib.suppress(OSError):
                os.pwrite(space.memory, area.former[: area.used], area.start)
            pages |= {address & -PAGE_SIZE for address in range(area.start, area.start + area.used, PAGE_SIZE)}
    mapped = [area for area in space.slots.areas if area.former is None]
    if not (pages or mapped) or not may_inject(thread):
        return True
    try:
        with injecting(thread) as call:
            for area in mapped:
                call(MUNMAP[space.word_size], area.start, area.end - area.start)
            space.slots = Slots()
            _drop(space, call, pages)
    except InjectionError:
        return False
    return True


def _drop(space: AddressSpace, call: Call, pages: set[int]) -> None:
    for start, size in _runs(pages):
        try:
            before = os.pread(space.memory, size, start)
        except OSError:
            continue
        if call(MADVISE[space.word_size], start, size, _DONTNEED) < 0:
            continue  # locked in memory
        with contextlib.suppress(OSError):
            after = os.pread(space.memory, size, start)
            for offset in range(0, size, PAGE_SIZE):
                if after[offset : offset + PAGE_SIZE] != before[offset : offset + PAGE_SIZE]:
                    os.pwrite(space.memory, before[offset : offset + PAGE_SIZE], start + offset)


def _runs(pages: set[int]) -> Iterator[tuple[int, int]]:
    """Join adjoining pages: give (start, size) of each run."""
    start = end = -1
    for page in sorted(pages):
        if page != end:
            if start >= 0:
                yield start, end - start
            start = page
        end = page + PAGE_SIZE
    if start >= 0:
        yield start, end - start
