"""Process that a stub serves, as the target of a program. It can be left to a debugger."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import no_core_notice, written_notice
from dprobes.engines.gdb.stub_context import StubContext
from dprobes.engines.gdb.stub_member import Inferior, StubMember
from dprobes.engines.gdb.stub_process import CodeFiles, StubProcess
from dprobes.engines.gdb.stub_program import CallStacks
from dprobes.engines.gdb.stub_stepper import Stepper
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.engines.gdb.unmet_needs import refuse_for_process, refuse_lacking_registers
from dprobes.engines.hits.probe_hits import CORE_DUMP, HANDING_OVER, HandlerRunner
from dprobes.errors import EngineError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.engines.engine_interface import Job, Notice
    from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_member import RunEvents
    from dprobes.engines.gdb.stub_program import StubProgram
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.engines.gdb.stub_requests import Stub
    from dprobes.engines.gdb.stub_transports import DebuggerRelay
    from dprobes.engines.hits.probe_hits import Handled
    from dprobes.resolve.probepoints import ResolvedModule

__all__ = ["ProbedProcess"]


class ProbedProcess(StubMember):
    """A process; its core files are written into ``core_directory``."""

    _resolved: ResolvedModule
    _process: StubProcess
    _code_files: CodeFiles | None = None

    def __init__(
        self, job: Job, resolved: ResolvedModule, program: StubProgram, events: RunEvents, core_directory: str
    ) -> None:
        super().__init__(job, resolved, program, events)
        self._core_directory = core_directory

    def kernel(self) -> GuestKernel:
        """Raise ``EngineError``: a process has no kernel."""
        name = self._target.stub.name
        raise EngineError(f"the stub {name} serves a process, and not for a machine with a kernel")

    def find(self, stub: Stub, tell: Callable[[str], None], warn: Callable[[str], None]) -> Inferior:
        """
        Return the process that the stub debugs, with its stepper and the context of handlers.

        ``tell`` and ``warn`` take lines for the restorer and warnings for the user.
        """
        architecture, processor = self.architecture, self._processor
        default = processor.default_description()
        target = StubTarget(stub, architecture.byte_order, default, processor.breakpoint, tell)
        context = StubContext(target, architecture, processor, warn)
        stepper = Stepper(target, processor, architecture, context.names)
        return Inferior(target, context, HandlerRunner(context), stepper)

    def begin(self) -> None:
        """
        Find the files of the process, and insert the breakpoints. A process that has not begun first runs to its entry.

        Raise ``EngineError`` if the scope names a process, because the stub serves only one.
        """
        target, stub, program = self._target, self._target.stub, self._job.program
        if self._job.scope.pid is not None:
            raise EngineError(f"the stub {stub.name} serves one process: leave out -p")
        process = self._process = StubProcess(target, self._processor, self._resolved)
        self._context.user, self._context.name = process.uid, process.name
        registers, names = target.registers(stub.current_thread()), self._context.names
        refuse_for_process(program, self.architecture)
        refuse_lacking_registers(program, self.architecture, names, registers, stub.name)
        self.program.stacks = CallStacks(target, self._processor, self._resolved, names, process.headers)
        if self._job.images is not None:
            name, module = os.fsdecode(process.name), self._resolved.module.elf
            self._code_files = CodeFiles(target, self._job.images, module, process.pid, name, process.program)
        target.tell(f"process {target.process}")
        self.program.reach.pids.add(process.pid)
        if (place := process.linker_place) is not None:
            process.insert(place)
        self.place_probes()

    def place_probes(self) -> None:
        """Insert the probepoints where the module is loaded now, unless they are inserted."""
        files = self._process.loaded_files()
        if self._code_files is not None:
            self._code_files.look(files)
        bias = self._process.bias_of_module(files)
        assert self.program.stacks is not None, "it was set after the process"
        self.program.stacks.forget(bias)
        if bias != self.placed.bias:
            self._returns.clear()
            self.events.report(self.placed.move(bias), self._process.pid)

    @property
    def own_places(self) -> set[int]:
        """Address in the dynamic linker at which it reports that files were loaded or will be unloaded (``r_brk``)."""
        return set() if self._process.linker_place is None else {self._process.linker_place}

    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Select the thread whose registers and memory the handlers access."""
        self._context.select(thread, registers, self._process.pid)

    def is_handed_over(self, handled: Sequence[Handled[StubProgram]]) -> bool:
        """Return whether a handler hands the process to the debugger; warn of further exits, which have no effect."""
        codes = [each.outcome.exit_code for each in handled if each.outcome is not None]
        handing_over = [code for code in codes if code in HANDING_OVER]
        first = handing_over[0] if handing_over else CORE_DUMP
        for code in handing_over[1:]:
            self.events.warn(
                f"'exit {code}' was not carried out in process {self._process.pid}: another handler ended with "
                f"'exit {first}' at the same moment"
            )
        return first != CORE_DUMP

    def hand_over(self, at: int, where: str, registers: Registers) -> DebuggerRelay:  # noqa: ARG002 - as they are
        """Remove all breakpoints, and return the relay through which a debugger takes over."""
        self._target.clear()
        relay = self._target.stub.relay()
        text = f"the process is stopped at {at:#x} ({where}) until a debugger takes over, or the run is ended"
        self.events.warn(text, f"gdb {self._process.program} -ex 'target remote {relay.path}'")
        return relay

    def write_core(self, at: int, registers: Registers) -> None:
        """Write the core file of the process, whose thread has stopped at ``at``, and report its path."""
        self.events.add(self._write_core(at, registers))

    def _write_core(self, at: int, registers: Registers) -> Notice:
        from dprobes.engines.gdb.stub_core import StubCore
        from dprobes.platform.core.core_writer import create_core_file

        process, thread = self._process, self._context.thread
        name = os.fsdecode(process.name)
        path = os.path.join(self._core_directory, f"core.dprobes.{process.pid}")
        try:
            path, output = create_core_file(path)
        except OSError as error:
            return no_core_notice(process.pid, name, path, reason_of(error))
        core = StubCore(self._target, self._processor, self.architecture.name, process, thread, registers, at)
        is_complete = False
        try:
            size = core.write(output)
            is_complete = True
        except OSError as error:
            return no_core_notice(process.pid, name, path, reason_of(error))
        finally:
            os.close(output)
            if not is_complete:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return written_notice(process.pid, name, path, size)
