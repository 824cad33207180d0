"""
Module on a machine as the target of a program, in all processes there or in one and its descendants.

The kernel's lists show which processes map the module at the start. A breakpoint in the kernel, after the creation of a
mapping, shows later ones. A hit counts only if the module is mapped there at that moment, and memory has the file's
instruction. So missed changes of mappings cause no wrong hits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
from dprobes.engines.gdb.machine.guest_processes import AddressSpaces, KernelFacts, MappedModule, ModulePlace
from dprobes.engines.gdb.machine.probed_machine import ProbedMachine
from dprobes.engines.gdb.placed_probes import PlacedProbes
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.engine_interface import Job
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_member import RunEvents
    from dprobes.engines.gdb.stub_program import StubProbe, StubProgram
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Point
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["ProbedPrograms"]

_HOOK = "perf_event_mmap"
"""Function that the kernel calls for each new or newly executable mapping (CONFIG_PERF_EVENTS)."""
_PLACES_SPARED = 32
"""Number of further load biases after which unneeded ones are searched for and removed."""
_PROCESSOR = "x86_64"


class MappedProbes(PlacedProbes):
    """
    Probepoints at one load bias. ``read`` returns memory of the address space for which they are placed.

    QEMU's breakpoints apply to an address in all address spaces. So processes that map the module at the same address
    share them, and other processes may hit them by chance. Memory that is not present yet is accepted, because it has
    not been executed.
    """

    read: Callable[[int, int], bytes] | None = None

    def _is_other(self, address: int, raw: bytes) -> bool:
        found = b"" if self.read is None else self.read(address, len(raw))
        return len(found) == len(raw) and found != raw


class ProbedPrograms(ProbedMachine):
    """Processes of a machine that map a module."""

    _resolved: ResolvedModule
    _module: MappedModule
    _spaces: AddressSpaces

    def __init__(self, job: Job, resolved: ResolvedModule, program: StubProgram, events: RunEvents) -> None:
        super().__init__(job, resolved, program, events)
        self._nowhere: PlacedProbes
        """Probepoints for processors where the module is not mapped."""
        self._here: Registers | None = None
        """Registers of the processor that stopped last."""
        self._hook: int | None = None
        self._places: dict[int, MappedProbes] = {}
        """Probepoints by load bias."""
        self._biases: dict[int, int] = {}
        """Load bias of the module by address space, where a probepoint was hit."""
        self._room = _PLACES_SPARED
        self._named: set[int] = set()

    def begin(self) -> None:
        """
        Find the module in the machine, and insert the breakpoints.

        Raise ``EngineError`` if the module is for another processor than those whose programs can be probed.
        """
        if self._resolved.architecture.name != _PROCESSOR:
            raise EngineError(
                f"'{self._resolved.module.elf.path}' is for {self._resolved.architecture.name}, and programs of a "
                f"machine are probed on {_PROCESSOR} only"
            )
        self._here, self._nowhere = None, self.placed
        self._places.clear()
        super().begin()
        if self._hook is None or not self._target.insert(self._hook):
            text = f"the kernel has no '{_HOOK}' for a breakpoint: processes that map the module later are not probed"
            self.events.warn(text)
            self._hook = None

    def _learn(self, thread: ThreadId | None) -> None:
        kernel = GuestKernel(self._target, self._target.registers(thread))
        self._facts = KernelFacts.of(kernel)
        if self._facts.spaces is None:
            raise EngineError(
                f"the processes of the kernel behind the stub {self._target.stub.name} are not known",
                hint="programs in a machine can be probed with Linux 6.1 or later",
            )
        self._spaces = AddressSpaces(self._target, self._facts, self._facts.spaces)
        self._module = MappedModule(self._spaces, self._resolved.module.elf, self._job.program.name)
        self._hook = next((found.address for found in kernel.symbols.find(_HOOK, "") if found.is_code), None)

    @property
    def own_places(self) -> set[int]:
        """Address in the kernel at which it maps a file. A breakpoint there shows new mappings of the module."""
        return set() if self._hook is None else {self._hook}

    @property
    def _files(self) -> tuple[ElfFile, ...]:
        return (self._resolved.module.elf,)

    # Places of the module

    def place_probes(self) -> None:
        """
        Insert the probepoints for all processes that map the module.

        At the breakpoint where the kernel reports a mapping, insert those for the new mapping only.
        """
        if self._here is not None:
            mapped = self._spaces.mapped_file(self._here["rdi"])
            pid = self._context.pid()
            bias = self._module.bias_in(mapped, pid)
            if mapped is not None and bias is not None:
                self._place_at(ModulePlace(mapped.space, pid, bias))
        else:
            for place in self._module:
                self._place_at(place)
        for pid in sorted(self._module.others - self._named):
            self._named.add(pid)
            elf = self._resolved.module.elf
            self.events.warn(f"process {pid} of the machine maps another build of '{elf.path.name}' than '{elf.path}'")

    def _place_at(self, place: ModulePlace) -> None:
        if place.bias in self._places:
            return
        if len(self._places) >= self._room:
            self._forget_unneeded()
        placed = MappedProbes(self._target, self._job.program, self.program, self._resolved)
        self._places[place.bias] = placed
        placed.points = self._nowhere.points  # points of returning calls are the same at any bias
        placed.read = lambda address, size: self._spaces.read(place.space, address, size)
        states = placed.move(place.bias)
        self.events.report(states, place.pid)

    def _forget_unneeded(self) -> None:
        """Remove the probepoints of load biases that no process has any more."""
        present = {place.bias for place in self._module}
        for bias in self._places.keys() - present:
            self._places.pop(bias).watched.forget()
        self._room = len(self._places) + _PLACES_SPARED

    @property
    def needed(self) -> set[int]:
        """Addresses at which the program needs breakpoints."""
        needed = self._returns.addresses | self.own_places
        for placed in self._places.values():
            needed |= placed.at.keys() | placed.entries.keys()
        return needed

    def _forget_places(self) -> None:
        for placed in self._places.values():
            placed.watched.forget()
        self._places.clear()

    @property
    def watches(self) -> bool:
        """True if there are watchpoints on the machine's memory."""
        return any(placed.watched for placed in self._places.values())

    def _drop(self, gone: Sequence[StubProbe]) -> bool:
        for placed in self._places.values():
            for probe in gone:
                placed.drop(probe)
        return super()._drop(gone)

    # The thread of a hit

    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """
        Select the processor whose registers and memory handlers access.

        If the process that it runs does not map the module, no probepoint is hit.
        """
        super().select(thread, registers)
        self._here, self.placed = registers, self._nowhere
        if self._context.is_in_kernel:
            return
        at, space = registers[self._processor.pc], self._context.current.space
        for bias, placed in self._places.items():
            if (at in placed.at or at in placed.entries) and self._is_executed(placed, at, bias, space):
                self.placed, self._biases[space] = placed, bias
                break
        self.program.bias = self._biases.get(space, 0)

    def _is_executed(self, placed: MappedProbes, at: int, bias: int, space: int) -> bool:
        """Return whether the instruction of a probepoint is executed, and not one of another file."""
        if not self._module.is_at(space, bias, at):
            return False
        raw = placed.raw.get(at, b"")
        found = self._target.read(at, len(raw))
        if found and found != raw:
            numbers = [probe.number for probe, _ in placed.at.get(at, ())]
            numbers += [entry.probe.number for entry in placed.entries.get(at, ())]
            self.events.report({ProbeState.MISMATCH: numbers}, self._context.pid())
        return found == raw

    def _is_sampled(self, at: int) -> bool:
        """Return whether the instruction that a processor is at belongs to the module."""
        if self._context.is_in_kernel:
            return False
        space = self._context.current.space
        bias = next((each for each in self._places if self._module.is_at(space, each, at)), None)
        if bias is not None:
            self.program.bias = self._biases[space] = bias
        return bias is not None

    def concerned(self, address: int, reason: str) -> list[tuple[StubProbe, Point]]:
        """Return the probepoints whose watchpoints cover an access to memory, in the running process."""
        return [owner for owners in self._watchers(address, reason) for owner in owners]

    def _watchers(self, address: int, reason: str) -> Iterator[list[tuple[StubProbe, Point]]]:
        space = self._context.current.space
        for bias, placed in self._places.items():
            if (owners := placed.watched.concerned(address, reason)) and self._module.is_at(space, bias):
                self.program.bias = self._biases[space] = bias
                yield owners
