"""
What engines have in common: what a program needs, what an engine can, and the events of a run.

An engine that lacks something a program needs refuses it here, before anything is inserted, with the line and the
reason.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from dprobes.record.layout import Item
from dprobes.rpn.isa import Group, OperandKind
from dprobes.rpn.program import Access, Address, Expression, Glob, ModuleType, Sampler
from dprobes.target.arch import RegisterClass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.resolve import LeftOutProbe, Probepoint, ResolvedModule
    from dprobes.rpn.program import Instruction, Program
    from dprobes.source import Span
    from dprobes.target.arch import Architecture

__all__ = [
    "Capability",
    "Counts",
    "Engine",
    "Event",
    "Finished",
    "Job",
    "Notice",
    "Pause",
    "ProbeState",
    "RecordEvent",
    "Requirement",
    "Session",
    "StateEvent",
    "refuse_unsupported",
    "requirements",
    "watches_user_addresses",
]


class Capability(enum.Enum):
    """Name what a program may need of an engine; the value completes "... needs"."""

    KERNEL_MODULE = "probes in the kernel or a kernel module"
    WATCHPOINT = "watchpoint probes"
    PORT_WATCHPOINT = "watchpoints on I/O ports"
    SAMPLER = "sampler probes"
    RETURN = "probes at a function's return"
    GLOB = "patterns in 'offset ='"
    WRITE_REGISTER = "writing registers"
    WRITE_MEMORY = "writing memory"
    FLOATING_POINT = "floating-point and SSE registers"
    SYSTEM_REGISTER = "control, debug and model-specific registers"
    CPUID = "the cpuid registers"
    SEGMENTED = "segmented addresses"
    IO_PORT = "I/O ports"
    TASK = "the kernel's task structure"
    HAND_OVER = "handing over to a debugger"
    CORE_DUMP = "writing a core dump"
    EXTENSION = "extensions called by callk"


@dataclass(frozen=True, slots=True)
class Requirement:
    """Say that ``what``, which stands at ``span``, needs a capability; ``hurdle`` is why engines can hardly have it."""

    capability: Capability
    what: str
    span: Span | None
    hurdle: str | None = None


class ProbeState(enum.Enum):
    """Name the states of a probepoint; the words are those of ``query`` (recovered reference 2.4)."""

    COMPILED = "COMPILED"
    ACTIVE = "ACTIVE"
    MISMATCH = "MISMATCH"
    CONFLICT = "CONFLICT"
    DISABLED = "DISABLED"
    REMOVED = "REMOVED"
    INVALID_OFFSET = "INVALID_OFFSET"
    EXCLUDED = "EXCLUDED"
    DEBUGREG_UNAVAIL = "DEBUGREG_UNAVAIL"
    WATCHPOINT_LEN_INVALID = "WATCHPOINT_LEN_INVALID"


@dataclass(slots=True)
class Counts:
    """
    Count what happened at one probepoint.

    ``hits`` are hits whose instruction completed, ``passed`` those of them that passcount passed over, ``records`` the
    records emitted, ``lost`` those dropped because nobody took them in time, ``recursed`` hits during a handler of the
    same thread, which run no handler. ``executed`` says in which ways the probed instruction was executed, where an
    engine has several.
    """

    hits: int = 0
    records: int = 0
    lost: int = 0
    passed: int = 0
    recursed: int = 0
    executed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Carry one record (``record.layout``) of a probepoint, an index into the session's ``probes``."""

    probe: int
    record: bytes


@dataclass(frozen=True, slots=True)
class StateEvent:
    """
    Report the state of probepoints in one process; ``detail`` says more where there is more to say.

    ``probes`` are indices into the session's ``probes``.
    """

    probes: tuple[int, ...]
    pid: int
    state: ProbeState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Tell the user something that belongs to no single probe; not every notice is a warning."""

    message: str
    hint: str | None = None
    is_warning: bool = True


@dataclass(frozen=True, slots=True)
class Pause:
    """Say that nothing more has arrived yet: the moment to flush what was written."""


@dataclass(frozen=True, slots=True)
class Finished:
    """
    Close a run.

    ``counts`` are in the order of the session's ``probes``. ``exit_status`` is the command's wait status, None where
    there was no command. After a ``cut_short`` run the counts are of what was received; more may have happened.
    """

    counts: tuple[Counts, ...]
    exit_status: int | None = None
    cut_short: bool = False


Event = RecordEvent | StateEvent | Notice | Pause | Finished


@dataclass(frozen=True, slots=True)
class Job:
    """
    Hold what is to be run: a program, and the processes in scope.

    Exactly one of ``command`` and ``pid`` is given. ``items`` are the header items that records are to carry.
    ``follow`` says that the processes which it starts are in scope as well. ``resolved`` is what is known already of
    one of the program's modules.
    """

    program: Program
    command: tuple[str, ...] = ()
    pid: int | None = None
    items: Item = Item.MAJOR | Item.MINOR
    follow: bool = True
    resolved: ResolvedModule | None = None


class Session(Protocol):
    """
    Hold one run of a program; entering the context manager starts it, leaving it takes every probepoint away.

    ``probes`` holds every probepoint that was found so far, in whatever file; it only grows.
    """

    @property
    def probes(self) -> Sequence[Probepoint]:
        """The probepoints by the numbers that events give them."""

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger runs for a process that was handed over, and Ctrl-C at the terminal is for it."""

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def events(self) -> Iterator[Event]:
        """Iterate over what happens until ``Finished``."""

    def stop(self) -> None:
        """Ask for the end; ``events`` goes on until ``Finished``."""


class Engine(Protocol):
    """Place probepoints and run handlers by one mechanism."""

    name: str
    capabilities: frozenset[Capability]

    def run(self, job: Job) -> Session:
        """Return the session of a run, which starts when it is entered."""


_READING = {
    RegisterClass.FLOATING_POINT: Capability.FLOATING_POINT,
    RegisterClass.CPUID: Capability.CPUID,
    RegisterClass.SYSTEM: Capability.SYSTEM_REGISTER,
}
"""What reading a register of a class needs; every engine reads the general and the segment registers."""


def requirements(program: Program, architecture: Architecture) -> Iterator[Requirement]:
    """Iterate over what a program needs that not every engine has."""
    if program.modtype is not ModuleType.USER and not watches_user_addresses(program):
        yield Requirement(Capability.KERNEL_MODULE, f"modtype = {program.modtype.value}", program.spans.get("modtype"))
    for definition in program.definitions:
        if definition.watchpoint is not None and isinstance(definition.location, Address):
            yield _needed_to_watch(definition.watchpoint, definition.span("watchpoint"))
        if isinstance(definition.location, Sampler):
            yield Requirement(Capability.SAMPLER, "sampler =", definition.span("sampler"))
        if isinstance(definition.location, Glob):
            yield Requirement(Capability.GLOB, f"offset = {definition.location.pattern}", definition.span("offset"))
        if definition.at_return:
            yield Requirement(Capability.RETURN, "return = yes", definition.span("return"))
    for code in program.bodies():
        for instruction in code.instructions:
            if (capability := _needed_by(instruction, architecture)) is not None:
                yield Requirement(capability, str(instruction), instruction.span)


_KERNEL_HALF = 1 << 63
"""From here on addresses are the kernel's."""


def watches_user_addresses(program: Program) -> bool:
    """
    Return whether a program for the kernel only watches addresses of user programs, and names nothing in the kernel.

    Such a program is about every process, whatever that maps.
    """
    if program.modtype is not ModuleType.KERNEL:
        return False
    for definition in program.definitions:
        match definition.location:
            case Address(Expression(low, None), None | Expression(_, None)) if low < _KERNEL_HALF:
                if definition.watchpoint is None:
                    return False
            case _:
                return False
    operands = (instruction.operand for code in program.bodies() for instruction in code.instructions)
    return not any(isinstance(operand, Expression) and operand.symbol is not None for operand in operands)


def _needed_to_watch(access: Access, span: Span | None) -> Requirement:
    if access is Access.IO:
        hurdle = "Linux offers the processor's watchpoints on I/O ports to nobody"
        return Requirement(Capability.PORT_WATCHPOINT, "watchpoint = io", span, hurdle)
    return Requirement(Capability.WATCHPOINT, f"watchpoint = {access.value}", span)


def _needed_by(instruction: Instruction, architecture: Architecture) -> Capability | None:
    row, operand = instruction.row, instruction.operand
    if row.operand_kind is OperandKind.REGISTER and isinstance(operand, (str, int)):
        if row.operator == "pop":
            return Capability.WRITE_REGISTER
        register = architecture.register(operand)
        return None if register is None else _READING.get(register.kind)
    if row.group is Group.SEGMENT:
        return Capability.SEGMENTED
    if row.group is Group.IO:
        return Capability.IO_PORT
    if row.operator == "callk":
        return Capability.EXTENSION
    if row.syntax == "push task":
        return Capability.TASK
    if row.syntax == "exit <code>" and operand in (1, 3):
        return Capability.HAND_OVER if operand == 1 else Capability.CORE_DUMP
    return Capability.WRITE_MEMORY if row.writes else None


def refuse_unsupported(
    program: Program, architecture: Architecture, engine: Engine, others: tuple[Engine, ...], diagnostics: Diagnostics
) -> None:
    """Add an error for everything that ``program`` needs and ``engine`` lacks, naming one of ``others`` that has it."""
    for requirement in requirements(program, architecture):
        if requirement.capability in engine.capabilities:
            continue
        able = [other.name for other in others if requirement.capability in other.capabilities]
        hint = f"use --engine {able[0]}" if able else requirement.hurdle or "no engine of this version provides that"
        diagnostics.error(
            requirement.span,
            f"'{requirement.what}' needs {requirement.capability.value}, which the {engine.name} engine lacks",
            hint=hint,
        )
