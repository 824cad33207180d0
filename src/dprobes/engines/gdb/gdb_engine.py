"""The engine: it probes what a stub stands for, whose files are on this machine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines import engine_interface
from dprobes.engines.gdb.machine.guest_kernel import described_processor, visited_kernel
from dprobes.engines.gdb.machine.guest_processes import KernelFacts
from dprobes.engines.gdb.machine.machine_programs import AnywhereSession, BareMachine, MachinePlaces, ProgramSession
from dprobes.engines.gdb.machine.machine_session import MachineSession
from dprobes.engines.gdb.shared_stub import SharedStub
from dprobes.engines.gdb.stub_connection import StubConnection
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.gdb.stub_session import StubSession
from dprobes.errors import EngineError
from dprobes.resolve.probed_space import MACHINE
from dprobes.rpn.instruction_encoding import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.engine_options import EngineOptions
    from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
    from dprobes.engines.gdb.stub_program import Resolved
    from dprobes.resolve.local_module import Compiled
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.running_kernel import RunningKernel

__all__ = ["GdbEngine"]


class GdbEngine(engine_interface.Engine):
    """Run handlers at hits of a target that the stub at the endpoint of the scope stops."""

    name = "gdb"

    def __init__(self, options: EngineOptions, scope: engine_interface.Scope) -> None:
        assert scope.endpoint is not None, "the registry says that this engine takes endpoints only"
        self._endpoint, self._command = scope.endpoint, scope.command
        self._core_directory = options.core_directory
        self._present = options.present
        self._kernel: Resolved | None = None
        self._facts: KernelFacts | None = None
        self._whatever_runs: BareMachine | None = None
        """The machine of a program that is about no code in particular."""
        self._visited: RunningKernel = BareMachine()
        self._may_connect = not (options.replaceable and (scope.command or scope.endpoint.startswith("|")))
        self._connection: StubConnection | None = None

    def check(self, scope: engine_interface.Scope, options: EngineOptions) -> None:  # noqa: ARG002 - it is known already
        """Raise ``EngineError`` if the stub is taken; who inserts programs for others starts no commands."""
        if not self._may_connect:
            raise EngineError(
                "the probe manager starts no command that has a stub",
                hint="start it yourself, and name the stub: HOST:PORT or the path of a socket",
            )

    @contextlib.contextmanager
    def processor(self, program: Program) -> Iterator[Architecture | None]:
        """
        Return that of the machine as such; others' kernels are found on one like this machine's only.

        The connection is that of the run: a machine that stands at its reset stays there until then.
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
    def kernel(self, program: Program) -> Iterator[RunningKernel]:
        """Hold the machine still meanwhile, and return its kernel; raise ``EngineError`` if there is none."""
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

    def _shared(self, sessions: Sequence[object]) -> SharedStub[StubSession] | None:
        """Return what those of some sessions share that are at the same stub; None if there are none."""
        stubs = [each.shared for each in sessions if isinstance(each, StubSession)]
        return next((each for each in stubs if each.connection.endpoint == self._endpoint and each.is_open), None)

    @property
    def records_kernel(self) -> RunningKernel | None:
        """The machine's kernel, None for a process."""
        return self._visited if self._kernel is not None else None

    def prepare(self, compiled: Compiled) -> None:
        """Take the places; raise ``EngineError`` if the module is not on this machine, or of no processor for it."""
        if compiled.kernel is not None:
            self._kernel = compiled.kernel
            return
        if compiled.everywhere:
            image = encode(compiled.program, compiled.architecture)
            self._kernel = MachinePlaces(compiled.architecture, image, compiled.everywhere)
            self._visited = self._whatever_runs = BareMachine()
            return
        if compiled.obstacle is not None:
            raise EngineError(compiled.obstacle.message, hint=compiled.obstacle.hint)
        if compiled.resolved is None:
            raise EngineError(f"the gdb engine needs the module '{compiled.program.name}' on this machine")
        if processor_of(compiled.architecture) is None:
            raise EngineError(f"the gdb engine does not know how stubs describe {compiled.architecture.name}")
        self._resolved = compiled.resolved

    def run(self, job: engine_interface.Job) -> StubSession:
        """
        Return the session; entering it stops the target until probepoints are there.

        What a stub stands for only it knows. So it is asked at once, unless a command has to start it: that is a
        process then. A session that is at the stub already is joined.
        """
        shared = self._shared(job.beside)
        if shared is not None:
            is_machine = isinstance(shared.members[0], MachineSession)
        else:
            shared = SharedStub[StubSession](self._connection or StubConnection(self._endpoint, self._command))
            is_machine = not self._command and self._kernel is None and shared.connection.open().is_machine
        if self._kernel is not None and self._whatever_runs is not None:
            return AnywhereSession(job, self._kernel, shared, self._whatever_runs)
        if self._kernel is not None:
            return MachineSession(job, self._kernel, shared, self._facts)
        if is_machine:
            return ProgramSession(job, self._resolved, shared)
        return StubSession(job, self._resolved, shared, self._core_directory)
