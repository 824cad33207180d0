"""
The run of a program behind a stub: from the connection to the last breakpoint that is taken out.

::

    connect ─► the program's entry, if it has not begun ─► breakpoints ─► let it run ─► stop ─► which is it?
                                                              ▲                           │
                                                              └───── step over it ◄─ handlers, or new files
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from dprobes.engines import interface
from dprobes.engines.gdb.emulation import Emulator
from dprobes.engines.gdb.loadedfiles import process_image
from dprobes.engines.gdb.processors import StubProcessor, processor_of
from dprobes.engines.gdb.program import StubProgram
from dprobes.engines.gdb.stopreplies import Exited, NoThreads, Stopped, ThreadId
from dprobes.engines.gdb.stub import Stub
from dprobes.engines.gdb.target import StubTarget
from dprobes.engines.gdb.threadcontext import StubContext
from dprobes.engines.gdb.transports import open_transport
from dprobes.engines.hits.emission import Emitter
from dprobes.engines.hits.handlerruns import HandlerRunner
from dprobes.engines.interface import Begun, Counts, Finished, Notice, RecordBatch, StateEvent
from dprobes.errors import EngineError, NotSupportedError
from dprobes.extensions.registry import called_extensions, load_extensions
from dprobes.keyed.store import stores_of
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.point import Point

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.gdb.loadedfiles import ProcessImage
    from dprobes.engines.gdb.program import StubProbe
    from dprobes.engines.gdb.stopreplies import StopReply
    from dprobes.engines.gdb.target import Registers
    from dprobes.engines.hits.handlerruns import Handled
    from dprobes.keyed.contents import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule

__all__ = ["StubSession"]

_PATIENCE = 2.0
"""Seconds after which it is said that a target does not stop."""
_UNDER_WAY = 0.5
"""Seconds within which an interrupt has reached a target that goes on."""
_LOOK = 0.1
"""Seconds after which somebody's wish to end is seen at the latest."""
_START_PATIENCE = 30.0
"""Seconds within which a program that has been started has to come to its entry."""
_TRAP, _INTERRUPT = 5, 2
"""How GDB numbers SIGTRAP and SIGINT (include/gdb/signals.def)."""
_FAULTS = frozenset({4, 8, 10, 11})
"""SIGILL, SIGFPE, SIGBUS and SIGSEGV."""


class StubSession(interface.ControlledSession):
    """One run."""

    probes: Sequence[Probepoint] = ()
    left_out: Sequence[LeftOutProbe] = ()

    def __init__(self, job: interface.Job, resolved: ResolvedModule, endpoint: str) -> None:
        self.probes = resolved.probepoints
        self.left_out = resolved.left_out
        self._job, self._resolved, self._endpoint = job, resolved, endpoint
        self._tables = stores_of(job.program.tables)
        self._events: deque[interface.Event] = deque()
        self._records: list[tuple[int, bytes]] = []
        extensions = load_extensions(called_extensions(job.program))
        self._program = StubProgram(job, resolved, extensions, self._tables, self._warn)
        self._emitter = Emitter(self)
        self._lock = threading.Lock()
        self._is_stopping = False
        self._asked_at: float | None = None
        """When the target was interrupted, None if that is not needed."""
        self._has_complained = False
        self._is_gone = False
        """Whether the target has ended, or was let go."""
        self._removals: list[int] = []
        self._by_address: dict[int, list[tuple[StubProbe, Point]]] = {}
        self._raw: dict[int, bytes] = {}
        """The instructions under breakpoints."""
        self._linker_place: int | None = None
        self._bias_now: int | None = None
        self._reported: set[tuple[int, ProbeState]] = set()
        self._process = 0

    # The connection

    def __enter__(self) -> Self:
        architecture = self._resolved.architecture
        processor = processor_of(architecture)
        assert processor is not None, "the engine has looked"
        self._processor: StubProcessor = processor
        self._stub = Stub(open_transport(self._endpoint))
        try:
            self._stub.start()
            self._target = StubTarget(self._stub, architecture.byte_order, processor.default_description())
            self._check_processor()
            self._context = StubContext(self._target, architecture, processor, lambda text: self._warn(text, None))
            self._runner = HandlerRunner(self._context)
            self._emulator = Emulator(self._target, architecture.word_size)
            self._begin()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Take everything out that is in, and end the connection; the target goes on."""
        try:
            if not self._is_gone and hasattr(self, "_target"):
                self._target.let_go(self._process)
        except EngineError as error:
            self._warn(f"breakpoints may be left in the target: {error.message}", None)
        finally:
            self._is_gone = True
            self._stub.close()

    def _check_processor(self) -> None:
        described = self._target.description.architecture
        if described and described not in self._processor.descriptions:
            raise EngineError(
                f"the stub {self._endpoint} stands for a processor '{described}', "
                f"'{self._resolved.module.elf.path}' is for {self._resolved.architecture.name}"
            )

    def _begin(self) -> None:
        """Find the files of the process, which may have to begin first, and insert the breakpoints."""
        reply = self._stub.reason()
        if not isinstance(reply, Stopped):
            raise EngineError(f"there is no program behind the stub {self._endpoint}: it has ended")
        thread = reply.thread or self._stub.current_thread()
        self._process = 0 if thread is None else thread.process
        image = process_image(self._target, self._resolved.architecture.word_size)
        if image is None:
            raise EngineError(f"the stub {self._endpoint} does not stand for a process of Linux")
        self._image: ProcessImage = image
        self._context.user = image.uid
        path = self._stub.read_object("exec-file", f"{self._process:x}") or b""
        name = os.path.basename(path.decode("utf-8", "surrogateescape")) or self._resolved.module.elf.path.name
        self._context.name = name.encode("utf-8", "surrogateescape")[:15]
        pid = self._pid_of(thread)
        self._program.reach.pids.add(pid)
        if image.debug_place is not None and image.linker_breakpoint(self._target) is None:
            self._run_to_entry(thread)
        self._linker_place = image.linker_breakpoint(self._target)
        if self._linker_place is not None:
            self._insert(self._linker_place)
        self._place_probes()

    def _pid_of(self, thread: ThreadId | None) -> int:
        """Return the process id; QEMU says 1 for any process, and names threads as the kernel does."""
        if thread is None:
            return 0
        return thread.process if thread.process > 1 else min(each.thread for each in self._stub.threads())

    def _run_to_entry(self, thread: ThreadId | None) -> None:
        """Let the dynamic linker do its work: what it has not loaded cannot be probed."""
        entry = self._image.entry
        self._insert(entry)
        self._target.resume()
        reply = self._target.await_stop(_START_PATIENCE)
        if reply is None:
            self._target.stop()
        self._target.remove(entry, len(self._processor.breakpoint))
        if not isinstance(reply, Stopped):
            self._is_gone = reply is not None
            raise EngineError(f"the program behind the stub {self._endpoint} has not come to its entry {entry:#x}")
        registers = self._target.registers(reply.thread or thread)
        self._correct_pc(reply, registers, {entry})
        self._target.write_back(reply.thread or thread, registers)

    def _insert(self, address: int) -> None:
        if not self._target.insert(address, self._breakpoint_size, self._processor.breakpoint):
            raise EngineError(f"the stub {self._endpoint} inserts no breakpoint at {address:#x}")

    @property
    def _breakpoint_size(self) -> int:
        return len(self._processor.breakpoint)

    # Probepoints

    def _place_probes(self) -> None:
        """Insert the probepoints of the module where it is loaded now, unless they are there."""
        bias = None if self._image.is_unloading(self._target) else self._bias()
        if bias == self._bias_now:
            return
        for address in self._by_address:
            self._target.forget(address, self._breakpoint_size)
        self._by_address.clear()
        self._raw.clear()
        self._bias_now = bias
        if bias is None:
            return
        self._program.bias = bias
        states: dict[ProbeState, list[int]] = {}
        for number, probe in enumerate(self.probes):
            is_wanted = self._program.probes[number].is_active and probe.state is ProbeState.COMPILED
            if is_wanted and probe.is_in_code:
                states.setdefault(self._place(number, probe, bias), []).append(number)
        pid = next(iter(self._program.reach.pids))
        for state, numbers in states.items():
            if (new := tuple(number for number in numbers if (number, state) not in self._reported)) != ():
                self._reported.update((number, state) for number in new)
                self._events.append(StateEvent(new, pid, state))

    def _place(self, number: int, probe: Probepoint, bias: int) -> ProbeState:
        instruction = probe.instruction
        address = bias + instruction.address
        if self._target.read(address, len(instruction.raw)) != instruction.raw:
            return ProbeState.MISMATCH
        if not self._target.insert(address, self._breakpoint_size, self._processor.breakpoint):
            return ProbeState.CONFLICT
        point = Point.of(self._job.program, probe.definition, probe.offset, probe.arguments)
        self._raw[address] = instruction.raw
        self._by_address.setdefault(address, []).append((self._program.probes[number], point))
        self._program.probes[number].state = ProbeState.ACTIVE
        return ProbeState.ACTIVE

    def _bias(self) -> int | None:
        """Return how far the module is above its link addresses, None if it is not loaded."""
        path = self._resolved.module.elf.path
        for loaded in self._image.loaded_files(self._target):
            if loaded.path and os.path.basename(loaded.path) == path.name:
                return loaded.bias
            is_program = not loaded.path and loaded.bias + self._resolved.module.elf.entry == self._image.entry
            if is_program and self._resolved.module.elf.entry:
                return loaded.bias
        return None

    # The run

    def events(self) -> Iterator[interface.Event]:
        """Iterate over what happens until the target has ended, or somebody asks for the end."""
        yield from self._taken()
        yield Begun()
        status: int | None = None
        self._target.resume()
        while True:
            self._ask_to_stop()
            reply = self._target.await_stop(_LOOK)
            if isinstance(reply, Exited | NoThreads):
                self._is_gone = True
                if isinstance(reply, Exited):
                    status = reply.signal if reply.signal is not None else (reply.status or 0) << 8
                break
            if reply is not None and self._on_stop(reply):
                break
            yield from self._taken()
        self._emitter.finish()
        yield from self._taken()
        yield Finished(self.counts(), status)

    def _ask_to_stop(self) -> None:
        """Interrupt the target if it has to stop, once."""
        now = time.monotonic()
        if not (self._is_stopping or self._removals):
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now
            self._target.interrupt()
        elif now > self._asked_at + _PATIENCE and not self._has_complained:
            self._has_complained = True
            text = "the target does not stop when it is interrupted: it is waited for until it comes to a probepoint"
            self._warn(text, None)

    def _taken(self) -> Iterator[interface.Event]:
        while self._events:
            yield self._events.popleft()
        if self._records:
            records, self._records = self._records, []
            yield RecordBatch(records)

    def _on_stop(self, reply: StopReply) -> bool:
        """See to a stop, and let the target go on; return whether the run is over instead."""
        assert isinstance(reply, Stopped)
        thread = reply.thread or self._stub.current_thread()
        registers = self._target.registers(thread)
        known = self._by_address.keys() | ({self._linker_place} if self._linker_place is not None else set())
        at = self._correct_pc(reply, registers, known)
        with self._lock:
            is_ours = self._target.has_answered(reply)
            if at is None:
                self._carry_out_removals()
                if self._may_end():
                    return True
                self._target.resume(0 if is_ours or reply.signal == _TRAP else reply.signal, thread)
                return False
            if at == self._linker_place:
                self._place_probes()
            outcome = self._hit(at, thread, registers) if at in self._by_address else None
            reply_of_step = self._pass(at, thread, registers)
            if outcome is not None:
                has_faulted = isinstance(reply_of_step, Stopped) and reply_of_step.signal in _FAULTS
                self._drop(self._emitter.count(outcome, has_faulted=has_faulted))
            self._carry_out_removals()
        return self._after_step(reply_of_step, thread)

    def _may_end(self) -> bool:
        """
        Return whether the run can end here: nothing of ours is still to reach the target.

        An interrupt that came when the target had just stopped is lost, or raises its signal as soon as that goes on.
        """
        if not self._is_stopping:
            return False
        is_under_way = self._target.interrupts > 0 and self._stub.raises_signals
        asked = self._asked_at
        return not is_under_way or asked is None or time.monotonic() > asked + _UNDER_WAY

    def _correct_pc(self, reply: Stopped, registers: Registers, known: set[int] | frozenset[int]) -> int | None:
        """Return the breakpoint that a thread has come to, None if that is not why it stopped."""
        if reply.signal != _TRAP:
            return None
        pc = registers[self._processor.pc]
        if pc in known:
            return pc
        before = pc - self._processor.moved
        if before in known and reply.reason != "swbreak":
            registers[self._processor.pc] = before
            return before
        return None

    def _hit(self, at: int, thread: ThreadId | None, registers: Registers) -> tuple[Handled[StubProgram], ...]:
        self._context.select(thread, registers, next(iter(self._program.reach.pids)))
        return self._runner.run(self._by_address[at])

    def _pass(self, at: int, thread: ThreadId | None, registers: Registers) -> StopReply:
        """Have the instruction under a breakpoint executed; return what came of that."""
        if (raw := self._raw.get(at)) is not None and self._emulator.carry_out(raw, registers):
            self._target.write_back(thread, registers)
            return Stopped(_TRAP, thread, {})
        self._target.write_back(thread, registers)
        self._target.remove(at, self._breakpoint_size)
        reply = self._target.step(thread, at, self._processor.pc, is_exact=True)
        if isinstance(reply, Stopped):
            self._target.insert_again(at, self._breakpoint_size, self._processor.breakpoint)
        return reply

    def _after_step(self, reply: StopReply, thread: ThreadId | None) -> bool:
        if not isinstance(reply, Stopped):
            self._is_gone = True
            return True
        if self._may_end():
            return True
        signal = reply.signal if reply.signal not in (_TRAP, _INTERRUPT) else 0
        self._target.resume(signal, reply.thread or thread)
        return False

    def send_record(self, program: int, probe: int, record: bytes) -> bool:  # noqa: ARG002 - of one program
        """Take a record of a probepoint."""
        self._records.append((probe, record))
        return True

    def _warn(self, message: str, hint: str | None) -> None:
        self._events.append(Notice(message, hint))

    def _drop(self, gone: Sequence[StubProbe]) -> None:
        """Take out the breakpoints of probepoints that have become inactive."""
        for probe in gone:
            for address, owners in list(self._by_address.items()):
                kept = [owner for owner in owners if owner[0] is not probe]
                if kept:
                    self._by_address[address] = kept
                elif owners:
                    del self._by_address[address]
                    if address != self._linker_place:
                        self._target.remove(address, self._breakpoint_size)
            self._events.append(StateEvent((probe.number,), 0, probe.state))

    def _carry_out_removals(self) -> None:
        numbers, self._removals = self._removals, []
        gone = [self._program.probes[number] for number in numbers if self._program.probes[number].is_active]
        for probe in gone:
            probe.state = ProbeState.REMOVED
        self._drop(gone)

    # What others ask

    def stop(self) -> None:
        """Ask for the end."""
        self._is_stopping = True

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far."""
        return tuple(each.copy() for each in self._program.tallies)

    def remove(self, probes: Sequence[int]) -> None:
        """Have probepoints removed."""
        with self._lock:
            self._removals += probes

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self._program.local_variables)

    def cpu_variables(self) -> list[list[int]]:
        """Return the variables of the one CPU that there is."""
        return [list(self._program.cpu_variables)]

    def tables(self) -> tuple[TableContents, ...]:
        """Return what the keyed tables hold."""
        with self._lock:
            return tuple(store.contents() for store in self._tables)

    def change(self, changes: Sequence[interface.Change]) -> None:
        """Change local variables and tables between two hits."""
        raise NotSupportedError(f"the gdb engine does not let others change variables and tables: {len(changes)}")

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables to zero."""
        with self._lock:
            for cells in (self._program.local_variables, self._program.cpu_variables):
                count = len(cells[first : None if last is None else last + 1])
                cells[first : first + count] = [0] * count
