"""
Detaching: only ``Detacher`` releases processes, all of them or one.

All threads are stopped first, and the children that they were just creating are registered. Then the original bytes are
restored. Threads that executed a breakpoint whose trap has not been delivered are moved back to the original
instruction. All threads are detached, each with the signal that it was about to receive.

A process can be handed to a debugger (``exit 1``), stopped at the probed instruction. It can have only one tracer at a
time, so all its threads are detached before the debugger attaches. A pending SIGSTOP keeps them from running program
code in between.

For a core dump (``exit 3``), all threads of a process remain stopped while a child of the tracer writes the file. The
tracer continues with all other processes meanwhile. Stops of the held threads are kept, and handled afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from dprobes.engines.engine_interface import HandedOver
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.held_signals import STOPPING, fix_up, is_in_native_stop
from dprobes.engines.ptrace.tracer.probe_removal import give_back_all
from dprobes.engines.ptrace.tracer.tracer_state import STRANGE, Thread, ThreadGoneError, ThreadState
from dprobes.engines.ptrace.tracer_messages import Dumped, Left, Warned
from dprobes.errors import reason_of
from dprobes.platform.core.core_file import PROCESSORS, signal_info_at
from dprobes.platform.core.core_writer import (
    POINTER,
    CoreRequest,
    HeldThread,
    create_core_file,
    register_sets_of,
    write_core,
)
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import catches_signal, copy_score, process_field
from dprobes.platform.linux.ptrace_calls import NEW_TASK_EVENTS, Event, Register, RegisterSet, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.tracer.hit_counter import HitCounter
    from dprobes.engines.ptrace.tracer.page_watchpoints import PageWatchpoints
    from dprobes.engines.ptrace.tracer.process_tree import ProcessTree
    from dprobes.engines.ptrace.tracer.single_steps import Stepper
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.thread_watchpoints import DebugRegisters
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram
    from dprobes.engines.ptrace.tracer.tracer_state import TracerState

__all__ = ["CoreDumps", "Detacher"]

_ATTEMPTS = 100
"""Maximum number of stops that a thread may report before its queued trap, which is delivered before other signals."""

_INIT = 1


class Detacher:
    """Detacher of threads. It first moves them to the state that they would have without the tracer."""

    def __init__(
        self,
        state: TracerState,
        tree: ProcessTree,
        stopper: Stopper,
        stepper: Stepper,
        debug_registers: DebugRegisters,
        counter: HitCounter,
    ) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._tree = tree
        self._stopper = stopper
        self._stepper = stepper
        self._debug_registers = debug_registers
        self._counter = counter
        self._registers = ptrace_calls.Registers()
        self._info = ptrace_calls.SignalInfo()
        self._signals: dict[int, int] = {}
        """Signal of each thread that has stopped for one."""
        self._leaving: dict[int, Thread] = {}
        """Threads of a released process that could not stop yet."""

    def detach_all(self) -> None:
        """Detach all processes, leaving them as they would be without the tracer."""
        self._stop(None)
        for space in self._threads.spaces():
            space.withdraw_all()
        self._detach(self._settle_all(list(self._threads.values()), give_back=True))
        self._threads.clear()

    def detach_process(self, pid: int, *, halted: bool = False) -> bool:
        """
        Remove the breakpoints from one process and detach it. Other processes stay traced.

        A ``halted`` process receives a SIGSTOP first, so none of its threads runs program code before a SIGCONT or a
        debugger resumes it. Processes that share its memory lose their breakpoints, too; a vfork parent gets them back
        when the child leaves that memory. If the process has just called execve, change nothing and return False.
        """
        if not self._stop(pid):
            return False
        mine = self._threads.of_process(pid)
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

    def hand_to_debugger(self, thread: Thread, program: InsertedProgram) -> bool:
        """
        Detach the process of a thread, which has stopped at the probed instruction; the client starts the debugger.

        Return False, with a warning to the user, if that is not possible and the thread must be resumed.
        """
        if thread.pid == _INIT:
            # The kernel does not let process 1 be stopped: it would continue after the probed instruction.
            text = "process 1 cannot be stopped for a debugger: it continues without the probe"
            self._connection.send(Warned(text, program=program.number))
            return False
        ptrace_calls.get_registers(thread.tid, self._registers)
        address, name = self._registers[Register.RIP], _command_name(thread.tid)
        if self.detach_process(thread.pid, halted=True):
            self._connection.send(Left(program.number, HandedOver(thread.pid, thread.tid, name, address)))
            return True
        text = f"process {thread.pid} ({name}) executed another program before a debugger could take it"
        self._connection.send(Warned(text, program=program.number))
        return False

    def let_go(self, tid: int, status: int) -> bool:
        """Detach a thread of a process that was released before it could stop; return False for any other thread."""
        thread = self._leaving.get(tid)
        if thread is None:
            return False
        kind, number = classify_stop(status)
        if kind is StopKind.EXITED:
            del self._leaving[tid]
            return True
        if kind is StopKind.EVENT and number in NEW_TASK_EVENTS:
            child = ptrace_calls.event_message(tid)
            self._leaving[child] = Thread(child, thread.pid, thread.space, ThreadState.NEWBORN)
            self._tree.reconsider(child)
        del self._leaving[tid]
        self._signals[tid] = number if kind is StopKind.SIGNAL else 0
        self._detach(self._settle_all([thread]))
        return True

    def _stop(self, pid: int | None) -> bool:
        """
        Stop all threads, or those of one process, and the children that these threads have just created.

        Return False if the process has called execve. That stop (PTRACE_EVENT_EXEC) remains in ``deferred``.
        """
        deferred = self._stopper.deferred
        while True:
            self._stopper.collect()
            threads = list(self._threads.values()) if pid is None else self._threads.of_process(pid)
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
        thread = self._threads.get(tid)
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
        """
        Let a thread that has stopped at the event ``event``, within a system call, finish the call.

        Before that no other call can be injected.
        """
        if event in NEW_TASK_EVENTS:
            self._tree.add_child(thread, Event(event), ptrace_calls.event_message(thread.tid))
        elif event == Event.EXEC:
            self._tree.leave_space(thread)
            thread.space = AddressSpace.closed(thread.space.word_size)
            thread.space.pids.add(thread.pid)
        self._stopper.resume(thread)
        if event == Event.VFORK:
            thread.state = ThreadState.VFORKING

    def _detach(self, signals: dict[Thread, int]) -> None:
        """Detach threads, and deliver to each the signal that belongs to it, if not 0."""
        for thread, number in signals.items():
            with contextlib.suppress(OSError):
                ptrace_calls.detach(thread.tid, number)

    def _settle_all(self, threads: list[Thread], *, give_back: bool = False) -> dict[Thread, int]:
        """
        Undo the tracer's influence on stopped threads; return the signal to resume each with, or 0.

        With ``give_back``, undo the changes in their address spaces, too.
        """
        signals: dict[Thread, int] = {}
        for thread in threads:
            number = self._signals.get(thread.tid, 0)
            try:
                signals[thread] = self._settle(thread)
            except (ProcessLookupError, ThreadGoneError):
                pass
            except STRANGE:
                # All others must still be settled, and none may be left.
                signals[thread] = 0 if number == signal.SIGTRAP else number
        if give_back:
            for space in {id(t.space): t.space for t in threads}.values():
                self._give_back(space, signals)
        return signals

    def _give_back(self, space: AddressSpace, signals: dict[Thread, int]) -> None:
        """
        Restore all memory that the engine has mapped or protected in an address space, by injected calls of a thread.

        ``signals`` has the stopped threads. Do nothing unless all threads of the space are among them, or wait in the
        kernel for their vfork child: such a thread does not return into a slot.
        """
        still = (ThreadState.VFORKING, ThreadState.ENDED)
        mine = [t for t in self._threads.in_space(space) if t.state not in still]
        ready = [t for t in mine if signals.get(t) == 0 and t.state is ThreadState.STOPPED]
        if not all(t in signals for t in mine) or not space.shared_with <= {t.pid for t in mine}:
            return
        for thread in ready or self._delivered(mine, signals):
            with contextlib.suppress(*STRANGE, ThreadGoneError):
                if give_back_all(space, thread, mine):
                    return

    def _delivered(self, threads: list[Thread], signals: dict[Thread, int]) -> Iterator[Thread]:
        """
        Step threads that are about to receive signals to the beginnings of the signal handlers, and yield each.

        A thread cannot make injected system calls before that. The kernel stops a single-stepped thread when it has
        prepared the call of the handler (``signal_setup_done`` in ``kernel/signal.c``).
        """
        for thread in threads:
            number = signals[thread]
            if thread.state is not ThreadState.STOPPED or not catches_signal(thread.tid, number):
                continue
            with contextlib.suppress(OSError):
                ptrace_calls.single_step(thread.tid, number)
                kind, stop = classify_stop(self._stopper.await_stop(thread))
                is_there = kind is StopKind.SIGNAL and stop == signal.SIGTRAP
                signals[thread] = stop if kind is StopKind.SIGNAL and not is_there else 0
                if is_there:
                    yield thread

    def _settle(self, thread: Thread) -> int:
        """
        Undo the tracer's influence on a stopped thread: move it out of slots and back from breakpoints.

        Return the signal to resume it with, or 0.
        """
        self._debug_registers.clear(thread)
        number = self._signals.pop(thread.tid, 0)
        self._counter.before_detachment(thread)
        if number == signal.SIGTRAP or thread.is_left_to_us:
            number = 0 if self._set_back(thread) else number
        elif fix_up(thread, self._registers, number):
            number = 0
        elif not number:
            if self._trap_is_queued(thread):
                number = self._await_trap(thread)
            else:
                self._stopper.waits.hide_interruption(thread)
        else:
            self._stopper.waits.hide_interruption(thread, number)
        return self._stepper.leave_slot(thread, self._registers, number)

    def _trap_is_queued(self, thread: Thread) -> bool:
        """Return whether a thread has caused a trap of the tracer whose signal is still pending."""
        ptrace_calls.get_registers(thread.tid, self._registers)
        pc, awaited = self._registers[Register.RIP], set[int]()
        if pc - 1 in thread.space.former or thread.debug.superseded:
            awaited.add(signal.SIGTRAP)
        if is_in_native_stop(thread.space, pc):
            awaited.update(STOPPING)
        pending = process_field(thread.tid, "SigPnd") if awaited else ""
        return bool(pending) and any(int(pending, 16) & 1 << (number - 1) for number in awaited)

    def _await_trap(self, thread: Thread) -> int:
        """Wait for a trap that the kernel has postponed in favour of an interrupt; return the signal to resume with."""
        for _ in range(_ATTEMPTS):
            ptrace_calls.resume(thread.tid)
            kind, number = classify_stop(self._stopper.await_stop(thread))
            if kind is StopKind.EXITED:
                raise ProcessLookupError
            if kind is StopKind.SIGNAL:
                is_ours = (number == signal.SIGTRAP or thread.is_left_to_us) and self._set_back(thread)
                return 0 if is_ours or fix_up(thread, self._registers, number) else number
        return 0

    def _set_back(self, thread: Thread) -> bool:
        """Move a thread that trapped to the original instruction; return False if the trap is the program's own."""
        if thread.trapped:
            ptrace_calls.set_instruction_pointer(thread.tid, thread.trapped)
            thread.trapped, thread.is_left_to_us, thread.parked = 0, False, None
            return True
        code = ptrace_calls.get_signal_info(thread.tid, self._info)
        if code == ptrace_calls.TRAP_TRACE and thread.hit.is_late:
            # End of a step of the tracer.
            self._stepper.settle_late(thread, thread.hit.breakpoint, self._registers)
            return True
        if code == ptrace_calls.TRAP_HWBKPT:
            hits, foreign = self._debug_registers.take_hits(thread)
            return bool(hits) and not foreign
        if code != ptrace_calls.SI_KERNEL:
            return False
        ptrace_calls.get_registers(thread.tid, self._registers)
        address = self._registers[Register.RIP] - 1
        slot = thread.space.slots.holding(address)
        if slot is not None and slot.trap == address:
            self._stepper.settle(thread, slot, self._registers)
            return True
        if address not in thread.space.former:
            return False
        ptrace_calls.set_instruction_pointer(thread.tid, address)
        return True


def _command_name(tid: int) -> str:
    try:
        with open(f"/proc/{tid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return "?"


@dataclass(slots=True, eq=False)
class _Dump:
    """A core file of the process of ``thread`` that is being written for ``program``."""

    thread: Thread
    program: InsertedProgram
    path: str
    result: int
    """End of a pipe from which the writer's answer is read: the size, or the error."""
    held: list[Thread]
    parked: dict[int, tuple[ThreadState, int]] = field(default_factory=dict)
    """Stops of threads that arrived during a core dump, with the threads' states before."""


class CoreDumps:
    """Core files that are being written. ``busy`` contains them by process id."""

    def __init__(self, state: TracerState, stopper: Stopper, pages: PageWatchpoints) -> None:
        self._pages = pages
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper
        self._writers: dict[int, _Dump] = {}
        self.busy: dict[int, _Dump] = {}

    def start(self, thread: Thread, program: InsertedProgram) -> bool:
        """
        Begin a core dump of a stopped thread's process. Its registers are set to the probed instruction.

        If no file can be written, report the reason to the user and return False; the caller then resumes the thread.
        """
        path = os.path.join(program.core_directory, f"core.dprobes.{thread.pid}")
        try:
            path, output = create_core_file(path)
        except OSError as error:
            self._tell(program, thread, path, 0, reason_of(error))
            return False
        siblings = [t for t in self._threads.of_process(thread.pid) if t is not thread]
        held = self._stopper.stop(siblings)
        dump = _Dump(thread, program, path, -1, held)
        for sibling in siblings:
            status = self._stopper.deferred.pop(sibling.tid, None)
            if status is not None and classify_stop(status)[0] is StopKind.EXITED:
                self._stopper.defer(sibling.tid, status)
            elif status is not None:
                self._park(dump, sibling, status)
        request = _request(dump, siblings)
        dump.result, answer = os.pipe2(os.O_CLOEXEC)
        writer = os.fork()
        if writer == 0:
            self._become_writer(request, thread, output, answer)
        os.close(output)
        os.close(answer)
        self._writers[writer] = self.busy[thread.pid] = dump
        return True

    def take(self, tid: int, status: int) -> bool:
        """
        Handle a wait status if it concerns a core file, otherwise return False.

        It concerns a core file if it is the end of a writer, or a stop in a process whose core is being written.
        """
        dump = self._writers.get(tid)
        if dump is not None:
            del self._writers[tid]
            self._finish(dump)
            return True
        thread = self._threads.get(tid)
        if thread is None or thread.pid not in self.busy or classify_stop(status)[0] is StopKind.EXITED:
            return False
        self._park(self.busy[thread.pid], thread, status)
        return True

    def abandon(self, program: InsertedProgram | None = None) -> None:
        """Abort unfinished core files, of all programs or of one that ends, while the processes continue."""
        for writer, dump in list(self._writers.items()):
            if program is None or dump.program is program:
                os.kill(writer, signal.SIGKILL)
                os.waitpid(writer, 0)
                self._stopper.deferred.pop(writer, None)
                del self._writers[writer]
                self._finish(dump, abandoned=True)
                if program is not None:
                    self._let_go_on(dump)

    def _park(self, dump: _Dump, thread: Thread, status: int) -> None:
        dump.parked[thread.tid] = (thread.state, status)
        thread.state = ThreadState.STOPPED

    def _become_writer(self, request: CoreRequest, thread: Thread, output: int, answer: int) -> NoReturn:
        text = "0"
        try:
            process_calls.end_with_parent()
            self._pages.close_in_child()
            copy_score(self._connection.client, os.getpid())
            self._connection.close_in_child()
            space = thread.space
            hidden = {address: each.original for address, each in space.breakpoints.items()} | space.patches.originals()
            text = str(write_core(request, space.memory, hidden, output))
        except OSError as error:
            text = reason_of(error)
        except BaseException:  # noqa: BLE001 - every error is reported
            text = traceback.format_exc()
        finally:
            os.write(answer, text.encode(errors="replace")[:4096])
            os._exit(0)

    def _finish(self, dump: _Dump, *, abandoned: bool = False) -> None:
        answer = os.read(dump.result, 4096).decode(errors="replace")
        os.close(dump.result)
        if abandoned:
            problem = "the run ended before it was complete"
        elif answer.isdecimal():
            problem = ""
        else:
            problem = answer or "the process that wrote it was killed"
        if problem:
            with contextlib.suppress(OSError):
                os.unlink(dump.path)
        self._tell(dump.program, dump.thread, dump.path, 0 if problem else int(answer), problem)
        del self.busy[dump.thread.pid]
        for tid, (state, status) in dump.parked.items():
            if tid in self._threads:
                self._threads[tid].state = state
                self._stopper.defer(tid, status)
        if not abandoned:
            self._let_go_on(dump)

    def _let_go_on(self, dump: _Dump) -> None:
        for thread in dump.held:
            if thread.tid in self._threads:
                self._stopper.release(thread)
        if dump.thread.tid in self._threads:
            self._stopper.resume(dump.thread)

    def _tell(self, program: InsertedProgram, thread: Thread, path: str, size: int, problem: str) -> None:
        name = process_field(thread.tid, "Name") or "ended"
        self._connection.send(Dumped(program.number, thread.pid, name, path, size, problem))


def _request(dump: _Dump, siblings: list[Thread]) -> CoreRequest:
    thread = dump.thread
    space = thread.space
    first = _state(thread, dump, space.word_size)
    offset, word = POINTER[space.word_size]
    (address,) = struct.unpack_from(word, first.registers, offset)
    processor = PROCESSORS["x86_64" if space.word_size == 8 else "i386"]
    return CoreRequest(
        pid=thread.pid,
        processor=processor,
        threads=(first, *(_state(t, dump, space.word_size) for t in siblings)),
        signal_info=signal_info_at(processor, address),
        left_out=space.patches.ranges(),
    )


def _state(thread: Thread, dump: _Dump, word_size: int) -> HeldThread:
    registers = ptrace_calls.get_register_set(thread.tid, RegisterSet.GENERAL)
    if registers:
        offset, word = POINTER[word_size]
        values = bytearray(registers)
        struct.pack_into(word, values, offset, _visible(struct.unpack_from(word, values, offset)[0], thread, dump))
        registers = bytes(values)
    return HeldThread(thread.tid, registers, register_sets_of(thread.tid, word_size))


def _visible(address: int, thread: Thread, dump: _Dump) -> int:
    """Return a thread's instruction pointer without the tracer: not after a breakpoint's byte, and not in a slot."""
    space = thread.space
    if (address - 1 in space.breakpoints or address - 1 in space.former) and _is_trapped(thread, dump):
        return address - 1
    slot = space.slots.holding(address)
    return slot.site if slot is not None and slot.address == address else address


def _is_trapped(thread: Thread, dump: _Dump) -> bool:
    if thread.tid in dump.parked:
        return classify_stop(dump.parked[thread.tid][1]) == (StopKind.SIGNAL, signal.SIGTRAP)
    return bool(int(process_field(thread.tid, "SigPnd") or "0", 16) & 1 << signal.SIGTRAP - 1)
