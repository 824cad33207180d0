"""
The tracer process: ``python -m dprobes.engines.ptrace.tracer READ-DESCRIPTOR WRITE-DESCRIPTOR``.

One loop: take a stop that the kernel reports, do what it calls for, let the thread run on. It ends when the targets are
gone, when the client says ``Stop`` or disappears, or on SIGTERM; in every case all breakpoints are taken away first,
and threads that ran into one just before are set back onto the original instruction.

Signals are blocked and taken with sigtimedwait, so that no event can slip in between a check and a wait.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Literal

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.connection import ClientGoneError, Connection
from dprobes.engines.ptrace.context import ThreadContext
from dprobes.engines.ptrace.detaching import Detacher
from dprobes.engines.ptrace.emulate import Action, emulate
from dprobes.engines.ptrace.modules import ModuleWatcher
from dprobes.engines.ptrace.probes import Probe
from dprobes.engines.ptrace.processes import AddressSpace, Thread, ThreadState, process_field
from dprobes.engines.ptrace.records import RecordBuilder
from dprobes.engines.ptrace.stopping import Completion, CompletionKind, Stopper, ThreadGoneError
from dprobes.engines.ptrace.syscalls import Event, Register, StopKind, classify_stop
from dprobes.engines.ptrace.wire import (
    Attach,
    Attached,
    Done,
    Failed,
    Placed,
    Removed,
    Start,
    Stop,
)
from dprobes.vm import Ending

if TYPE_CHECKING:
    from dprobes.engines.ptrace.processes import Breakpoint
    from dprobes.engines.ptrace.records import Header
    from dprobes.vm import Outcome

__all__ = ["Tracer", "main"]

_SIGNALS = {signal.SIGCHLD, signal.SIGIO, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
_ENDING_SIGNALS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}

_CHECK_INTERVAL = 64
"""How many stops are handled in a row before signals are looked at."""


_RETRY = 0.005
"""Seconds after which a full pipe to the client is tried again."""


class _EndedError(Exception):
    """Report that the tracer is to stop tracing."""


class Tracer:
    """Trace the processes that the client names, and everything they start."""

    def __init__(self, connection: Connection, start: Start) -> None:
        self._connection = connection
        self._threads: dict[int, Thread] = {}
        self._early: dict[int, int] = {}
        self._probes = [Probe(number, limits) for number, limits in enumerate(start.probes)]
        self._context = ThreadContext(*start.variables)
        self._records = RecordBuilder(start.items)
        self._modules = ModuleWatcher(connection, self._probes)
        self._stopper = Stopper(self._threads, self._context)
        self._registers = syscalls.Registers()
        self._info = syscalls.SignalInfo()
        self._launching: set[int] = set()
        self._attached = False

    # The loop

    def run(self) -> None:
        """Trace until there is nothing left to trace, then take everything away and say ``Done``."""
        try:
            self._take_messages()
            while self._threads or not self._attached:
                if not self._handle_stops():
                    self._wait()
        except (_EndedError, ClientGoneError):
            pass
        finally:
            Detacher(self._threads, self._stopper, self._early).detach_all()
            self._connection.send(Done(tuple(probe.counts for probe in self._probes)))
            self._connection.close()

    def _handle_stops(self) -> bool:
        """Handle what the kernel has to report; return False if that was nothing."""
        handled = 0
        while handled < _CHECK_INTERVAL:
            found = self._stopper.next_stop()
            if found is None:
                return bool(handled)
            tid, status = found
            handled += 1
            try:
                self._handle(tid, status)
            except ProcessLookupError:
                continue  # killed between two of our requests: its end is reported by waitpid
        self._connection.flush()
        self._check_signals(0)
        return True

    def _wait(self) -> None:
        """Sleep until something happens."""
        if not self._connection.is_idle:
            self._take_messages()
            self._connection.flush()
        self._check_signals(1 if self._connection.is_idle else _RETRY)

    def _check_signals(self, timeout: float) -> None:
        info = signal.sigtimedwait(_SIGNALS, timeout)
        if info is not None and info.si_signo in _ENDING_SIGNALS:
            raise _EndedError
        if info is None or info.si_signo == signal.SIGIO:
            self._take_messages()

    def _take_messages(self) -> None:
        while (message := self._connection.receive()) is not None:
            match message:
                case Attach(pid, launching):
                    self._attach(pid, launching=launching)
                case Stop():
                    raise _EndedError

    # Taking processes over

    def _attach(self, pid: int, *, launching: bool) -> None:
        self._attached = True
        space: AddressSpace | None = None
        try:
            syscalls.seize(pid)
            leader = self._adopt(pid, pid)
            space = leader.space
            if launching:
                self._launching.add(pid)
            else:
                self._seize_other_threads(pid, leader)
                self._modules.update(space, leader)
        except OSError as error:
            self._connection.send(Failed(pid, error.strerror or str(error), error.errno or 0))
            return
        finally:
            for thread in list(self._threads.values()):
                if thread.space is space and thread.state is ThreadState.STOPPED:
                    self._stopper.resume(thread)
        self._connection.send(Attached(pid))

    def _adopt(self, tid: int, pid: int, space: AddressSpace | None = None) -> Thread:
        """Stop a thread that was just seized and enter it into the tables."""
        syscalls.interrupt(tid)
        # What the thread stops for first is kept: the interrupt is then still to come, and is resumed from as usual.
        status = os.waitpid(tid, syscalls.WALL)[1]
        if classify_stop(status)[0] is StopKind.EXITED:
            raise ProcessLookupError(3, "the process ended")
        if space is None:
            space = AddressSpace.of_thread(tid, self._word_size(tid))
            space.pids.add(pid)
        thread = self._threads[tid] = Thread(tid, pid, space, ThreadState.STOPPED)
        if classify_stop(status) != (StopKind.EVENT, Event.STOP):
            thread.state = ThreadState.RUNNING
            self._stopper.deferred.append((tid, status))
        return thread

    def _seize_other_threads(self, pid: int, leader: Thread) -> None:
        """Seize all threads of a process; new ones may appear while it is done, so until none is new."""
        while True:
            tids = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
            new = tids - self._threads.keys()
            if not new:
                return
            for tid in new:
                with contextlib.suppress(ProcessLookupError):
                    syscalls.seize(tid)
                    self._adopt(tid, pid, leader.space)

    def _word_size(self, tid: int) -> Literal[4, 8]:
        syscalls.get_registers(tid, self._registers)
        return 4 if self._registers[Register.CS] == syscalls.USER_CS_32 else 8

    # Stops

    def _handle(self, tid: int, status: int) -> None:
        thread = self._threads.get(tid)
        kind, number = classify_stop(status)
        if thread is None:
            if kind is not StopKind.EXITED:
                self._early[tid] = status  # a child whose parent's event is still to come
            return
        if kind is StopKind.SIGNAL and number == signal.SIGTRAP:
            self._on_trap(thread)
            return
        thread.state = ThreadState.STOPPED
        match kind:
            case StopKind.EXITED:
                self._on_exit(thread)
            case StopKind.SIGNAL:
                self._stopper.resume(thread, number)
            case StopKind.GROUP_STOP:
                thread.state = ThreadState.LISTENING
                syscalls.listen(tid)
            case StopKind.SYSCALL:
                self._stopper.resume(thread)
            case StopKind.EVENT:
                self._on_event(thread, number)

    def _on_event(self, thread: Thread, event: int) -> None:
        if event in (Event.FORK, Event.VFORK, Event.CLONE):
            self._on_new_task(thread, event, syscalls.event_message(thread.tid))
        elif event == Event.EXEC:
            self._on_exec(thread)
        self._stopper.resume(thread)
        if event == Event.VFORK:
            thread.state = ThreadState.VFORKING

    def _on_new_task(self, parent: Thread, event: int, tid: int) -> None:
        pid = _process_of(tid)
        if pid == parent.pid:
            space = parent.space
        elif event == Event.VFORK or (event == Event.CLONE and syscalls.same_memory(parent.tid, tid)):
            space = parent.space
            space.pids.add(pid)
        else:
            space = parent.space.copy_for_child(tid)
            space.pids.add(pid)
            if space.breakpoints:
                pairs = tuple((b.address, b.original) for b in space.breakpoints.values())
                self._connection.send(Placed(pid, pairs))
        child = self._threads[tid] = Thread(tid, pid, space, ThreadState.NEWBORN)
        if (status := self._early.pop(tid, None)) is not None:
            self._stopper.deferred.append((child.tid, status))

    def _on_exec(self, thread: Thread) -> None:
        for other in [t for t in self._threads.values() if t.pid == thread.pid and t is not thread]:
            del self._threads[other.tid]
        self._leave_space(thread)
        thread.space = AddressSpace.of_thread(thread.tid, self._word_size(thread.tid))
        thread.space.pids.add(thread.pid)
        thread.rseq = 0
        thread.uid = None
        self._launching.discard(thread.pid)
        self._modules.update(thread.space, thread)

    def _on_exit(self, thread: Thread) -> None:
        del self._threads[thread.tid]
        if not any(t.pid == thread.pid for t in self._threads.values()):
            self._leave_space(thread)

    def _leave_space(self, thread: Thread) -> None:
        """Note that the process of ``thread`` no longer runs in its address space."""
        space = thread.space
        space.pids.discard(thread.pid)
        self._connection.send(Removed(thread.pid))
        if not space.pids:
            space.close()

    # Hits

    def _on_trap(self, thread: Thread) -> None:
        registers = self._registers
        syscalls.get_registers(thread.tid, registers)
        if syscalls.get_signal_info(thread.tid, self._info) == syscalls.SI_KERNEL:
            address = registers[Register.RIP] - 1
            breakpoint_ = thread.space.breakpoints.get(address)
            if breakpoint_ is not None:
                registers[Register.RIP] = address
                thread.state = ThreadState.STOPPED
                self._on_hit(thread, breakpoint_)
                return
            original = thread.space.former.get(address)
            if original is not None:
                # The thread ran into a breakpoint that was taken away a moment ago.
                thread.space.restore_byte(address, original)
                registers[Register.RIP] = address
                syscalls.set_registers(thread.tid, registers)
                self._stopper.resume(thread)
                return
        self._stopper.resume(thread, signal.SIGTRAP)

    def _on_hit(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        probe = breakpoint_.probe
        outcome: Outcome | None = None
        header = None
        self._context.select(thread, self._registers)
        try:
            if probe is None:
                self._modules.update(thread.space, thread)
            elif probe.is_active and probe.runs_handler:
                site = breakpoint_.site
                assert site.point is not None
                word_size = thread.space.word_size
                outcome = self._modules.handlers[word_size].run(probe.number, site.point, self._context)
                if outcome.ending is not Ending.ABORT:
                    header = self._records.header(self._context, self._registers, word_size)
        except BaseException:
            # Whatever ends the run here, the thread must not go on behind the breakpoint.
            syscalls.set_registers(thread.tid, self._registers)
            raise
        try:
            completion = self._complete(thread, breakpoint_)
        except ThreadGoneError as gone:
            self._stopper.deferred.append((thread.tid, gone.status))
            return
        if completion.kind is not CompletionKind.INTERRUPTED:
            if probe is not None and probe.is_active:
                self._count(probe, outcome, header, completion)
            self._stopper.resume(thread, completion.signal)

    def _complete(self, thread: Thread, breakpoint_: Breakpoint) -> Completion:
        """Carry the original instruction out, by emulation or by a step."""
        emulation = breakpoint_.site.emulation
        may_emulate = not (thread.space.has_shadow_stack and emulation[0] == Action.RETURN)
        if may_emulate and emulate(emulation, self._registers, self._context):
            syscalls.set_registers(thread.tid, self._registers)
            return Completion(CompletionKind.COMPLETED)
        return self._stopper.step(thread, breakpoint_, self._registers)

    def _count(
        self,
        probe: Probe,
        outcome: Outcome | None,
        header: Header | None,
        completion: Completion,
    ) -> None:
        if completion.kind is CompletionKind.FAULTED and not probe.limits.keep_on_fault:
            return
        probe.count_hit(outcome)
        if outcome is not None and header is not None:
            self._emit(probe, self._records.record(header, outcome))
            if outcome.trace:
                self._emit(probe, self._records.stack_trace(header, outcome))
        if not probe.is_active:
            self._withdraw(probe)

    def _emit(self, probe: Probe, record: bytes) -> None:
        if self._connection.send_record(probe.number, record):
            probe.counts.records += 1
        else:
            probe.counts.lost += 1

    def _withdraw(self, probe: Probe) -> None:
        """Take a probe's breakpoints out of all address spaces: it is disabled or removed."""
        for space in {id(t.space): t.space for t in self._threads.values()}.values():
            mine = [b for b in space.breakpoints.values() if b.probe is probe]
            for breakpoint_ in mine:
                space.withdraw(breakpoint_)
            for pid in space.pids if mine else ():
                self._connection.send(Removed(pid, tuple(b.address for b in mine)))


def _process_of(tid: int) -> int:
    """Return the process id of a thread; a thread that is gone already counts as its own process."""
    with contextlib.suppress(ValueError):
        return int(process_field(tid, "Tgid"))
    return tid


def main(arguments: list[str]) -> int:
    """Run the tracer on two pipes to the client; the arguments are the descriptors to read from and to write to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    syscalls.set_process_name("dprobes-tracer")
    connection = Connection(int(arguments[0]), int(arguments[1]))
    gc.freeze()  # what is loaded now lives as long as the process: collections need not look at it
    while (message := connection.receive()) is None:
        signal.sigtimedwait({signal.SIGIO}, 0.1)
    assert isinstance(message, Start)
    Tracer(connection, message).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
