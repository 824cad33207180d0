"""The run of a program on a machine behind a stub: its processors are what stops, and its kernel what is probed."""

from __future__ import annotations

import math
import os
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dprobes.engines.engine_interface import Notice
from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
from dprobes.engines.gdb.machine.guest_processes import AddressSpaces, TaskReader
from dprobes.engines.gdb.machine.guest_stacks import KernelStacks, ProgramStacks, UnwindTables
from dprobes.engines.gdb.machine.machine_context import MachineContext
from dprobes.engines.gdb.machine.machine_target import MachineTarget
from dprobes.engines.gdb.machine.privileged_registers import Executor, Monitor, Privileged, fault_entries
from dprobes.engines.gdb.remote_protocol import Stopped, ThreadId
from dprobes.engines.gdb.stub_session import StubSession
from dprobes.engines.gdb.stub_stepper import EMULATED, Emulator
from dprobes.engines.gdb.unmet_needs import no_machine, refuse_lacking
from dprobes.engines.hits.probe_hits import DEBUGGER
from dprobes.errors import EngineError
from dprobes.resolve.kernel_places import ResolvedKernel
from dprobes.resolve.probe_state import ProbeState
from dprobes.resolve.probed_space import ANYWHERE, MACHINE
from dprobes.resolve.probepoints import ProbeKind
from dprobes.rpn.rpn_program import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.engine_interface import Job
    from dprobes.engines.gdb.machine.guest_processes import KernelFacts
    from dprobes.engines.gdb.remote_protocol import StopReply
    from dprobes.engines.gdb.shared_stub import SharedStub
    from dprobes.engines.gdb.stub_program import Resolved, StubProbe, StubProgram
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor, TargetDescription
    from dprobes.engines.hits.probe_hits import Handled
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["MachineSession", "SampleClocks"]

# The samplers of a program on a machine behind a stub: when each of them wants the machine to stop.
#
# One stop is a sample on each processor. It takes milliseconds, so a clock that has become due several times meanwhile
# is due once.


class SampleClocks:
    """The clocks of those ``probes`` that are samplers; times are in seconds, of one clock that never goes back."""

    def __init__(self, probes: Sequence[StubProbe], probepoints: Sequence[Probepoint]) -> None:
        self._periods = {
            probe: 1 / each.clock.frequency
            for probe, each in zip(probes, probepoints, strict=True)
            if each.kind is ProbeKind.SAMPLER
        }
        self._due: dict[StubProbe, float] = {}

    def __bool__(self) -> bool:
        """Whether there are samplers."""
        return bool(self._periods)

    def next(self, now: float) -> float:
        """Return when the next one is due, which may be past; infinity if none will ever be."""
        return min((self._due_at(probe, now) for probe in self._active()), default=math.inf)

    def take(self, now: float) -> list[StubProbe]:
        """Return those that are due; they are so again a period later."""
        due = [probe for probe in self._active() if self._due_at(probe, now) <= now]
        for probe in due:
            late = now - self._due[probe]
            self._due[probe] = now + self._periods[probe] - late % self._periods[probe]
        return due

    def _active(self) -> list[StubProbe]:
        return [probe for probe in self._periods if probe.state is ProbeState.ACTIVE]

    def _due_at(self, probe: StubProbe, now: float) -> float:
        """Return when a sampler is due: a period after it was looked at first."""
        return self._due.setdefault(probe, now + self._periods[probe])


_TRAP = 5
"""How GDB numbers SIGTRAP (include/gdb/signals.def)."""
_FAULT = 11
"""SIGSEGV, as which the session takes the fault of an instruction."""
_CRASH_DUMP = 2
"""The operand of ``exit`` that asks for the memory of the machine."""


def new_path(path: Path) -> Path:
    """Return a path at which there is nothing: the one that is given, or that with a number behind it."""
    number = 0
    found = path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found


class _Processes(set[int]):
    """The processes that a program is about, of which that one is asked for that runs."""

    def __init__(self, is_concerned: Callable[[], bool]) -> None:
        super().__init__()
        self._is_concerned = is_concerned

    def __contains__(self, _: object) -> bool:
        return self._is_concerned()


class MachineSession(StubSession):
    """One run, on a machine; ``facts`` are None where no kernel is known."""

    _target: MachineTarget
    _context: MachineContext

    def __init__(
        self, job: Job, resolved: Resolved, shared: SharedStub[StubSession], facts: KernelFacts | None
    ) -> None:
        super().__init__(job, resolved, shared)
        self._emulator: Emulator | None = None
        self._fault_entries: frozenset[int] = frozenset()
        """Where the kernel begins to see to the fault of an instruction."""
        self._facts = facts
        self._pid, self._follows = job.scope.pid, job.scope.follow
        self._program.reach.pids = _Processes(self._is_concerned)
        self._code_base = 0
        """Where the code begins that the last processor which came to a breakpoint counts from."""
        self._processors: Sequence[ThreadId] = ()
        self._clocks = SampleClocks(self._program.probes, resolved.probepoints)

    def _target_of(
        self, order: Literal["little", "big"], default: TargetDescription, tell: Callable[[str], None]
    ) -> MachineTarget:
        return MachineTarget(self._stub, order, default, tell)

    def _context_of(self, architecture: Architecture, processor: StubProcessor) -> MachineContext:
        return MachineContext(self._target, architecture, processor, self._shared.warn)

    def begin(self) -> None:
        """Get to know the machine, and insert the breakpoints."""
        reply = self._target.reason()
        thread = reply.thread if isinstance(reply, Stopped) else None
        thread = thread or self._stub.current_thread()
        self._target.process = 0 if thread is None else thread.process
        self._target.tell(f"process {self._target.process}")
        if self._stub.is_process:
            raise no_machine(self._stub.name)
        described = self._target.description.architecture
        if described and described not in self._processor.descriptions:
            name = self._resolved.architecture.name
            raise EngineError(f"the stub {self._stub.name} stands for a processor '{described}', not for {name}")
        self._target.hold_interrupts()
        self._learn(thread)
        self._processors = self._stub.threads()
        self._target.processors = len(self._processors)
        if self._facts is not None:
            if self._facts.left_out:
                self._warn(self._facts.left_out, None)
            self._target.kernel_tables, self._target.kernel_paging = self._facts.tables, self._facts.paging
            self._context.tasks = TaskReader(self._target, self._facts, len(self._processors))
            self._context.stacks_of_kernel = self._kernel_stacks(self._facts)
            self._program.stacks_of_programs = self._program_stacks(self._facts)
        monitor, is_x86 = Monitor(self._stub), self.architecture.name in EMULATED
        if is_x86:
            self._emulator = Emulator(self._target, self._context.word_size)
        if is_x86 and monitor.is_there:
            executor, privileged = self._executor(), self._context.privileged
            if privileged is None or executor is not None:
                privileged = self._context.privileged = Privileged(self._target, monitor, executor)
            if self._facts is not None:
                base, limit = privileged.table("idt", thread)
                self._fault_entries = fault_entries(self._target.read, base, limit)
        self._refuse_lacking(self._target.registers(thread))
        self._warn_of_lost_accesses()
        self.place_probes()

    def _warn_of_lost_accesses(self) -> None:
        """Warn of watchpoints that may miss accesses; how many they miss is unknown."""
        accesses = {each.watchpoint for each in self._job.program.definitions}
        if len(self._processors) > 1 and not accesses <= {None, Access.EXECUTE}:
            self._warn(
                f"of accesses that several of the {len(self._processors)} processors make at once the stub "
                f"{self._stub.name} tells one: watchpoints count at least what is shown",
                "to count all, give the machine one processor (-smp 1)",
            )

    def kernel(self) -> GuestKernel:
        """Return the kernel behind the stub, which stands still; raise ``EngineError`` if there is none."""
        return GuestKernel(self._target, self._target.registers(self._stub.current_thread()))

    def _learn(self, thread: ThreadId | None) -> None:
        """Get to know what was not known before there was a connection."""

    def _leave_core(
        self,
        handled: Sequence[Handled[StubProgram]],
        at: int,  # noqa: ARG002 - there are no cores of machines
        registers: Registers,  # noqa: ARG002
    ) -> Sequence[Handled[StubProgram]]:
        return handled

    def _place_of(self, registers: Registers) -> int:
        """Return the linear address of the instruction that a processor is at."""
        pc = registers[self._processor.pc]
        if self._facts is None and self._context.privileged is not None:
            return pc + self._context.privileged.code_base(self._context.thread)
        return pc

    def _kernel_stacks(self, facts: KernelFacts) -> KernelStacks:
        def is_entered(address: int) -> bool:
            symbol = facts.symbols.covering(address)
            return symbol is not None and symbol.address == address

        return KernelStacks(self._target.word, UnwindTables(self._target, facts).entry_at, is_entered)

    def _program_stacks(self, facts: KernelFacts) -> ProgramStacks | None:
        if facts.spaces is None:
            return None
        spaces = AddressSpaces(self._target, facts, facts.spaces)
        return ProgramStacks(spaces, self._resolved.architecture, self._context.names, self._files)

    @property
    def _files(self) -> tuple[ElfFile, ...]:
        """The files that are known, of those that programs of the machine map."""
        return ()

    def _executor(self) -> Executor | None:
        facts = self._facts
        if facts is None or facts.tables is None:
            return None
        return Executor(self._target, facts.text, facts.tables, facts.paging)

    def _refuse_lacking(self, registers: Registers) -> None:
        refuse_lacking(
            self._job.program,
            self._resolved.architecture,
            self._context.names,
            registers,
            self._stub.name,
            has_monitor=self._context.privileged is not None,
            has_physical=self._target.has_physical,
            has_kernel=self._facts is not None,
            has_programs=self._program.stacks_of_programs is not None,
        )

    def _bias(self) -> int:
        return 0

    @property
    def _process_id(self) -> int:
        return 0

    @property
    def own_places(self) -> set[int]:
        """Nowhere: a kernel comes and goes as a whole."""
        return set()

    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Have handlers speak of a processor."""
        self._context.select(thread, registers, 0)

    def _is_concerned(self) -> bool:
        return self._pid is None or self._is_in_scope(self._pid)

    def _is_in_scope(self, pid: int) -> bool:
        """Return whether a process runs, or one that it has started."""
        context = self._context
        if context.pid() == pid or context.tasks is None or not self._follows:
            return context.pid() == pid
        return pid in context.tasks.ancestors(context.task())

    # Samples

    @property
    def due(self) -> float:
        """When a sampler will want the machine to stop."""
        return self._clocks.next(time.monotonic())

    @property
    def wants_stop(self) -> bool:
        """Whether the machine has to stop for what was asked, or for a sample."""
        return super().wants_stop or self.due <= time.monotonic()

    def turn(self) -> bool:
        """Wait for the machine to stop, for a short time, and see to that; return whether it did."""
        has_stopped = super().turn()
        if has_stopped and any(each.due < math.inf for each in self._shared.members):
            self.forget_request()  # QEMU forgets an interrupt that comes when the machine has just stopped
        return has_stopped

    def take_samples(self) -> None:
        """Run the handlers of samplers that are due, on each processor."""
        due = self._clocks.take(time.monotonic())
        for thread in self._processors if due else ():
            registers = self._target.registers(thread)
            self.select(thread, registers)
            if not self._is_sampled(registers[self._processor.pc]):
                continue
            wanted = [probe for probe in due if probe.number not in self._removals]
            outcome = self._runner.run([(probe, self._placed.points[probe]) for probe in wanted])
            if self._hand_over(outcome, registers[self._processor.pc], registers):
                self._shared.is_left = True
                return
            self._target.write_back(thread, registers)
            self._count(outcome)

    def _is_sampled(self, at: int) -> bool:
        """Return whether the instruction that a processor comes to is in what the program is about."""
        if self._job.program.name in (ANYWHERE, MACHINE):
            return True
        return self._context.is_in_kernel and (self._code is None or at in self._code)

    @cached_property
    def _code(self) -> range | None:
        """Where the code of the kernel's module is that the program is about; None if it is about the whole kernel."""
        resolved = self._resolved
        if not isinstance(resolved, ResolvedKernel) or not resolved.module.name:
            return None
        loaded = resolved.module.kernel.modules[resolved.module.name]
        return range(loaded.address, loaded.address + loaded.size)

    # What handlers want to be done with the machine

    def _hand_over(
        self,
        handled: Sequence[Handled[StubProgram]],
        at: int,  # noqa: ARG002 - a program counter, which may count from a segment's base
        registers: Registers,
    ) -> bool:
        """Write a dump, or leave the machine as it stands to a debugger; then return True."""
        codes = {each.outcome.exit_code for each in handled if each.outcome is not None}
        if _CRASH_DUMP in codes:
            self._dump([each.probe for each in handled if each.outcome and each.outcome.exit_code == _CRASH_DUMP])
        if DEBUGGER not in codes:
            return False
        where = next((self._shared.owner(each.probe).probes[each.probe.number].where for each in handled), "")
        self._count(handled)
        self._target.write_back(self._context.thread, registers)
        place, command = f"{self._place_of(registers):#x} ({where})", f"-ex 'target remote {self._stub.name}'"
        if len(self._processors) > 1 and self._context.thread in self._processors:
            number = self._processors.index(self._context.thread)
            place = f"{place} on CPU {number}"
            command = f"{command} -ex 'thread {number + 1}'"  # it shows the first one, whichever has stopped
        self._target.leave_standing()
        self._warn(f"the machine stands still at {place}", f"gdb {command}")
        return True

    def _dump(self, probes: Sequence[StubProbe]) -> None:
        """Have QEMU write the machine's memory, as it is before the probed instruction; the probepoints are removed."""
        path = new_path(Path("vmcore").absolute())
        privileged = self._context.privileged
        if privileged is None:
            self._warn(f"the stub {self._stub.name} has no monitor that could write a dump", None)
        else:
            try:
                warning = privileged.monitor.dump(str(path))
                message = f"the machine's memory is in '{path}', where its stub runs"
                told = f"its monitor says: {warning}" if warning else None
                self._events.append(Notice(message, told, is_warning=False))
            except EngineError as error:
                self._warn(error.message, error.hint)
        for probe in probes:
            self._shared.owner(probe).remove_soon(probe.number)

    # Calls belong to tasks, which may go on on another processor

    def see_returns(self, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Run the handlers of returns to an address."""
        super().see_returns(at, self._caller(thread, at), registers)

    def see_entry(self, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Await the returns of a function that is entered."""
        super().see_entry(at, self._caller(thread, at), registers)

    def _caller(self, thread: ThreadId | None, at: int) -> ThreadId | None:
        """Return who calls and returns, by its task; the idle tasks are one for each processor."""
        if at not in self._placed.entries and at not in self._returns.addresses:
            return thread
        return ThreadId(0, self._context.task()) if self._context.task() else thread

    def _correct_pc(self, reply: Stopped, registers: Registers, known: set[int] | frozenset[int]) -> int | None:
        """
        Return the breakpoint that a processor has come to; its program counter may count from a segment's base.

        That is the last one as long as there is a breakpoint then: to ask the monitor takes longer than all else.
        """
        if reply.signal != _TRAP:
            return None
        if self._context.privileged is not None:
            self._context.privileged.forget()
        self._context.thread = reply.thread
        pc = registers[self._processor.pc]
        if pc + self._code_base not in known:
            self._code_base = self._place_of(registers) - pc
        at = pc + self._code_base
        return at if at in known else None

    def _carries_out(self, at: int, registers: Registers) -> bool:
        raw = self._instruction_at(at)
        watches = any(each.watches for each in self._shared.members)
        if raw is None or watches or self._emulator is None:
            return False
        return self._emulator.carry_out(raw, registers)

    def _goes_on_before(self, at: int, thread: ThreadId | None, registers: Registers) -> bool:  # noqa: ARG002
        return False  # who runs is read from memory

    def _pass(self, at: int, thread: ThreadId | None, registers: Registers) -> StopReply:
        """Have the instruction under a breakpoint executed; return what came of that."""
        self._target.write_back(thread, registers)
        pc = self._processor.pc
        self._target.remove(at, self._breakpoint_size)
        reply = self._target.step(thread, registers[pc], pc, is_exact=False)
        if isinstance(reply, Stopped) and at in self._needed:
            self._target.insert_again(at, self._breakpoint_size, self._processor.breakpoint)
        if self._fault_entries and isinstance(reply, Stopped):
            behind = self._target.registers(thread)[pc]
            if behind in self._fault_entries and at not in self._fault_entries:
                return Stopped(_FAULT, thread, {})  # it is executed once more when that was seen to, or never
        return reply

    def _after_step(self, reply: StopReply, thread: ThreadId | None) -> bool:  # noqa: ARG002 - no signals are passed
        """Let the machine go on behind a hit; return whether the run is over instead."""
        if not isinstance(reply, Stopped) or self._shared.is_left or self._may_end():
            return True
        self._shared.resume()
        return False

    def _instruction_at(self, at: int) -> bytes | None:
        """Return the instruction under a breakpoint if it is still there: the kernel changes its code as it runs."""
        raw = self._raw(at)
        return raw if raw and self._target.read(at, len(raw)) == raw else None

    # What others ask

    def cpu_variables(self) -> list[list[int]]:
        """Return the variables of all CPUs."""
        with self._lock:
            return self._program.variables_of_cpus(len(self._processors))

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables to zero."""
        super().reset_variables(first, last)
        with self._lock:
            self._program.reset_variables_of_cpus(first, last)
