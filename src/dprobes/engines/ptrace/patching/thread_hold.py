"""
Short stops of all threads of a process that is not traced otherwise.

Each stop seizes the threads, stops them, and detaches them at its end. A thread that sleeps in the kernel without
being interruptible, such as the parent of a vfork, does not stop now: then the stop has no effect, and the caller
repeats it later. Such a thread stays seized until it can be released; the kernel releases it when dprobes ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.thread_places import stack_words
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
from dprobes.engines.ptrace.tracer.thread_watchpoints import DebugRegisters
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState, ThreadTable
from dprobes.errors import EngineError, PrivilegeError
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.procfs import process_field, thread_state, threads_of
from dprobes.platform.linux.ptrace_calls import Register, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["HeldProcess", "ThreadHold", "TracedBrieflyError", "refused"]

_ENDED = ("Z", "X")
_PAUSE = 0.002


class TracedBrieflyError(EngineError):
    """Error for a process that another stop of this kind holds now; it can be traced some milliseconds later."""


def refused(pid: int) -> EngineError:
    """Return the error for a process that this user may not trace, or that is traced already."""
    if tracer := int(process_field(pid, "TracerPid") or 0):
        message = f"process {pid} is already traced by process {tracer}"
        return TracedBrieflyError(message) if _holds_briefly(tracer) else EngineError(message)
    return PrivilegeError(
        f"process {pid} may not be traced by this user",
        hint="run as the user that owns the process, or as root; kernel.yama.ptrace_scope may also forbid it",
    )


def _holds_briefly(tracer: int) -> bool:
    """Return whether a tracer is a thread of this process, or of another dprobes that is no tracer of probes."""
    from dprobes.engines.refusals import is_dprobes, probed_by

    with contextlib.suppress(OSError):
        if tracer in threads_of(os.getpid()):
            return True
    return is_dprobes(tracer) and probed_by(tracer) is None


class HeldProcess:
    """
    A process during a stop of its threads, with its address space.

    ``ready`` are those of its ``threads`` that stopped for no other reason than the request. ``running`` is the id of a
    thread that could not be stopped; 0: all are stopped.
    """

    def __init__(self, space: AddressSpace, threads: list[Thread], ready: list[Thread], running: int) -> None:
        self.space = space
        self.threads = threads
        self.ready = ready
        self.running = running

    def threads_in(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """
        Return the ids of the threads that are in code, ``ranges`` of addresses (end excluded), or may return into it.

        Any word on a thread's stack may be a return address. A thread counts if its stack cannot be searched.
        """
        return [each.tid for each in self.threads if any(self._is_in(each, begin, end) for begin, end in ranges)]

    def _is_in(self, thread: Thread, begin: int, end: int) -> bool:
        registers = ptrace_calls.Registers()
        ptrace_calls.get_registers(thread.tid, registers)
        if begin <= registers[Register.RIP] < end:
            return True
        words = stack_words(self.space, thread.tid, [registers[Register.RSP]], begin, end - 1)
        return words is None or bool(words)


class ThreadHold:
    """Stopping and releasing of the threads of process ``pid``."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._threads = ThreadTable()
        self._stopper = Stopper(self._threads, DebugRegisters(lambda _: None).program_and_report, lambda _: None)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[HeldProcess]:
        """
        Stop all threads for the duration of the block.

        Raise ``EngineError`` if they cannot be traced, and ``ProcessLookupError`` if the process has ended.
        """
        with contextlib.closing(self._open()) as space:
            try:
                self._stop(space)
                for tid, status in self._stopper.deferred.items():
                    if tid in self._threads and classify_stop(status)[0] is StopKind.EXITED:
                        self._threads[tid].state = ThreadState.ENDED
                threads = [thread for thread in self._threads.values() if thread.state is not ThreadState.ENDED]
                if not threads:
                    raise ProcessLookupError(errno.ESRCH, f"process {self._pid} has ended")
                ready = [thread for thread in threads if thread.state is ThreadState.STOPPED]
                running = next((t.tid for t in threads if t not in ready and t.tid not in self._stopper.deferred), 0)
                yield HeldProcess(space, threads, ready, running)
            finally:
                self._release()

    def release_rest(self, seconds: float) -> bool:
        """
        Release the threads that could not be stopped, as they stop now; return whether none is left.

        Give up after ``seconds``.
        """
        until = time.monotonic() + seconds
        while self._threads:
            self._stopper.stop(list(self._threads.values()))
            self._release()
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE if self._threads else 0)
        return not self._threads

    def _open(self) -> AddressSpace:
        try:
            return AddressSpace.of_thread(self._pid, 8)
        except PermissionError as error:
            raise refused(self._pid) from error
        except FileNotFoundError as error:
            raise ProcessLookupError(errno.ESRCH, f"process {self._pid} has ended") from error

    def _stop(self, space: AddressSpace) -> None:
        while True:
            is_new = self._seize(space)
            asked = [t for t in self._threads.values() if t.state is ThreadState.RUNNING]
            self._stopper.stop([t for t in asked if t.tid not in self._stopper.deferred])
            if not is_new:  # a thread that is stopped creates no other
                return

    def _seize(self, space: AddressSpace) -> bool:
        """Seize the threads that are not seized yet; return whether there were any."""
        found = False
        for tid in threads_of(self._pid):
            if tid in self._threads:
                self._threads[tid].space = space
                continue
            try:
                ptrace_calls.seize(tid, follow=False)
            except OSError as error:
                if error.errno == errno.ESRCH or thread_state(tid) in _ENDED:
                    continue
                raise refused(self._pid) from error
            self._threads.enter(tid, self._pid, space)
            found = True
        return found

    def _release(self) -> None:
        for tid, thread in list(self._threads.items()):
            signal_number = 0
            if tid in self._stopper.deferred:
                kind, number = classify_stop(self._stopper.deferred.pop(tid))
                thread.state = ThreadState.ENDED if kind is StopKind.EXITED else ThreadState.STOPPED
                signal_number = number if kind is StopKind.SIGNAL else 0
            if thread.state is ThreadState.STOPPED:
                with contextlib.suppress(OSError):
                    self._stopper.waits.hide_interruption(thread, signal_number)
                with contextlib.suppress(OSError):
                    ptrace_calls.detach(tid, signal_number)
            if thread.state is not ThreadState.RUNNING or thread_state(tid) in _ENDED:
                del self._threads[tid]
