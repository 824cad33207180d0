"""
The run of a program behind a stub: from the connection to the last breakpoint that is taken out.

::

    connect ─► the program's entry, if it has not begun ─► breakpoints ─► let it run ─► stop ─► which is it?
                                                              ▲                           │
                                                              └───── step over it ◄─ handlers, or new files
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from dprobes.engines.engine_interface import Begun, Finished, Pause
from dprobes.engines.gdb.placed_probes import PlacedProbes
from dprobes.engines.gdb.remote_protocol import Exited, NoThreads, Stopped, ThreadId
from dprobes.engines.gdb.stub_context import AwaitedReturns, CallEntry, PendingCall, StubContext
from dprobes.engines.gdb.stub_member import StubMember
from dprobes.engines.gdb.stub_process import CodeFiles, StubProcess
from dprobes.engines.gdb.stub_program import CallStacks, StubProgram
from dprobes.engines.gdb.stub_registers import StubProcessor, processor_of
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.engines.gdb.stub_transports import ConnectionLostError
from dprobes.engines.gdb.unmet_needs import refuse_for_process, refuse_lacking_registers
from dprobes.engines.hits.probe_hits import Emitter, is_last, skipping
from dprobes.errors import EngineError
from dprobes.extensions.extension_registry import called_extensions, load_extensions
from dprobes.keyed.table_entries import stores_of
from dprobes.resolve.probepoints import ResolvedModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines import engine_interface
    from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
    from dprobes.engines.gdb.remote_protocol import StopReply
    from dprobes.engines.gdb.shared_stub import SharedStub
    from dprobes.engines.gdb.stub_program import Resolved
    from dprobes.engines.gdb.stub_registers import Registers, TargetDescription
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint

__all__ = ["StubSession"]

_PATIENCE = 2.0
"""Seconds after which it is said that a target does not stop."""
_UNDER_WAY = 0.5
"""Seconds within which an interrupt has reached a target that goes on."""
_TRAP, _INTERRUPT = 5, 2
"""How GDB numbers SIGTRAP and SIGINT (include/gdb/signals.def)."""
_CHANGES = ("fork", "vfork", "vforkdone", "exec")
"""Stops for what has become of a process."""
_FAULTS = frozenset({4, 8, 10, 11})
"""SIGILL, SIGFPE, SIGBUS and SIGSEGV."""


class StubSession(StubMember):
    """One run, on a process; core files are written into ``core_directory``."""

    _shared: SharedStub[StubSession]
    probes: Sequence[Probepoint] = ()
    left_out: Sequence[LeftOutProbe] = ()

    def __init__(
        self, job: engine_interface.Job, resolved: Resolved, shared: SharedStub[StubSession], core_directory: str = "."
    ) -> None:
        self.probes = resolved.probepoints
        self.left_out = resolved.left_out
        self._job, self._resolved = job, resolved
        self._shared = shared
        principal = job.principal if isinstance(job.principal, StubSession) else None
        self._tables = stores_of(job.program.tables) if principal is None else principal.stores
        self._events: deque[engine_interface.Event] = deque()
        self._records: list[tuple[int, bytes]] = []
        extensions = load_extensions(called_extensions(job.program))
        own = None if principal is None else principal.program
        self._program = StubProgram(job, resolved, extensions, self._tables, self._warn, own)
        self._emitter = Emitter(self)
        self._lock = shared.lock
        self._is_stopping = False
        self._asked_at: float | None = None
        """When the target was interrupted, None if that is not needed."""
        self._is_overtaken = False
        """Whether the target has stopped for something else since then."""
        self._has_complained = False
        self._removals: list[int] = []
        processor = processor_of(resolved.architecture)
        assert processor is not None, "the engine has looked"
        self._processor: StubProcessor = processor
        self._returns = AwaitedReturns(processor.dropped)
        self._reported = set()
        self._code_files: CodeFiles | None = None
        self._core_directory = core_directory

    @property
    def architecture(self) -> Architecture:
        """The processor of the target."""
        return self._resolved.architecture

    def kernel(self) -> GuestKernel:
        """Return the kernel behind the stub, which stands still; raise ``EngineError`` if there is none."""
        raise EngineError(f"the stub {self._stub.name} stands for a process, and not for a machine with a kernel")

    def _placement(self) -> PlacedProbes:
        """Return probepoints that are nowhere yet."""
        code = self._processor.breakpoint
        return PlacedProbes(self._target, code, self._job.program, self._program, self._resolved)

    def _target_of(
        self, order: Literal["little", "big"], default: TargetDescription, tell: Callable[[str], None]
    ) -> StubTarget:
        return StubTarget(self._stub, order, default, tell)

    def _context_of(self, architecture: Architecture, processor: StubProcessor) -> StubContext:
        return StubContext(self._target, architecture, processor, self._shared.warn)

    def begin(self) -> None:
        """Find the files of the process, which may have to begin first, and insert the breakpoints."""
        assert isinstance(self._resolved, ResolvedModule), "processes have files"
        if self._job.scope.pid is not None:
            raise EngineError(f"the stub {self._stub.name} stands for one process: leave out -p")
        process = self._process = StubProcess(self._target, self._processor, self._resolved)
        self._context.user, self._context.name = process.uid, process.name
        architecture, registers = self._resolved.architecture, self._target.registers(self._stub.current_thread())
        names = self._context.names
        refuse_for_process(self._job.program, architecture)
        refuse_lacking_registers(self._job.program, architecture, names, registers, self._stub.name)
        self._program.stacks = CallStacks(self._target, self._processor, self._resolved, names, process.headers)
        if self._job.images is not None:
            name, module = os.fsdecode(process.name), self._resolved.module.elf
            images = self._job.images
            self._code_files = CodeFiles(self._target, images, module, process.pid, name, process.program)
        self._target.tell(f"process {self._target.process}")
        self._program.reach.pids.add(process.pid)
        if (place := process.linker_place) is not None:
            process.insert(place)
        self.place_probes()

    # Probepoints

    def place_probes(self) -> None:
        """Insert the probepoints of the module where it is loaded now, unless they are there."""
        bias = self._bias()
        if bias == self._placed.bias:
            return
        self._returns.clear()
        states = self._placed.move(bias)
        self._stepper.sees_accesses = any(each.watches for each in self._shared.members)
        self._remove_unneeded()
        for address in sorted(self._needed - self._target.inserted):  # which others had where this was
            self._target.insert(address, self._breakpoint_size, self._processor.breakpoint)
        self._report(states, self._process_id)

    def _bias(self) -> int | None:
        """Return how far the module is above its link addresses, None if it is not there."""
        files = self._process.loaded_files()
        if self._code_files is not None:
            self._code_files.look(files)
        bias = self._process.bias_of_module(files)
        assert self._program.stacks is not None, "it was set behind the process"
        self._program.stacks.forget(bias)
        return bias

    @property
    def _process_id(self) -> int:
        return self._process.pid

    @property
    def own_places(self) -> set[int]:
        """Where breakpoints of the engine's own are, at which modules may have come or gone."""
        return set() if self._process.linker_place is None else {self._process.linker_place}

    # The run

    def poll(self) -> Iterator[engine_interface.Event]:
        """Iterate over what happens until the target has ended, or somebody asks for the end."""
        yield from self._taken()
        yield Begun()
        shared = self._shared
        shared.begin()
        while not (shared.is_over or self._has_withdrawn):
            has_come = shared.turn()
            yield from self._taken()
            if not has_come:
                yield Pause()
        self._emitter.finish()
        yield from self._taken()
        if shared.relay is not None and shared.members[:1] == [self]:
            yield from self._serve_debugger(shared.relay)
        yield Finished(self.counts(), shared.status)

    def turn(self) -> bool:
        """Wait for the target to stop, for a short time, and see to that; return whether it did."""
        shared = self._shared
        try:
            self._ask_to_stop()
            reply = self._target.await_stop(self._shared.patience())
            is_over = isinstance(reply, Exited | NoThreads) or (reply is not None and self._on_stop(reply))
        except ConnectionLostError as error:
            reply, is_over = None, not self._has_returned(error)
        self._is_overtaken |= reply is not None
        if isinstance(reply, Exited):
            shared.status = reply.signal if reply.signal is not None else (reply.status or 0) << 8
        shared.is_over |= is_over
        return reply is not None

    def _has_returned(self, error: ConnectionLostError) -> bool:
        """Return whether a stub whose connection was lost could be reached again; then the run goes on."""
        members = self._shared.members
        stub = None if all(each.is_stopping for each in members) else self._shared.connection.reopen()
        if stub is None:
            self._target.is_over = True
            for each in members:
                each.warn(f"{error.message}: the run ends")
            return False
        for each in members:
            each.warn(f"{error.message}, and was reached again: hits meanwhile are missed")
            each.forget_calls()
        self._set_up(stub)
        self._shared.resume()
        return True

    def _ask_to_stop(self) -> None:
        """Interrupt the target if it has to stop, once."""
        now = time.monotonic()
        if not self._shared.is_wanted:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at, self._is_overtaken = now, False
            self._target.interrupt()
        elif self._is_overtaken and now > self._asked_at + _UNDER_WAY:
            # The interrupt came when the target had just stopped: it is lost, else it would have come by now.
            self._is_overtaken = False
            self._target.interrupt()
        elif now > self._asked_at + _PATIENCE and not self._has_complained:
            self._has_complained = True
            text = "the target does not stop when it is interrupted: it is waited for until it comes to a probepoint"
            self._warn(text, None)

    def forget_request(self) -> None:
        """Take notice that the target has stopped: whoever wants it to stop again has to ask again."""
        self._asked_at = None

    def _on_stop(self, reply: StopReply) -> bool:
        """See to a stop, and let the target go on; return whether the run is over instead."""
        assert isinstance(reply, Stopped)
        if reply.reason in _CHANGES:
            with self._lock:
                self._on_change(reply)
            self._shared.resume()
            return False
        thread = reply.thread or self._stub.current_thread()
        registers = self._target.registers(thread)
        if reply.address is not None:
            with self._lock:
                self._on_access(reply, thread, registers)
            return self._after_step(reply, thread)
        at = self._correct_pc(reply, registers, self._needed)
        with self._lock:
            is_ours = self._target.has_answered(reply)
            members = self._shared.members
            if at is None:
                for each in members:
                    each.take_samples()
                    if self._shared.is_left:
                        return True
                self._carry_out_wishes()
                if self._may_end():
                    return True
                self._shared.resume(0 if is_ours or reply.signal == _TRAP else reply.signal, thread)
                return False
            if self._goes_on_before(at, thread, registers):
                return False
            for each in members:
                each.select(thread, registers)
            for each in members:
                if at in each.own_places:
                    each.place_probes()
            for each in members:
                each.see_returns(at, thread, registers)
                if self._shared.is_left:
                    return True
                each.see_entry(at, thread, registers)
            owners = [owner for each in members for owner in each.owners_at(at)]
            outcome = self._runner.run(owners) if owners else ()
            if self._hand_over(outcome, at, registers):
                return True  # before the instruction
            uncounted = self._leave_core(outcome, at, registers)
            if (skip := skipping(outcome)) is not None and skip.outcome is not None:
                reply_of_step = self._stepper.leave_function(skip.outcome.value, thread, registers)
            elif self._carries_out(at, registers):
                if not (self._shared.is_wanted or is_last(outcome)):
                    self._target.resume_with(thread, registers, self._processor.pc)
                    self._count(uncounted)
                    return False
                self._target.write_back(thread, registers)
                reply_of_step = Stopped(_TRAP, thread, {})
            else:
                reply_of_step = self._pass(at, thread, registers)
            has_faulted = isinstance(reply_of_step, Stopped) and reply_of_step.signal in _FAULTS
            self._count(uncounted, has_faulted=has_faulted)
            if isinstance(reply_of_step, Stopped) and reply_of_step.address is not None:
                self._on_access(reply_of_step, thread, self._target.registers(thread))
            self._carry_out_wishes()
        return self._after_step(reply_of_step, thread)

    def _goes_on_before(self, at: int, thread: ThreadId | None, registers: Registers) -> bool:
        """
        Let the target go on before handlers run that need but the registers; return whether that was done.

        QEMU then translates the code anew, as it does behind each stop, while they run.
        """
        is_ours = at in self._returns.addresses or at in self.own_places
        if at not in self._placed.detached or is_ours or self._shared.is_wanted or len(self._shared.members) > 1:
            return False
        before = registers.copy()
        if not self._carries_out(at, registers):
            return False
        self._target.resume_with(thread, registers, self._processor.pc)
        self.select(thread, before)
        self._count(self._runner.run(self._placed.at[at]))
        return True

    def _carries_out(self, at: int, registers: Registers) -> bool:
        """Carry the instruction under a breakpoint out here, where that can be done; return whether it was."""
        return self._stepper.carries_out(self._raw(at), registers)

    def _pass(self, at: int, thread: ThreadId | None, registers: Registers) -> StopReply:
        """Have the instruction under a breakpoint executed; return what came of that."""
        return self._stepper.step_over(at, self._raw(at), thread, registers, self._needed)

    def take_samples(self) -> None:
        """Do nothing: a process behind a stub has no processors."""

    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Have handlers speak of a thread."""
        self._context.select(thread, registers, self._process.pid)

    def _on_change(self, reply: Stopped) -> None:
        """Take notice of a process that was forked, which is not in scope, or of another program in this one."""
        match reply.reason:
            case "fork" | "vfork":
                shares_memory = reply.reason == "vfork"
                self._target.leave_fork(ThreadId.parse(reply.data), self._breakpoint_size, shares_memory=shares_memory)
            case "vforkdone":
                self._target.end_sharing(self._processor.breakpoint)
            case "exec":
                self._target.begin_anew()
                for each in self._shared.members:
                    each.leave_places()
                for each in self._shared.members:
                    each.begin()

    def see_returns(self, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Run the handlers of returns to an address."""
        for call in self._returns.arrive(thread, at, registers[self._processor.sp]):
            self._context.entry = call.entry
            point = self._placed.points[call.probe]
            handled = self._runner.run([(call.probe, point)])
            self._context.entry = None
            if self._hand_over(handled, at, registers):
                self._shared.is_left = True
                return
            self._count(self._leave_core(handled, at, registers))

    def _on_access(self, reply: Stopped, thread: ThreadId | None, registers: Registers) -> None:
        """Run the handlers of those who watch the memory that was accessed."""
        assert reply.address is not None
        members = self._shared.members
        for each in members:
            each.select(thread, registers)
        outcome = self._runner.run([o for each in members for o in each.concerned(reply.address, reply.reason)])
        pc = registers[self._processor.pc]
        self._shared.is_left = self._hand_over(outcome, pc, registers)
        if not self._shared.is_left:
            uncounted = self._leave_core(outcome, pc, registers)
            self._target.write_back(thread, registers)
            self._count(uncounted)

    def see_entry(self, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Await the returns of a function that is entered."""
        for probe, kept in self._placed.entries.get(at, ()):
            address, top = self._stepper.return_place(registers)
            if address is None or not self._target.insert(address, self._breakpoint_size, self._processor.breakpoint):
                continue  # a function that cannot return
            size, frame, found = self._context.word_size, registers[self._processor.sp], dict[int, int]()
            for register in kept:
                if register.memory_offset is None:
                    found[register.index] = self._context.register(register.index, user=False)
                elif (value := self._target.word(frame + register.memory_offset, size)) is not None:
                    found[register.index] = value
            entry = CallEntry(self._context.time(), found)
            self._returns.enter(PendingCall(thread, address, top, probe, entry))

    def _may_end(self) -> bool:
        """
        Return whether the run can end here: nothing of ours is still to reach the target.

        An interrupt that came when the target had just stopped is lost, or raises its signal as soon as that goes on.
        """
        if not all(each.is_stopping for each in self._shared.members):
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

    def _after_step(self, reply: StopReply, thread: ThreadId | None) -> bool:
        if not isinstance(reply, Stopped) or self._shared.is_left or self._may_end():
            return True
        signal = reply.signal if reply.signal not in (_TRAP, _INTERRUPT) else 0
        self._shared.resume(signal, reply.thread or thread)
        return False
