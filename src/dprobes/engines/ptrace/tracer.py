"""
The tracer process: ``python -m dprobes.engines.ptrace.tracer READ-DESCRIPTOR WRITE-DESCRIPTOR``.

One loop: take a stop that the kernel reports, do what it calls for, let the thread run on. It ends when the targets are
gone, when the client says ``Stop`` or disappears, or on SIGTERM; in every case all breakpoints are taken away first,
and threads that ran into one just before are set back onto the original instruction.

Signals are blocked and taken with sigtimedwait, so that no event can slip in between a check and a wait.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.arming import Armer
from dprobes.engines.ptrace.connection import ClientGoneError, Connection
from dprobes.engines.ptrace.context import ThreadContext
from dprobes.engines.ptrace.coredump import CoreDumps
from dprobes.engines.ptrace.detaching import Detacher
from dprobes.engines.ptrace.emulate import Action, emulate, uses_return_addresses
from dprobes.engines.ptrace.family import ORPHAN_AGE, Family
from dprobes.engines.ptrace.givingback import give_back_pages
from dprobes.engines.ptrace.handover import HandOver
from dprobes.engines.ptrace.localtable import LocalTables
from dprobes.engines.ptrace.modules import ModuleWatcher
from dprobes.engines.ptrace.probes import CORE_DUMP, HANDING_OVER
from dprobes.engines.ptrace.processes import (
    AddressSpace,
    DebugState,
    Thread,
    ThreadGoneError,
    ThreadState,
    living_thread,
    process_field,
    thread_state,
    threads_of,
)
from dprobes.engines.ptrace.records import RecordBuilder
from dprobes.engines.ptrace.returns import Returns
from dprobes.engines.ptrace.stepping import COMPLETED, TRAP_FLAG, Completion, CompletionKind, Stepper
from dprobes.engines.ptrace.stopping import Stopper
from dprobes.engines.ptrace.syscalls import RESUME_FLAG, Event, Register, StopKind, classify_stop
from dprobes.engines.ptrace.watching import UnwatchedMemory, Watching
from dprobes.engines.ptrace.wire import (
    Attach,
    Attached,
    Done,
    Failed,
    Placed,
    Refused,
    Removed,
    Role,
    Sites,
    Start,
    Stop,
    Warned,
)
from dprobes.errors import EngineError
from dprobes.vm import Ending

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.probes import Probe
    from dprobes.engines.ptrace.processes import Breakpoint
    from dprobes.engines.ptrace.records import Header
    from dprobes.engines.ptrace.returns import Hit
    from dprobes.extensions import Extension
    from dprobes.vm import Outcome, Point

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

    def __init__(self, connection: Connection, start: Start, extensions: dict[str, Extension]) -> None:
        self._connection = connection
        self._threads: dict[int, Thread] = {}
        self._context = ThreadContext(*start.variables)
        self._context.on_rewrite = self._on_rewrite
        self._context.warn = self._warn
        self._context.extensions = extensions
        self._records = RecordBuilder(start.items)
        self._returns = Returns(connection, self._context)
        self._armer = Armer(connection.send)
        self._stopper = Stopper(self._threads, self._armer)
        self._watching = Watching(self._threads, connection, self._stopper, self._armer)
        self._modules = ModuleWatcher(connection, start.definitions, self._watching)
        self._context.segments.local = LocalTables(self._stopper, self._context.memory, self._warn).descriptor
        self._stepper = Stepper(self._stopper, self._context, connection)
        self._family = Family(self._threads, connection, self._stopper, self._modules, follow=start.follow)
        self._detacher = Detacher(self._family, self._stopper, self._stepper, self._armer)
        self._stepper.on_watchpoint = self._on_watchpoint
        self._hand_over = HandOver(connection, self._detacher)
        self._dumps = CoreDumps(connection, self._stopper, self._threads, start.core_directory)
        self._registers = syscalls.Registers()
        self._registers_at_watchpoint = syscalls.Registers()
        self._info = syscalls.SignalInfo()
        self._attached = False
        self._warned: set[str] = set()

    # The loop

    def run(self) -> None:
        """Trace until there is nothing left to trace, then take everything away and say ``Done``."""
        complete, problem = False, ""
        try:
            self._take_messages()
            while self._threads or not self._attached or self._family.has_strangers or self._dumps.busy:
                if not self._handle_stops():
                    self._wait()
            complete = True
        except (_EndedError, ClientGoneError):
            pass
        except Exception:  # noqa: BLE001 - whatever it is, the target comes first, and the client is told
            problem = traceback.format_exc()
        finally:
            self._dumps.abandon()
            self._detacher.detach_all()
            counts = {number: probe.final_counts() for number, probe in self._modules.probes.items()}
            self._connection.send(Done(counts, complete, problem))
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
            except ThreadGoneError as gone:
                self._stopper.defer(tid, gone.status)
            except ProcessLookupError:
                continue  # killed between two of our requests: its end is reported by waitpid
        self._check_signals(0)
        self._connection.flush_if_due()
        return True

    def _wait(self) -> None:
        """Sleep until something happens."""
        if self._family.has_strangers:
            self._family.adopt_orphans(ORPHAN_AGE)
        if self._connection.has_messages:
            self._take_messages()
        delay = self._connection.flush_if_due()
        if self._family.has_strangers:
            delay = min(_RETRY, delay or _RETRY)
        self._check_signals(1 if delay is None else delay)

    def _check_signals(self, timeout: float) -> None:
        # The kernel hands out the lowest number first, and there is nearly always a SIGCHLD: so take all of them.
        info = signal.sigtimedwait(_SIGNALS, timeout)
        messages = info is None
        while info is not None:
            if info.si_signo in _ENDING_SIGNALS:
                raise _EndedError
            messages = messages or info.si_signo == signal.SIGIO
            info = signal.sigtimedwait(_SIGNALS, 0)
        if messages:
            self._take_messages()

    def _take_messages(self) -> None:
        while (message := self._connection.receive()) is not None:
            match message:
                case Attach(pid, launching):
                    self._attach(pid, launching=launching)
                case Sites():
                    self._modules.answered(message, list(self._threads.values()))
                case Stop():
                    raise _EndedError

    # Taking processes over

    def _attach(self, pid: int, *, launching: bool) -> None:
        self._attached = True
        held: list[Thread] = []
        try:
            if not launching:
                # What takes time comes first, while the process runs.
                self._modules.learn(living_thread(pid))
            held = self._seize_all(pid)
            if not launching:
                leader = next(iter(self._threads.values()))
                self._modules.update(leader.space, leader)
        except OSError as error:
            self._connection.send(Failed(pid, error.strerror or str(error), error.errno or 0))
            return
        finally:
            for thread in held:
                self._stopper.release(thread)
        self._connection.send(Attached(pid))

    def _seize_all(self, pid: int) -> list[Thread]:
        """
        Seize and stop all threads of a process; return those that stopped for no other reason.

        A thread that is making a new thread or process at this moment has finished when it stops; so no breakpoint can
        get into a child that is not traced. New threads may appear meanwhile, so until none is new.
        """
        held: list[Thread] = []
        space: AddressSpace | None = None
        while True:
            new: list[Thread] = []
            for tid in sorted(threads_of(pid) - self._threads.keys(), key=lambda tid: tid != pid):
                try:
                    syscalls.seize(tid)
                except OSError as error:
                    # A thread may have ended, the first one as a zombie. All others must be ours: a breakpoint is
                    # deadly for a thread that is not traced.
                    has_ended = error.errno == errno.ESRCH or thread_state(tid) in ("Z", "X")
                    if has_ended and threads_of(pid) != {tid}:
                        continue
                    if process_field(tid, "TracerPid") == str(os.getpid()):
                        continue  # born of a thread that is ours already, which has yet to tell of it
                    raise
                if space is None:
                    space = AddressSpace.of_thread(tid, _word_size_of(tid))
                    space.pids.add(pid)
                new.append(self._family.enter(tid, pid, space))
            if not new:
                break
            held += self._stopper.stop(new)
            for thread in new:
                if thread.state is ThreadState.RUNNING and thread.tid not in self._stopper.deferred:
                    held += self._seize_vfork_child(thread)
        if space is None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return held

    def _seize_vfork_child(self, parent: Thread) -> list[Thread]:
        """Seize the child that runs in the memory of ``parent``, which cannot stop because it waits for that."""
        try:
            with open(f"/proc/{parent.pid}/task/{parent.tid}/children", "rb") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            return []
        held: list[Thread] = []
        for pid in children:
            if not syscalls.same_memory(parent.tid, pid) or pid in self._threads:
                continue
            syscalls.seize(pid)
            parent.state = ThreadState.VFORKING
            parent.space.pids.add(pid)
            held += self._stopper.stop([self._family.enter(pid, pid, parent.space)])
        return held

    # Stops

    def _handle(self, tid: int, status: int) -> None:
        if self._dumps.busy and self._dumps.take(tid, status):
            return
        thread = self._threads.get(tid)
        kind, number = classify_stop(status)
        if thread is None:
            if kind is StopKind.EVENT and number == Event.EXEC:
                thread = self._leader_by_exec(tid)
            elif self._detacher.let_go(tid, status):
                return
            else:
                self._family.note_stranger(tid, status)
                return
        if kind is StopKind.SIGNAL and number == signal.SIGTRAP:
            self._on_trap(thread)
            return
        thread.state = ThreadState.STOPPED
        match kind:
            case StopKind.EXITED:
                self._family.remove(thread)
            case StopKind.SIGNAL:
                self._deliver(thread, number)
            case StopKind.GROUP_STOP:
                thread.state = ThreadState.LISTENING
                syscalls.listen(tid)
            case StopKind.SYSCALL:
                self._stopper.resume(thread)
            case StopKind.EVENT:
                self._on_event(thread, Event(number))

    def _on_event(self, thread: Thread, event: Event) -> None:
        if event is Event.STOP:
            if not self._dismissed(thread):
                self._stopper.release(thread)
            return
        if event in syscalls.NEW_TASK_EVENTS:
            self._family.add_child(thread, event, syscalls.event_message(thread.tid))
        elif event is Event.EXEC:
            self._on_exec(thread)
            if self._dismissed(thread):
                return
        elif event is Event.VFORK_DONE and thread.space.lent:
            self._family.take_back(thread)
        self._stopper.resume(thread)
        if event is Event.VFORK:
            thread.state = ThreadState.VFORKING

    def _dismissed(self, thread: Thread) -> bool:
        """Let a process go that is not in scope and has memory of its own; return whether it went."""
        if not thread.is_outside or thread.space.pids != {thread.pid}:
            return False
        return self._detacher.detach_process(thread.pid)

    def _leader_by_exec(self, tid: int) -> Thread:
        """Return the entry of a thread that took the number of an untraced, ended leader when it executed a program."""
        former = self._threads[syscalls.event_message(tid)]
        return self._family.enter(tid, former.pid, former.space)

    def _on_exec(self, thread: Thread) -> None:
        for other in [t for t in self._threads.values() if t.pid == thread.pid and t is not thread]:
            del self._threads[other.tid]
        self._family.leave_space(thread)
        syscalls.get_registers(thread.tid, self._registers)
        word_size = syscalls.word_size(self._registers)
        try:
            thread.space = AddressSpace.of_thread(thread.tid, word_size)
        except PermissionError:
            # It executes a file that its user may not read: nobody but root may look into it.
            thread.space = AddressSpace.closed(word_size)
            self._connection.send(
                Warned(
                    f"process {thread.pid} runs a program that this user may not read: it has no probes there",
                    "run dprobes as root",
                )
            )
        thread.space.pids.add(thread.pid)
        thread.rseq = 0
        thread.debug = DebugState()  # the kernel has cleared the registers
        thread.uid = None
        thread.unfinished = thread.deadline = thread.written = None
        thread.restarting = 0
        thread.returns = []
        if not thread.is_outside:
            self._modules.update(thread.space, thread)

    # Hits

    def _on_trap(self, thread: Thread) -> None:
        registers = self._registers
        syscalls.get_registers(thread.tid, registers)
        code = syscalls.get_signal_info(thread.tid, self._info)
        if code == syscalls.SI_KERNEL:
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
            slot = thread.space.slots.holding(address)
            if slot is not None and slot.trap == address and thread.unfinished is not None:
                self._on_late_step(thread)
                return
        elif code == syscalls.TRAP_TRACE and thread.unfinished is not None:
            self._on_late_step(thread)
            return
        elif code == syscalls.TRAP_HWBKPT:
            thread.state = ThreadState.STOPPED
            if self._on_watchpoint(thread):
                self._go_on(thread)
                return
        self._deliver(thread, signal.SIGTRAP)

    def _deliver(self, thread: Thread, number: int) -> None:
        """Let a thread run on with the signal that it has stopped for."""
        number_now = self._stepper.leave_slot(thread, self._registers, number)
        if number_now is not None:
            self._stopper.resume(thread, number_now)

    def _on_late_step(self, thread: Thread) -> None:
        """Count the hit of a thread that went to sleep in its step, and has got past the instruction after all."""
        assert thread.unfinished is not None
        breakpoint_, outcome, header = thread.unfinished
        thread.unfinished = thread.written = None
        thread.state = ThreadState.STOPPED
        self._stepper.settle_late(thread, breakpoint_, self._registers)
        if breakpoint_.probe is not None and breakpoint_.probe.is_active:
            self._count(thread, breakpoint_.probe, outcome, header, COMPLETED)
        if breakpoint_.exits:
            self._leave(thread, breakpoint_)
        if thread.debug.slots:
            self._on_watchpoint(thread)
        self._go_on(thread)

    def _on_hit(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        probe = None if thread.is_outside else breakpoint_.probe
        outcome: Outcome | None = None
        header = None
        repeated = thread.restarting == breakpoint_.address
        unfinished, thread.unfinished, thread.restarting = thread.unfinished, None, 0
        self._context.select(thread, self._registers)
        try:
            if breakpoint_.own:
                self._on_own(thread, breakpoint_)
            if breakpoint_.waiting and not thread.is_outside:
                self._after(thread, self._returns.arrived(thread, breakpoint_, self._registers))
                if thread.debug.exit_code:
                    self._go_on(thread)
                    return
            if probe is None or repeated:
                pass  # a system call that is made once more, only because we interrupted it
            elif unfinished is not None and unfinished[0] is breakpoint_:
                _, outcome, header = unfinished
                self._context.written = thread.written
            elif probe.is_active and probe.runs_handler:
                assert breakpoint_.site.point is not None
                outcome, header = self._run_handler(thread, probe, breakpoint_.site.point, self._registers)
        except BaseException:
            # Whatever ends the run here, the thread must not go on behind the breakpoint.
            syscalls.set_registers(thread.tid, self._registers)
            raise
        if probe is not None and outcome is not None and outcome.exit_code in HANDING_OVER:
            # The record comes first, then the probepoint goes, and the instruction is not carried out by us.
            syscalls.set_registers(thread.tid, self._registers)
            self._count(thread, probe, outcome, header, COMPLETED)
            if not self._leave_to(outcome.exit_code, thread):
                self._stopper.resume(thread)
            return
        completion = self._complete(thread, breakpoint_)
        thread.written = None
        if completion.kind is CompletionKind.INTERRUPTED:
            thread.written = self._context.written
            if (probe is not None or breakpoint_.exits) and not repeated and not completion.signal:
                thread.unfinished = (breakpoint_, outcome, header)
            elif repeated and not completion.signal:
                thread.restarting = breakpoint_.address
        elif probe is not None and probe.is_active and not repeated:
            self._count(thread, probe, outcome, header, completion)
        if completion.kind is CompletionKind.COMPLETED and (thread.debug.slots or thread.debug.superseded):
            self._on_watchpoint(thread)
        if breakpoint_.exits and completion.kind is CompletionKind.COMPLETED:
            self._leave(thread, breakpoint_)
        if completion.resumable:
            self._go_on(thread, completion.signal)

    def _on_watchpoint(self, thread: Thread) -> bool:
        """Take the watchpoints that a stopped thread has hit; return False if its trap has another reason as well."""
        hits, foreign = self._armer.take_hits(thread)
        if not hits:
            return False
        registers = self._registers_at_watchpoint
        syscalls.get_registers(thread.tid, registers)
        place = registers[Register.RIP]
        slot = thread.space.slots.holding(place)
        if slot is not None:  # of a repeated string instruction: any other has left its slot
            registers[Register.RIP] = slot.site if place == slot.address else slot.following
        outer = self._context.written  # of a breakpoint that the thread is just being stepped from
        self._context.select(thread, registers)
        for watchpoint in hits:
            probe = watchpoint.probe
            if not probe.is_active:
                continue
            outcome = header = None
            if probe.runs_handler:
                outcome, header = self._run_handler(thread, probe, watchpoint.point, registers)
            self._count(thread, probe, outcome, header, COMPLETED)
            if outcome is not None and outcome.exit_code in HANDING_OVER:
                thread.debug.exit_code = outcome.exit_code
        if written := self._context.written:
            if Register.RIP in written:
                registers[Register.EFLAGS] &= ~RESUME_FLAG  # it was meant for the instruction at the old place
            else:
                registers[Register.RIP] = place
            syscalls.set_registers(thread.tid, registers)
        self._context.select(thread, self._registers)
        self._context.written = outer
        return not foreign

    def _go_on(self, thread: Thread, number: int = 0) -> None:
        """Let a thread run on after its hits, with a signal or 0, or hand its process over if a handler said so."""
        if code := thread.debug.exit_code:
            thread.debug.exit_code = 0
            syscalls.get_registers(thread.tid, self._registers)
            if self._leave_to(code, thread):
                return
        self._stopper.resume(thread, number)

    def _leave_to(self, exit_code: int, thread: Thread) -> bool:
        """Begin what ``exit`` says of a stopped thread's process; return False if the thread is to go on."""
        if exit_code == CORE_DUMP:
            return self._dumps.start(thread)
        return self._hand_over(thread, self._registers)

    def _run_handler(
        self, thread: Thread, probe: Probe, point: Point, registers: ctypes.Array[ctypes.c_ulong]
    ) -> tuple[Outcome, Header | None]:
        """Run the handler on the thread that the context has selected."""
        word_size = thread.space.word_size
        outcome = self._modules.handlers[word_size].run(probe.definition, point, self._context)
        if outcome.ending is Ending.ABORT:
            return outcome, None
        return outcome, self._records.header(self._context, registers, word_size, keep_ip=probe.limits.keep_ip)

    def _on_own(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        if Role.LINKER in breakpoint_.own:
            self._modules.update(thread.space, thread)
        if Role.UNWINDING in breakpoint_.own:
            self._returns.unwinding(thread)

    def _leave(self, thread: Thread, breakpoint_: Breakpoint) -> None:
        """Let the probes be hit whose function an instruction that was carried out has left."""
        if not thread.is_outside:
            syscalls.get_registers(thread.tid, self._registers)
            self._context.select(thread, self._registers)
            self._after(thread, self._returns.left(thread, breakpoint_, self._registers))

    def _after(self, thread: Thread, hits: list[Hit]) -> None:
        """Run handlers on the state after a return."""
        for probe, site in hits:
            if not probe.is_active:
                continue
            outcome = header = None
            if probe.runs_handler:
                assert site.point is not None
                outcome, header = self._run_handler(thread, probe, site.point, self._registers)
                if outcome.exit_code in HANDING_OVER:
                    thread.debug.exit_code = outcome.exit_code
            syscalls.set_registers(thread.tid, self._registers)
            self._count(thread, probe, outcome, header, COMPLETED)
        if hits:
            # What the handlers changed is done: it is not undone if the next instruction is interrupted.
            self._context.select(thread, self._registers)

    def _complete(self, thread: Thread, breakpoint_: Breakpoint) -> Completion:
        """Carry the original instruction out, by emulation or by a step."""
        emulation = breakpoint_.site.emulation
        may_emulate = not self._registers[Register.EFLAGS] & TRAP_FLAG and not (
            thread.space.has_shadow_stack and uses_return_addresses(emulation)
        )
        space = thread.space
        memory = UnwatchedMemory(self._context, space) if space.watchpoints else self._context
        if may_emulate and emulate(emulation, self._registers, memory):
            syscalls.set_registers(thread.tid, self._registers)
            return COMPLETED
        return self._stepper.step(thread, breakpoint_, self._registers)

    def _warn(self, message: str, hint: str | None) -> None:
        """Tell the user something once."""
        if message not in self._warned:
            self._warned.add(message)
            self._connection.send(Warned(message, hint))

    def _on_rewrite(self, thread: Thread, breakpoints: list[Breakpoint]) -> None:
        """Take notice of instructions under our breakpoints that a handler changed."""
        space = thread.space
        for breakpoint_ in breakpoints:
            # What was decided about the old instruction does not hold for the new one.
            emulation = (Action.STEP, len(breakpoint_.site.original))
            breakpoint_.site = replace(breakpoint_.site, emulation=emulation, copy=None)
        for pid in space.pids:
            self._connection.send(Placed(pid, tuple((b.address, b.original) for b in breakpoints)))

    def _count(
        self,
        thread: Thread,
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
            self._withdraw(probe, thread)

    def _emit(self, probe: Probe, record: bytes) -> None:
        if self._connection.send_record(probe.number, record):
            probe.counts.records += 1
        else:
            probe.counts.lost += 1

    def _withdraw(self, probe: Probe, thread: Thread) -> None:
        """Take a probe's breakpoints and watchpoints out of all address spaces: it is disabled or removed."""
        self._watching.withdraw(probe)
        for space in self._family.spaces():
            gone = space.drop(probe)
            for pid in space.pids if gone else ():
                self._connection.send(Removed(pid, tuple(b.address for b in gone)))
            if gone and space is thread.space:
                self._give_back(thread, [b.address for b in gone])

    def _give_back(self, thread: Thread, addresses: list[int]) -> None:
        """Let a stopped thread drop the pages of its space that have no breakpoints any more."""
        with self._stopper.others_stopped(thread.space, thread):
            give_back_pages(thread.space, thread, addresses)


def _word_size_of(tid: int) -> Literal[4, 8]:
    """Return the word size of the program that a thread runs, which need not be stopped."""
    with open(f"/proc/{tid}/exe", "rb") as file:
        return 4 if file.read(5)[4:] == b"\x01" else 8  # EI_CLASS: ELFCLASS32


def main(arguments: list[str]) -> int:
    """Run the tracer on two pipes to the client; the arguments are the descriptors to read from and to write to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    syscalls.set_process_name("dprobes-tracer")
    connection = Connection(int(arguments[0]), int(arguments[1]))
    gc.freeze()  # what is loaded now lives as long as the process: collections need not look at it
    try:
        while (message := connection.receive()) is None:
            signal.sigtimedwait({signal.SIGIO}, 0.1)
    except ClientGoneError:
        return 0
    assert isinstance(message, Start)
    try:
        extensions = _load(message)
    except EngineError as error:
        connection.send(Refused(error.message))
        connection.close()
        return 0
    Tracer(connection, message, extensions).run()
    return 0


def _load(start: Start) -> dict[str, Extension]:
    """Import the extensions that the program may call: before anything is traced, because that may take its time."""
    if not start.extensions:
        return {}
    from dprobes.extensions.registry import load_extensions

    return load_extensions(start.extensions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
