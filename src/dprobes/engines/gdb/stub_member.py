"""
Program at a stub: its probepoints in the target, which other programs may share, and its pending events.

The program's module determines the kind of target: ``ProbedProcess``, ``ProbedMachine``, ``ProbedPrograms``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.engine_interface import Notice, RecordBatch, StateEvent
from dprobes.engines.gdb.placed_probes import PlacedProbes
from dprobes.engines.gdb.stub_context import AwaitedReturns, CallEntry, PendingCall
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.hits.probe_hits import Emitter
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.engine_interface import Event, Job
    from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_context import StubContext
    from dprobes.engines.gdb.stub_program import Resolved, StubProbe, StubProgram
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor
    from dprobes.engines.gdb.stub_requests import Stub
    from dprobes.engines.gdb.stub_stepper import Stepper
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.engines.gdb.stub_transports import DebuggerRelay
    from dprobes.engines.hits.probe_hits import Handled, HandlerRunner
    from dprobes.rpn.rpn_program import Point

__all__ = ["Inferior", "RunEvents", "Sample", "StubMember"]


class Inferior(NamedTuple):
    """Target of a stub, with the context of handlers and the executor of instructions."""

    target: StubTarget
    context: StubContext
    runner: HandlerRunner
    stepper: Stepper


class Sample(NamedTuple):
    """A thread to be sampled, with the samplers that are due."""

    thread: ThreadId
    registers: Registers
    owners: Sequence[tuple[StubProbe, Point]]


class RunEvents:
    """Events of a run that its user has not received yet."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._records: list[tuple[int, bytes]] = []
        self._reported: set[tuple[int, ProbeState]] = set()

    def take(self) -> Iterator[Event]:
        """Iterate over the pending events and remove them."""
        while self._events:
            yield self._events.popleft()
        if self._records:
            records, self._records = self._records, []
            yield RecordBatch(records)

    def add(self, event: Event) -> None:
        """Append an event to those that ``poll`` of the session returns."""
        self._events.append(event)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Add a warning, with a hint about the remedy."""
        self._events.append(Notice(message, hint))

    def report(self, states: Mapping[ProbeState, Sequence[int]], pid: int) -> None:
        """Add state changes of probepoints; each state of a probepoint is reported once."""
        for state, numbers in states.items():
            if (new := tuple(number for number in numbers if (number, state) not in self._reported)) != ():
                self._reported.update((number, state) for number in new)
                self._events.append(StateEvent(new, pid, state))

    def send_record(self, program: int, probe: int, record: bytes) -> bool:  # noqa: ARG002 - of one program
        """Add a record of a probepoint; return True, because there is always room."""
        self._records.append((probe, record))
        return True


class StubMember(ABC):
    """A program with probepoints in the target; ``placed`` are those in the address space of the selected thread."""

    is_machine = False
    _target: StubTarget
    _context: StubContext
    _stepper: Stepper
    placed: PlacedProbes

    def __init__(self, job: Job, resolved: Resolved, program: StubProgram, events: RunEvents) -> None:
        self._job, self._resolved = job, resolved
        self.program, self.events = program, events
        self.architecture = resolved.architecture
        processor = processor_of(resolved.architecture)
        assert processor is not None, "the engine has looked"
        self._processor: StubProcessor = processor
        self._returns = AwaitedReturns(processor.dropped)
        self._emitter = Emitter(events)
        self.is_stopping = False
        """True if the end of the program was requested."""
        self.has_withdrawn = False
        """True if the probepoints were removed while those of other programs stay."""

    # The target behind the stub

    @abstractmethod
    def find(self, stub: Stub, tell: Callable[[str], None], warn: Callable[[str], None]) -> Inferior:
        """Return the target of the stub. The first member determines the kind for all."""

    def take_over(self, inferior: Inferior) -> None:
        """Use a target that another member has found. No probepoint of this program is inserted in it yet."""
        self._target, self._context, _, self._stepper = inferior
        self.placed = self._placement()

    def _placement(self) -> PlacedProbes:
        return PlacedProbes(self._target, self._job.program, self.program, self._resolved)

    @abstractmethod
    def begin(self) -> None:
        """Identify the stopped target, and insert the breakpoints."""

    @abstractmethod
    def kernel(self) -> GuestKernel:
        """Return the kernel of the stopped target; raise ``EngineError`` if there is none."""

    # Places of probepoints

    @abstractmethod
    def place_probes(self) -> None:
        """Insert the probepoints where their module is mapped now, unless they are inserted."""

    @property
    def own_places(self) -> set[int]:
        """Addresses of the engine's own breakpoints, at which modules may have been mapped or unmapped."""
        return set()

    @property
    def needed(self) -> set[int]:
        """Addresses at which the program needs breakpoints."""
        return self.placed.at.keys() | self.placed.entries.keys() | self._returns.addresses | self.own_places

    @property
    def watches(self) -> bool:
        """True if there are watchpoints on the target's memory."""
        return bool(self.placed.watched)

    def awaits_return_at(self, at: int) -> bool:
        """Return whether a function that was entered will return to ``at``, so that a breakpoint is needed there."""
        return at in self._returns.addresses

    def concerned(self, address: int, reason: str) -> Sequence[tuple[StubProbe, Point]]:
        """
        Return the probepoints whose watchpoints cover ``address``, with their points.

        ``reason`` is the access in the stub's report: ``watch``, ``rwatch`` or ``awatch``.
        """
        return self.placed.watched.concerned(address, reason)

    def withdraw(self) -> None:
        """Forget all breakpoints of the program, without an access to the target."""
        self._returns.clear()
        self._forget_places()
        self.has_withdrawn = True

    def _forget_places(self) -> None:
        for probe in self.program.probes:
            self.placed.drop(probe)

    def forget_calls(self) -> None:
        """Forget all calls whose returns are awaited."""
        self._returns.clear()

    def leave_places(self) -> None:
        """Forget the places of the module, which is not mapped any more, and the calls that will not return."""
        self._returns.clear()
        self.placed.move(None)

    # The thread of a hit

    @abstractmethod
    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Select the thread whose registers and memory the handlers access. ``registers`` are the thread's."""

    def _caller(self, thread: ThreadId | None, at: int) -> ThreadId | None:  # noqa: ARG002 - for machines
        """Return the thread that calls or returns at an address; None if the stub has no thread ids."""
        return thread

    def returned_calls(self, at: int, thread: ThreadId | None, registers: Registers) -> list[PendingCall]:
        """Return the calls from which a thread returns at an address, and stop awaiting them."""
        return self._returns.arrive(self._caller(thread, at), at, registers[self._processor.sp])

    def see_entry(self, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Await the return of a function that is entered, and keep the values that its handlers need."""
        for probe, kept in self.placed.entries.get(at, ()):
            address, top = self._stepper.return_place(registers)
            if address is None or not self._target.insert(address):
                continue  # its return cannot be detected
            size, frame, found = self._context.word_size, registers[self._processor.sp], dict[int, int]()
            for register in kept:
                if register.memory_offset is None:
                    found[register.index] = self._context.register(register.index, user=False)
                elif (value := self._target.word(frame + register.memory_offset, size)) is not None:
                    found[register.index] = value
            entry = CallEntry(self._context.time(), found)
            self._returns.enter(PendingCall(self._caller(thread, at), address, top, probe, entry))

    # Requests of handlers about the target

    @abstractmethod
    def is_handed_over(self, handled: Sequence[Handled[StubProgram]]) -> bool:
        """Return whether handlers request that the target is left to a debugger."""

    @abstractmethod
    def hand_over(self, at: int, where: str, registers: Registers) -> DebuggerRelay | None:
        """Remove all breakpoints and leave the target stopped; return a relay for the debugger, None for a machine."""

    @abstractmethod
    def write_core(self, at: int, registers: Registers) -> None:
        """
        Write the core file of a process whose thread has stopped at ``at``, and report its path.

        For a machine do nothing.
        """

    # Requests of clients

    @property
    def due(self) -> float:
        """Monotonic time in seconds at which the target must stop for a sample, or infinity."""
        return math.inf

    @property
    def wants_stop(self) -> bool:
        """True if the target must stop, for a request of a client."""
        return self.is_stopping or bool(self.program.removals)

    def samples(self) -> Iterable[Sample]:
        """Iterate over the threads that are due to be sampled, selecting each; processes are not sampled."""
        return ()

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables for all CPUs; a process counts as one CPU."""
        return [list(self.program.cpu_variables)]

    def count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool) -> bool:
        """
        Count hits of the program; return True if a probepoint became inactive.

        With ``has_faulted``, the probed instruction faulted, and only probepoints with ``keep_on_fault`` count the hit.
        """
        return self._drop(self._emitter.count(handled, has_faulted=has_faulted))

    def _drop(self, gone: Sequence[StubProbe]) -> bool:
        """
        Forget the breakpoints and awaited returns of probepoints that have become inactive, and report their states.

        Return whether there are any.
        """
        for probe in gone:
            self.placed.drop(probe)
            self._returns.drop(probe)
            self.events.add(StateEvent((probe.number,), 0, probe.state))
        return bool(gone)

    def carry_out_removals(self) -> bool:
        """Remove the probepoints whose removal was requested; return True if there are any."""
        numbers, self.program.removals = self.program.removals, []
        gone = [self.program.probes[number] for number in numbers if self.program.probes[number].is_active]
        for probe in gone:
            probe.state = ProbeState.REMOVED
        return self._drop(gone)

    def finish(self) -> None:
        """Send the records that have not been sent yet, at the end of the run."""
        self._emitter.finish()
