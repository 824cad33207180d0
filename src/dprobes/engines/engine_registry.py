"""
The engines: one row for each, with all that others know of it.

An engine is a package in ``engines/`` and its row here. What a row names as "module:object" is imported when it is
asked for the first time. Nothing else imports an engine, compares the name of one, or lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_interface import ScopeKind
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.engine_interface import Engine, Finding, LeftThings, PlaceNote, Scope
    from dprobes.engines.engine_options import EngineOptions, MachineKnowledge
    from dprobes.resolve.local_module import Compiled
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.btf import Btf
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module

__all__ = [
    "AUTO",
    "Candidacy",
    "EngineRow",
    "KernelSupport",
    "Speedup",
    "candidates",
    "engine_row",
    "faster_row",
    "named_engine",
    "names",
    "rows",
]

AUTO = "auto"
"""What stands for the engine that can do what a program needs, and is cheapest."""


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """
    What this kernel lets an engine do for this user.

    ``problem`` is a clause that says why it cannot work at all, ``remedy`` what to do about that; ``tree_problem`` one
    that says why it cannot follow the processes of a tree, ``tree_remedy`` where it could. ``capabilities`` is what it
    can besides its row; each may be found out when it is asked for.
    """

    problem: str | None = None
    remedy: str | None = None
    tree_problem: str | None = None
    tree_remedy: str | None = None
    capabilities: Container[Capability] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidacy:
    """
    What ``auto`` weighs of an engine.

    ``cost`` is that of a hit, relative to others. ``usual_reason`` says why it is taken where nothing speaks against
    it, which a user need not hear; ``scope_reason`` why it is taken where others cannot take the scope. ``better_at``
    is what cheaper engines can do less well, with the reason. ``found_by_trying`` is what some kernels let it do
    besides its row; ``support`` returns its ``KernelSupport``. ``offer`` is for those for whom other engines do not
    work.
    """

    cost: int
    usual_reason: str = ""
    scope_reason: str = ""
    better_at: Mapping[Capability, str] = field(default_factory=dict)
    found_by_trying: frozenset[Capability] = frozenset()
    support: str = ""
    offer: str = ""


@dataclass(frozen=True, slots=True)
class Speedup:
    """
    What ``auto`` weighs of an engine that does all that ``engine`` does, and some of it faster.

    ``reason`` says what is faster. ``obstacle`` returns why that is of no use to a compiled program, None if it is.
    """

    engine: str
    reason: str
    obstacle: str


@dataclass(frozen=True, slots=True)
class EngineRow:
    """
    An engine as others know it.

    ``factory`` returns the engine for ``EngineOptions`` and a ``Scope``. ``argument`` says what follows the name, as in
    NAME=FILE, ``summary`` what the engine does with it. ``capabilities`` is what it can where it works at all; some
    kernels let one do more. ``how_to_ask`` is the hint for those whose program needs it; None if it does not probe what
    runs. ``starts_commands`` says that a command may start what the argument names, ``has_processes`` that there may be
    processes in that, of which a user chooses one by its number there, ``is_managed`` that the manager may have it,
    ``stops_all`` that all of what the argument names stands still at a hit, ``is_tracer`` that it traces the processes
    in scope, which only one can at a time, ``waits_for_modules`` that a user is told of a module that is not there yet,
    ``shares_variables`` that its sessions can use the variables and tables of others. ``options`` is the dataclass of
    options of its own; those in ``demands`` cannot be ignored by another engine, and are named there as users write
    them. ``doctor`` returns ``Finding``s, ``trial`` those about what the argument names. ``place_notes`` says what the
    engine does at instructions, ``code_listing`` how it compiles a program (``show``), ``probe_notes`` what it does
    with each probepoint of one, if a user asks for that. ``kernel_types`` returns the types (BTF) of a kernel that does
    not run here. ``left_things`` takes out of processes what killed runs of it have left.
    """

    name: str
    factory: str
    scopes: frozenset[ScopeKind]
    capabilities: frozenset[Capability]
    argument: str | None = None
    summary: str = ""
    how_to_ask: str | None = None
    is_tracer: bool = False
    starts_commands: bool = False
    has_processes: bool = False
    is_managed: bool = True
    stops_all: bool = False
    waits_for_modules: bool = False
    shares_variables: bool = False
    candidacy: Candidacy | None = None
    speedup: Speedup | None = None
    options: str | None = None
    demands: Mapping[str, str] = field(default_factory=dict)
    doctor: str | None = None
    trial: str | None = None
    place_notes: str | None = None
    code_listing: str | None = None
    probe_notes: str | None = None
    kernel_types: str | None = None
    left_things: str | None = None
    hit_time: int = 0
    """The nanoseconds up to which the measured time of a call is mostly what its hits cost; 0 where that is little."""

    @property
    def usage(self) -> str:
        """What a user writes for it."""
        return self.name if self.argument is None else f"{self.name}={self.argument}"

    def make(self, options: EngineOptions, scope: Scope) -> Engine:
        """Return the engine for a run."""
        engine: Engine = _load(self.factory)(options, scope)
        return engine

    def own_options(self, values: Mapping[str, Any]) -> Any:
        """Return the options of its own, with those of ``values`` that are among them."""
        assert self.options is not None, "the engine has no options of its own"
        kind = _load(self.options)
        return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})

    def support(self, knowledge: MachineKnowledge) -> KernelSupport:
        """Return what the kernel lets it do."""
        if self.candidacy is None or not self.candidacy.support:
            return KernelSupport()
        support: KernelSupport = _load(self.candidacy.support)(knowledge)
        return support

    def speeds_up(self, compiled: Compiled) -> bool:
        """Return whether it serves a program faster than the engine that it stands in for."""
        return self.speedup is not None and _load(self.speedup.obstacle)(compiled) is None

    def kernel_types_of(self, scope: Scope) -> Callable[[], Btf | None] | None:
        """Return what gives the types of the kernel in a scope; None if it is the one that runs here."""
        if self.kernel_types is None or scope.endpoint is None:
            return None
        types: Callable[[], Btf | None] = partial(_load(self.kernel_types), scope.endpoint)
        return types

    def examine(self) -> list[Finding]:
        """Return what it needs of this machine, and whether that works."""
        return [] if self.doctor is None else list(_load(self.doctor)())

    def examine_behind(self, argument: str) -> list[Finding]:
        """Return what is found where the argument leads to."""
        assert self.trial is not None, "nothing can be tried"
        return list(_load(self.trial)(argument))

    def remove_left(self) -> Iterable[LeftThings]:
        """Take out of all processes what killed runs have left there; give what each had."""
        return () if self.left_things is None else _load(self.left_things)()

    def notes_on(self, module: Module, instructions: Sequence[DecodedInstruction]) -> Iterable[PlaceNote]:
        """Return what it would do at each of some instructions of a module; nothing if there is nothing to say."""
        return () if self.place_notes is None else _load(self.place_notes)(module, instructions)

    def notes_on_probes(self, program: Program, resolved: ResolvedModule) -> Mapping[int, str]:
        """Return what it does with probepoints of a module, by their places among these."""
        return {} if self.probe_notes is None else _load(self.probe_notes)(program, resolved)


_COMMON = frozenset(
    {
        Capability.EXTENSION,
        Capability.HAND_OVER,
        Capability.CORE_DUMP,
        Capability.GLOB,
        Capability.WATCHPOINT,
        Capability.MODULE_WATCHPOINT,
        Capability.RETURN,
    }
)
"""What all engines of this version can."""

_WRITING = frozenset({Capability.WRITE_REGISTER, Capability.WRITE_MEMORY, Capability.VERIFY_WRITE})

_INTERPRETED = (
    _COMMON
    | _WRITING
    | {Capability.SEGMENT_REGISTER, Capability.SEGMENTED, Capability.INTERPRETED_EXTENSION, Capability.USER_STACK}
    | {Capability.SKIP}
)
"""What engines can whose handlers run in Python."""

_PTRACE = EngineRow(
    name="ptrace",
    hit_time=100_000,
    factory="dprobes.engines.ptrace.ptrace_engine:engine_for",
    scopes=frozenset({ScopeKind.TREE}),
    capabilities=_INTERPRETED | {Capability.FLOATING_POINT, Capability.CPUID},
    how_to_ask="use --engine ptrace with -c COMMAND or -p PID",
    is_tracer=True,
    waits_for_modules=True,
    shares_variables=True,
    candidacy=Candidacy(
        cost=10,
        better_at={
            Capability.HAND_OVER: "leaves the probed instruction to the debugger only there",
            Capability.CORE_DUMP: "shows the state before the probed instruction only there",
            Capability.MODULE_WATCHPOINT: "sees accesses from the very start of a process only there",
        },
        offer="for one command or process (-c, -p) there is an engine that needs neither",
    ),
    doctor="dprobes.engines.ptrace.ptrace_doctor:examine",
    place_notes="dprobes.engines.ptrace.step_cost:place_notes",
)

_EBPF = EngineRow(
    name="ebpf",
    hit_time=30_000,
    factory="dprobes.engines.ebpf.ebpf_engine:engine_for",
    scopes=frozenset({ScopeKind.EVERYWHERE, ScopeKind.TREE, ScopeKind.CGROUP, ScopeKind.USER}),
    capabilities=_COMMON
    | {
        Capability.TASK,
        Capability.SAMPLER,
        Capability.KERNEL_EVENT,
        Capability.TRACEPOINT,
        Capability.KERNEL_STACK,
        Capability.USER_STACK,
    },
    how_to_ask="use --engine ebpf",
    shares_variables=True,
    candidacy=Candidacy(
        cost=1,
        usual_reason="handlers run in the kernel, and nothing in the program needs ptrace",
        scope_reason="only it probes processes that it did not start or attach to",
        found_by_trying=_WRITING | {Capability.KERNEL_MODULE, Capability.KERNEL_SKIP},
        support="dprobes.engines.ebpf.ebpf_availability:support",
    ),
    options="dprobes.engines.ebpf.ebpf_options:EbpfOptions",
    demands={"pid_namespace": "--pid-namespace"},
    doctor="dprobes.engines.ebpf.ebpf_doctor:examine",
    place_notes="dprobes.engines.ebpf.place_notes:place_notes",
    code_listing="dprobes.engines.ebpf.ebpf_listing:ebpf_listing",
)

_INLINE = EngineRow(
    name="inline",
    factory="dprobes.engines.inline.inline_engine:engine_for",
    scopes=frozenset({ScopeKind.TREE}),
    capabilities=_PTRACE.capabilities,
    how_to_ask="use --engine inline with -c COMMAND or -p PID",
    shares_variables=True,
    is_tracer=True,
    waits_for_modules=True,
    speedup=Speedup(
        engine="ptrace",
        reason="handlers run in the process",
        obstacle="dprobes.engines.inline.handler_pieces:obstacle_to_all",
    ),
    probe_notes="dprobes.engines.inline.handler_trials:probe_notes",
    left_things="dprobes.engines.ptrace.client.left_removal:remove_all_left",
)

_REPLAY = EngineRow(
    name="replay",
    factory="dprobes.engines.replay.replay_engine:ReplayEngine",
    scopes=frozenset({ScopeKind.ENDPOINT}),
    capabilities=_INTERPRETED | {Capability.TASK, Capability.SAMPLER, Capability.OTHER_PROCESSOR},
    argument="FILE",
    is_managed=False,
    summary="runs handlers on the hits that FILE describes",
)

_GDB = EngineRow(
    name="gdb",
    hit_time=1_000_000,
    factory="dprobes.engines.gdb.gdb_engine:GdbEngine",
    kernel_types="dprobes.engines.gdb.machine.guest_kernel:kernel_types",
    scopes=frozenset({ScopeKind.ENDPOINT}),
    capabilities=frozenset(
        {
            Capability.EXTENSION,
            Capability.INTERPRETED_EXTENSION,
            Capability.KERNEL_MODULE,
            Capability.KERNEL_EVENT,
            Capability.WATCHPOINT,
            Capability.SAMPLER,
            Capability.TASK,
            Capability.SYSTEM_REGISTER,
            Capability.CPUID,
            Capability.IO_PORT,
            Capability.SEGMENTED,
            Capability.PHYSICAL_MEMORY,
            Capability.VERIFY_WRITE,
            Capability.HAND_OVER,
            Capability.CORE_DUMP,
            Capability.GLOB,
            Capability.RETURN,
            Capability.WRITE_REGISTER,
            Capability.WRITE_MEMORY,
            Capability.KERNEL_WRITE,
            Capability.SEGMENT_REGISTER,
            Capability.FLOATING_POINT,
            Capability.USER_STACK,
            Capability.KERNEL_STACK,
            Capability.MODULE_WATCHPOINT,
            Capability.SKIP,
            Capability.OTHER_PROCESSOR,
        }
    ),
    shares_variables=True,
    argument="ENDPOINT",
    trial="dprobes.engines.gdb.stub_doctor:examine_stub",
    starts_commands=True,
    has_processes=True,
    stops_all=True,
    how_to_ask="use --engine gdb=ENDPOINT, where a stub stands for such a machine or process",
    summary="probes what is behind a stub of GDB's protocol: HOST:PORT, a socket, a serial line, or |COMMAND",
)

_ROWS = (_PTRACE, _EBPF, _INLINE, _REPLAY, _GDB)


def rows() -> Sequence[EngineRow]:
    """Return the engines, those first that need the least of a machine."""
    return _ROWS


def engine_row(name: str) -> EngineRow:
    """Return the engine called ``name``; raise ``EngineError`` if there is none."""
    for row in _ROWS:
        if row.name == name:
            return row
    raise EngineError(f"there is no engine '{name}'", hint=f"engines are {', '.join(names())}")


def engine_that_probes(kind: ScopeKind) -> str:
    """Return the name of the engine that probes a kind of scope; raise ``EngineError`` if none does."""
    for row in _ROWS:
        if kind in row.scopes:
            return row.name
    raise EngineError(f"no engine of this version probes {kind.value}")


def names() -> tuple[str, ...]:
    """Return what users may ask for."""
    return (AUTO, *sorted(row.usage for row in _ROWS))


def named_engine(text: str) -> tuple[str, str | None]:
    """Return the name and the argument in what a user asks for; raise ``EngineError`` if there is no such engine."""
    name, equals, argument = text.partition("=")
    if name == AUTO and not equals:
        return name, None
    row = engine_row(name)
    if row.argument is None and equals:
        raise EngineError(f"the {name} engine takes no argument: '{text}'", hint=f"write --engine {name}")
    if row.argument is not None and not argument:
        raise EngineError(f"the {name} engine needs an argument", hint=f"write --engine {row.usage}")
    return name, argument or None


def candidates() -> tuple[EngineRow, ...]:
    """Return the engines that ``auto`` chooses from, those first whose hits cost least."""
    weighed = [(row.candidacy.cost, row) for row in _ROWS if row.candidacy is not None]
    return tuple(row for _, row in sorted(weighed, key=lambda each: each[0]))


def faster_row(name: str) -> EngineRow | None:
    """Return the engine that stands in for another one where it is faster, None if there is none."""
    return next((row for row in _ROWS if row.speedup is not None and row.speedup.engine == name), None)


def code_listing(compiled: Compiled) -> Iterator[str]:
    """Iterate over the lines of a program as the engine that compiles handlers would run it (``show --bpf``)."""
    path = next(row.code_listing for row in _ROWS if row.code_listing is not None)
    lines: Iterator[str] = _load(path)(compiled)
    return lines


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
