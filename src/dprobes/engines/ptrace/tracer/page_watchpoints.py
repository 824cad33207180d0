"""
Watchpoints without a debug register: writes to protected pages, and the watchpoints that they hit.

A thread that writes to a protected page waits, and a message arrives. Then all threads of the address space are
stopped, the page is opened, and the thread alone executes its instruction. So no write of another thread is missed. An
access that touches a watched byte is a hit. Any other access to the page is counted as a *neighbour*.

A thread that waits in the kernel, in a system call that writes to the page, cannot be stopped by an interrupt: it tries
again, with a message each time. It counts as stopped. When its turn comes, it is interrupted and the page is opened. It
finishes the system call, and stops before it runs program code.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.tracer.call_injection import ThreadBusyError
from dprobes.engines.ptrace.tracer.gated_steps import GatedSlots
from dprobes.engines.ptrace.tracer.held_signals import FAULTS, move_signal_address
from dprobes.engines.ptrace.tracer.page_protection import ProtectionError, make_object, protect_page
from dprobes.engines.ptrace.tracer.protected_pages import pages_of
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError, ThreadState
from dprobes.engines.ptrace.tracer_messages import ProbeStatus
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import ids_of, system_call_of, thread_state
from dprobes.platform.linux.ptrace_calls import Event, Register, StopKind, classify_stop
from dprobes.platform.linux.userfault_calls import FaultEvent
from dprobes.platform.x86.written_memory import written_memory
from dprobes.resolve.codeless_probes import length_problem
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.hit_counter import HitCounter, WatchpointHits
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Watchpoint
    from dprobes.engines.ptrace.tracer.protected_pages import ProtectedPages
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState

__all__ = ["PageWatchpoints"]

_RIP, _RAX, _ORIG_RAX = int(Register.RIP), int(Register.RAX), int(Register.ORIG_RAX)
_EFLAGS = int(Register.EFLAGS)

_LONGEST = 15
"""Maximum size of an instruction in bytes."""

_STUCK = 0.1
"""Seconds after which an instruction that waits for something else than a protected page is given up."""

_PATIENCE = 1.0
"""Seconds to wait until a thread has finished a system call that writes to a protected page."""

_SETTLING = 0.01
"""Seconds to wait until threads that were asked to stop no longer run."""

_SPINS = 40

_ATTEMPTS = 8
"""Number of stops at which a thread may be unable to make system calls."""

_FILLING = {8: frozenset({0, 17, 45, 318}), 4: frozenset({3, 180, 355})}
"""
System calls by word size (read, pread64, recvfrom, getrandom) that fill a buffer and return the number of bytes.

The buffer is the second argument, or the first argument of getrandom.
"""
_GETRANDOM = {8: 318, 4: 355}
_BUFFER = {8: (int(Register.RSI), int(Register.RDI)), 4: (int(Register.RCX), int(Register.RBX))}


class PageWatchpoints:
    """Write protection of pages with watched memory in all address spaces, and handler of the writes to them."""

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper
        self._armed: list[AddressSpace] = []
        self._attempts: dict[int, int] = {}
        self._registers = ptrace_calls.Registers()
        self._info = ptrace_calls.SignalInfo()
        self._slots = GatedSlots(state.connection)
        self._waker = -1
        self.hits: WatchpointHits
        self.counter: HitCounter
        self.go_on: Callable[[Thread], None]

    @property
    def is_armed(self) -> bool:
        """True if pages of any traced process are write-protected for a watchpoint."""
        return bool(self._armed)

    def close(self) -> None:
        """End all protection; no more hits are reported."""
        for space in self._armed:
            if space.pages is not None:
                space.pages.close()
                space.pages = None
        self._armed.clear()

    # Protection

    def arm(self, thread: Thread) -> None:
        """
        Protect the pages of the watchpoints of an address space. ``thread`` runs in it, and is at an event stop.

        Watchpoints whose pages cannot be protected are removed and reported.
        """
        space = thread.space
        with self._stopper.others_stopped(space, thread):
            try:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.waits.hide_interruption(thread)
                self._arm(space, thread)
            except ThreadBusyError as error:
                tries = self._attempts[id(space)] = self._attempts.get(id(space), 0) + 1
                if tries < _ATTEMPTS:
                    return  # the next stop is another one
                self._refuse(space, thread, {w: str(error) for w in space.watchpoints if w.by_page})
            except ThreadGoneError as gone:
                self._stopper.defer(thread.tid, gone.status)
                return
            except ProcessLookupError:
                return
            if space.pages is not None and space.pages.changes:
                self._on_changes(space, space.pages)
        self._attempts.pop(id(space), None)
        space.awaits_pages = False

    def _arm(self, space: AddressSpace, thread: Thread) -> None:
        wanted = [w for w in space.watchpoints if w.by_page]
        refused: dict[Watchpoint, str] = {}
        if space.pages is None and wanted:
            try:
                space.pages = make_object(thread)
            except ProtectionError as error:
                self._refuse(space, thread, dict.fromkeys(wanted, str(error)))
                return
            space.pages.before_change = partial(self._ask_to_stop, space)
            self._armed.append(space)
        if space.pages is None:
            return
        space.release_pages()
        threads = self._threads.in_space(space)
        running = [t for t in threads if t.state is ThreadState.RUNNING and t.tid not in self._stopper.deferred]
        are_stopped = not running or running == [thread]
        for watchpoint in wanted:
            try:
                for page in pages_of(watchpoint.watch.address, watchpoint.watch.length):
                    if page not in space.pages.protected:
                        protect_page(space.pages, thread, threads, page, are_stopped=are_stopped)
            except ProtectionError as error:
                refused[watchpoint] = str(error)
        if refused:
            self._refuse(space, thread, refused)
            space.release_pages()
        placed: dict[int, list[int]] = {}
        for watchpoint in wanted:
            if watchpoint not in refused:
                probe = watchpoint.probe
                probe.counts.note(Placement.PROTECTED)
                probe.state = ProbeState.ACTIVE
                placed.setdefault(probe.program.number, []).append(probe.number)
        for number, probes in placed.items():
            self._connection.send(ProbeStatus(number, tuple(probes), thread.pid, ProbeState.ACTIVE))

    def _refuse(self, space: AddressSpace, thread: Thread, refused: dict[Watchpoint, str]) -> None:
        space.watchpoints = tuple(w for w in space.watchpoints if w not in refused)
        for watchpoint, reason in refused.items():
            probe, watch = watchpoint.probe, watchpoint.watch
            problem = length_problem(watch.access, watch.address, watch.length)
            state = ProbeState.DEBUGREG_UNAVAIL if problem is None else ProbeState.WATCHPOINT_LEN_INVALID
            why = f"no debug register holds it, and its page cannot be protected: {reason}"
            self._connection.send(ProbeStatus(probe.program.number, (probe.number,), thread.pid, state, reason=why))

    # Waiting for messages

    def wait(self, signals: process_calls.SignalSet, seconds: float) -> None:
        """Wait until a blocked signal or a message about a page arrives, at most ``seconds``."""
        if self._waker < 0:
            self._waker = process_calls.signal_descriptor(signals)
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        for space in self._armed:
            if space.pages is not None and space.pages.descriptor >= 0:
                poll.register(space.pages.descriptor, select.POLLIN)
        poll.poll(seconds * 1000)

    def close_in_child(self) -> None:
        """Close all descriptors in a child of this process: a copy would keep the protection after its end."""
        for space in self._armed:
            if space.pages is not None:
                space.pages.close()

    # Writes

    def serve(self) -> bool:
        """Handle the writes that wait; return whether there were any."""
        served = False
        for space in list(self._armed):
            pages = space.pages
            if pages is None:
                self._armed.remove(space)
                continue
            pages.read()
            if pages.changes:
                self._on_changes(space, pages)
            if pages.waiting:
                self._round(space, pages)
                served = True
        return served

    def _on_changes(self, space: AddressSpace, pages: ProtectedPages) -> None:
        """Protect pages again that the process has discarded, and report watchpoints of memory that is gone."""
        changes, pages.changes = pages.changes, []
        gone: dict[Watchpoint, str] = {}
        with self._stopper.holding(self._threads.in_space(space)):
            for change in changes:
                if change.event is FaultEvent.REMOVE:
                    continue
                verb = "moved" if change.event is FaultEvent.REMAP else "unmapped"
                for watchpoint in space.watchpoints:
                    watch = watchpoint.watch
                    if (
                        watchpoint.by_page
                        and change.address < watch.address + watch.length
                        and (watch.address & -PAGE_SIZE) < change.end
                    ):
                        gone.setdefault(watchpoint, f"the process has {verb} the memory at {watch.address:#x}")
            pages.renew()
        if gone:
            space.watchpoints = tuple(w for w in space.watchpoints if w not in gone)
            for watchpoint, reason in gone.items():
                probe = watchpoint.probe
                state = ProbeState.INVALID_OFFSET
                self._connection.send(
                    ProbeStatus(probe.program.number, (probe.number,), min(space.pids, default=0), state, reason=reason)
                )
            space.release_pages()

    def _ask_to_stop(self, space: AddressSpace) -> None:
        """Interrupt the threads of a space, and wait until none runs program code; their stops are reported later."""
        running = [
            each
            for each in self._threads.in_space(space)
            if each.state is ThreadState.RUNNING and each.tid not in self._stopper.deferred
        ]
        space.awaits_pages = True  # if another part of the tracer takes the stops
        for thread in running:
            with contextlib.suppress(OSError):
                ptrace_calls.interrupt(thread.tid)
        until = time.monotonic() + _SETTLING
        while any(thread_state(each.tid) == "R" for each in running) and time.monotonic() < until:
            pass

    def _round(self, space: AddressSpace, pages: ProtectedPages) -> None:
        """Stop the threads of a space, and let those that wait for a page write, one after the other."""
        users: list[tuple[Thread, int]] = []
        in_kernel: dict[Thread, int] = {}
        waiting, pages.waiting = pages.waiting, {}
        for number, address in waiting.items():
            thread = self._thread(space, number)
            if thread is None or thread.state is not ThreadState.RUNNING or thread.tid in self._stopper.deferred:
                continue  # it has stopped for another reason, and will try again
            where = system_call_of(thread.tid)
            if pages.is_in_kernel(number) or (where is not None and where >= 0):
                in_kernel[thread] = address
            elif where is not None:
                users.append((thread, address))
        pages.begin_round()
        others = [each for each in self._threads.in_space(space) if each not in in_kernel]
        released = set(self._stopper.stop(others))
        # Threads that were interrupted and cannot stop would pass while a page is open for another thread.
        pages.read()
        late: dict[Thread, int] = {}
        for number in list(pages.waiting):
            thread = self._thread(space, number)
            if thread is not None and thread not in in_kernel and thread.state is ThreadState.RUNNING:
                if thread.tid not in self._stopper.deferred:
                    late[thread] = pages.waiting[number]
                del pages.waiting[number]
        hit: list[Thread] = []
        for group in (late, *({thread: address} for thread, address in in_kernel.items())):
            if group:
                finished = self._let_finish(group, pages)
                released |= finished
                hit += [thread for thread in finished if thread.exit_request is not None]
        for thread, address in users:
            if thread in released and self._let_write(thread, pages, address):
                hit.append(thread)
            if thread.tid in self._stopper.deferred:
                released.discard(thread)
        if pages.changes:
            self._on_changes(space, pages)
        for thread in released:
            if thread.state is not ThreadState.STOPPED or self._threads.get(thread.tid) is not thread:
                continue
            if thread not in hit:
                self._stopper.release(thread)
            else:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.waits.hide_interruption(thread)
                self.go_on(thread)

    def _thread(self, space: AddressSpace, number: int) -> Thread | None:
        """Return the thread of a space by its id in its process's PID namespace, or None if there is none."""
        thread = self._threads.get(number)
        if thread is not None and thread.space is space:
            return thread
        for each in self._threads.in_space(space):
            if (ids := ids_of(each.tid)) and ids[-1] == number:
                return each
        return None

    def _let_write(self, thread: Thread, pages: ProtectedPages, address: int) -> bool:
        """
        Let a stopped thread execute the instruction that faulted in a write to the protected page of ``address``.

        Return whether it has changed watched memory, and so was a hit.
        """
        space, registers = thread.space, self._registers
        try:
            ptrace_calls.get_registers(thread.tid, registers)
            raw = space.read(registers[_RIP], _LONGEST)
        except OSError:
            return False
        written = written_memory(raw, registers, space.word_size)
        touched = [address & -PAGE_SIZE]
        before = None if written is not None else self._content(space, touched)
        with contextlib.ExitStack() as stack:
            stack.enter_context(pages.opened(touched))
            is_done = self._execute(thread, pages, raw, touched, stack)
        if not is_done:
            return False
        if written is None:
            written = self._changed(space, address, before)
        hits = self._hits_of(thread, written)
        hit = thread.hit
        if hit.state is HitState.PENDING:
            ptrace_calls.get_registers(thread.tid, registers)
            if registers[_RIP] != hit.slot.address:
                self.counter.complete(thread)
        self._count(thread, touched, hits)
        return bool(hits)

    def _execute(
        self, thread: Thread, pages: ProtectedPages, raw: bytes, touched: list[int], stack: contextlib.ExitStack
    ) -> bool:
        """
        Let a stopped thread execute an instruction. Add further pages that it writes to ``touched``.

        Return False if the instruction was not executed. A stop for another reason is kept for later.
        """
        registers, tid = self._registers, thread.tid
        gated = None
        if not thread.hit.is_late and not registers[_EFLAGS] & ptrace_calls.TRAP_FLAG:
            try:
                gated = self._slots.find(thread, pages, registers[_RIP], raw)
            except ThreadGoneError as gone:
                self._stopper.defer(tid, gone.status)
                return False
        if gated is None:
            return self._step(thread, pages, touched, stack)
        gated.enter(registers)
        ptrace_calls.set_registers(tid, registers)
        thread.state = ThreadState.RUNNING
        ptrace_calls.resume(tid)
        status = self._next_status(thread, pages, touched, stack, time.monotonic() + _STUCK, gated.gate)
        if status is None:
            # It waits for something else, which perhaps another thread has to provide.
            ptrace_calls.interrupt(tid)
            status = self._next_status(thread, pages, touched, stack, time.monotonic() + _PATIENCE, gated.gate)
            if status is None:
                return False
        kind, number = classify_stop(status)
        if kind is StopKind.EXITED:
            self._stopper.defer(tid, status)
            return False
        ptrace_calls.get_registers(tid, registers)
        is_done = gated.leave(registers)
        ptrace_calls.set_registers(tid, registers)
        code = ptrace_calls.get_signal_info(tid, self._info) if kind is StopKind.SIGNAL else 0
        is_watch = number == signal.SIGTRAP and code == ptrace_calls.TRAP_HWBKPT
        if (kind is StopKind.EVENT and number == Event.STOP) or (kind is StopKind.SIGNAL and is_watch):
            thread.state = ThreadState.STOPPED
            return is_done
        if kind is StopKind.SIGNAL and number in FAULTS and code > 0:
            move_signal_address(self._info, gated.slot.address, gated.slot.site)
            ptrace_calls.set_signal_info(tid, self._info)
        self._stopper.defer(tid, status)
        return is_done

    def _step(self, thread: Thread, pages: ProtectedPages, touched: list[int], stack: contextlib.ExitStack) -> bool:
        """
        Step a stopped thread. Add further pages that it writes to ``touched``; ``stack`` opens them.

        Return False if the instruction was not executed. A stop for another reason is kept for later.
        """
        tid = thread.tid
        until, is_asked = time.monotonic() + _STUCK, False
        thread.state = ThreadState.RUNNING
        ptrace_calls.single_step(tid, 0)
        while True:
            status = self._next_status(thread, pages, touched, stack, until)
            if status is None:
                if is_asked:
                    return False
                # It waits for something else, which perhaps another thread has to provide.
                is_asked, until = True, time.monotonic() + _PATIENCE
                ptrace_calls.interrupt(tid)
                continue
            kind, number = classify_stop(status)
            if kind is StopKind.SIGNAL and number == signal.SIGTRAP:
                code = ptrace_calls.get_signal_info(tid, self._info)
                if code in (ptrace_calls.TRAP_TRACE, ptrace_calls.TRAP_HWBKPT):
                    thread.state = ThreadState.STOPPED
                    return True
            if kind is StopKind.EVENT and number == Event.STOP:
                thread.state = ThreadState.STOPPED
                if is_asked:
                    return False
                thread.state = ThreadState.RUNNING
                ptrace_calls.single_step(tid, 0)
                continue
            self._stopper.defer(tid, status)
            return False

    def _next_status(
        self,
        thread: Thread,
        pages: ProtectedPages,
        touched: list[int],
        stack: contextlib.ExitStack,
        until: float,
        gate: int = 0,
    ) -> int | None:
        """
        Wait for the next stop of a thread; open the pages for which it waits. Return None after ``until``.

        A thread that waits at the page ``gate`` is asked to stop there.
        """
        turn = 0
        while True:
            found, status = os.waitpid(thread.tid, ptrace_calls.WALL | os.WNOHANG)
            if found:
                return status
            pages.read()
            for number in list(pages.waiting):
                if self._thread(thread.space, number) is thread:
                    page = pages.waiting.pop(number) & -PAGE_SIZE
                    if page == gate:
                        ptrace_calls.interrupt(thread.tid)
                        continue
                    if page not in touched:
                        touched.append(page)
                        stack.enter_context(pages.opened([page]))
                    pages.wake(page)
            turn += 1
            if turn > _SPINS:
                if time.monotonic() > until and thread_state(thread.tid) in ("S", "D"):
                    return None
                signal.sigtimedwait([signal.SIGCHLD], 0.0005)

    def _let_finish(self, threads: dict[Thread, int], pages: ProtectedPages) -> set[Thread]:
        """
        Let threads that wait in the kernel, at the given addresses, finish their system calls.

        Return those that are at an event stop then; the stops of others are kept for later.
        """
        space = next(iter(threads)).space
        before = self._content(space, pages.protected)
        touched = {thread: [address & -PAGE_SIZE] for thread, address in threads.items()}
        statuses: dict[Thread, int] = {}
        with contextlib.ExitStack() as stack:
            for thread, mine in touched.items():
                stack.enter_context(pages.opened(mine))
                with contextlib.suppress(OSError):
                    ptrace_calls.interrupt(thread.tid)  # then it tries again
            until = time.monotonic() + _PATIENCE
            for thread, mine in touched.items():
                with contextlib.suppress(ChildProcessError):
                    status = self._next_status(thread, pages, mine, stack, until)
                    if status is not None:
                        statuses[thread] = status
        rested = set()
        for thread, status in statuses.items():
            is_rest = classify_stop(status) == (StopKind.EVENT, Event.STOP)
            if classify_stop(status)[0] is not StopKind.EXITED:
                thread.state = ThreadState.STOPPED
                with contextlib.suppress(OSError):
                    ptrace_calls.get_registers(thread.tid, self._registers)
                    if self._registers[_ORIG_RAX] < ptrace_calls.NO_SYSTEM_CALL:  # otherwise it has written nothing yet
                        written = [*self._changed(space, threads[thread], before), *self._filled(thread)]
                        self._count(thread, touched[thread], self._hits_of(thread, written))
            if is_rest:
                rested.add(thread)
            else:
                thread.state = ThreadState.RUNNING
                self._stopper.defer(thread.tid, status)
        return rested

    def _filled(self, thread: Thread) -> list[tuple[int, int]]:
        """Return the buffer that a finished system call of a thread has written, if it is one of those known."""
        registers, size = self._registers, thread.space.word_size
        call, result = registers[_ORIG_RAX], registers[_RAX]
        if call not in _FILLING[size] or not 0 < result < 1 << 31:
            return []
        return [(registers[_BUFFER[size][call == _GETRANDOM[size]]], result)]

    @staticmethod
    def _content(space: AddressSpace, pages: Iterable[int]) -> dict[int, bytes]:
        found = {}
        for page in pages:
            with contextlib.suppress(OSError):
                found[page] = os.pread(space.memory, PAGE_SIZE, page)
        return found

    def _changed(self, space: AddressSpace, address: int, before: dict[int, bytes] | None) -> list[tuple[int, int]]:
        """Return the byte at ``address``, and the bytes that differ from ``before``."""
        changed = [(address, 1)]
        for page, content in (before or {}).items():
            now = self._content(space, [page]).get(page, content)
            if now != content:
                changed += [(page + n, 1) for n, (old, new) in enumerate(zip(content, now, strict=False)) if old != new]
        return changed

    @staticmethod
    def _hits_of(thread: Thread, written: list[tuple[int, int]]) -> list[Watchpoint]:
        return [
            w
            for w in thread.space.watchpoints
            if w.by_page
            and thread.pid in w.probe.program.reach.pids
            and any(w.watch.is_touched(address, size, writes=True) for address, size in written)
        ]

    def _count(self, thread: Thread, touched: list[int], hits: list[Watchpoint]) -> None:
        """
        Count an access to the pages ``touched``, and run the handlers of the watchpoints ``hits``.

        Other watchpoints on these pages count it as a neighbor's.
        """
        for watchpoint in thread.space.watchpoints:
            if watchpoint.by_page and watchpoint not in hits:
                pages = pages_of(watchpoint.watch.address, watchpoint.watch.length)
                if any(page in pages for page in touched):
                    watchpoint.probe.counts.neighbours += 1
        if hits or thread.debug.slots:
            self.hits.take(thread, self._registers, hits)
