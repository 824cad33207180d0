"""
Stopping threads, stepping one of them, and what may come in between.

Rules that this module keeps:

* Nobody runs code of an address space while a breakpoint is away for a step.
* A stop that is reported while another one is awaited is kept and handled later; none is lost.
* A thread that cannot stop now (it waits in the kernel) is not waited for: it stops before it runs user code again.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.emulate import Action
from dprobes.engines.ptrace.processes import ThreadState
from dprobes.engines.ptrace.syscalls import Event, Register, StopKind, classify_stop

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

    from dprobes.engines.ptrace.context import ThreadContext
    from dprobes.engines.ptrace.processes import AddressSpace, Breakpoint, Thread

__all__ = ["Completion", "Stopper", "ThreadGoneError"]

_TRAP_FLAG = 0x100

# Signals that an instruction raises itself, when si_code says that the kernel sent them (sigaction(2)).
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)

_SPINS = 40
"""How many times to ask for a stop, about a microsecond each, before sleeping until there is one."""

_PATIENCE = 20
"""How many times 5 ms to wait for a thread before looking whether it can stop at all."""


class ThreadGoneError(Exception):
    """Report that a thread ended, and its wait status, while it was being stepped."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class CompletionKind(enum.Enum):
    """Say how the probed instruction ended."""

    COMPLETED = "completed"
    FAULTED = "raised a signal"
    INTERRUPTED = "not executed: the whole process stops; it will be hit again"


@dataclass(frozen=True, slots=True)
class Completion:
    """Hold how the probed instruction ended, and the signal with which the thread is to be resumed."""

    kind: CompletionKind
    signal: int = 0


class Stopper:
    """Stop and step threads; ``threads`` is the tracer's table of all of them."""

    def __init__(self, threads: dict[int, Thread], context: ThreadContext) -> None:
        self._threads = threads
        self._context = context
        self._info = syscalls.SignalInfo()
        # Asking again makes sense only if the thread can run meanwhile.
        self._spins = _SPINS if len(os.sched_getaffinity(0)) > 1 else 1
        self.deferred: deque[tuple[int, int]] = deque()
        """Reported stops (tid, wait status) that nobody has handled yet."""

    # Waiting

    def next_stop(self) -> tuple[int, int] | None:
        """
        Return the next stop of any thread (tid, wait status), or None if there is none for some microseconds.

        A thread that was just let run is likely to hit again at once, and to be put to sleep and woken up costs more
        than to ask some more times.
        """
        if self.deferred:
            return self.deferred.popleft()
        with contextlib.suppress(ChildProcessError):
            for _ in range(self._spins):
                tid, status = os.waitpid(-1, syscalls.WALL | os.WNOHANG)
                if tid:
                    return tid, status
        return None

    def wait_for(self, tid: int) -> int:
        """Return the wait status of the next stop of one thread, which must be running or about to stop."""
        for number, (deferred_tid, status) in enumerate(self.deferred):
            if deferred_tid == tid:
                del self.deferred[number]
                return status
        for _ in range(self._spins):
            found, status = os.waitpid(tid, syscalls.WALL | os.WNOHANG)
            if found:
                return status
        return os.waitpid(tid, syscalls.WALL)[1]

    def _wait_patiently(self, tid: int) -> int | None:
        """Return the next wait status of a thread, or None if it sleeps in the kernel and cannot stop now."""
        with contextlib.suppress(ChildProcessError):
            while True:
                for _ in range(_PATIENCE):
                    found, status = os.waitpid(tid, syscalls.WALL | os.WNOHANG)
                    if found:
                        return status
                    signal.sigtimedwait([signal.SIGCHLD], 0.005)
                if _sleeps_uninterruptibly(tid):
                    return None
        return None

    # Stopping

    @contextlib.contextmanager
    def others_stopped(self, space: AddressSpace, thread: Thread) -> Iterator[None]:
        """Hold all other threads that run in ``space``."""
        others = [t for t in self._threads.values() if t.space is space and t is not thread]
        held = self.stop(others) if others else []
        try:
            yield
        finally:
            for other in held:
                self.resume(other)

    def stop(self, threads: list[Thread]) -> list[Thread]:
        """
        Stop the running ones among ``threads``; return those that stopped for no other reason.

        What the others stopped for waits in ``deferred``.
        """
        asked = []
        for thread in threads:
            if thread.state is not ThreadState.RUNNING or any(tid == thread.tid for tid, _ in self.deferred):
                continue
            with contextlib.suppress(OSError):
                syscalls.interrupt(thread.tid)
                asked.append(thread)
        held = []
        for thread in asked:
            status = self._wait_patiently(thread.tid)
            if status is None:
                continue
            if classify_stop(status) == (StopKind.EVENT, Event.STOP):
                thread.state = ThreadState.STOPPED
                held.append(thread)
            else:
                self.deferred.append((thread.tid, status))
        return held

    def resume(self, thread: Thread, number: int = 0) -> None:
        """Let a stopped thread run, with a signal or 0."""
        thread.state = ThreadState.RUNNING
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile: its end is reported by waitpid
            syscalls.resume(thread.tid, number)

    # Stepping

    def step(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> Completion:
        """
        Let a thread execute the original instruction under a breakpoint; ``registers`` stand at its start.

        Raise ``ThreadGoneError`` if the thread ends in it.
        """
        space = thread.space
        with self.others_stopped(space, thread):
            os.pwrite(space.memory, bytes([breakpoint_.original]), breakpoint_.address)
            try:
                syscalls.set_registers(thread.tid, registers)
                return self._step_through(thread, breakpoint_, registers)
            finally:
                # After an exec the breakpoint is no longer one of this space, or the space is closed.
                if space.breakpoints.get(breakpoint_.address) is breakpoint_:
                    with contextlib.suppress(OSError):
                        os.pwrite(space.memory, b"\xcc", breakpoint_.address)

    def _step_through(
        self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]
    ) -> Completion:
        action = breakpoint_.site.emulation[0]
        advance = syscalls.resume_to_syscall if action == Action.SYSTEM_CALL else syscalls.single_step
        pending: list[tuple[int, list[int]]] = []
        while True:
            advance(thread.tid)
            status = self.wait_for(thread.tid)
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is StopKind.SYSCALL:
                self._requeue(thread, pending)
                return Completion(CompletionKind.COMPLETED)
            if kind is StopKind.SIGNAL:
                code = syscalls.get_signal_info(thread.tid, self._info)
                if number == signal.SIGTRAP and code == syscalls.TRAP_TRACE:
                    if action == Action.REPEAT and self._stands_at(thread, breakpoint_.address, registers):
                        continue
                    if action == Action.PUSH_FLAGS:
                        self._clear_pushed_trap_flag(thread, breakpoint_, registers)
                    return self._completed(thread, pending)
                if number in _FAULTS and code > 0 and self._stands_at(thread, breakpoint_.address, registers):
                    self._requeue(thread, pending)
                    return Completion(CompletionKind.FAULTED, number)
                # Some other signal came first. It is delivered when the instruction is done.
                pending.append((number, list(self._info)))
            elif kind is StopKind.GROUP_STOP or number != Event.STOP:
                self.deferred.append((thread.tid, status))
                self._requeue(thread, pending)
                return Completion(CompletionKind.INTERRUPTED)

    def _stands_at(self, thread: Thread, address: int, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
        syscalls.get_registers(thread.tid, registers)
        return bool(registers[Register.RIP] == address)

    def _clear_pushed_trap_flag(
        self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]
    ) -> None:
        # Single-stepping sets the trap flag, and pushf pushes it: a later popf would trap in the program.
        size = breakpoint_.site.emulation[2]
        syscalls.get_registers(thread.tid, registers)
        with contextlib.suppress(OSError):
            flags = self._context.read_word(registers[Register.RSP], size)
            self._context.write_word(registers[Register.RSP], size, flags & ~_TRAP_FLAG)

    def _completed(self, thread: Thread, pending: list[tuple[int, list[int]]]) -> Completion:
        if not pending:
            return Completion(CompletionKind.COMPLETED)
        number, info = pending.pop(0)
        self._requeue(thread, pending)
        # Resuming with another signal than the one reported makes the kernel invent a siginfo; give it the real one.
        self._info = syscalls.SignalInfo(*info)
        with contextlib.suppress(OSError):
            syscalls.set_signal_info(thread.tid, self._info)
        return Completion(CompletionKind.COMPLETED, number)

    def _requeue(self, thread: Thread, pending: list[tuple[int, list[int]]]) -> None:
        for number, _ in pending:
            with contextlib.suppress(OSError):
                syscalls.send_signal(thread.pid, thread.tid, number)


def _sleeps_uninterruptibly(tid: int) -> bool:
    try:
        with open(f"/proc/{tid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"D", b"Z", b"X")
    except OSError:
        return True
