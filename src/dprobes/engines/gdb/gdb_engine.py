"""The gdb engine, which probes the target behind a stub; the target's files must be on this machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dprobes.engines import engine_interface
from dprobes.engines.gdb.machine.guest_kernel import described_processor, visited_kernel
from dprobes.engines.gdb.machine.guest_processes import KernelFacts
from dprobes.engines.gdb.machine.probed_machine import BareMachine, MachinePlaces, ProbedMachine
from dprobes.engines.gdb.machine.probed_programs import ProbedPrograms
from dprobes.engines.gdb.probed_process import ProbedProcess
from dprobes.engines.gdb.shared_stub import SharedStub
from dprobes.engines.gdb.stub_connection import StubConnection
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.gdb.stub_session import StubSession
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import MACHINE
from dprobes.rpn.instruction_encoding import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.engine_interface import EngineOptions
    from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
    from dprobes.engines.gdb.stub_program import Resolved
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.running_kernel import RunningKernel

__all__ = ["GdbEngine"]


@dataclass(frozen=True, slots=True)
class StubPlan(engine_interface.Plan):
    """
    Plan for the target of a stub.

    ``places`` has the places on a machine, or is None for places in the job's module. ``machine`` is the machine of a
    program that probes the machine itself (``machine``), or None.
    """

    places: Resolved | None = None
    machine: BareMachine | None = None


class GdbEngine(engine_interface.Engine):
    """Engine that runs handlers at hits in a target, which the stub at the endpoint of the scope stops."""

    name = "gdb"

    def __init__(self, options: EngineOptions, scope: engine_interface.Scope) -> None:
        assert scope.endpoint is not None, "the registry says that this engine takes endpoints only"
        self._endpoint, self._command = scope.endpoint, scope.command
        self._core_directory = options.core_directory
        self._present = options.present
        self._facts: KernelFacts | None = None
        self._visited: RunningKernel = BareMachine()
        self._may_connect = not (options.replaceable and (scope.command or scope.endpoint.startswith("|")))
        self._connection: StubConnection | None = None

    def check(self, scope: engine_interface.Scope, options: EngineOptions) -> None:  # noqa: ARG002 - it is known already
        """Raise ``EngineError`` for a command that starts a stub, if the probe manager makes the run."""
        if not self._may_connect:
            raise EngineError(
                "the probe manager starts no command that has a stub",
                hint="start it yourself, and name the stub: HOST:PORT or the path of a socket",
            )

    @contextlib.contextmanager
    def visit_processor(self, program: Program) -> Iterator[Architecture | None]:
        """
        Yield the processor for a program that probes the machine itself, or None for another program.

        Kernels for other programs are only found on machines with this machine's architecture. The run uses the same
        connection, so a machine that is stopped at its reset remains stopped until the run begins.
        """
        shared = self._shared(self._present)
        if program.name != MACHINE or (shared is None and not self._may_connect):
            yield None
            return
        if shared is not None:
            yield shared.members[0].architecture
            return
        connection = StubConnection(self._endpoint, self._command)
        try:
            yield described_processor(connection)
        except BaseException:
            connection.abandon()
            raise
        self._connection = connection

    @contextlib.contextmanager
    def visit_kernel(self, program: Program) -> Iterator[RunningKernel]:
        """Stop the machine during the context, and yield its kernel; raise ``EngineError`` if it has none."""
        if program.name == MACHINE:
            yield BareMachine()
            return
        with self._visit() as kernel:
            self._visited = kernel
            yield kernel
            self._facts = KernelFacts.of(kernel)

    @contextlib.contextmanager
    def _visit(self) -> Iterator[GuestKernel]:
        if (shared := self._shared(self._present)) is None:
            with visited_kernel(self._endpoint) as kernel:
                yield kernel
        else:
            with shared.standing_still():
                yield shared.members[0].kernel()

    def _shared(self, sessions: Sequence[object]) -> SharedStub | None:
        """Return the open stub at the same endpoint that one of ``sessions`` has, or None if there is none."""
        stubs = [each.shared for each in sessions if isinstance(each, StubSession)]
        return next((each for each in stubs if each.connection.endpoint == self._endpoint and each.is_open), None)

    def plan(self, job: engine_interface.Job) -> StubPlan:
        """Return the plan; raise ``EngineError`` if the module is not on this machine, or its processor unsupported."""
        compiled = job.compiled
        if compiled.kernel is not None:
            return StubPlan(self, job, self._visited, compiled.kernel)
        if compiled.everywhere:
            image = encode(compiled.program, compiled.architecture)
            machine = BareMachine()
            return StubPlan(
                self, job, machine, MachinePlaces(compiled.architecture, image, compiled.everywhere), machine
            )
        if compiled.obstacle is not None:
            raise EngineError(compiled.obstacle.message, hint=compiled.obstacle.hint)
        if compiled.resolved is None:
            raise EngineError(f"the gdb engine needs the module '{compiled.program.name}' on this machine")
        if processor_of(compiled.architecture) is None:
            raise EngineError(f"the gdb engine does not know how stubs describe {compiled.architecture.name}")
        return StubPlan(self, job)

    @contextlib.contextmanager
    def reach(self, plan: engine_interface.Plan) -> Iterator[None]:
        """Start the command, if there is one, and connect to the stub, unless a session is connected to it already."""
        if self._shared(plan.job.beside) is not None:
            yield
            return
        self._connection = connection = self._connection or StubConnection(self._endpoint, self._command)
        try:
            connection.open()
            yield
        except BaseException:
            connection.abandon()
            raise

    def attach(self, plan: engine_interface.Plan) -> StubSession:
        """Stop the target, insert the probepoints, and return the session, which may share the stub with others."""
        assert isinstance(plan, StubPlan)
        session = self._session(plan)
        session.enter()
        return session

    def _session(self, plan: StubPlan) -> StubSession:
        """
        Return the session for the kind of target.

        The stub reports the kind, unless a command has to start it: then the target is a process.
        """
        job, places = plan.job, plan.places
        shared = self._shared(job.beside)
        if shared is not None:
            is_machine = shared.members[0].is_machine
        else:
            shared = SharedStub(self._connection or StubConnection(self._endpoint, self._command))
            is_machine = not self._command and places is None and shared.connection.open().is_machine
        if places is not None:
            machine = partial(ProbedMachine, facts=self._facts, bare=plan.machine)
            return StubSession(job, places, shared, machine)
        assert job.resolved is not None, "the plan refuses what has no module"
        if is_machine:
            return StubSession(job, job.resolved, shared, ProbedPrograms)
        process = partial(ProbedProcess, core_directory=self._core_directory)
        return StubSession(job, job.resolved, shared, process)
