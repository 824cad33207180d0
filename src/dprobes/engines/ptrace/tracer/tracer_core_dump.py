"""
The tracer's part of ``exit 3``: all threads of a process are held while a child of ours writes its core file.

The tracer goes on with all other processes meanwhile. What the held threads stopped for is kept, and handled when the
file is written; then the process goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from dprobes.engines.ptrace.tracer.tracer_state import ThreadState as State
from dprobes.engines.ptrace.tracer_messages import Dumped
from dprobes.errors import reason_of
from dprobes.platform.core.core_file import PROCESSORS, signal_info_at
from dprobes.platform.core.core_writer import (
    POINTER,
    CoreRequest,
    ThreadState,
    create_core_file,
    register_sets_of,
    write_core,
)
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import copy_score, process_field
from dprobes.platform.linux.ptrace_calls import RegisterSet, StopKind, classify_stop

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState

__all__ = ["CoreDumps"]


@dataclass(slots=True, eq=False)
class _Dump:
    """A core file that is being written, for ``program``, of the process of ``thread``."""

    thread: Thread
    program: InsertedProgram
    path: str
    result: int
    """The end of a pipe from which the writer's answer is read: the size, or what went wrong."""
    held: list[Thread]
    parked: dict[int, tuple[State, int]] = field(default_factory=dict)
    """What threads have stopped for, with their state before."""


class CoreDumps:
    """The core files that are being written; ``busy`` are the processes, by process id."""

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper
        self._writers: dict[int, _Dump] = {}
        self.busy: dict[int, _Dump] = {}

    def start(self, thread: Thread, program: InsertedProgram) -> bool:
        """
        Begin with the process of a stopped thread, whose registers are already set to the probed instruction.

        Return False, with a word to the user, if no file can be written; the thread is then to go on.
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
        """Take a report that concerns us: a writer's end, or a stop in a process that is being written."""
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
        """Give up what is not finished: the run ends now, or that of one program, while the processes go on."""
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
        thread.state = State.STOPPED

    def _become_writer(self, request: CoreRequest, thread: Thread, output: int, answer: int) -> NoReturn:
        text = "0"
        try:
            process_calls.end_with_parent()
            copy_score(self._connection.client, os.getpid())
            self._connection.close_in_child()
            space = thread.space
            hidden = {address: each.original for address, each in space.breakpoints.items()} | space.patches.originals()
            text = str(write_core(request, space.memory, hidden, output))
        except OSError as error:
            text = reason_of(error)
        except BaseException:  # noqa: BLE001 - whatever it is, it is told
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


def _state(thread: Thread, dump: _Dump, word_size: int) -> ThreadState:
    registers = ptrace_calls.get_register_set(thread.tid, RegisterSet.GENERAL)
    if registers:
        offset, word = POINTER[word_size]
        values = bytearray(registers)
        struct.pack_into(word, values, offset, _visible(struct.unpack_from(word, values, offset)[0], thread, dump))
        registers = bytes(values)
    return ThreadState(thread.tid, registers, register_sets_of(thread.tid, word_size))


def _visible(address: int, thread: Thread, dump: _Dump) -> int:
    """Return where a thread would be without us: neither behind a breakpoint nor in a slot."""
    space = thread.space
    if (address - 1 in space.breakpoints or address - 1 in space.former) and _is_trapped(thread, dump):
        return address - 1
    slot = space.slots.holding(address)
    return slot.site if slot is not None and slot.address == address else address


def _is_trapped(thread: Thread, dump: _Dump) -> bool:
    if thread.tid in dump.parked:
        return classify_stop(dump.parked[thread.tid][1]) == (StopKind.SIGNAL, signal.SIGTRAP)
    return bool(int(process_field(thread.tid, "SigPnd") or "0", 16) & 1 << signal.SIGTRAP - 1)
