"""The part of a session by which its probepoints are in the target, beside those of others at the same stub."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, Self

from dprobes.engines.gdb.exits import StubExits
from dprobes.engines.gdb.steps.stepper import Stepper
from dprobes.engines.hits.handlerruns import HandlerRunner
from dprobes.engines.interface import StateEvent
from dprobes.errors import EngineError
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines import interface
    from dprobes.engines.gdb.description import TargetDescription
    from dprobes.engines.gdb.placement import PlacedProbes
    from dprobes.engines.gdb.processors import StubProcessor
    from dprobes.engines.gdb.program import StubProbe, StubProgram
    from dprobes.engines.gdb.returns import AwaitedReturns
    from dprobes.engines.gdb.stub import Stub
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.engines.gdb.threadcontext import StubContext
    from dprobes.engines.hits.handlerruns import Handled
    from dprobes.rpn.point import Point

__all__ = ["StubMember"]


class StubMember(StubExits):
    """
    A member of the sessions at one stub.

    The first one finds out what stands behind it, which the others use as well.
    """

    _job: interface.Job
    _runner: HandlerRunner
    _stepper: Stepper
    _placed: PlacedProbes
    _returns: AwaitedReturns
    _has_withdrawn = False
    """Whether the probepoints were taken out while those of others stay."""

    @abstractmethod
    def begin(self) -> None:
        """Insert the breakpoints."""

    @property
    @abstractmethod
    def own_places(self) -> set[int]:
        """Where breakpoints of the engine's own are, at which modules may have come or gone."""

    @abstractmethod
    def forget_request(self) -> None:
        """Take notice that the target has stopped: whoever wants it to stop again has to ask again."""

    @abstractmethod
    def _placement(self) -> PlacedProbes:
        """Return probepoints that are nowhere yet."""

    @abstractmethod
    def _target_of(
        self, order: Literal["little", "big"], default: TargetDescription, tell: Callable[[str], None]
    ) -> StubTarget:
        """Return the target behind the stub."""

    @abstractmethod
    def _context_of(self, architecture: Architecture, processor: StubProcessor) -> StubContext:
        """Return what handlers see of the target."""

    # Coming and going

    def __enter__(self) -> Self:
        shared = self._shared
        if shared.members:
            with shared.standing_still():
                self._join()
            return self
        try:
            shared.members.append(self)
            self._set_up(shared.connection.open())
        except BaseException:
            shared.members.clear()
            shared.connection.abandon()
            raise
        return self

    def _set_up(self, stub: Stub) -> None:
        """Take notice of what the stub stands for, and place the probepoints of all in it."""
        architecture, processor, connection = self._resolved.architecture, self._processor, self._shared.connection
        self._stub = stub
        self._target = self._target_of(architecture.byte_order, processor.default_description(), connection.tell)
        connection.target = self._target
        self._context = self._context_of(architecture, processor)
        self._runner = HandlerRunner(self._context)
        self._stepper = Stepper(self._target, processor, architecture, self._context.names)
        for each in self._shared.members:
            each.take_over(self)
        for each in self._shared.members:
            each.begin()

    def take_over(self, leader: StubMember) -> None:
        """Use what stands behind the stub as another session has found it."""
        self._stub, self._target, self._context = leader._stub, leader._target, leader._context
        self._runner, self._stepper = leader._runner, leader._stepper
        self._placed = self._placement()

    def _join(self) -> None:
        """Place the probepoints beside those of others, while the target stands still."""
        self.take_over(self._shared.members[0])
        self._shared.members.append(self)
        try:
            self.begin()
        except BaseException:
            self.withdraw()
            raise
        replaced = self._job.replaces
        if isinstance(replaced, StubMember) and replaced in self._shared.members:
            replaced.withdraw()

    def withdraw(self) -> None:
        """Take the probepoints out, while the target stands still; those of others stay."""
        self._returns.clear()
        self._forget_places()
        self._has_withdrawn = True
        self._shared.members.remove(self)
        self._remove_unneeded()

    def _forget_places(self) -> None:
        for probe in self._program.probes:
            self._placed.drop(probe)

    def __exit__(self, *exception: object) -> None:
        shared = self._shared
        if self not in shared.members:
            return
        if len(shared.members) > 1 and not shared.is_over:
            self._is_stopping = True
            # Where the target does not stop, it is withdrawn when that does.
            with contextlib.suppress(EngineError), shared.standing_still():
                if not self._has_withdrawn:
                    self.withdraw()
            return
        try:
            if shared.members == [self]:
                shared.connection.close()
        finally:
            shared.members.remove(self)

    # Where it has probepoints

    @property
    def own_needed(self) -> set[int]:
        """Where breakpoints have to be for this program."""
        return self._placed.at.keys() | self._placed.entries.keys() | self._returns.addresses | self.own_places

    @property
    def _needed(self) -> set[int]:
        """Where breakpoints have to be."""
        return self._shared.needed

    @property
    def watches(self) -> bool:
        """Whether some of the target's memory is watched."""
        return bool(self._placed.watched)

    def raw_at(self, at: int) -> bytes | None:
        """Return the instruction of a probepoint; None if there is none."""
        return self._placed.raw.get(at)

    def _raw(self, at: int) -> bytes | None:
        """Return the instruction under a breakpoint, as whoever has a probepoint there knows it."""
        return next((raw for each in self._shared.members if (raw := each.raw_at(at)) is not None), None)

    def owners_at(self, at: int) -> Sequence[tuple[StubProbe, Point]]:
        """Return the probepoints at an instruction."""
        return self._placed.at.get(at, ())

    def concerned(self, address: int, reason: str) -> Sequence[tuple[StubProbe, Point]]:
        """Return the probepoints whom an access to memory concerns."""
        return self._placed.watched.concerned(address, reason)

    def forget_calls(self) -> None:
        """Await no returns of calls any longer."""
        self._returns.clear()

    def leave_places(self) -> None:
        """Take notice that the module is nowhere, and calls do not return."""
        self._returns.clear()
        self._placed.move(None)

    def _remove_unneeded(self) -> None:
        for address in sorted(self._target.inserted - self._needed):
            self._target.remove(address, self._breakpoint_size)

    @property
    def _breakpoint_size(self) -> int:
        return len(self._processor.breakpoint)

    # Behind a hit

    def _count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool = False) -> None:
        """Count hits, each for its program, and take out what has become inactive by that."""
        for each in self._shared.members:
            each.count(handled, has_faulted=has_faulted)

    def count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool) -> None:
        """Count those hits that are of the program."""
        if len(self._shared.members) > 1:
            handled = [each for each in handled if each.probe.program is self._program]
        self._drop(self._emitter.count(handled, has_faulted=has_faulted))

    def _drop(self, gone: Sequence[StubProbe]) -> None:
        """Take out the breakpoints of probepoints that have become inactive."""
        for probe in gone:
            self._placed.drop(probe)
            self._returns.drop(probe)
            self._events.append(StateEvent((probe.number,), 0, probe.state))
        if gone:
            self._remove_unneeded()

    def _carry_out_wishes(self) -> None:
        """Remove what is to be removed, and those programs whose end was asked for while others stay."""
        members = self._shared.members
        for each in members:
            each.carry_out_removals()
        if len(members) > 1:
            for each in [each for each in members if each.is_stopping]:
                if len(members) > 1:
                    each.withdraw()

    def carry_out_removals(self) -> None:
        """Remove the probepoints whose removal was asked for."""
        numbers, self._removals = self._removals, []
        gone = [self._program.probes[number] for number in numbers if self._program.probes[number].is_active]
        for probe in gone:
            probe.state = ProbeState.REMOVED
        self._drop(gone)
