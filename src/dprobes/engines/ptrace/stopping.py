"""
Stopping threads, stepping one of them, and what may come in between.

Rules that this module keeps:

* Nobody runs code of an address space while a breakpoint is away for a step.
* A stop that is reported while another one is awaited is kept and handled later; none is lost.
* A thread that cannot stop now (it waits in the kernel) is not waited for: it stops before it runs user code again.
* A thread that we stopped does not notice: its system calls do not fail because of us, and its signals keep their
  order and their ``siginfo``.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.emulate import Action
from dprobes.engines.ptrace.processes import INT3, ThreadState, thread_state
from dprobes.engines.ptrace.syscalls import Event, Register, StopKind, classify_stop

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

    from dprobes.engines.ptrace.context import ThreadContext
    from dprobes.engines.ptrace.processes import AddressSpace, Breakpoint, Thread

__all__ = ["Completion", "CompletionKind", "Stopper", "ThreadGoneError"]

_TRAP_FLAG = 0x100

# Signals that an instruction raises itself, when si_code says that the kernel sent them (sigaction(2)). The kernel
# kills a thread that raises one of them while it is blocked, so we never block them.
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
_ALL_BUT_FAULTS = ((1 << 64) - 1) & ~sum(1 << number - 1 for number in (*_FAULTS, signal.SIGSYS))

_SPINS = 40
"""How many times to ask for a stop, about a microsecond each, before sleeping until there is one."""

_TURNS = 8
"""After how many kept stops to look for new ones, so that one busy process does not hold up another."""

_STUCK = 0.1
"""Seconds after which a thread that sleeps in the middle of a step is left to itself."""

_MASK_64 = (1 << 64) - 1
_EINTR = -4 & _MASK_64
_ERESTARTNOHAND = -514 & _MASK_64
_RESTARTS = {number & _MASK_64 for number in (-512, -513, -514, -516)}
_NO_SYSTEM_CALL = 1 << 63

# Linux fails these with EINTR just because the thread stopped (signal(7), "Interruption of system calls ... by stop
# signals", and measured): epoll_wait, epoll_pwait, epoll_pwait2, accept, accept4, recvfrom, recvmsg, recvmmsg, sendto,
# sendmsg (with a timeout), rt_sigtimedwait, semop, semtimedop, io_getevents, io_pgetevents.
_FAILING_64 = frozenset({232, 281, 441, 43, 288, 45, 47, 299, 44, 46, 128, 65, 220, 208, 333})
# The same, and socketcall and ipc, in the numbers of i386.
_FAILING_32 = frozenset({256, 319, 441, 102, 364, 371, 372, 337, 417, 369, 370, 177, 421, 117, 420, 247, 385, 416})
_EPOLL_WAITS = frozenset({232, 281, 256, 319})


class ThreadGoneError(Exception):
    """Report that a thread ended, and its wait status, while it was being stepped."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class CompletionKind(enum.Enum):
    """Say how the probed instruction ended."""

    COMPLETED = "completed"
    FAULTED = "raised a signal"
    INTERRUPTED = "not executed: something else comes first, and it will be hit again"


@dataclass(frozen=True, slots=True)
class Completion:
    """
    Hold how the probed instruction ended, and the signal with which the thread is to be resumed.

    ``resumable`` is false where the thread's stop is still to be handled, or still to come.
    """

    kind: CompletionKind
    signal: int = 0
    resumable: bool = True


class Stopper:
    """Stop and step threads; ``threads`` is the tracer's table of all of them."""

    def __init__(self, threads: dict[int, Thread], context: ThreadContext) -> None:
        self._threads = threads
        self._context = context
        self._info = syscalls.SignalInfo()
        self._held_registers = syscalls.Registers()
        # Asking again makes sense only if the thread can run meanwhile.
        self._spins = _SPINS if len(os.sched_getaffinity(0)) > 1 else 1
        self._turns = 0
        self.deferred: dict[int, int] = {}
        """Reported stops (wait statuses by tid, in order of arrival) that nobody has handled yet."""

    # Waiting

    def next_stop(self) -> tuple[int, int] | None:
        """
        Return the next stop of any thread (tid, wait status), or None if there is none for some microseconds.

        A thread that was just let run is likely to hit again at once, and to be put to sleep and woken up costs more
        than to ask some more times. Of several threads each gets its turn: the kernel would always name the first one
        that has stopped.
        """
        if self.deferred:
            self._turns += 1
            if self._turns % _TURNS == 0:
                self.collect()
            return self.oldest_deferred()
        with contextlib.suppress(ChildProcessError):
            for _ in range(self._spins):
                tid, status = os.waitpid(-1, syscalls.WALL | os.WNOHANG)
                if tid:
                    if len(self._threads) == 1:
                        return tid, status
                    self.defer(tid, status)
                    self.collect()
                    return self.oldest_deferred()
        return None

    def defer(self, tid: int, status: int) -> None:
        """Keep a stop for later; it takes the place of an older one, which a kill or an exec made void."""
        self.deferred.pop(tid, None)
        self.deferred[tid] = status

    def oldest_deferred(self) -> tuple[int, int]:
        """Take the oldest of the stops that are kept."""
        tid = next(iter(self.deferred))
        return tid, self.deferred.pop(tid)

    def collect(self) -> None:
        """Keep all stops that the kernel has to report now."""
        with contextlib.suppress(ChildProcessError):
            while True:
                tid, status = os.waitpid(-1, syscalls.WALL | os.WNOHANG)
                if not tid:
                    return
                self.defer(tid, status)

    def _wait_for_step(self, tid: int, *, may_leave: bool) -> int | None:
        """Return the wait status of a thread that was let run for a moment, or None if it went to sleep instead."""
        status = self.deferred.pop(tid, None)
        if status is not None:
            return status
        for _ in range(self._spins):
            found, status = os.waitpid(tid, syscalls.WALL | os.WNOHANG)
            if found:
                return status
        until = time.monotonic() + _STUCK
        while True:
            signal.sigtimedwait([signal.SIGCHLD], _STUCK / 4)
            found, status = os.waitpid(tid, syscalls.WALL | os.WNOHANG)
            if found:
                return status
            if may_leave and time.monotonic() > until and thread_state(tid) in ("S", "D"):
                return None

    def _wait_patiently(self, thread: Thread) -> int | None:
        """Return the next wait status of a thread, or None if it cannot stop now."""
        pause = 0.0
        with contextlib.suppress(ChildProcessError):
            while True:
                for _ in range(self._spins):
                    found, status = os.waitpid(thread.tid, syscalls.WALL | os.WNOHANG)
                    if found:
                        return status
                if pause:
                    state = thread_state(thread.tid)
                    if state in ("Z", "X"):
                        thread.state = ThreadState.ENDED
                        return None
                    if state == "D" and pause >= 0.002:
                        return None
                pause = min(pause + 0.001, 0.005)
                signal.sigtimedwait([signal.SIGCHLD], pause)
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
                self.release(other)

    def stop(self, threads: list[Thread]) -> list[Thread]:
        """
        Stop the running ones among ``threads``; return those that stopped for no other reason.

        What the others stopped for waits in ``deferred``.
        """
        asked = []
        for thread in threads:
            if thread.state is not ThreadState.RUNNING or thread.tid in self.deferred:
                continue
            with contextlib.suppress(OSError):
                syscalls.interrupt(thread.tid)
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
        """Let a stopped thread run, with a signal or 0."""
        thread.state = ThreadState.RUNNING
        if number:
            self._give_up_hit(thread)
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile: its end is reported by waitpid
            syscalls.resume(thread.tid, number)

    def _give_up_hit(self, thread: Thread) -> None:
        """Forget a hit whose instruction was not executed: a signal handler comes first, and may go elsewhere."""
        thread.unfinished = None
        thread.restarting = 0
        if thread.written is None:
            return
        # If the instruction is tried again, the handler runs again; so it must find what it found before.
        with contextlib.suppress(ProcessLookupError):
            registers = self._held_registers
            syscalls.get_registers(thread.tid, registers)
            for word, (before, after) in thread.written.items():
                if registers[word] == after:  # else a repeated string instruction has moved on
                    registers[word] = before
            syscalls.set_registers(thread.tid, registers)
        thread.written = None

    def release(self, thread: Thread) -> None:
        """Let a thread run on that stopped only because we asked for it."""
        with contextlib.suppress(ProcessLookupError):
            self.hide_interruption(thread)
        self.resume(thread)

    def hide_interruption(self, thread: Thread) -> None:
        """
        See to it that a thread at an event stop of ours goes on with the system call that it was in.

        Most calls restart by themselves; a few fail with EINTR unless told otherwise. The kernel looks at the registers
        when the thread goes on, and acts as if no signal had come.
        """
        registers = self._held_registers
        syscalls.get_registers(thread.tid, registers)
        call = registers[Register.ORIG_RAX]
        if call >= _NO_SYSTEM_CALL:
            thread.deadline = None
            return
        result = registers[Register.RAX]
        failing = _FAILING_32 if syscalls.word_size(registers) == 4 else _FAILING_64
        if result == _EINTR and call in failing:
            if self._timeout_is_over(thread, call):
                registers[Register.RAX] = result = 0
            else:
                registers[Register.RAX] = result = _ERESTARTNOHAND
            syscalls.set_registers(thread.tid, registers)
        if result in _RESTARTS:
            thread.restarting = registers[Register.RIP] - 2

    def _timeout_is_over(self, thread: Thread, call: int) -> bool:
        """Return whether an epoll_wait, whose timeout begins anew with each restart, has waited long enough."""
        registers = self._held_registers
        if call not in _EPOLL_WAITS:
            return False
        source = Register.RSI if syscalls.word_size(registers) == 4 else Register.R10
        timeout = registers[source] & 0xFFFFFFFF
        if timeout >= 1 << 31:
            return False
        now, stack = time.monotonic(), registers[Register.RSP]
        if thread.deadline is None or thread.deadline[0] != stack:
            thread.deadline = (stack, now + timeout / 1000)
        return now >= thread.deadline[1]

    # Stepping

    def step(self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]) -> Completion:
        """
        Let a thread execute the original instruction under a breakpoint; ``registers`` stand at its start.

        Raise ``ThreadGoneError`` if the thread ends in it.
        """
        space = thread.space
        address = breakpoint_.address
        with self.others_stopped(space, thread):
            os.pwrite(space.memory, bytes([breakpoint_.original]), address)
            try:
                syscalls.set_registers(thread.tid, registers)
                if breakpoint_.site.emulation[0] == Action.REPEAT:
                    with _temporary_breakpoint(space, address + breakpoint_.site.emulation[1]):
                        return self._step_through(thread, breakpoint_, registers)
                return self._step_through(thread, breakpoint_, registers)
            finally:
                # After an exec the breakpoint is no longer one of this space, or the space is closed.
                if space.breakpoints.get(address) is breakpoint_:
                    with contextlib.suppress(OSError):
                        os.pwrite(space.memory, INT3, address)

    def _step_through(
        self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]
    ) -> Completion:
        tid, address = thread.tid, breakpoint_.address
        action, length = breakpoint_.site.emulation[:2]
        advance = {Action.SYSTEM_CALL: syscalls.resume_to_syscall, Action.REPEAT: syscalls.resume}.get(
            action, syscalls.single_step
        )
        signals = _HeldSignals(thread)
        while True:
            advance(tid)
            status = self._wait_for_step(tid, may_leave=not signals)
            if status is None:
                # It sleeps, in a page fault that perhaps another thread has to answer. When it wakes up it finds the
                # breakpoint again, or has just got past it.
                thread.state = ThreadState.RUNNING
                return Completion(CompletionKind.INTERRUPTED, resumable=False)
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                raise ThreadGoneError(status)
            if kind is StopKind.SYSCALL:
                return Completion(CompletionKind.COMPLETED)
            if kind is StopKind.SIGNAL:
                code = syscalls.get_signal_info(tid, self._info)
                if number == signal.SIGTRAP and code == syscalls.TRAP_TRACE:
                    if action == Action.PUSH_FLAGS:
                        self._clear_pushed_trap_flag(thread, breakpoint_, registers)
                    return Completion(CompletionKind.COMPLETED, signals.give_back())
                if action == Action.REPEAT and number == signal.SIGTRAP and code == syscalls.SI_KERNEL:
                    syscalls.get_registers(tid, registers)
                    registers[Register.RIP] = address + length
                    syscalls.set_registers(tid, registers)
                    return Completion(CompletionKind.COMPLETED, signals.give_back())
                if number in _FAULTS and code > 0 and _stands_at(thread, address, registers):
                    if held := signals.give_back():
                        # That came first; the instruction will be tried, and hit, again after its handler.
                        return Completion(CompletionKind.INTERRUPTED, held)
                    return Completion(CompletionKind.FAULTED, number)
                # Some other signal came first. It is delivered when the instruction is done; a system call must not be
                # entered with it in hand, because there is no way to deliver it from there.
                if action == Action.SYSTEM_CALL:
                    return Completion(CompletionKind.INTERRUPTED, number)
                signals.hold(number, self._info)
            elif kind is StopKind.GROUP_STOP or number != Event.STOP:
                signals.send_again()
                self.defer(tid, status)
                return Completion(CompletionKind.INTERRUPTED, resumable=False)

    def _clear_pushed_trap_flag(
        self, thread: Thread, breakpoint_: Breakpoint, registers: ctypes.Array[ctypes.c_ulong]
    ) -> None:
        # Single-stepping sets the trap flag, and pushf pushes it: a later popf would trap in the program.
        size = breakpoint_.site.emulation[2]
        syscalls.get_registers(thread.tid, registers)
        with contextlib.suppress(OSError):
            flags = self._context.read_word(registers[Register.RSP], size)
            self._context.write_word(registers[Register.RSP], size, flags & ~_TRAP_FLAG)


def _stands_at(thread: Thread, address: int, registers: ctypes.Array[ctypes.c_ulong]) -> bool:
    """Read ``registers`` anew, and return whether the thread is at ``address``."""
    syscalls.get_registers(thread.tid, registers)
    return bool(registers[Register.RIP] == address)


class _HeldSignals:
    """
    Keep back the signals that reach a thread before its instruction is done.

    The first is held with its ``siginfo``; all others are blocked from then on and wait in the kernel. Only those that
    cannot be blocked, and those like SIGSEGV that must not be, may follow; they are sent again.
    """

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._first: tuple[int, list[int]] | None = None
        self._more: list[int] = []
        self._mask: int | None = None

    def __bool__(self) -> bool:
        return self._mask is not None

    def hold(self, number: int, info: ctypes.Array[ctypes.c_int32]) -> None:
        """Hold the signal that the thread has stopped for."""
        if self._first is not None:
            self._more.append(number)
            return
        self._first = (number, list(info))
        self._mask = syscalls.get_signal_mask(self._thread.tid)
        syscalls.set_signal_mask(self._thread.tid, self._mask | _ALL_BUT_FAULTS)

    def give_back(self) -> int:
        """Return the signal with which to resume the thread, which has stopped for one, or 0."""
        if self._first is None:
            return 0
        number, info = self._first
        self._first = None
        self.send_again()
        # Resuming with another signal than the one reported makes the kernel invent a siginfo; give it the real one.
        with contextlib.suppress(OSError):
            syscalls.set_signal_info(self._thread.tid, syscalls.SignalInfo(*info))
        return number

    def send_again(self) -> None:
        """Send what is held anew, with a ``siginfo`` of our own, and let the thread receive signals again."""
        if self._mask is None:
            return
        with contextlib.suppress(OSError):
            syscalls.set_signal_mask(self._thread.tid, self._mask)
        for number in ([self._first[0]] if self._first is not None else []) + self._more:
            with contextlib.suppress(OSError):
                syscalls.send_signal(self._thread.pid, self._thread.tid, number)
        self._mask = None


@contextlib.contextmanager
def _temporary_breakpoint(space: AddressSpace, address: int) -> Iterator[None]:
    """Stop the stepping thread behind a repeated string instruction, which may take millions of single steps."""
    original = os.pread(space.memory, 1, address)
    os.pwrite(space.memory, INT3, address)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.pwrite(space.memory, original, address)
