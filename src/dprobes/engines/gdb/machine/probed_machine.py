"""A whole machine behind a stub as the target of a program: all its processors stop at a hit."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Notice
from dprobes.engines.gdb.machine.guest_kernel import WATCHPOINTS_MAX, GuestKernel
from dprobes.engines.gdb.machine.guest_processes import AddressSpaces, KernelFacts, TaskReader
from dprobes.engines.gdb.machine.guest_stacks import KernelStacks, ProgramStacks, UnwindTables
from dprobes.engines.gdb.machine.machine_context import MachineContext
from dprobes.engines.gdb.machine.machine_target import MachineTarget
from dprobes.engines.gdb.machine.privileged_registers import Executor, Monitor, Privileged, fault_entries
from dprobes.engines.gdb.remote_protocol import SIGSEGV, SIGTRAP, Stopped, ThreadId
from dprobes.engines.gdb.stub_member import Inferior, Sample, StubMember
from dprobes.engines.gdb.stub_stepper import EMULATED, Emulator, Stepper
from dprobes.engines.gdb.unmet_needs import no_machine, refuse_lacking
from dprobes.engines.hits.probe_hits import DEBUGGER, HandlerRunner
from dprobes.errors import EngineError, TargetError
from dprobes.resolve.kernel_places import ResolvedKernel
from dprobes.resolve.probepoints import ANYWHERE, MACHINE, ProbeKind, ProbeState
from dprobes.rpn.rpn_program import Access
from dprobes.target.kernel.kernel_symbols import Kallsyms, KernelSymbol
from dprobes.target.kernel.running_kernel import RunningKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.engine_interface import Job
    from dprobes.engines.gdb.remote_protocol import StopReply
    from dprobes.engines.gdb.stub_member import RunEvents
    from dprobes.engines.gdb.stub_program import Resolved, StubProbe, StubProgram
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor
    from dprobes.engines.gdb.stub_requests import Stub
    from dprobes.engines.hits.probe_hits import Handled
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["BareMachine", "MachinePlaces", "ProbedMachine", "SampleClocks"]

_CRASH_DUMP = 2
"""Operand of ``exit`` that requests a dump of the machine's memory."""


class SampleClocks:
    """
    Clocks of the samplers among ``probes``; times are in seconds of a monotonic clock.

    A stop takes milliseconds, and all processors are sampled at a stop. If a clock is due several times during a stop,
    it counts once.
    """

    def __init__(self, probes: Sequence[StubProbe], probepoints: Sequence[Probepoint]) -> None:
        self._periods = {
            probe: 1 / each.sampler.number
            for probe, each in zip(probes, probepoints, strict=True)
            if each.kind is ProbeKind.SAMPLER
        }
        self._due: dict[StubProbe, float] = {}

    def __bool__(self) -> bool:
        """Return whether there are samplers."""
        return bool(self._periods)

    def next(self, now: float) -> float:
        """Return the monotonic time in seconds at which the next sampler is due, or infinity if none is active."""
        return min((self._due_at(probe, now) for probe in self._active()), default=math.inf)

    def take(self, now: float) -> list[StubProbe]:
        """Return the samplers that are due; each is due again a period later."""
        due = [probe for probe in self._active() if self._due_at(probe, now) <= now]
        for probe in due:
            late = now - self._due[probe]
            self._due[probe] = now + self._periods[probe] - late % self._periods[probe]
        return due

    def _active(self) -> list[StubProbe]:
        return [probe for probe in self._periods if probe.state is ProbeState.ACTIVE]

    def _due_at(self, probe: StubProbe, now: float) -> float:
        """Return the monotonic time in seconds at which a sampler is due: first, one period after the first call."""
        return self._due.setdefault(probe, now + self._periods[probe])


class MachineStepper(Stepper):
    """Executor of instructions under breakpoints on a machine, whose code may change while it runs."""

    runs_ahead = False  # the current process is read from memory

    def __init__(
        self, target: MachineTarget, processor: StubProcessor, architecture: Architecture, context: MachineContext
    ) -> None:
        super().__init__(target, processor, architecture, context.names)
        self._context = context
        if not isinstance(self._emulator, Emulator):
            self._emulator = None
        self.has_kernel = False
        """True if the kernel is known: addresses are then linear, and the base of the code segment is 0."""
        self.fault_entries: frozenset[int] = frozenset()
        """Addresses of the first instructions of the kernel's fault handlers."""
        self._code_base = 0
        """Base of the code segment of the processor that last reached a breakpoint."""

    def place_of(self, registers: Registers) -> int:
        """Return the linear address of the instruction that a processor is at."""
        pc = registers[self.processor.pc]
        if not self.has_kernel and self._context.privileged is not None:
            return pc + self._context.privileged.code_base(self._context.thread)
        return pc

    def breakpoint_of(self, reply: Stopped, registers: Registers, known: Container[int]) -> int | None:
        """
        Return the breakpoint of ``known`` that a processor has reached, or None if it stopped for another reason.

        The program counter may be relative to a segment's base. The last base is tried first. The monitor is queried
        only if no breakpoint is there, because a query takes longer than all other steps.
        """
        if reply.signal != SIGTRAP:
            return None
        if self._context.privileged is not None:
            self._context.privileged.forget()
        self._context.thread = reply.thread
        pc = registers[self.processor.pc]
        if pc + self._code_base not in known:
            self._code_base = self.place_of(registers) - pc
        at = pc + self._code_base
        return at if at in known else None

    def carries_out(self, at: int, raw: bytes | None, registers: Registers) -> bool:
        """
        Emulate an instruction if memory still contains it; return False if it was not emulated.

        The kernel changes its code while it runs.
        """
        is_there = bool(raw) and self._target.read(at, len(raw or b"")) == raw
        return is_there and super().carries_out(at, raw, registers)

    def step_over(
        self,
        at: int,
        raw: bytes | None,  # noqa: ARG002 - for stubs without steps
        thread: ThreadId | None,
        registers: Registers,
        needed: Container[int],
    ) -> StopReply:
        """
        Execute the instruction at the breakpoint ``at``, and return the stop after it.

        The breakpoint is removed during the step, and inserted again if ``at`` is in ``needed``. If the processor is
        then in a fault handler, the stop has SIGSEGV.
        """
        self._target.write_back(thread, registers)
        pc = self.processor.pc
        self._target.remove(at)
        reply = self._target.step(thread, registers[pc], pc, is_exact=False)
        if isinstance(reply, Stopped) and at in needed:
            self._target.insert_again(at)
        if self.fault_entries and isinstance(reply, Stopped):
            after = self._target.registers(thread)[pc]
            if after in self.fault_entries and at not in self.fault_entries:
                return Stopped(SIGSEGV, thread, {})  # it is executed again after the fault is handled, or never
        return reply


def new_path(path: Path) -> Path:
    """Return ``path``, or if it exists, the first path with a number appended that does not exist."""
    number = 0
    found = path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found


class _Processes(set[int]):
    """Process ids in the scope of a program; ``in`` always tests the current process, whatever the id."""

    def __init__(self, is_concerned: Callable[[], bool]) -> None:
        super().__init__()
        self._is_concerned = is_concerned

    def __contains__(self, _: object) -> bool:
        return self._is_concerned()


class ProbedMachine(StubMember):
    """
    A machine as a target; ``facts`` are None if no kernel is known in advance.

    ``bare`` is the machine of a program about the machine itself. It receives the kernel's symbols if there is a
    kernel.
    """

    is_machine = True
    _target: MachineTarget
    _context: MachineContext
    _stepper: MachineStepper

    def __init__(
        self,
        job: Job,
        resolved: Resolved,
        program: StubProgram,
        events: RunEvents,
        facts: KernelFacts | None = None,
        bare: BareMachine | None = None,
    ) -> None:
        super().__init__(job, resolved, program, events)
        self._facts, self._bare = facts, bare
        self._pid, self._follows = job.scope.pid, job.scope.follow
        program.reach.pids = _Processes(self._is_concerned)
        self._processors: Sequence[ThreadId] = ()
        self._clocks = SampleClocks(program.probes, resolved.probepoints)

    def find(self, stub: Stub, tell: Callable[[str], None], warn: Callable[[str], None]) -> Inferior:
        """
        Return the machine that the stub emulates or debugs, with its stepper and the context of handlers.

        ``tell`` and ``warn`` take lines for the restorer and warnings for the user.
        """
        architecture, processor = self.architecture, self._processor
        default = processor.default_description()
        target = MachineTarget(stub, architecture.byte_order, default, processor.breakpoint, tell)
        context = MachineContext(target, architecture, processor, warn)
        stepper = MachineStepper(target, processor, architecture, context)
        return Inferior(target, context, HandlerRunner(context), stepper)

    def begin(self) -> None:
        """Identify the machine and insert the breakpoints; raise ``EngineError`` for a machine of another processor."""
        target, stub = self._target, self._target.stub
        reply = target.reason()
        thread = (reply.thread if isinstance(reply, Stopped) else None) or stub.current_thread()
        target.process = 0 if thread is None else thread.process
        target.tell(f"process {target.process}")
        if stub.is_process:
            raise no_machine(stub.name)
        described = target.description.architecture
        if described and described not in self._processor.descriptions:
            raise EngineError(
                f"the stub {stub.name} serves a processor '{described}', not for {self.architecture.name}"
            )
        target.hold_interrupts()
        self._learn(thread)
        self._processors = stub.threads()
        target.processors = len(self._processors)
        if self._facts is not None:
            self._know(self._facts)
        self._find_monitor(thread)
        self._refuse_lacking(target.registers(thread))
        self._warn_of_lost_accesses()
        self.place_probes()

    def _learn(self, thread: ThreadId | None) -> None:
        """
        Look for a kernel in the stopped machine, for a program whose module is not a kernel.

        If there is none, handlers run without symbols and processes. It is searched for on this connection, because
        many stubs accept only one.
        """
        if self._bare is not None:
            # Such a program needs no kernel to find its probepoints. It asks on the connection of the run, because many
            # stubs accept only one.
            try:
                kernel = GuestKernel(self._target, self._target.registers(thread))
                self._facts = KernelFacts.of(kernel)
            except EngineError:  # firmware, or another system
                return
            self._bare.know(kernel)

    def _know(self, facts: KernelFacts) -> None:
        """Use facts about the machine's kernel, which give access to tasks, stacks and programs."""
        if facts.left_out:
            self.events.warn(facts.left_out)
        target = self._target
        target.kernel_tables, target.kernel_paging = facts.tables, facts.paging
        self._context.tasks = TaskReader(target, facts, len(self._processors))

        def is_entered(address: int) -> bool:
            symbol = facts.symbols.covering(address)
            return symbol is not None and symbol.address == address

        entry_at = UnwindTables(target, facts).entry_at
        self._context.stacks_of_kernel = KernelStacks(target.word, entry_at, is_entered)
        self.program.stacks_of_programs = None
        if facts.spaces is not None:
            spaces = AddressSpaces(target, facts, facts.spaces)
            names = self._context.names
            self.program.stacks_of_programs = ProgramStacks(spaces, self.architecture, names, self._files)

    def _find_monitor(self, thread: ThreadId | None) -> None:
        """Find QEMU's monitor, which reads system registers, and the addresses of the kernel's fault handlers."""
        facts, monitor, context = self._facts, Monitor(self._target.stub), self._context
        self._stepper.has_kernel = facts is not None
        if self.architecture.name not in EMULATED or not monitor.is_there:
            return
        executor = None
        if facts is not None and facts.tables is not None:
            executor = Executor(self._target, facts.text, facts.tables, facts.paging)
        if context.privileged is None or executor is not None:
            context.privileged = Privileged(self._target, monitor, executor)
        if facts is not None:
            base, limit = context.privileged.table("idt", thread)
            self._stepper.fault_entries = fault_entries(self._target.read, base, limit)

    def _warn_of_lost_accesses(self) -> None:
        """Warn of watchpoints that may miss accesses; the number of missed accesses is unknown."""
        accesses = {each.watchpoint for each in self._job.program.definitions}
        if len(self._processors) > 1 and not accesses <= {None, Access.EXECUTE}:
            self.events.warn(
                f"of simultaneous accesses by the {len(self._processors)} processors the stub "
                f"{self._target.stub.name} reports one: the counts of watchpoints are lower bounds",
                "to count all, give the machine one processor (-smp 1)",
            )

    def _refuse_lacking(self, registers: Registers) -> None:
        refuse_lacking(
            self._job.program,
            self.architecture,
            self._context.names,
            registers,
            self._target.stub.name,
            has_monitor=self._context.privileged is not None,
            has_physical=self._target.has_physical,
            has_kernel=self._facts is not None,
            has_programs=self.program.stacks_of_programs is not None,
        )

    def kernel(self) -> GuestKernel:
        """Return the kernel of the stopped machine; raise ``EngineError`` if there is none."""
        return GuestKernel(self._target, self._target.registers(self._target.stub.current_thread()))

    @property
    def _files(self) -> tuple[ElfFile, ...]:
        """Known files among those that programs of the machine map."""
        return ()

    def place_probes(self) -> None:
        """Insert the probepoints unless they are already inserted. A kernel stays where it is mapped."""
        if self.placed.bias is None:
            self._returns.clear()
            self.events.report(self.placed.move(0), 0)

    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Select the processor, a ``thread`` of the stub, whose registers and memory the handlers access."""
        self._context.select(thread, registers, 0)

    def _is_concerned(self) -> bool:
        """Return whether the current process is in scope: the scope's process or, if followed, a descendant."""
        context = self._context
        if self._pid is None or context.pid() == self._pid:
            return True
        return context.tasks is not None and self._follows and self._pid in context.tasks.ancestors(context.task())

    def _caller(self, thread: ThreadId | None, at: int) -> ThreadId | None:
        """
        Return the key of a call: the current task, which may continue on another processor before it returns.

        The idle tasks of the processors are distinct tasks, too.
        """
        if at not in self.placed.entries and not self.awaits_return_at(at):
            return thread
        return ThreadId(0, self._context.task()) if self._context.task() else thread

    # Samples

    @property
    def due(self) -> float:
        """Monotonic time at which a sampler next needs the machine to stop."""
        return self._clocks.next(time.monotonic())

    @property
    def wants_stop(self) -> bool:
        """True if the machine has to stop for a request or for a sample."""
        return super().wants_stop or self.due <= time.monotonic()

    def samples(self) -> Iterator[Sample]:
        """Iterate over the processors to be sampled now, and select each before it is yielded."""
        due = self._clocks.take(time.monotonic())
        for thread in self._processors if due else ():
            registers = self._target.registers(thread)
            self.select(thread, registers)
            if self._is_sampled(registers[self._processor.pc]):
                wanted = [probe for probe in due if probe.number not in self.program.removals]
                yield Sample(thread, registers, [(probe, self.placed.points[probe]) for probe in wanted])

    def _is_sampled(self, at: int) -> bool:
        """Return whether the instruction at an address is in code that the program samples."""
        if self._job.program.name in (ANYWHERE, MACHINE):
            return True
        return self._context.is_in_kernel and (self._code is None or at in self._code)

    @cached_property
    def _code(self) -> range | None:
        """Address range of the probed kernel module's code; None if the program is about the whole kernel."""
        resolved = self._resolved
        if not isinstance(resolved, ResolvedKernel) or not resolved.module.name:
            return None
        loaded = resolved.module.kernel.modules[resolved.module.name]
        return range(loaded.address, loaded.address + loaded.size)

    # Requests of handlers about the machine

    def is_handed_over(self, handled: Sequence[Handled[StubProgram]]) -> bool:
        """Return whether a handler leaves the machine to a debugger; write a dump if a handler requests one."""
        ended = [(each.probe, each.outcome.exit_code) for each in handled if each.outcome is not None]
        dumping = [probe for probe, code in ended if code == _CRASH_DUMP]
        if dumping:
            self._dump()
        for probe in dumping:
            probe.program.removals.append(probe.number)
        return any(code == DEBUGGER for _, code in ended)

    def hand_over(self, at: int, where: str, registers: Registers) -> None:  # noqa: ARG002 - as its segment counts
        """Remove the breakpoints, and leave the machine stopped, so that a debugger can connect to the stub."""
        place, name = f"{self._stepper.place_of(registers):#x} ({where})", self._target.stub.name
        command = f"-ex 'target remote {name}'"
        if len(self._processors) > 1 and self._context.thread in self._processors:
            number = self._processors.index(self._context.thread)
            place = f"{place} on CPU {number}"
            command = f"{command} -ex 'thread {number + 1}'"  # gdb shows the first thread, whichever stopped
        self._target.leave_standing()
        self.events.warn(f"the machine is stopped at {place}", f"gdb {command}")

    def write_core(self, at: int, registers: Registers) -> None:
        """Do nothing: a core file has the memory of a process, and a machine is none."""

    def _dump(self) -> None:
        """Make QEMU write a dump of the machine's memory, in the state before the probed instruction."""
        path = new_path(Path("vmcore").absolute())
        privileged = self._context.privileged
        if privileged is None:
            self.events.warn(f"the stub {self._target.stub.name} has no monitor to write a dump")
            return
        try:
            warning = privileged.monitor.dump(str(path))
            message = f"the machine's memory is in '{path}', where its stub runs"
            told = f"its monitor says: {warning}" if warning else None
            self.events.add(Notice(message, told, is_warning=False))
        except EngineError as error:
            self.events.warn(error.message, error.hint)

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables of all processors."""
        return self.program.variables_of_cpus(len(self._processors))


@dataclass(frozen=True, slots=True)
class MachinePlaces:
    """Probepoints at addresses that belong to no module (``Resolved``)."""

    architecture: Architecture
    image: CodeImage
    probepoints: tuple[Probepoint, ...]
    symbols: tuple[tuple[str, int], ...] = ()
    left_out: tuple[LeftOutProbe, ...] = ()
    per_cpu: tuple[int, frozenset[int]] = (0, frozenset())


class BareMachine(RunningKernel):
    """
    Machine without regard to its software, in the form of a kernel without symbols.

    A probe program names it ``machine``, and writes addresses as numbers: in firmware, boot loaders, other systems, and
    kernels that have not started. Code at an address may change between compilation and run.
    """

    called = (MACHINE,)
    checks_places = False
    watchpoints = WATCHPOINTS_MAX

    def __init__(self) -> None:
        super().__init__(_NoSymbols(b""), _NoText(), modules={})

    def know(self, kernel: RunningKernel) -> None:
        """Use the symbols of a kernel that was found on the machine."""
        self.symbols, self.modules = kernel.symbols, kernel.modules

    def base_of(self, module: str) -> int:
        """Return 0; raise ``TargetError`` for a module."""
        if module:
            raise TargetError(f"the module '{module}' is in a kernel, and 'name = {MACHINE}' has none")
        return 0

    def symbol(self, name: str, module: str, *, is_code: bool = False) -> KernelSymbol:  # noqa: ARG002 - none of any
        """Raise ``TargetError``: there are no symbols."""
        raise TargetError(
            f"a machine as such has no symbol '{name}'",
            hint="write 'address =' and a number, or 'name = vmlinux' if a kernel of Linux runs there",
        )

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """Empty: a stub can probe whatever the machine executes."""
        return ()

    @cached_property
    def skippable(self) -> None:
        """None: no functions are known."""
        return

    def is_traceable(self, address: int) -> bool | None:  # noqa: ARG002 - nothing needs to be redirected
        """Return None: there is no kernel to ask."""
        return None


class _NoSymbols(Kallsyms):
    """Symbol table without names, in which each address is a symbol of its own."""

    @property
    def is_hidden(self) -> bool:
        """False: no symbols exist that could be hidden."""
        return False

    def covering(self, address: int) -> KernelSymbol | None:
        """Return the address itself as a symbol."""
        return KernelSymbol(f"{address:#x}", address, "t")


class _NoText:
    """Placeholder for code that may change at any time, and is not read."""

    shift: int | None = None

    def read(self, _address: int, _size: int) -> bytes:
        """Return no bytes: the code of a machine without a kernel may change at any time, and is not read."""
        return b""

    def problem_at(self, _address: int) -> str | None:
        """Return None: code is not checked."""
        return None

    def origin_of(self, _address: int) -> str:
        """Return an empty string: the code is not from a file."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False: there is no original to compare an instruction with."""
        return False
