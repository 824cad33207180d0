"""
Stops of threads: waiting for them, requesting them, and resuming threads.

Rules that this module keeps:

* A thread that has executed a breakpoint is stopped after the breakpoint's byte, in the middle of an instruction. If
  the tracer is killed, the kernel resumes the thread: with SIGTRAP if the stop has not been waited for, otherwise
  without a signal. Then the thread would execute the rest of the instruction as an instruction. (In the kernel
  ``wait_task_stopped`` clears the signal that ``ptrace_stop`` delivers.) So the instruction pointer is corrected before
  the stop is waited for.
* A stop that is reported while another one is awaited is kept and handled later; none is lost.
* A thread that cannot stop now (it waits in the kernel) is not waited for: it stops before it runs user code again.
* Stops are transparent to the thread: its system calls do not fail because of them, and its signals keep their order
  and their ``siginfo``.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.held_signals import STOPPING, leave_to_us
from dprobes.engines.ptrace.tracer.interrupted_calls import Waits, step_on
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError, ThreadState
from dprobes.errors import system_error
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import children_of, system_call_of, thread_state
from dprobes.platform.linux.ptrace_calls import Event, Register, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadTable

__all__ = ["Stopper", "await_stop", "await_stop_for"]

_RIP = int(Register.RIP)

_POLL = ptrace_calls.WALL | os.WNOHANG
"""Options of waitpid to poll for a stop."""

_LOOK = _POLL | os.WEXITED | os.WSTOPPED | os.WNOWAIT
"""Options of waitid to poll for a stop and leave it with the kernel."""

_ENDS = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)

_ROUND = 64
"""Number of stops of a single thread after which stops of threads that are not in the table are looked for."""

_SPINS = 40
"""Number of polls for a stop, about a microsecond each, before sleeping until there is one."""

_TURNS = 8
"""Number of kept stops after which new ones are looked for, so that one busy process does not delay another."""

_FORKING = 5.0
"""Seconds to wait for a thread that creates a process."""

# fork, vfork, clone, clone3.
_PROCESS_MAKING = {8: frozenset({57, 58, 56, 435}), 4: frozenset({2, 190, 120, 435})}

_STUCK = 0.1
"""Seconds after which a thread that sleeps in the middle of a step is no longer waited for."""


_NOTHING = (0, 0)


def _take_plainly(tid: int) -> tuple[int, int]:
    return os.waitpid(tid, _POLL)


def await_stop(tid: int, take: Callable[[int], tuple[int, int]] = _take_plainly) -> int:
    """
    Wait for the next stop or the end of a thread, and return its wait status.

    Raise ``ProcessLookupError`` if it has ended and the end is not reported yet. The kernel delays the report of a
    process's first thread until all others have been waited for.
    """
    status = await_stop_for(tid, math.inf, take)
    assert status is not None
    return status


def await_stop_for(tid: int, seconds: float, take: Callable[[int], tuple[int, int]] = _take_plainly) -> int | None:
    """Wait as ``await_stop`` does, but return None if the thread sleeps for ``seconds`` in a row instead."""
    found, status = take(tid)
    until = time.monotonic() + seconds
    while not found:
        signal.sigtimedwait([signal.SIGCHLD], 0.005)
        state = thread_state(tid)
        found, status = take(tid)
        if found:
            break
        if state in ("Z", "X"):
            raise system_error(errno.ESRCH)
        if state not in ("S", "D"):
            until = max(until, time.monotonic() + seconds)  # it runs, or waits for a processor
        elif time.monotonic() > until:
            return None
    return status


class Stopper:
    """
    Stopping and resuming of threads.

    ``prepare`` programs the debug registers of a thread that is about to run, if its watchpoints have changed.
    ``ended`` is called with a thread that has ended, while its /proc entry still exists.
    """

    def __init__(
        self, threads: ThreadTable, prepare: Callable[[Thread], None], ended: Callable[[Thread], None]
    ) -> None:
        self._threads = threads
        self._prepare = prepare
        self._ended = ended
        self._held_registers = ptrace_calls.Registers()
        self._info = ptrace_calls.SignalInfo()
        self.registers = ptrace_calls.Registers()
        """Registers that were read last. A caller that takes the object puts another one in its place."""
        self.registers_owner: Thread | None = None
        """
        Thread at a breakpoint whose ``registers`` they are, if they have not changed since.

        The code that the thread runs is of the word size of its address space.
        """
        # Polling makes sense only if the thread can run meanwhile.
        self._spins = _SPINS if len(os.sched_getaffinity(0)) > 1 else 1
        self._turns = 0
        self.deferred: dict[int, int] = {}
        """Reported stops (wait statuses by tid, in order of arrival) that are not handled yet."""
        self.waits = Waits()
        """System calls that threads were in when they were stopped."""

    # Waiting

    def next_stop(self) -> tuple[int, int] | None:
        """
        Return the next stop of any thread (tid, wait status), or None if there is none for some microseconds.

        A thread that was just resumed is likely to hit again at once, and sleeping and being woken costs more than some
        polls. Stops of several threads are taken in turn, because the kernel would always return the first thread that
        has stopped.
        """
        self._turns += 1
        if self.deferred:
            self.registers_owner = None
            if self._turns % _TURNS == 0:
                self.collect()
            return self.oldest_deferred()
        spins = self._spins
        if len(self._threads) == 1 and self._turns % _ROUND:
            # Its registers can be read as soon as it has stopped, so no separate query for the stop is needed.
            ((tid, thread),) = self._threads.items()
            if self._secure(thread, spins) and (found := os.waitpid(tid, _POLL))[0]:
                return found
            spins = 1
        try:
            for _ in range(spins):
                found = self._take()
                if found[0]:
                    break
            else:
                return None
        except ChildProcessError:
            return None
        if len(self._threads) == 1:
            return found
        self.defer(*found)
        self.collect()
        return self.oldest_deferred()

    def defer(self, tid: int, status: int) -> None:
        """Keep a thread's wait status for the main loop, replacing an older one, which a kill or an exec made void."""
        self.deferred.pop(tid, None)
        self.deferred[tid] = status

    def oldest_deferred(self) -> tuple[int, int]:
        """Remove and return the oldest of the stops that are kept."""
        tid = next(iter(self.deferred))
        return tid, self.deferred.pop(tid)

    def collect(self) -> None:
        """Take all stops that the kernel reports now, and keep them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                tid, status = self._take()
                if not tid:
                    return
                self.defer(tid, status)

    def _take(self, tid: int = 0) -> tuple[int, int]:
        """
        Take a stop of a thread, or of any thread if ``tid`` is 0, as ``waitpid`` does.

        Return (0, 0) if there is none.
        """
        found = os.waitid(os.P_PID if tid else os.P_ALL, tid, _LOOK)
        if found is None:
            return _NOTHING
        if found.si_status in STOPPING and found.si_code == os.CLD_TRAPPED:
            if (thread := self._threads.get(found.si_pid)) is not None:
                self._secure(thread)
        elif found.si_code in _ENDS and (thread := self._threads.get(found.si_pid)) is not None:
            self._ended(thread)
        return os.waitpid(found.si_pid, _POLL)

    def _secure(self, thread: Thread, attempts: int = 1) -> bool:
        """
        Return True if a thread has stopped. If it ran into a breakpoint, correct its instruction pointer.

        The pointer is set to the instruction, or to its copy if there is one, because the thread can execute the copy
        without the tracer. The thread's ``trapped`` is then the address of the breakpoint.
        """
        registers, space = self.registers, thread.space
        if not ptrace_calls.has_stopped(thread.tid, registers, attempts):
            return False
        self.registers_owner = None
        if space.patches.stops and leave_to_us(thread, registers, self._info):
            self.registers_owner = thread
            return True
        address = registers[_RIP] - 1
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None and address not in space.former:
            return True
        info, runs_natively = self._info, ptrace_calls.runs_as(registers, space.word_size)
        way_on = address
        if breakpoint_ is not None and runs_natively:
            site = breakpoint_.site
            slot = None if site.copy is None else space.slots.by_site.get((address, site.original))
            way_on = address if slot is None else slot.address
        try:
            # Faults that the kernel raises have the same code.
            if ptrace_calls.get_signal_info(thread.tid, info) != ptrace_calls.SI_KERNEL or info[0] != signal.SIGTRAP:
                return True
            ptrace_calls.set_instruction_pointer(thread.tid, way_on)
        except OSError:
            return True  # it was killed meanwhile, or has not stopped for a signal
        thread.trapped = address
        if runs_natively:
            self.registers_owner = thread
        return True

    def await_stop(self, thread: Thread) -> int:
        """Wait as the function ``await_stop`` does, for a thread that may run into a breakpoint."""
        return await_stop(thread.tid, self._take)

    def wait_for_step(self, tid: int, *, may_leave: bool, in_slot: bool = False) -> int | None:
        """
        Return the wait status of a thread that was resumed for one step.

        With ``may_leave``, return None if the thread sleeps instead, after ``_STUCK`` seconds. With ``in_slot`` the
        thread cannot run into a breakpoint. Raise ``ProcessLookupError`` if it has ended and the end is not reported
        yet.
        """
        status = self.deferred.pop(tid, None)
        if status is not None:
            return status
        take = _take_plainly if in_slot else self._take
        for _ in range(self._spins):
            found, status = take(tid)
            if found:
                return status
        until = time.monotonic() + _STUCK
        while True:
            signal.sigtimedwait([signal.SIGCHLD], _STUCK / 4)
            found, status = take(tid)
            if found:
                return status
            state = thread_state(tid)
            if state in ("Z", "X"):
                raise system_error(errno.ESRCH)
            if may_leave and time.monotonic() > until and state in ("S", "D"):
                return None

    def _wait_patiently(self, thread: Thread) -> int | None:
        """Return the next wait status of a thread, or None if it cannot stop now."""
        pause = waited = 0.0
        with contextlib.suppress(ChildProcessError):
            while True:
                for _ in range(self._spins):
                    found, status = self._take(thread.tid)
                    if found:
                        return status
                if pause or thread.space.pages is not None:
                    if self._waits_for_page(thread):
                        return None
                    state = thread_state(thread.tid)
                    if state in ("Z", "X"):
                        thread.state = ThreadState.ENDED
                        return None
                    if state == "D" and pause >= 0.002 and not (self._makes_a_process(thread) and waited < _FORKING):
                        return None
                pause = min(pause + 0.001, 0.005)
                waited += pause
                signal.sigtimedwait([signal.SIGCHLD], pause)
        return None

    @staticmethod
    def _waits_for_page(thread: Thread) -> bool:
        """Return whether a thread waits in the kernel for a protected page: then it does not stop before it is open."""
        pages = thread.space.pages
        if pages is None:
            return False
        pages.read()
        return pages.is_in_kernel(thread.tid)

    def _makes_a_process(self, thread: Thread) -> bool:
        """
        Return whether a thread that sleeps in the kernel is copying its memory for a child.

        Such a thread is waited for: a write to its memory meanwhile may or may not be copied to the child. A thread
        that waits for its vfork child has finished the copy.
        """
        if system_call_of(thread.tid) not in _PROCESS_MAKING[thread.space.word_size]:
            return False
        children = children_of(thread.pid, thread.tid)
        return not any(process_calls.same_memory(thread.tid, child) for child in children)

    # Stopping

    @contextlib.contextmanager
    def others_stopped(self, space: AddressSpace, thread: Thread) -> Iterator[None]:
        """Return a context manager during which all threads of ``space`` except ``thread`` are stopped."""
        with self.holding([t for t in self._threads.in_space(space) if t is not thread]):
            yield

    @contextlib.contextmanager
    def holding(self, threads: list[Thread]) -> Iterator[None]:
        """Return a context manager during which those of ``threads`` that run are stopped."""
        held = self.stop(threads) if threads else []
        try:
            yield
        finally:
            self.release_all(held)

    @contextlib.contextmanager
    def process_held(self, pid: int) -> Iterator[list[Thread]]:
        """
        Stop all threads in the memory of a process during the ``with`` block; yield a list with at most one thread.

        This thread can make system calls now. It has stopped for no other reason, waits for jumps, or has just run into
        a breakpoint. In the last case, its trap is taken already, and its instruction pointer is corrected.
        """
        mine = self._threads.of_process(pid)
        held = self.stop(self._threads.in_space(mine[0].space)) if mine else []
        ready: list[Thread] = []
        for thread in held:
            with contextlib.suppress(ProcessLookupError, ThreadGoneError):
                self.waits.hide_interruption(thread)
                ready.append(thread)
                break
        if not ready:
            ready = [thread for thread in mine if thread.awaits_jumps and thread.state is ThreadState.STOPPED][:1]
        if not ready:
            ready = [thread for thread in mine if thread.trapped and thread.tid in self.deferred][:1]
        try:
            yield ready
        finally:
            self.release_all(held)

    def stop(self, threads: list[Thread]) -> list[Thread]:
        """
        Stop the running ones among ``threads``; return those that stopped for no other reason.

        The stops of the others are kept in ``deferred``.
        """
        asked = []
        for thread in threads:
            if thread.state is not ThreadState.RUNNING or thread.tid in self.deferred:
                continue
            with contextlib.suppress(OSError):
                ptrace_calls.interrupt(thread.tid)
                asked.append(thread)
        held = []
        for thread in asked:
            status = self._wait_patiently(thread)
            if status is None:
                continue
            if classify_stop(status) == (StopKind.EVENT, Event.STOP):
                thread.state = ThreadState.STOPPED
                held.append(thread)
            else:
                self.defer(thread.tid, status)
        return held

    def resume(self, thread: Thread, number: int = 0) -> None:
        """Resume a stopped thread, and deliver the signal ``number`` if it is not 0."""
        thread.state = ThreadState.RUNNING
        if number:
            self.give_up_hit(thread)
        try:
            if number:
                self.waits.hide_interruption(thread, number)
            if thread.debug.programmed is not thread.space.watchpoints:
                self._prepare(thread)
            if thread.awaits_jumps or thread.space.awaits_pages:
                ptrace_calls.interrupt(thread.tid)
            if thread.hit.state and not number and step_on(thread, self._held_registers):
                return
            if thread.wait is None:
                ptrace_calls.resume(thread.tid, number)
            else:
                ptrace_calls.resume_to_syscall(thread.tid, number)
        except ProcessLookupError:
            pass  # killed meanwhile: waitpid reports its end

    def give_up_hit(self, thread: Thread) -> None:
        """
        Drop the hit of a thread whose instruction was not executed, and restore the registers that handlers changed.

        A signal handler runs first. If it returns, the instruction is hit again.
        """
        hit = thread.hit
        hit.end()
        thread.restarting = 0
        if hit.written is None:
            return
        # If the instruction is reached again, the handler runs again, and must see the same registers.
        with contextlib.suppress(ProcessLookupError):
            registers = self._held_registers
            ptrace_calls.get_registers(thread.tid, registers)
            for word, (before, after) in hit.written.items():
                if registers[word] == after:  # otherwise a repeated string instruction has advanced it
                    registers[word] = before
            ptrace_calls.set_registers(thread.tid, registers)
        hit.written = None

    def release(self, thread: Thread) -> None:
        """Resume a thread that stopped for no other reason than the tracer's request."""
        with contextlib.suppress(ProcessLookupError):
            self.waits.hide_interruption(thread)
        self.resume(thread)

    def release_all(self, threads: Iterable[Thread]) -> None:
        """Resume threads that stopped for no other reason than the tracer's request."""
        for thread in threads:
            self.release(thread)
