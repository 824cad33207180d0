"""
Interface of the engines: jobs, scopes, options, plans, attachments, and the events of a run.

``engine_capabilities`` has the needs of probe programs and the capabilities of engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, assert_never

from dprobes.escapes import escaped, escaped_lines
from dprobes.record.log_record import Item
from dprobes.target.probed_module import OWN_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, MutableSequence, Sequence
    from contextlib import AbstractContextManager

    from dprobes.arch import Architecture
    from dprobes.engines.engine_capabilities import Capability
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ProbeState, ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.running_kernel import RunningKernel
    from dprobes.target.probed_module import SymbolProvider
    from dprobes.target.process_images import ProcessImages

__all__ = [
    "OBJECTS_BETWEEN_COLLECTIONS",
    "Area",
    "Attachment",
    "Begun",
    "Change",
    "Counts",
    "Engine",
    "EngineOptions",
    "Event",
    "Finding",
    "Finished",
    "HandedOver",
    "Job",
    "MachineKnowledge",
    "Notice",
    "Pause",
    "PlaceNote",
    "Plan",
    "ProbeRemoval",
    "RecordBatch",
    "Scope",
    "ScopeKind",
    "StateEvent",
    "Stop",
    "TableChange",
    "Use",
    "ValueChange",
    "VariableChange",
    "VariableReset",
    "apply_changes",
    "make_changes",
    "no_core_notice",
    "written_notice",
]

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""
Number of new objects after which Python's garbage collector runs in the processes of a run.

A plan of ten thousand jumps has a million objects, and none of them is garbage. With Python's default of 700, the
collector takes an eighth of the time.
"""

# Results of ``doctor``: one finding for each mechanism that it tried on this machine.


class Area(Enum):
    """Group of checks. The groups are printed in this order."""

    SYSTEM = "system"
    RIGHTS = "rights"
    ENGINES = "engines"
    KERNEL = "kernel features"
    TOOLS = "tools"


class Use(NamedTuple):
    """
    Benefit of a mechanism, with an example.

    ``doctor`` recommends the missing mechanism with the largest ``gain``.
    """

    text: str
    command: str
    gain: int


class Finding(NamedTuple):
    """
    Result of one check by ``doctor``.

    ``what`` is the name of the mechanism. If it works, ``detail`` describes it. Otherwise ``detail`` is the reason, and
    ``remedy`` is advice about it. Without an ``essential`` mechanism, no probepoint works.
    """

    what: str
    works: bool
    detail: str = ""
    remedy: str = ""
    essential: bool = False
    area: Area = Area.KERNEL
    use: Use | None = None


@dataclass(slots=True)
class Counts:
    """
    Counts of one probepoint.

    * ``hits`` are all known hits whose instruction completed. For some of them no handler ran: passcount excluded the
      ``passed`` hits, memory for the state of ``missed`` hits was lacking, and ``skipped`` hits were too costly for the
      overload guard (``overload_guard``).
    * ``records`` were emitted. ``lost`` records were discarded because the client did not read them in time.
    * ``faulted`` runs of the handler left no record, because the probed instruction faulted.
    * ``neighbours`` are writes to the protected pages of a watchpoint that did not touch it.
    * ``executed`` names the ways in which the probed instruction was executed, for engines that have several.
    """

    hits: int = 0
    records: int = 0
    lost: int = 0
    passed: int = 0
    missed: int = 0
    skipped: int = 0
    faulted: int = 0
    neighbours: int = 0
    executed: tuple[str, ...] = ()


class RecordBatch(NamedTuple):
    """
    Records (``log_record``) in their order, as pairs of an index into the attachment's ``probes`` and the record.

    Engines that emit many records pass a ``RecordTable``, which is a sequence of such pairs.
    """

    records: Sequence[tuple[int, bytes]]


class StateEvent(NamedTuple):
    """
    State of probepoints in one process, with an optional ``detail``.

    ``probes`` are indices into the attachment's ``probes``.
    """

    probes: tuple[int, ...]
    pid: int
    state: ProbeState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """
    Message to the user that is not about the state of a probepoint. It is a warning if ``is_warning``.

    ``message`` is one line. ``details`` are further lines, printed like those of diagnostics.
    """

    message: str
    hint: str | None = None
    is_warning: bool = True
    details: str = ""

    @property
    def text(self) -> str:
        """The message and its details without the hint, escaped for lines and terminals."""
        text = escaped(self.message)
        return f"{text}\n{escaped_lines(self.details)}" if self.details else text


def written_notice(pid: int, name: str, path: str, size: int) -> Notice:
    """Return the notice about a core file that was written; ``size`` is in bytes."""
    return Notice(f"the core of process {pid} ({name}) is in '{path}' ({size} bytes)", is_warning=False)


def no_core_notice(pid: int, name: str, path: str, problem: str) -> Notice:
    """Return the notice that a core file could not be written; ``problem`` is the reason."""
    return Notice(f"no core of process {pid} ({name}) in '{path}': {problem.rstrip()}; the process continues")


@dataclass(frozen=True, slots=True)
class Pause:
    """Event that no further records have arrived. The receiver can flush its output."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Event, once in a run, that all probepoints in processes in scope at the beginning are placed or have failed."""


class Finished(NamedTuple):
    """
    End of a run.

    ``counts`` has the order of the attachment's ``probes``. ``exit_status`` is the wait status of the command, or None
    without one. With ``cut_short``, events were lost at the end, and ``counts`` may be too low.
    """

    counts: tuple[Counts, ...]
    exit_status: int | None = None
    cut_short: bool = False


Event = RecordBatch | StateEvent | Notice | Pause | Begun | Finished


class HandedOver(NamedTuple):
    """
    Event that a process is no longer probed and stops (SIGSTOP), so that a debugger can attach.

    The thread ``tid`` with the name ``name`` is stopped at ``address``, before the probed instruction, or after it if
    ``has_executed``.
    """

    pid: int
    tid: int
    name: str
    address: int
    has_executed: bool = False


class LeftThings(NamedTuple):
    """
    Remains of killed runs that were removed from a process.

    Code was restored at ``places`` instructions. The memory of handlers was unmapped, or with ``is_unmapped`` False is
    still in use.
    """

    pid: int
    places: int
    is_unmapped: bool

    @property
    def said(self) -> str:
        """Message about the removal of the remains."""
        places = f"{self.places} place{'' if self.places == 1 else 's'} in its code"
        memory = "and the memory of handlers was" if self.is_unmapped else "the memory of handlers is in use, and stays"
        return f"{places} {'was' if self.places == 1 else 'were'} restored, {memory}" + (
            " given back" if self.is_unmapped else ""
        )


class ScopeKind(Enum):
    """Kind of a scope. The value completes "the engine cannot probe ..."."""

    EVERYWHERE = "all processes"
    TREE = "a command or process"
    CGROUP = "a cgroup"
    USER = "a user's processes"
    ENDPOINT = "the target of a stub, or recorded hits"
    MACHINE = "a virtual machine"
    KERNEL = "the kernel"


@dataclass(frozen=True, slots=True)
class Scope:
    """
    Processes, or another target, that a run probes; all processes by default.

    At most one of these is given: ``pid``, a ``command`` to be started, the path ``cgroup`` of a directory in a cgroup
    file system, the user id ``uid``, an ``endpoint``, a ``machine`` and the ``kernel``. There are two exceptions: an
    endpoint may have a command that starts its target, or the ``pid`` of a process there.

    An endpoint is the part after the name of an engine (NAME=ENDPOINT), such as HOST:PORT or a file. With ``follow``,
    processes that the process or command starts are in scope, too; for all other kinds they always are. ``program`` is
    the path of the file that the process ``pid`` is about to execute; the process comes into scope with that execve.
    ``output`` is the descriptor for the standard output of a command, by default that of this process.
    """

    pid: int | None = None
    command: tuple[str, ...] = ()
    cgroup: str | None = None
    uid: int | None = None
    follow: bool = True
    program: str | None = None
    output: int | None = None
    endpoint: str | None = None
    machine: str | None = None
    kernel: bool = False

    @property
    def kind(self) -> ScopeKind:
        """The kind of the scope."""
        if self.is_tree and self.endpoint is None:
            return ScopeKind.TREE
        given = {
            ScopeKind.CGROUP: self.cgroup is not None,
            ScopeKind.USER: self.uid is not None,
            ScopeKind.ENDPOINT: self.endpoint is not None,
            ScopeKind.MACHINE: self.machine is not None,
            ScopeKind.KERNEL: self.kernel,
        }
        return next((kind for kind, is_given in given.items() if is_given), ScopeKind.EVERYWHERE)

    @property
    def is_tree(self) -> bool:
        """True if ``pid`` or ``command`` is given, with or without ``follow``."""
        return self.pid is not None or bool(self.command)

    @property
    def is_command(self) -> bool:
        """True if the scope is a command that has not been executed yet."""
        return bool(self.command) or self.program is not None


class Job(NamedTuple):
    """
    Compiled probe program to be run, and the processes in scope.

    ``items`` has the header items of the records. ``globals`` has the global variables that the run shares with others,
    or is None if it has its own. ``images`` is notified of the mappings of processes.

    ``replaces`` is an attachment of the same engine whose program this one replaces. A hit at an offset that both have
    runs the handler of exactly one of them. If the new program cannot be attached, the old one continues; otherwise
    ``poll`` of the old attachment ends.

    ``beside`` has other attachments of the same owner. One of them may already trace the process in scope, which
    excludes any other tracer.

    ``principal`` is the attachment, of the same engine, of the first companion; this program uses its variables and
    tables. ``companions`` has all programs that share them, this one included.
    """

    compiled: ResolvedProgram
    scope: Scope
    items: Item = Item.MAJOR | Item.MINOR
    globals: GlobalVariables | None = None
    replaces: Attachment | None = None
    beside: tuple[Attachment, ...] = ()
    images: ProcessImages | None = None
    principal: Attachment | None = None
    companions: tuple[Program, ...] = ()

    @property
    def program(self) -> Program:
        """The probe program."""
        return self.compiled.program

    @property
    def resolved(self) -> ResolvedModule | None:
        """The resolution of one of the program's modules, or None if no module is resolved yet."""
        return self.compiled.resolved

    @property
    def kernel(self) -> ResolvedKernel | None:
        """The addresses of the program's probepoints in the kernel, or None for a program in user space."""
        return self.compiled.kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Result of an engine's planning. Nothing is attached yet.

    ``kernel`` is the kernel of the machine from which the records come, or None for this machine.
    """

    engine: Engine
    job: Job
    kernel: RunningKernel | None = None


class VariableChange(NamedTuple):
    """Change of the local variable with the index ``number`` to a 64-bit ``value``."""

    number: int
    value: int


class TableChange(NamedTuple):
    """
    Change of the keyed table with the number ``table``.

    If ``value`` is a signed integer, it is tallied under ``key``, or with ``adds`` added to the number that a table of
    kind ``last`` keeps. If it is bytes, of a string or a call stack, they are stored. If it is None, the key is
    deleted. If ``key`` is None, the table is cleared.
    """

    table: int
    key: bytes | None = None
    value: int | bytes | None = None
    adds: bool = False


class VariableReset(NamedTuple):
    """Reset of the local and CPU variables ``first`` to ``last`` (included) to zero. None is the last variable."""

    first: int = 0
    last: int | None = None


class ProbeRemoval(NamedTuple):
    """Removal of probepoints, as by the instruction ``remove``. ``poll`` reports them as REMOVED."""

    probes: Sequence[int]


class Stop(NamedTuple):
    """End of the run. ``poll`` continues until ``Finished``. A signal handler may request it."""


ValueChange = VariableChange | TableChange
Change = ValueChange | VariableReset | ProbeRemoval | Stop


class Changeable(Protocol):
    """Attachment with a method for each kind of change."""

    def change_values(self, changes: Sequence[ValueChange]) -> None:
        """Change local variables and tables between two runs of handlers. At the return, the changes have been made."""

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set the local and CPU variables ``first`` to ``last`` (included) to zero. None is the last variable."""

    def remove(self, probes: Sequence[int]) -> None:
        """Remove probepoints, given by their indices in ``probes``."""

    def stop(self) -> None:
        """Request the end of the run."""


def make_changes(attachment: Changeable, changes: Sequence[Change]) -> None:
    """Make changes of variables, tables and probepoints in their order. Adjacent changes of values are combined."""
    values: list[ValueChange] = []
    for number, change in enumerate(changes, 1):
        match change:
            case VariableChange() | TableChange():
                values.append(change)
                if number < len(changes) and isinstance(changes[number], ValueChange):
                    continue
                attachment.change_values(values)
                values = []
            case VariableReset(first, last):
                attachment.reset_variables(first, last)
            case ProbeRemoval(probes):
                attachment.remove(probes)
            case Stop():
                attachment.stop()
            case _:
                assert_never(change)


def apply_changes(
    changes: Sequence[ValueChange], variables: MutableSequence[int], tables: Sequence[KeyedStore]
) -> None:
    """Change variables and tables of a program. No other thread may write them during the call."""
    for change in changes:
        match change:
            case VariableChange(index, value):
                variables[index] = value
            case TableChange(table, None):
                tables[table].clear()
            case TableChange(table, bytes() as key, None):
                tables[table].delete(key)
            case TableChange(table, bytes() as key, int() as value, adds):
                if adds:
                    tables[table].add(key, value)
                else:
                    tables[table].tally(key, value)
            case TableChange(table, bytes() as key, bytes() as value):
                tables[table].keep(key, value)


class Attachment(Protocol):
    """
    Probe program in its targets, from ``Engine.attach`` until it is closed.

    ``probes`` has every probepoint found so far, in any file; it only grows. One thread iterates over ``poll``. Any
    thread may read the properties and call the other methods, except ``close``.
    """

    @property
    def probes(self) -> Sequence[Probepoint]:
        """Probepoints. Events identify them by their indices."""

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """The places that match a pattern and have no probepoint."""

    @property
    def mapped_files(self) -> dict[str, str]:
        """The files that processes in scope were reported to map as code: the path of each file name."""
        return {}

    @property
    def is_debugging(self) -> bool:
        """
        True while a debugger runs for a process that was handed to it.

        Ctrl-C at the terminal is then for the debugger.
        """
        return False

    @property
    def tracer(self) -> int | None:
        """The process id of the attachment's tracer, or None if it has none, or its tracer has ended."""
        return None

    def poll(self) -> Iterator[Event]:
        """Iterate over the events until ``Finished``."""

    def close(self) -> None:
        """Remove every probepoint from the targets, and release all resources. A second call does nothing."""

    def change(self, changes: Sequence[Change]) -> None:
        """
        Make changes of variables, tables and probepoints in their order.

        Variables and tables are changed between two runs of handlers, and have been changed at the return.
        """

    def hurry(self) -> bool:
        """
        Discard the records that are still to be emitted after the end, and count them as lost.

        Return False, and discard nothing, if that would save no time. A signal handler may call this.
        """
        return False

    def end_command(self) -> int | None:
        """
        Send SIGTERM to the command that was started, and return its wait status.

        Only valid after ``Finished``. Return None if there is no command, or if it does not end within a few seconds.
        """
        return None

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts so far, in the order of ``probes``."""

    def wake(self) -> None:
        """Make ``poll`` read the records that have arrived, without waiting for more."""
        return

    def local_variables(self) -> list[int]:
        """Return the values of the program's local variables."""

    def cpu_variables(self) -> list[list[int]]:
        """Return the values of the program's CPU variables, a list for each CPU."""

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the program's keyed tables, in the order of its header."""
        return ()


class PlaceNote(NamedTuple):
    """
    Description of how an engine probes an instruction, for users who choose one.

    ``text`` is a clause. ``verdict`` completes the sentence "the instruction is ..." before advice. ``is_cheap`` is
    True if a hit costs less than at other instructions.
    """

    text: str
    verdict: str = ""
    is_cheap: bool = False


class Engine(ABC):
    """Mechanism that places probepoints and runs handlers."""

    name: str

    @property
    def found_capabilities(self) -> Container[Capability]:
        """The capabilities on this machine, in addition to those of the engine's row in the registry."""
        return ()

    def visit_kernel(self, program: Program) -> AbstractContextManager[RunningKernel] | None:  # noqa: ARG002 - overridden
        """
        Return a context manager that stops the target's kernel and yields its description.

        None: the program is for this machine.
        """
        return None

    def visit_processor(self, program: Program) -> AbstractContextManager[Architecture | None] | None:  # noqa: ARG002
        """
        Return a context manager that yields the processor of a kernel program's target.

        Return None for this machine's.
        """
        return None

    def check(self, scope: Scope, options: EngineOptions) -> None:  # noqa: B027 - most engines work everywhere
        """Raise ``DprobesError`` if the engine cannot work on this machine or on the targets in scope."""

    def drawback(self, job: Job) -> str | None:  # noqa: ARG002 - overridden by engines that have one
        """Return a clause with the reason to prefer another engine that can serve the job, or None."""
        return None

    def plan(self, job: Job) -> Plan:
        """Return the plan of a job; raise ``DprobesError`` if the engine cannot probe the probepoints found."""
        return Plan(self, job)

    def reach(self, plan: Plan) -> AbstractContextManager[object]:  # noqa: ARG002 - most targets are here
        """
        Return a context manager that connects to the target of a plan. The caller attaches the plan within it.

        Its entry raises ``EngineError`` if the target does not reply. If an error leaves it, it disconnects.
        """
        return nullcontext()

    @abstractmethod
    def attach(self, plan: Plan) -> Attachment:
        """Insert the program of a plan, start the command if there is one, and return the attachment to be closed."""


T = TypeVar("T")


class MachineKnowledge:
    """
    Cache of the engines' findings about this machine.

    A caller that inserts several programs passes the same object, so that engines do not repeat their checks.
    """

    def __init__(self) -> None:
        self._known: dict[type[Any], Any] = {}

    def recall(self, kind: type[T]) -> T:
        """Return the object of class ``kind`` in the cache. The first call creates it without arguments."""
        if kind not in self._known:
            self._known[kind] = kind()
        known: T = self._known[kind]
        return known


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """User's options for the engine of an insertion, as for the verb ``run``."""

    allow_write: bool = False
    symbols: SymbolProvider = OWN_SYMBOLS
    debugger: tuple[str, ...] | None = None
    core_directory: str = "."
    overhead: float | None = None
    """
    Maximum percentage of a CPU that hits may take (``--overhead``), 0 for no limit, or None for the scope's default.
    """
    replaceable: bool = False
    """True if the caller may later replace this program while it runs."""
    traces_already: bool = False
    """True if this tool already traces the process in scope, for the program that this one replaces."""
    tracers: frozenset[int] = frozenset()
    """Process ids of the tracers of other programs, with which this one may be attached at the same time."""
    present: tuple[object, ...] = ()
    """Attachments with which this one may be attached at the same time."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """
    Options of single engines by name.

    An engine ignores options of others, except those in ``demands`` of the registry.
    """
    knowledge: MachineKnowledge = field(default_factory=MachineKnowledge)
