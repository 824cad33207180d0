"""
A program at a stub: where its probepoints are in the target, beside those of others, and what there is to tell of it.

What the program is about decides what stands behind the stub: ``ProbedProcess``, ``ProbedMachine``, ``ProbedPrograms``.
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
from dprobes.resolve.probe_state import ProbeState

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
    """What stands behind a stub, with what executes handlers and instructions there."""

    target: StubTarget
    context: StubContext
    runner: HandlerRunner
    stepper: Stepper


class Sample(NamedTuple):
    """A thread that samplers are about, with those that are due."""

    thread: ThreadId
    registers: Registers
    owners: Sequence[tuple[StubProbe, Point]]


class RunEvents:
    """What has come of a run since its user was told last."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._records: list[tuple[int, bytes]] = []
        self._reported: set[tuple[int, ProbeState]] = set()

    def take(self) -> Iterator[Event]:
        """Iterate over what has come, which is forgotten by that."""
        while self._events:
            yield self._events.popleft()
        if self._records:
            records, self._records = self._records, []
            yield RecordBatch(records)

    def add(self, event: Event) -> None:
        """Add something."""
        self._events.append(event)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Add a warning, with what to do about it."""
        self._events.append(Notice(message, hint))

    def report(self, states: Mapping[ProbeState, Sequence[int]], pid: int) -> None:
        """Add what has become of probepoints, each state of one once."""
        for state, numbers in states.items():
            if (new := tuple(number for number in numbers if (number, state) not in self._reported)) != ():
                self._reported.update((number, state) for number in new)
                self._events.append(StateEvent(new, pid, state))

    def send_record(self, program: int, probe: int, record: bytes) -> bool:  # noqa: ARG002 - of one program
        """Add a record of a probepoint."""
        self._records.append((probe, record))
        return True


class StubMember(ABC):
    """A program whose probepoints are in the target; ``placed`` are those where the thread is that was selected."""

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
        """Whether the end was asked for."""
        self.has_withdrawn = False
        """Whether the probepoints were taken out while those of others stay."""

    # What stands behind the stub

    @abstractmethod
    def find(self, stub: Stub, tell: Callable[[str], None], warn: Callable[[str], None]) -> Inferior:
        """Return what stands behind the stub, of which all programs there are to be."""

    def take_over(self, inferior: Inferior) -> None:
        """Use what stands behind the stub, where no probepoint is yet."""
        self._target, self._context, _, self._stepper = inferior
        self.placed = self._placement()

    def _placement(self) -> PlacedProbes:
        return PlacedProbes(self._target, self._job.program, self.program, self._resolved)

    @abstractmethod
    def begin(self) -> None:
        """Get to know the target, which stands still, and insert the breakpoints."""

    @abstractmethod
    def kernel(self) -> GuestKernel:
        """Return the kernel of the target, which stands still; raise ``EngineError`` if there is none."""

    # Where probepoints are

    @abstractmethod
    def place_probes(self) -> None:
        """Insert the probepoints where their module is now, unless they are there."""

    @property
    def own_places(self) -> set[int]:
        """Where breakpoints of the engine's own are, at which modules may have come or gone."""
        return set()

    @property
    def needed(self) -> set[int]:
        """Where breakpoints have to be for the program."""
        return self.placed.at.keys() | self.placed.entries.keys() | self._returns.addresses | self.own_places

    @property
    def watches(self) -> bool:
        """Whether some of the target's memory is watched."""
        return bool(self.placed.watched)

    def awaits_return_at(self, at: int) -> bool:
        """Return whether a call is to return to an address."""
        return at in self._returns.addresses

    def concerned(self, address: int, reason: str) -> Sequence[tuple[StubProbe, Point]]:
        """Return the probepoints whom an access to memory concerns."""
        return self.placed.watched.concerned(address, reason)

    def withdraw(self) -> None:
        """Need no breakpoint any more."""
        self._returns.clear()
        self._forget_places()
        self.has_withdrawn = True

    def _forget_places(self) -> None:
        for probe in self.program.probes:
            self.placed.drop(probe)

    def forget_calls(self) -> None:
        """Await no returns of calls any longer."""
        self._returns.clear()

    def leave_places(self) -> None:
        """Take notice that the module is nowhere, and calls do not return."""
        self._returns.clear()
        self.placed.move(None)

    # Whose hit it is

    @abstractmethod
    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Have handlers speak of a thread."""

    def _caller(self, thread: ThreadId | None, at: int) -> ThreadId | None:  # noqa: ARG002 - for machines
        """Return who calls and returns at an address."""
        return thread

    def returned_calls(self, at: int, thread: ThreadId | None, registers: Registers) -> list[PendingCall]:
        """Return the calls that a thread comes back from at an address, which are awaited no longer."""
        return self._returns.arrive(self._caller(thread, at), at, registers[self._processor.sp])

    def see_entry(self, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Await the returns of a function that is entered."""
        for probe, kept in self.placed.entries.get(at, ()):
            address, top = self._stepper.return_place(registers)
            if address is None or not self._target.insert(address):
                continue  # a function that cannot return
            size, frame, found = self._context.word_size, registers[self._processor.sp], dict[int, int]()
            for register in kept:
                if register.memory_offset is None:
                    found[register.index] = self._context.register(register.index, user=False)
                elif (value := self._target.word(frame + register.memory_offset, size)) is not None:
                    found[register.index] = value
            entry = CallEntry(self._context.time(), found)
            self._returns.enter(PendingCall(self._caller(thread, at), address, top, probe, entry))

    # What handlers want to be done with the target

    @abstractmethod
    def is_handed_over(self, handled: Sequence[Handled[StubProgram]]) -> bool:
        """Return whether handlers want the target to be left as it stands."""

    @abstractmethod
    def hand_over(self, at: int, where: str, registers: Registers) -> DebuggerRelay | None:
        """Take everything out, and leave the target as it stands; return where a debugger takes a process over."""

    @abstractmethod
    def write_core(self, at: int, registers: Registers) -> None:
        """Write the core of a process, and tell of it."""

    # What was asked

    @property
    def due(self) -> float:
        """When it will want the target to stop by itself, by the clock that never goes back."""
        return math.inf

    @property
    def wants_stop(self) -> bool:
        """Whether the target has to stop for what was asked."""
        return self.is_stopping or bool(self.program.removals)

    def samples(self) -> Iterable[Sample]:
        """Iterate over the threads that samplers are due on, each selected; a process has no processors."""
        return ()

    def cpu_variables(self) -> list[list[int]]:
        """Return the variables of all CPUs, of which a process has one."""
        return [list(self.program.cpu_variables)]

    def count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool) -> bool:
        """Count hits of the program; return whether a probepoint has become inactive by that."""
        return self._drop(self._emitter.count(handled, has_faulted=has_faulted))

    def _drop(self, gone: Sequence[StubProbe]) -> bool:
        """Forget the places of probepoints that have become inactive."""
        for probe in gone:
            self.placed.drop(probe)
            self._returns.drop(probe)
            self.events.add(StateEvent((probe.number,), 0, probe.state))
        return bool(gone)

    def carry_out_removals(self) -> bool:
        """Remove the probepoints whose removal was asked for; return whether there was one."""
        numbers, self.program.removals = self.program.removals, []
        gone = [self.program.probes[number] for number in numbers if self.program.probes[number].is_active]
        for probe in gone:
            probe.state = ProbeState.REMOVED
        return self._drop(gone)

    def finish(self) -> None:
        """Give out the records that are left."""
        self._emitter.finish()
