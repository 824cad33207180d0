"""Probe program whose handlers run at hits in a stub's target: its variables, probepoints, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

from dprobes.engines.engine_interface import Counts
from dprobes.engines.hits import probe_hits
from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.engines.hits.probe_hits import Handlers, RecordBuilder
from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.unwind.frame_tables import FileFrames, MemoryFrameTable, MovedFrames, completed
from dprobes.target.unwind.stack_walk import COLUMNS, CallStack, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from dprobes.arch import Architecture, ByteOrder
    from dprobes.engines.engine_interface import Job
    from dprobes.engines.gdb.machine.guest_stacks import ProgramStacks
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.engines.hits.hit_context import Reach, SharedCounters
    from dprobes.extensions import Extension
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.target.unwind.frame_tables import FrameRules

__all__ = ["CallStacks", "Resolved", "StubProbe", "StubProgram"]

# Unwind tables are read from the target's memory, where they match the code. Those of the probed module are read from
# its file as well. A walk ends with a reason if a function has no table. The caller of a function that has just begun
# is known even so, if calls leave the return address in a register.


_UNSAID = (StackEnd.OUTERMOST, StackEnd.LIMIT)


class CallStacks:
    """
    Unwinder of the stacks of a ``target``; ``names`` maps register indices to the target's names.

    ``find_headers`` returns the addresses of the ELF headers of loaded files.
    """

    def __init__(
        self,
        target: StubTarget,
        processor: StubProcessor,
        resolved: ResolvedModule,
        names: Mapping[int, str],
        find_headers: Callable[[], Sequence[int]],
    ) -> None:
        architecture = resolved.architecture
        self.word_size = architecture.word_size
        self.byte_order: ByteOrder = architecture.byte_order
        self._target = target
        self._processor = processor
        self._module = resolved.module
        self._columns = COLUMNS[architecture.name]
        columns = {number: architecture.register(name) for number, name in enumerate(self._columns.names) if name}
        self._names = {number: names[each.index] for number, each in columns.items() if each and each.index in names}
        self._find_headers = find_headers
        self._headers: Sequence[int] | None = None
        self._bias: int | None = None
        self._tables: dict[int | None, FrameRules | None] = {}
        self._file = FileFrames(resolved.module.elf)

    def forget(self, bias: int | None) -> None:
        """Forget the tables, because the code may have changed; ``bias`` is the probed module's, None if not mapped."""
        self._tables.clear()
        self._headers, self._bias = None, bias

    def stack(self, registers: Registers, frames: int) -> list[int]:
        """Return up to ``frames`` addresses of the call stack of a thread, as ``Context.user_stack`` returns them."""
        values = {number: registers[name] for number, name in self._names.items()}
        stack = walk(self, self._columns, values, frames)
        if stack.end is StackEnd.NO_TABLE and len(stack.addresses) == 1 and frames > 1:
            stack = self._from_caller(stack, values, frames)
        return [*stack.addresses] if stack.end in _UNSAID else [*stack.addresses, stack.end]

    def _from_caller(self, stack: CallStack, values: dict[int, int], frames: int) -> CallStack:
        """
        Extend a stack that ended after its first address because no unwind tables cover the code.

        If that address is the start of a function, the caller's address is in the link register, and the stack
        continues there. ``values`` are the registers, ``frames`` the maximum length. In other cases return ``stack``.
        """
        (address,) = stack.addresses
        offset = None if self._bias is None else self._module.elf.file_offset(address - self._bias)
        link = next((number for number, name in self._names.items() if name == self._processor.link), None)
        if offset is None or link is None or self._module.function_start(offset) != address - (self._bias or 0):
            return stack
        above = walk(self, self._columns, values | {self._columns.pc: values[link]}, frames - 1)
        return CallStack((address, *above.addresses), above.end)

    # Methods that the walk calls

    def read(self, address: int, n: int) -> bytes:
        """Return bytes of memory; raise ``TargetError`` if some cannot be read."""
        data = self._target.read(address, n)
        if len(data) < n:
            raise TargetError(f"{n} bytes at {address:#x} cannot be read")
        return data

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that contains an address, or None if there is none."""
        if self._headers is None:
            self._headers = self._find_headers()
        header = max((each for each in self._headers if each <= address), default=None)
        if header not in self._tables:
            in_memory = None if header is None else MemoryFrameTable.at(self, header)
            self._tables[header] = completed(
                in_memory, None if self._bias is None else MovedFrames(self._file, self._bias)
            )
        return self._tables[header]


class Resolved(Protocol):
    """The places of a program, as resolved in a module, a kernel or a machine."""

    @property
    def architecture(self) -> Architecture:
        """Architecture of the code."""

    @property
    def image(self) -> CodeImage:
        """The program's encoded code."""

    @property
    def probepoints(self) -> tuple[Probepoint, ...]:
        """Resolved probepoints."""

    @property
    def symbols(self) -> tuple[tuple[str, int], ...]:
        """Names and addresses of the symbols that handlers push."""

    @property
    def left_out(self) -> tuple[LeftOutProbe, ...]:
        """Functions that match a pattern and have no probepoint."""

    @property
    def per_cpu(self) -> tuple[int, frozenset[int]]:
        """Address of the table of the CPUs' offsets, and the addresses in ``symbols`` to which an offset is added."""


StubProbe = probe_hits.Probe["StubProgram"]
"""A probepoint of the program."""


@dataclass(slots=True, eq=False)
class _Reach:
    """Process ids of the processes in which the program's hits run handlers. The session adds the target."""

    pids: set[int] = field(default_factory=set)


class _Tally(Counts):
    """Counts of the hits and records of one probepoint, and of the ways in which its instruction is executed."""

    def copy(self) -> Counts:
        """Return a copy of the current counts."""
        return Counts(**{each.name: getattr(self, each.name) for each in fields(Counts)})

    def note(self, placement: str) -> None:
        """Record how the probed instruction was executed, such as by emulation. ``executed`` has each way once."""
        if placement not in self.executed:
            self.executed = (*self.executed, placement)


class _OwnCounters:
    """Counters of a run whose variables no other process resets: the session does that between two hits."""

    resets: Sequence[int] = (0, 0)

    def reset_if_asked(self) -> None:
        """Do nothing: the session resets variables between two hits."""


class StubProgram:
    """
    Probe program whose handlers run at hits in a stub's target. ``bias`` is the load bias of its module in bytes.

    If it has a ``principal``, it shares the principal's variables. ``stacks`` is the unwinder for a process,
    ``stacks_of_programs`` the unwinder for processes on a machine.
    """

    number: int = 0
    rank: int = 0

    def __init__(
        self,
        job: Job,
        resolved: Resolved,
        extensions: Mapping[str, Extension],
        tables: Sequence[KeyedStore],
        warn: Callable[[str, str | None], None],
        principal: StubProgram | None = None,
    ) -> None:
        program = job.program
        self.records = RecordBuilder(job.items, resolved.architecture.byte_order)
        handlers = Handlers(resolved.image, resolved.architecture.name, warn)
        self.handlers: dict[int, Handlers] = {resolved.architecture.word_size: handlers}
        self.reach: Reach = _Reach()
        self.counters: SharedCounters = _OwnCounters()
        self.local_variables: MutableSequence[int] = [0] * program.vars
        self.global_variables: MutableSequence[int] = (
            job.globals.cells() if job.globals is not None else [0] * program.gvars
        )
        self.cpu_variables: MutableSequence[int] = [0] * program.cvars
        self._of_threads: dict[int, list[int]] = {}
        self._of_cpus: dict[int, list[int]] = {}
        if principal is not None:
            self.local_variables, self.cpu_variables = principal.local_variables, principal.cpu_variables
            self._of_threads, self._of_cpus = principal._of_threads, principal._of_cpus  # noqa: SLF001 - as one
        self.stacks: CallStacks | None = None
        self.stacks_of_programs: ProgramStacks | None = None
        self.per_cpu = resolved.per_cpu[1]
        """Addresses of symbols of which each CPU has a copy."""
        self._thread_count = program.tvars
        self.extensions = extensions
        self.keyed_tables = tables
        self.symbols = dict(resolved.symbols)
        self.bias = 0
        self.removals: list[int] = []
        """Probepoints whose removal was requested."""
        self._places = [each.where for each in resolved.probepoints]
        self.tallies = [_Tally() for _ in resolved.probepoints]
        self.probes = [self._probe(number, probe, job) for number, probe in enumerate(resolved.probepoints)]

    def _probe(self, number: int, probe: Probepoint, job: Job) -> StubProbe:
        definition = probe.definition
        limits = ProbeLimits(
            definition.passcount,
            definition.maxhits,
            job.program.keeps_log_on_fault(definition),
            definition.has_many_places,
        )
        return StubProbe(self, number, probe.number, limits, (0, 0), self.tallies[number])

    def place_of(self, probe: StubProbe) -> str:
        """Return the place of a probepoint, for users."""
        return self._places[probe.number]

    def variables_of(self, tid: int) -> MutableSequence[int]:
        """Return the thread variables of the thread ``tid``, zeros for a new thread."""
        return self._of_threads.setdefault(tid, [0] * self._thread_count)

    def variables_of_cpu(self, cpu: int) -> MutableSequence[int]:
        """Return the variables of a CPU of a machine."""
        return self._of_cpus.setdefault(cpu, [0] * len(self.cpu_variables))

    def variables_of_cpus(self, count: int) -> list[list[int]]:
        """Return the variables of all CPUs, at least ``count``."""
        zeros = [0] * len(self.cpu_variables)
        return [list(self._of_cpus.get(cpu, zeros)) for cpu in range(max(count, *self._of_cpus, 0))]

    def reset_variables(self, first: int, last: int | None) -> None:
        """Set local variables, and those of all CPUs, from index ``first`` to ``last`` (included) to zero."""
        for cells in (self.local_variables, self.cpu_variables, *self._of_cpus.values()):
            count = len(cells[first : None if last is None else last + 1])
            cells[first : first + count] = [0] * count
