"""
The tracer process: ``python -m dprobes.engines.ptrace.tracer.tracer_process READ-DESCRIPTOR WRITE-DESCRIPTOR MODULE``.

A single loop waits for a stop, handles the stop, and resumes the thread. The loop ends when all targets have ended,
when the client ends the last program, exits or is killed, or on SIGTERM. In each case all breakpoints are removed
first, and threads that have just executed one are moved back to the original instruction.

Signals are blocked, and received by sigtimedwait(2): no event is lost between a check and a wait.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import OBJECTS_BETWEEN_COLLECTIONS
from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Sites
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.client_connection import ClientGoneError, Connection
from dprobes.engines.ptrace.tracer.detachment import CoreDumps, Detacher
from dprobes.engines.ptrace.tracer.handler_context import LocalTables, ThreadContext
from dprobes.engines.ptrace.tracer.hit_counter import HitCounter, Settler, WatchpointHits
from dprobes.engines.ptrace.tracer.hit_handling import HitHandler
from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
from dprobes.engines.ptrace.tracer.native.handler_ends import HandlerEnds, JumpAbsence, JumpWaits, Reclaimer
from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
from dprobes.engines.ptrace.tracer.page_watchpoints import PageWatchpoints
from dprobes.engines.ptrace.tracer.probe_removal import Remover
from dprobes.engines.ptrace.tracer.process_tree import ORPHAN_AGE, Attachment, Identities, ProcessTree
from dprobes.engines.ptrace.tracer.program_insertion import Inserter, Replacer
from dprobes.engines.ptrace.tracer.single_steps import Stepper
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
from dprobes.engines.ptrace.tracer.thread_watchpoints import DebugRegisters, Watchpoints
from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Programs
from dprobes.engines.ptrace.tracer.tracer_state import (
    STRANGE,
    Thread,
    ThreadGoneError,
    ThreadState,
    ThreadTable,
    TracerState,
)
from dprobes.engines.ptrace.tracer_messages import (
    Attach,
    ChangeRequest,
    Done,
    End,
    Insert,
    Overloaded,
    PatchSites,
    Refused,
    ReleaseMemory,
    Remove,
    Replace,
    ShareMemory,
    Start,
    Warned,
)
from dprobes.errors import EngineError
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import spare_process, thread_state
from dprobes.platform.linux.ptrace_calls import Event, StopKind, classify_stop
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Tracer", "main"]

_SIGNALS = {signal.SIGCHLD, signal.SIGIO, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
_GOES_ON = "it continues without probes; this may be a bug in dprobes: please report it"

_ENDING_SIGNALS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}

_CHECK_INTERVAL = 64
"""Number of stops handled in a row before signals are checked."""

_RETRY = 0.005
"""Seconds until the next check while stops of unreported children are kept."""


class _EndedError(Exception):
    """Exception that ends the main loop."""


class Tracer:
    """Main loop of the process that traces the processes which the client names, and all their descendants."""

    def __init__(self, connection: Connection, program: InsertedProgram) -> None:
        self._signals = process_calls.signal_set(_SIGNALS)
        state = TracerState(connection, Programs([program]), ThreadTable())
        debug_registers = DebugRegisters(connection.send)
        identities = Identities(connection.send)
        stopper = Stopper(state.threads, debug_registers.program_and_report, identities.ended)
        pages = PageWatchpoints(state, stopper)
        watchpoints = Watchpoints(state, stopper, debug_registers)
        modules = ModuleBreakpoints(state, watchpoints)
        patcher = Patcher(state, stopper, modules, lambda space: tree.take_children(space))  # noqa: PLW0108 - defined later
        jump_waits = JumpWaits(state.threads, stopper, state.connection.client)
        handler_ends = HandlerEnds(state, stopper)
        tree = ProcessTree(state, stopper, modules, patcher, jump_waits, identities)
        jump_absence = JumpAbsence(state, stopper, patcher, handler_ends, jump_waits)
        remover = Remover(state, stopper, watchpoints, jump_absence)
        counter = HitCounter(connection, remover)
        context = ThreadContext(connection.warn_once, connection.send, LocalTables(stopper).descriptor)
        watchpoint_hits = WatchpointHits(context, debug_registers, counter)
        stepper = Stepper(connection, stopper, context, counter, watchpoint_hits)
        detacher = Detacher(state, tree, stopper, stepper, debug_registers, counter)
        dumps = CoreDumps(state, stopper, pages)
        settler = Settler(stopper, counter)
        self._connection, self._programs, self._threads = connection, state.programs, state.threads
        self._stopper, self._modules, self._tree, self._remover = stopper, modules, tree, remover
        self._counter, self._detacher, self._dumps = counter, detacher, dumps
        self._attachment = Attachment(state, stopper, modules, tree, detacher.detach_process)
        self._patcher = patcher
        self._jump_waits, self._handler_ends = jump_waits, handler_ends
        self._reclaimer = Reclaimer(state, stopper)
        self._hits = HitHandler(
            state, modules, stopper, context, counter, watchpoint_hits, stepper, detacher, dumps, patcher, jump_waits
        )
        self._inserter = Inserter(state, tree, modules, stopper, remover, settler, dumps, detacher, jump_absence)
        self._replacer = Replacer(state, modules, stopper, watchpoints, settler, jump_absence)
        pages.hits, pages.counter, pages.go_on = watchpoint_hits, counter, self._hits.go_on
        self._pages = pages
        self._registers = ptrace_calls.Registers()
        self._attached = False
        # Checks of hits produce records, which have to be sent in time: so sending is the last one.
        self._watches: tuple[Callable[[], float | None], ...] = (
            counter.look_after,
            stopper.waits.look_after,
            self._look_after_load,
            *(part.look_after for part in (patcher, jump_waits, self._reclaimer, self._attachment, self._inserter)),
            connection.flush_if_due,
        )

    # The loop

    def run(self) -> None:
        """Trace until no process is left, then remove all probes and send ``Done``."""
        complete, problem = False, ""
        try:
            self._take_messages()
            while self._threads or not self._attached or self._tree.has_unreported or self._dumps.busy:
                served = self._pages.serve()
                if not self._handle_stops():
                    self._wait(may_sleep=not served)
                if self._tree.has_idle_programs:
                    self._tree.has_idle_programs = False
                    self._inserter.end_idle()
                    self._reclaimer.begin()
            complete = True
        except (_EndedError, ClientGoneError):
            pass
        except Exception:  # noqa: BLE001 - restore the targets first, then report any error
            problem = traceback.format_exc()
        finally:
            self._dumps.abandon()
            self._pages.close()
            self._detacher.detach_all()
            self._counter.finish()
            self._inserter.finish()
            self._connection.send(Done(complete, problem))
            self._connection.close()

    def _handle_stops(self) -> bool:
        """
        Handle the stops that the kernel reports; after a full round, do all other work that is due.

        Return False if there were no stops.
        """
        handled = self._handle_reported()
        if handled < _CHECK_INTERVAL:
            return bool(handled)
        self._check_signals(0)
        self._look_after_all()
        return True

    def _handle_reported(self) -> int:
        """Handle the stops that the kernel reports, at most ``_CHECK_INTERVAL``, and return their number."""
        handled = 0
        while handled < _CHECK_INTERVAL and (found := self._stopper.next_stop()) is not None:
            tid, status = found
            handled += 1
            try:
                self._handle(tid, status)
            except ThreadGoneError as gone:
                self._stopper.defer(tid, gone.status)
            except ProcessLookupError:
                continue  # killed between two requests: waitpid reports its end
            except STRANGE as problem:
                if not self._let_alone(tid, status, problem):
                    raise
        return handled

    def _wait(self, *, may_sleep: bool) -> None:
        """Do all work that is due; with ``may_sleep``, sleep then until an event occurs."""
        if self._tree.has_unreported:
            self._tree.adopt_orphans(ORPHAN_AGE)
        if self._connection.has_messages:
            self._take_messages()
        delay = self._look_after_all()
        if self._tree.has_unreported:
            delay = min(delay, _RETRY)
        self._check_signals(delay if may_sleep else 0)

    def _look_after_all(self) -> float:
        """Run all periodic checks, and return the seconds until the next one."""
        delays = [look_after() for look_after in self._watches]
        return min((delay for delay in delays if delay is not None), default=1)

    def _check_signals(self, timeout: float) -> None:
        if timeout and self._pages.is_armed:
            self._pages.wait(self._signals, timeout)
            timeout = 0
        # The kernel returns the lowest number first, and there is nearly always a SIGCHLD: so take all of them.
        number = process_calls.take_signal(self._signals, timeout)
        messages = not number
        while number:
            if number in _ENDING_SIGNALS:
                raise _EndedError
            messages = messages or number == signal.SIGIO
            number = process_calls.take_signal(self._signals, 0)
        if messages:
            self._take_messages()

    def _take_messages(self) -> None:
        while (message := self._connection.receive()) is not None:
            match message:
                case Attach(pid, launching):
                    self._attached = True
                    self._attachment.begin(pid, launching=launching)
                case Sites():
                    self._modules.answered(message)
                case Remove(number, numbers, state):
                    if (program := self._programs.numbered(number)) is not None:
                        self._remover.remove(program.remove(numbers), state)
                case ChangeRequest(number, count, changes):
                    if (program := self._programs.numbered(number)) is not None:
                        program.change(changes, count)
                case ShareMemory():
                    self._serve(message.pid, partial(self._patcher.share, message))
                case PatchSites():
                    self._serve(message.pid, partial(self._patcher.patch, message))
                case ReleaseMemory():
                    self._handler_ends.release(message)
                case Insert(start, pid):
                    if start.follow and self._threads.of_process(pid):
                        # The tracer may have begun with programs that follow no processes.
                        self._attachment.begin_descendants(pid)
                    self._inserter.insert(message)
                case Replace():
                    self._replacer.replace(message, self._handle_reported)
                    self._reclaimer.begin()
                case End(number):
                    if self._programs.is_the_end(message):
                        raise _EndedError
                    if (program := self._programs.numbered(number)) is not None:
                        self._inserter.end(program, partial(self._handler_ends.let_end, self._handle_reported, number))
                        self._reclaimer.begin()

    def _look_after_load(self) -> float | None:
        """Limit the share of a CPU that hits take; return the seconds until the next check, None for never."""
        delay, found = self._programs.look_after_load()
        for program, verdict, rates in found:
            if verdict.thinned or verdict.disabled:
                self._connection.send(Overloaded(program.number, verdict, rates))
            self._remover.remove([program.probes[number] for number in verdict.disabled], ProbeState.DISABLED)
        return delay

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
                self._tree.note_unreported(tid, status)
                return
        if kind is StopKind.SIGNAL and (number == signal.SIGTRAP or thread.is_left_to_us):
            if thread.trapped:
                self._hits.on_breakpoint(thread)
            else:
                self._hits.on_trap(thread)
            return
        thread.state = ThreadState.STOPPED
        if thread.hit.state is HitState.PENDING:
            self._counter.resolve(thread, kind, number)
        match kind:
            case StopKind.EXITED:
                self._tree.remove(thread)
            case StopKind.SIGNAL:
                self._hits.deliver(thread, number)
            case StopKind.GROUP_STOP:
                thread.state = ThreadState.LISTENING
                ptrace_calls.listen(tid)
            case StopKind.SYSCALL:
                self._stopper.waits.on_system_call(thread)
                self._hits.on_system_call(thread)
            case StopKind.EVENT:
                self._on_event(thread, Event(number))

    def _serve(self, pid: int, act: Callable[[], None]) -> None:
        """
        Call ``act``, which carries out a request of the client for the process ``pid``.

        If an unexpected error occurs, warn the user and detach the process.
        """
        try:
            act()
        except ProcessLookupError:
            pass  # killed meanwhile: waitpid reports its end
        except STRANGE as problem:
            reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
            self._connection.warn_once(f"process {pid} can no longer be probed: {reason}", _GOES_ON)
            if not self._detacher.detach_process(pid):
                raise

    def _let_alone(self, tid: int, status: int, problem: Exception) -> bool:
        """
        Detach the process of a thread that cannot be handled; return whether that was done. All others continue.

        The whole process is detached, because a thread that is not traced dies at the first breakpoint.
        """
        thread = self._threads.get(tid)
        if thread is None:
            return False
        thread.state = ThreadState.RUNNING
        if thread_state(tid) == "t":
            self._stopper.defer(tid, status)
        reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        message = f"process {thread.pid} can no longer be probed: thread {tid} cannot be served ({reason})"
        self._connection.warn_once(message, _GOES_ON)
        return self._detacher.detach_process(thread.pid)

    def _on_event(self, thread: Thread, event: Event) -> None:
        if event is Event.STOP:
            if thread.space.awaits_pages:
                self._pages.arm(thread)
                if thread.tid in self._stopper.deferred:
                    return
            if not self._dismissed(thread) and not self._jump_waits.take(thread):
                self._stopper.release(thread)
            return
        if event in ptrace_calls.NEW_TASK_EVENTS:
            self._tree.add_child(thread, event, ptrace_calls.event_message(thread.tid))
        elif event is Event.EXEC:
            self._on_exec(thread)
            if self._dismissed(thread):
                return
        elif event is Event.VFORK_DONE and thread.space.shared_with:
            self._tree.take_back(thread)
        self._stopper.resume(thread)
        if event is Event.VFORK:
            thread.state = ThreadState.VFORKING

    def _dismissed(self, thread: Thread) -> bool:
        """Detach a process that is not in scope and does not share its memory; return whether that was done."""
        if not thread.is_outside or thread.space.pids != {thread.pid}:
            return False
        return self._detacher.detach_process(thread.pid)

    def _leader_by_exec(self, tid: int) -> Thread:
        """Enter a thread that took over the id of an untraced, ended leader in an exec; return its entry."""
        former = self._threads[ptrace_calls.event_message(tid)]
        return self._threads.enter(tid, former.pid, former.space)

    def _on_exec(self, thread: Thread) -> None:
        for other in self._threads.of_process(thread.pid):
            if other is not thread:
                self._counter.forget(other)
                other.end()
                del self._threads[other.tid]
                self._programs.forget_thread(other.tid)
        self._programs.forget_thread(thread.tid)
        self._tree.leave_space(thread)
        ptrace_calls.get_registers(thread.tid, self._registers)
        word_size = ptrace_calls.word_size(self._registers)
        try:
            space = AddressSpace.of_thread(thread.tid, word_size)
        except PermissionError:
            # It executes a file that its user may not read: only root may access its memory.
            space = AddressSpace.closed(word_size)
            self._connection.send(
                Warned(
                    f"process {thread.pid} runs a program that this user may not read: it has no probes there",
                    "run dprobes as root",
                )
            )
        space.pids.add(thread.pid)
        self._counter.drop(thread)
        self._stopper.waits.forget(thread)
        thread.begin_program(space)
        if not thread.is_outside:
            self._modules.begin(space, thread)
            self._jump_waits.begin(thread)


def main(arguments: list[str]) -> int:
    """
    Run the tracer on two pipes to the client.

    The arguments are the descriptors to read from and to write to, and optionally the name of the probed module, which
    users of ps(1) see.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    process_calls.set_process_name("dprobes-tracer")
    spare_process()
    connection = Connection(int(arguments[0]), int(arguments[1]))
    gc.freeze()  # objects loaded now live as long as the process: collections need not look at them
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        while (message := connection.receive()) is None:
            signal.sigtimedwait({signal.SIGIO}, 0.1)
    except ClientGoneError:
        return 0
    assert isinstance(message, Start)
    connection.use_restorer(*message.restorer)
    try:
        native = message.native
        program = InsertedProgram.of(message, native=None if native is None else native.opened(native.descriptor))
    except EngineError as error:
        connection.send(Refused(error.message))
        connection.close()
        return 0
    Tracer(connection, program).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
