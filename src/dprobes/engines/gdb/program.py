"""The program whose handlers run at hits behind a stub: its variables, and its probepoints with their counts."""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Protocol

from dprobes.engines.hits import probes
from dprobes.engines.hits.probelimits import ProbeLimits
from dprobes.engines.hits.probes import Handlers
from dprobes.engines.hits.records import RecordBuilder
from dprobes.engines.interface import Counts
from dprobes.lazydataclass import dataclass
from dprobes.rpn.program import MANY_PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.callstacks import CallStacks
    from dprobes.engines.gdb.machine.stacks.programstacks import ProgramStacks
    from dprobes.engines.hits.hitcontext import Reach, SharedCounters
    from dprobes.engines.interface import Job
    from dprobes.extensions import Extension
    from dprobes.keyed.store import KeyedStore
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.rpn.encoder import CodeImage

__all__ = ["Resolved", "StubProbe", "StubProgram"]


class Resolved(Protocol):
    """What a session is told of the places of a program: those in a module, a kernel, or a machine."""

    @property
    def architecture(self) -> Architecture:
        """The processor."""

    @property
    def image(self) -> CodeImage:
        """The program's encoded code."""

    @property
    def probepoints(self) -> tuple[Probepoint, ...]:
        """The places."""

    @property
    def symbols(self) -> tuple[tuple[str, int], ...]:
        """The addresses of those that handlers push."""

    @property
    def left_out(self) -> tuple[LeftOutProbe, ...]:
        """What matches a pattern and has no probepoint."""

    @property
    def per_cpu(self) -> tuple[int, frozenset[int]]:
        """Where the offsets of the CPUs' copies are, and which addresses in ``symbols`` mean such copies."""


StubProbe = probes.Probe["StubProgram"]
"""A probepoint of the program."""


@dataclass(slots=True, eq=False)
class _Reach:
    """The processes that the program is about."""

    pids: set[int] = field(default_factory=set)


class _Tally(Counts):
    """The counts of a probepoint."""

    def copy(self) -> Counts:
        """Return what they are now."""
        return Counts(**{each.name: getattr(self, each.name) for each in fields(Counts)})

    def note(self, placement: str) -> None:
        """Note where the probed instruction is executed."""
        if placement not in self.executed:
            self.executed = (*self.executed, placement)


class _OwnCounters:
    """Variables that nobody else resets."""

    def reset_if_asked(self) -> None:
        """Do nothing: the session does that between two hits."""


class StubProgram:
    """
    A program; ``bias`` is how far its module is above its link addresses.

    It has the variables of its ``principal``, if there is one. ``stacks`` walks up those of a process,
    ``stacks_of_programs`` those of programs in a machine.
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
        """The addresses of symbols of which each CPU has a copy."""
        self._thread_count = program.tvars
        self.extensions = extensions
        self.keyed_tables = tables
        self.symbols = dict(resolved.symbols)
        self.bias = 0
        self.tallies = [_Tally() for _ in resolved.probepoints]
        self.probes = [self._probe(number, probe, job) for number, probe in enumerate(resolved.probepoints)]

    def _probe(self, number: int, probe: Probepoint, job: Job) -> StubProbe:
        definition = probe.definition
        limits = ProbeLimits(
            definition.passcount,
            definition.maxhits,
            job.program.keeps_log_on_fault(definition),
            isinstance(definition.location, MANY_PLACES),
        )
        return StubProbe(self, number, probe.number, limits, (0, 0), self.tallies[number])

    def variables_of(self, tid: int) -> MutableSequence[int]:
        """Return the variables of a thread."""
        return self._of_threads.setdefault(tid, [0] * self._thread_count)

    def variables_of_cpu(self, cpu: int) -> MutableSequence[int]:
        """Return the variables of a CPU of a machine."""
        return self._of_cpus.setdefault(cpu, [0] * len(self.cpu_variables))

    def variables_of_cpus(self, count: int) -> list[list[int]]:
        """Return those of all CPUs, of which there are so many."""
        zeros = [0] * len(self.cpu_variables)
        return [list(self._of_cpus.get(cpu, zeros)) for cpu in range(max(count, *self._of_cpus, 0))]

    def reset_variables_of_cpus(self, first: int, last: int | None) -> None:
        """Set variables of all CPUs to zero."""
        for cells in self._of_cpus.values():
            count = len(cells[first : None if last is None else last + 1])
            cells[first : first + count] = [0] * count
