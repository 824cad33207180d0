"""
The run of a program about a module on a machine behind a stub: in all processes there, or one with what that starts.

The kernel's own lists say who maps the module now, and a breakpoint in the kernel where it has mapped something says
who does later. A breakpoint that somebody comes to counts if the module is mapped there at that moment, in memory, with
the file's instruction; so whatever has become of processes since does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guest_kernel import WATCHPOINTS_MAX, GuestKernel
from dprobes.engines.gdb.machine.guest_processes import AddressSpaces, KernelFacts, MappedModule, ModulePlace
from dprobes.engines.gdb.machine.machine_session import MachineSession
from dprobes.engines.gdb.placed_probes import PlacedProbes
from dprobes.errors import EngineError, TargetError
from dprobes.resolve.probe_state import ProbeState
from dprobes.resolve.probed_space import MACHINE
from dprobes.target.kernel.kernel_symbols import Kallsyms, KernelSymbol
from dprobes.target.kernel.running_kernel import RunningKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.engine_interface import Job
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.shared_stub import SharedStub
    from dprobes.engines.gdb.stub_program import Resolved, StubProbe
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.engines.gdb.stub_session import StubSession
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.rpn.rpn_program import Point
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["AnywhereSession", "BareMachine", "MachinePlaces", "ProgramSession"]

# The probepoints of a program at each distance above its link addresses at which its module is mapped in a machine.
#
# QEMU's breakpoints are for an address in whatever address space, so processes that map the module at the same place
# share them, and others may come to them by chance. What is not in memory yet is no obstacle: nobody has executed it.


class MappedProbes(PlacedProbes):
    """The probepoints at one distance; ``read`` returns the memory of the process that they are placed for."""

    read: Callable[[int, int], bytes] | None = None

    def _is_other(self, address: int, raw: bytes) -> bool:
        found = b"" if self.read is None else self.read(address, len(raw))
        return len(found) == len(raw) and found != raw


_HOOK = "perf_event_mmap"
"""What the kernel calls with each mapping that it has made, or has let be executed (CONFIG_PERF_EVENTS)."""
_PLACES_SPARED = 32
"""At how many more distances the module is placed until those are looked for that nobody needs any more."""
_PROCESSOR = "x86_64"


class ProgramSession(MachineSession):
    """One run, on the programs of a machine."""

    _resolved: ResolvedModule
    _placed: MappedProbes

    def __init__(self, job: Job, resolved: ResolvedModule, shared: SharedStub[StubSession]) -> None:
        super().__init__(job, resolved, shared, None)
        self._module: MappedModule
        self._spaces: AddressSpaces
        self._nowhere: MappedProbes
        """The probepoints where the module is not mapped."""
        self._here: Registers | None = None
        """The registers of the processor that stopped last."""
        self._hook: int | None = None
        self._places: dict[int, MappedProbes] = {}
        """The probepoints by how far the module is above its link addresses."""
        self._biases: dict[int, int] = {}
        """What that is in address spaces in which a probepoint was hit."""
        self._room = _PLACES_SPARED
        self._named: set[int] = set()

    def begin(self) -> None:
        """Find the module in the machine, and insert the breakpoints."""
        if self._resolved.architecture.name != _PROCESSOR:
            raise EngineError(
                f"'{self._resolved.module.elf.path}' is for {self._resolved.architecture.name}, and programs of a "
                f"machine are probed on {_PROCESSOR} only"
            )
        self._here, self._nowhere = None, self._placed
        self._places.clear()
        super().begin()
        if self._hook is None or not self._insert(self._hook):
            text = f"the kernel has no '{_HOOK}' for a breakpoint: processes that map the module later are not probed"
            self._warn(text, None)
            self._hook = None

    def _learn(self, thread: ThreadId | None) -> None:
        kernel = GuestKernel(self._target, self._target.registers(thread))
        self._facts = KernelFacts.of(kernel)
        if self._facts.spaces is None:
            raise EngineError(
                f"the processes of the kernel behind the stub {self._stub.name} are not known",
                hint="programs in a machine can be probed with Linux 6.1 or later",
            )
        self._spaces = AddressSpaces(self._target, self._facts, self._facts.spaces)
        self._module = MappedModule(self._spaces, self._resolved.module.elf, self._job.program.name)
        self._hook = next((found.address for found in kernel.symbols.find(_HOOK, "") if found.is_code), None)

    def _insert(self, address: int) -> bool:
        return self._target.insert(address, self._breakpoint_size, self._processor.breakpoint)

    @property
    def own_places(self) -> set[int]:
        """Where the kernel tells of mappings."""
        return set() if self._hook is None else {self._hook}

    def _placement(self) -> MappedProbes:
        code = self._processor.breakpoint
        return MappedProbes(self._target, code, self._job.program, self._program, self._resolved)

    @property
    def _files(self) -> tuple[ElfFile, ...]:
        return (self._resolved.module.elf,)

    # Where the module is

    def place_probes(self) -> None:
        """Insert the probepoints where the module is mapped: by all at the beginning, by one at the breakpoint."""
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
            self._warn(f"process {pid} of the machine maps another build of '{elf.path.name}' than '{elf.path}'", None)

    def _place_at(self, place: ModulePlace) -> None:
        if place.bias in self._places:
            return
        if len(self._places) >= self._room:
            self._forget_unneeded()
        placed = self._places[place.bias] = self._placement()
        placed.points = self._nowhere.points  # those of calls that return are the same wherever that is
        placed.read = lambda address, size: self._spaces.read(place.space, address, size)
        states = placed.move(place.bias)
        self._report(states, place.pid)

    def _forget_unneeded(self) -> None:
        """Take out what was placed for processes that are no more."""
        present = {place.bias for place in self._module}
        for bias in self._places.keys() - present:
            self._places.pop(bias).watched.forget()
        self._remove_unneeded()
        self._room = len(self._places) + _PLACES_SPARED

    @property
    def own_needed(self) -> set[int]:
        """Where breakpoints have to be for this program."""
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
        """Whether some of the machine's memory is watched."""
        return any(placed.watched for placed in self._places.values())

    def _drop(self, gone: Sequence[StubProbe]) -> None:
        for placed in self._places.values():
            for probe in gone:
                placed.drop(probe)
        super()._drop(gone)

    # Whose hit it is

    def select(self, thread: ThreadId | None, registers: Registers) -> None:
        """Have handlers speak of a processor; where the module is not mapped, it is at no probepoint."""
        super().select(thread, registers)
        self._here, self._placed = registers, self._nowhere
        if self._context.is_in_kernel:
            return
        at, space = registers[self._processor.pc], self._context.current.space
        for bias, placed in self._places.items():
            if (at in placed.at or at in placed.entries) and self._is_executed(placed, at, bias, space):
                self._placed, self._biases[space] = placed, bias
                break
        self._program.bias = self._biases.get(space, 0)

    def _is_executed(self, placed: MappedProbes, at: int, bias: int, space: int) -> bool:
        """Return whether the instruction of a probepoint is executed, and not one of another file."""
        if not self._module.is_at(space, bias, at):
            return False
        raw = placed.raw.get(at, b"")
        found = self._target.read(at, len(raw))
        if found and found != raw:
            numbers = [probe.number for probe, _ in placed.at.get(at, ())]
            numbers += [entry.probe.number for entry in placed.entries.get(at, ())]
            self._report({ProbeState.MISMATCH: numbers}, self._context.pid())
        return found == raw

    def _is_sampled(self, at: int) -> bool:
        """Return whether the instruction that a processor comes to is one of the module's."""
        if self._context.is_in_kernel:
            return False
        space = self._context.current.space
        bias = next((each for each in self._places if self._module.is_at(space, each, at)), None)
        if bias is not None:
            self._program.bias = self._biases[space] = bias
        return bias is not None

    def concerned(self, address: int, reason: str) -> list[tuple[StubProbe, Point]]:
        """Return the probepoints whom an access to memory concerns, in the process that runs."""
        return [owner for owners in self._watchers(address, reason) for owner in owners]

    def _watchers(self, address: int, reason: str) -> Iterator[list[tuple[StubProbe, Point]]]:
        space = self._context.current.space
        for bias, placed in self._places.items():
            if (owners := placed.watched.concerned(address, reason)) and self._module.is_at(space, bias):
                self._program.bias = self._biases[space] = bias
                yield owners


# A machine as such, whatever runs on it: a kernel without symbols, in which each address is a place.
#
# A program names it ``machine``, and writes addresses as numbers. It is for firmware, boot loaders, other systems, and
# kernels that have not begun. What is at an address when a program is compiled says nothing of what will be there.


@dataclass(frozen=True, slots=True)
class MachinePlaces:
    """What a session is told of places that are in no module (``Resolved``)."""

    architecture: Architecture
    image: CodeImage
    probepoints: tuple[Probepoint, ...]
    symbols: tuple[tuple[str, int], ...] = ()
    left_out: tuple[LeftOutProbe, ...] = ()
    per_cpu: tuple[int, frozenset[int]] = (0, frozenset())


class BareMachine(RunningKernel):
    """A machine without a system that is known."""

    called = (MACHINE,)
    checks_places = False
    watchpoints = WATCHPOINTS_MAX

    def __init__(self) -> None:
        super().__init__(_NoSymbols(b""), _NoText(), modules={})

    def know(self, kernel: RunningKernel) -> None:
        """Have the names of a kernel that runs there after all."""
        self.symbols, self.modules = kernel.symbols, kernel.modules

    def base_of(self, module: str) -> int:
        """Return 0; raise ``TargetError`` for a module."""
        if module:
            raise TargetError(f"the module '{module}' is in a kernel, and 'name = {MACHINE}' has none")
        return 0

    def symbol(self, name: str, module: str, *, is_code: bool = False) -> KernelSymbol:  # noqa: ARG002 - none of any
        """Raise ``TargetError``: there are none."""
        raise TargetError(
            f"a machine as such has no symbol '{name}'",
            hint="write 'address =' and a number, or 'name = vmlinux' if a kernel of Linux runs there",
        )

    @cached_property
    def blacklist(self) -> tuple[tuple[int, int, str], ...]:
        """Nothing: whoever stops the machine can probe whatever it executes."""
        return ()

    @cached_property
    def skippable(self) -> None:
        """Return None: no functions are known."""
        return

    def is_traceable(self, address: int) -> bool | None:  # noqa: ARG002 - nothing needs to be redirected
        """Return None: there is no kernel to be asked."""
        return None


class _NoSymbols(Kallsyms):
    """No names, but a place at each address."""

    @property
    def is_hidden(self) -> bool:
        """Return False: nothing is there to be hidden."""
        return False

    def covering(self, address: int) -> KernelSymbol | None:
        """Return the address itself."""
        return KernelSymbol(f"{address:#x}", address, "t")


class _NoText:
    """What stands in memory is another thing at each time."""

    shift: int | None = None

    def read(self, _address: int, _size: int) -> bytes:
        """Return nothing."""
        return b""

    def problem_at(self, _address: int) -> str | None:
        """Return None: nothing is asked of it."""
        return None

    def origin_of(self, _address: int) -> str:
        """Return nothing."""
        return ""

    def is_patched(self, _instruction: DecodedInstruction) -> bool:
        """Return False."""
        return False


# The run of a program about whatever runs on a machine: it gets to know the kernel when it is there, if there is one.
#
# It needs no kernel to find its probepoints. So it asks on the connection of the run: many stubs serve but one.


class AnywhereSession(MachineSession):
    """One run, on whatever a machine executes; ``machine`` gets the names of the kernel that is found."""

    def __init__(self, job: Job, places: Resolved, shared: SharedStub[StubSession], machine: BareMachine) -> None:
        super().__init__(job, places, shared, None)
        self._machine = machine

    def _learn(self, thread: ThreadId | None) -> None:
        try:
            kernel = GuestKernel(self._target, self._target.registers(thread))
            facts = KernelFacts.of(kernel)
        except EngineError:  # firmware, or another system
            return
        self._facts = facts
        self._machine.know(kernel)
