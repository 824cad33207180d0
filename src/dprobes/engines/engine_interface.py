"""
What engines have in common: what they are to run and on which processes, and the events of a run.

What a program needs and an engine can is in ``capabilities``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import NotSupportedError
from dprobes.escapes import escaped, escaped_lines
from dprobes.record.log_record import Item

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, MutableSequence, Sequence
    from contextlib import AbstractContextManager

    from dprobes.arch import Architecture
    from dprobes.engines.engine_capabilities import Capability
    from dprobes.engines.engine_options import EngineOptions
    from dprobes.engines.shared_globals import GlobalVariables
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.kernel_places import ResolvedKernel
    from dprobes.resolve.local_module import Compiled
    from dprobes.resolve.probe_state import ProbeState
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.kernel.running_kernel import RunningKernel
    from dprobes.target.process_images import ProcessImages

__all__ = [
    "Attachment",
    "Begun",
    "Change",
    "Counts",
    "Engine",
    "Event",
    "Finding",
    "Finished",
    "HandedOver",
    "Job",
    "Notice",
    "Pause",
    "PlaceNote",
    "Plan",
    "RecordBatch",
    "Scope",
    "ScopeKind",
    "StateEvent",
    "TableChange",
    "VariableChange",
    "carry_out",
    "no_core_notice",
    "written_notice",
]

# What ``doctor`` finds out about a machine: one answer for each thing that was tried.


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether ``what`` works, why or how (``detail``), and what to do if it does not (``remedy``)."""

    what: str
    works: bool
    detail: str = ""
    remedy: str = ""
    essential: bool = False


@dataclass(slots=True)
class Counts:
    """
    What happened at one probepoint.

    ``hits`` are all that are known of whose instruction completed. Of them ``passed`` ones were skipped by passcount,
    ``recursed`` ones came during a handler of the same thread, for ``missed`` ones there was no room, and with
    ``skipped`` ones the run would have taken too much of a CPU: they ran no handler. ``records`` were emitted, ``lost``
    ones dropped because nobody took them in time. ``faulted`` runs of the handler left no record, because the
    instruction faulted then. ``executed`` says in which ways the probed instruction was executed, where an engine has
    several.
    """

    hits: int = 0
    records: int = 0
    lost: int = 0
    passed: int = 0
    recursed: int = 0
    missed: int = 0
    skipped: int = 0
    faulted: int = 0
    executed: tuple[str, ...] = ()


class RecordBatch(NamedTuple):
    """Records (``log_record``) in their order, each with its probepoint: an index into the attachment's ``probes``."""

    records: Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class StateEvent:
    """
    The state of probepoints in one process; ``detail`` says more where there is more to say.

    ``probes`` are indices into the attachment's ``probes``.
    """

    probes: tuple[int, ...]
    pid: int
    state: ProbeState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """
    What the user is told that belongs to no single probe; not every notice is a warning.

    ``message`` is one line; ``details`` are more of them, as diagnostics are rendered.
    """

    message: str
    hint: str | None = None
    is_warning: bool = True
    details: str = ""

    @property
    def text(self) -> str:
        """All of it but the hint, harmless to lines and terminals."""
        text = escaped(self.message)
        return f"{text}\n{escaped_lines(self.details)}" if self.details else text


def written_notice(pid: int, name: str, path: str, size: int) -> Notice:
    """Tell where the core of a process is."""
    return Notice(f"the core of process {pid} ({name}) is in '{path}' ({size} bytes)", is_warning=False)


def no_core_notice(pid: int, name: str, path: str, problem: str) -> Notice:
    """Tell why there is none."""
    return Notice(f"no core of process {pid} ({name}) in '{path}': {problem.rstrip()}; the process continues")


@dataclass(frozen=True, slots=True)
class Pause:
    """A moment in which nothing more has arrived yet: time to flush what was written."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The moment from which all is probed that was in scope at the beginning, as far as that can be; comes once."""


@dataclass(frozen=True, slots=True)
class Finished:
    """
    The end of a run.

    ``counts`` are in the order of the attachment's ``probes``. ``exit_status`` is the command's wait status, None where
    there was no command. After a ``cut_short`` run the counts are of what was received; more may have happened.
    """

    counts: tuple[Counts, ...]
    exit_status: int | None = None
    cut_short: bool = False


Event = RecordBatch | StateEvent | Notice | Pause | Begun | Finished


@dataclass(frozen=True, slots=True)
class HandedOver:
    """
    A process that is not probed any more and stops (SIGSTOP), for a debugger to attach.

    ``name`` is that of thread ``tid``, which stands at ``address``: that of the probed instruction, which it has not
    executed, or with ``has_executed`` the one after it.
    """

    pid: int
    tid: int
    name: str
    address: int
    has_executed: bool = False


class LeftThings(NamedTuple):
    """What killed runs had left in a process: so many jumps and breakpoints, and memory, which may be in use still."""

    pid: int
    places: int
    is_unmapped: bool

    @property
    def said(self) -> str:
        """What was done about it."""
        places = f"{self.places} place{'' if self.places == 1 else 's'} in its code"
        memory = "and the memory of handlers was" if self.is_unmapped else "the memory of handlers is in use, and stays"
        return f"{places} {'was' if self.places == 1 else 'were'} restored, {memory}" + (
            " given back" if self.is_unmapped else ""
        )


class ScopeKind(Enum):
    """What a scope consists of; the value completes "the engine cannot probe ..."."""

    EVERYWHERE = "all processes"
    TREE = "a command or process"
    CGROUP = "a cgroup"
    USER = "a user's processes"
    ENDPOINT = "what an address or file names"
    MACHINE = "a virtual machine"
    KERNEL = "the kernel"


@dataclass(frozen=True, slots=True)
class Scope:
    """
    What a run is about: all processes, unless something is given.

    At most one of ``pid``, a ``command`` that is to be started, the path ``cgroup`` of a directory in a cgroup file
    system, the user id ``uid``, an ``endpoint``, a ``machine`` and the ``kernel`` is given, but for a command that
    starts what an endpoint stands for, and a process at one. An endpoint is what stands after the name of an
    engine (NAME=ENDPOINT), such as HOST:PORT or a file. ``follow`` says that what the process or command starts is in
    scope as well; with the others that follows by itself. ``program`` is the path of what the
    process ``pid`` is about to execute: it comes into scope with that. ``output`` is the descriptor that a command gets
    as its standard output, by default ours.
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
        """What it consists of."""
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
        """Whether it is one process, and what that starts."""
        return self.pid is not None or bool(self.command)

    @property
    def is_command(self) -> bool:
        """Whether it is a command that has not begun yet."""
        return bool(self.command) or self.program is not None


@dataclass(frozen=True, slots=True)
class Job:
    """
    What is to be run: a program that was compiled, and the processes in scope.

    ``items`` are the header items that records are to carry. ``globals`` are the global variables that the run shares
    with others; without them it has its own. ``replaces`` is an attachment of the same engine whose program this one
    takes the place of: a hit of an offset that both have runs the handler of exactly one of them. If the new one cannot
    be attached, the old one goes on; else its ``poll`` comes to its end. ``beside`` are other attachments of the same
    owner: one of them may follow the process in scope already, in a way that lets nobody else do so. ``images`` are to
    be told what processes map. ``principal`` is an attachment of the same engine whose variables and tables this one
    uses instead of its own: both were written as one. ``companions`` are the programs of all that share them, this one
    included.
    """

    compiled: Compiled
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
        """The program."""
        return self.compiled.program

    @property
    def resolved(self) -> ResolvedModule | None:
        """What is known already of one of the program's modules."""
        return self.compiled.resolved

    @property
    def kernel(self) -> ResolvedKernel | None:
        """Where its probepoints in the kernel are."""
        return self.compiled.kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """
    What an engine is going to attach; nothing has happened yet.

    ``kernel`` is the one of another machine that records are from; None if they are from this one.
    """

    engine: Engine
    job: Job
    kernel: RunningKernel | None = None


class VariableChange(NamedTuple):
    """A new value, of 64 bits, of a local variable."""

    number: int
    value: int


class TableChange(NamedTuple):
    """
    What is done to a keyed table by its number.

    A signed ``value`` is taken in under a ``key``, and bytes, of a string or a call stack, are kept there; with None
    the key is taken out, and without a key all keys.
    """

    table: int
    key: bytes | None = None
    value: int | bytes | None = None


Change = VariableChange | TableChange


def carry_out(changes: Sequence[Change], variables: MutableSequence[int], tables: Sequence[KeyedStore]) -> None:
    """Change variables and tables of a program; nobody else may write them meanwhile."""
    for change in changes:
        match change:
            case VariableChange(index, value):
                variables[index] = value
            case TableChange(table, None):
                tables[table].clear()
            case TableChange(table, bytes() as key, None):
                tables[table].delete(key)
            case TableChange(table, bytes() as key, int() as value):
                tables[table].tally(key, value)
            case TableChange(table, bytes() as key, bytes() as value):
                tables[table].keep(key, value)


class Attachment(Protocol):
    """
    A program in its targets, from ``Engine.attach`` until it is closed.

    ``probes`` holds every probepoint that was found so far, in whatever file; it only grows. One thread polls; what
    others look at, change and ask for may be called by any thread.
    """

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The probepoints by the numbers that events give them."""

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""

    @property
    def mapped_files(self) -> dict[str, str]:
        """The files that processes in scope mapped as code, as far as it was told: file names, and paths."""
        return {}

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger runs for a process that was handed over, and Ctrl-C at the terminal is for it."""
        return False

    @property
    def tracer(self) -> int | None:
        """The process that traces those in scope for the attachment, None if there is none (any more)."""
        return None

    def poll(self) -> Iterator[Event]:
        """Iterate over what happens until ``Finished``."""

    def close(self) -> None:
        """Remove every probepoint, and give everything up."""

    def stop(self) -> None:
        """Ask for the end; ``poll`` goes on until ``Finished``."""

    def hurry(self) -> bool:
        """
        Give up the records that are still to be given out after the end, and count them as lost.

        Return False if nothing can be gained by that; may be called by a signal handler.
        """
        return False

    def end_command(self) -> int | None:
        """
        Ask the command that was started to end (SIGTERM), and return its wait status.

        To be called after ``Finished``. None: there is no such command, or it does not end.
        """
        return None

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far, in the order of ``probes``."""

    def wake(self) -> None:
        """Have ``poll`` look at once what has come, and give it out."""
        return

    def remove(self, probes: Sequence[int]) -> None:
        """Remove probepoints, as the instruction ``remove`` does; ``poll`` reports them as REMOVED."""

    def local_variables(self) -> list[int]:
        """Return the program's local variables."""

    def cpu_variables(self) -> list[list[int]]:
        """Return its CPU variables, a list for each CPU."""

    def tables(self) -> tuple[TableContents, ...]:
        """Return what its keyed tables hold, in the order of its header."""
        return ()

    def change(self, changes: Sequence[Change]) -> None:  # noqa: ARG002 - for engines that can
        """Change local variables and tables between two handlers, and return when that is done."""
        raise NotSupportedError("this engine does not let others change variables and tables")

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set its local and CPU variables with the indices from ``first`` to ``last``, by default all, to zero."""


@dataclass(frozen=True, slots=True)
class PlaceNote:
    """
    What an engine does at an instruction, for people who choose a place.

    ``text`` is a clause; ``verdict`` completes "the instruction is ``text``" where advice follows. ``is_cheap`` marks
    the instructions where a hit costs less than at others.
    """

    text: str
    verdict: str = ""
    is_cheap: bool = False


class Engine(ABC):
    """A mechanism that places probepoints and runs handlers."""

    name: str

    @property
    def found_capabilities(self) -> Container[Capability]:
        """What it can on this machine, besides its row in the registry."""
        return ()

    def kernel(self, program: Program) -> AbstractContextManager[RunningKernel] | None:  # noqa: ARG002 - as above
        """Return what gives the kernel that a program is about, held still meanwhile; None: the one that runs here."""
        return None

    def processor(self, program: Program) -> AbstractContextManager[Architecture | None] | None:  # noqa: ARG002
        """Return what gives the processor that a program for a kernel is for; None: that of this machine."""
        return None

    def check(self, scope: Scope, options: EngineOptions) -> None:  # noqa: B027 - most engines work everywhere
        """Raise an error of ours if it cannot work here, or not on what is in scope."""

    def drawback(self, job: Job) -> str | None:  # noqa: ARG002 - for those that have one
        """Return why another engine that can attach the program should do so, as a clause; None if there is none."""
        return None

    def plan(self, job: Job) -> Plan:
        """Return how a job is to be done; raise an error of ours if it cannot serve the probepoints that were found."""
        return Plan(self, job)

    @abstractmethod
    def attach(self, plan: Plan) -> Attachment:
        """Insert the program of a plan, and start the command if there is one; return what has become of that."""
