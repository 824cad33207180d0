"""
Registry of the engines, with one row for each that has its properties for other modules.

An engine is a package in ``engines/`` and its row here. Objects that a row names as "module:object" are imported when
they are first used. No other module imports an engine, compares an engine's name, or lists the engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_interface import ScopeKind
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.engine_interface import (
        Engine,
        EngineOptions,
        Finding,
        LeftThings,
        MachineKnowledge,
        PlaceNote,
        Scope,
    )
    from dprobes.resolve.local_module import ResolvedProgram
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.btf import Btf
    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module

__all__ = [
    "AUTO",
    "TOOL",
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
"""Value of ``--engine`` for the automatic choice of an engine (``engine_choice``)."""


class KernelSupport(NamedTuple):
    """
    Support of this kernel for an engine, with the privileges of this user.

    ``problem`` is a clause with the reason why the engine cannot work, or None if it works. ``remedy`` is advice about
    it. ``tree_problem`` is the reason why the engine cannot follow a process tree; ``tree_remedy`` completes the advice
    "use ...". ``capabilities`` has those that the row lacks; a look-up may test the kernel.
    """

    problem: str | None = None
    remedy: str | None = None
    tree_problem: str | None = None
    tree_remedy: str | None = None
    capabilities: Container[Capability] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidacy:
    """
    Properties of an engine by which ``auto`` chooses.

    * ``cost`` is the cost of a hit, relative to other engines.
    * ``usual_reason`` is the reason for the choice in the normal case, which users do not see. ``scope_reason`` is the
      reason if other engines cannot probe the scope.
    * ``better_at`` has the capabilities that cheaper engines have only in a weaker form, each with the reason why this
      engine is better.
    * ``found_by_trying`` has the capabilities that depend on the kernel; ``support`` returns the ``KernelSupport``.
    * ``offer`` is a clause that recommends the engine if others do not work.
    """

    cost: int
    usual_reason: str = ""
    scope_reason: str = ""
    better_at: Mapping[Capability, str] = field(default_factory=dict)
    found_by_trying: frozenset[Capability] = frozenset()
    support: str = ""
    offer: str = ""


class Speedup(NamedTuple):
    """
    Properties of an engine that can replace ``engine`` for every program, and serves some programs faster.

    ``reason`` is a clause about the gain. ``obstacle`` returns the reason why the engine is not faster for a compiled
    program, or None if it is faster.
    """

    engine: str
    reason: str
    obstacle: str


@dataclass(frozen=True, slots=True)
class EngineRow:
    """
    Properties of an engine for other modules.

    * ``factory`` returns the engine for ``EngineOptions`` and a ``Scope``.
    * ``argument`` is the name of the argument, such as FILE in NAME=FILE, and ``summary`` describes the engine's use of
      it.
    * ``capabilities`` are those on every machine on which the engine works; some kernels allow more.
    * ``how_to_ask`` is the hint for users whose program needs the engine; None if it does not probe running processes.
    * ``starts_commands``: a command may start the target of the argument.
    * ``has_processes``: that target may have processes, of which a user chooses one by its id there.
    * ``is_managed``: the manager may use the engine.
    * ``stops_all``: the whole target of the argument stops at a hit.
    * ``is_tracer``: it traces the processes in scope; a process has one tracer at a time.
    * ``waits_for_modules``: users get a notice about a module that is not mapped yet.
    * ``shares_variables``: its attachments can use the variables and tables of a principal.
    * ``options`` is the dataclass of the engine's own options. Other engines refuse those in ``demands``, which maps
      them to their names for users.
    * ``doctor`` returns ``Finding``s about this machine, ``trial`` those about the target of an argument.
    * ``place_notes`` returns ``PlaceNote``s on instructions, ``code_listing`` the machine code or bytecode of a program
      (``show``), and ``probe_notes`` how each probepoint is placed, if a user asks for that.
    * ``kernel_types`` returns the types (BTF) of the kernel of another machine.
    * ``left_things`` removes the remains of killed runs of the engine from processes.
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
    """
    Duration of a function in nanoseconds below which a hit takes longer than the function, or 0 if hits are cheap.
    """

    @property
    def usage(self) -> str:
        """The argument of ``--engine`` for this engine: NAME, or NAME=ARGUMENT."""
        return self.name if self.argument is None else f"{self.name}={self.argument}"

    def make(self, options: EngineOptions, scope: Scope) -> Engine:
        """Return the engine of this row for a user's options and the targets in ``scope``."""
        engine: Engine = _load(self.factory)(options, scope)
        return engine

    def own_options(self, values: Mapping[str, Any]) -> Any:
        """Return an object of the engine's options class, with the options in ``values`` that the class has."""
        assert self.options is not None, "the engine has no options of its own"
        kind = _load(self.options)
        return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})

    def support(self, knowledge: MachineKnowledge) -> KernelSupport:
        """Return the kernel's support for the engine, cached in ``knowledge``."""
        if self.candidacy is None or not self.candidacy.support:
            return KernelSupport()
        support: KernelSupport = _load(self.candidacy.support)(knowledge)
        return support

    def speeds_up(self, compiled: ResolvedProgram) -> bool:
        """Return whether the engine runs a program's hits faster than the engine whose place it takes by default."""
        return self.speedup is not None and _load(self.speedup.obstacle)(compiled) is None

    def kernel_types_of(self, scope: Scope) -> Callable[[], Btf | None] | None:
        """Return a function that returns the types of the kernel in a scope, or None for the kernel of this machine."""
        if self.kernel_types is None or scope.endpoint is None:
            return None
        types: Callable[[], Btf | None] = partial(_load(self.kernel_types), scope.endpoint)
        return types

    def examine(self) -> list[Finding]:
        """
        Return the findings of ``doctor`` about the engine on this machine.

        If the engine has no checks, there are none.
        """
        return [] if self.doctor is None else list(_load(self.doctor)())

    def examine_behind(self, argument: str) -> list[Finding]:
        """
        Return the findings of ``doctor`` about the target of an argument.

        If the engine has no checks, there are none.
        """
        assert self.trial is not None, "nothing can be tried"
        return list(_load(self.trial)(argument))

    def remove_left(self) -> Iterable[LeftThings]:
        """Remove the remains of killed runs from all processes; return what was removed from each process."""
        return () if self.left_things is None else _load(self.left_things)()

    def notes_on(self, module: Module, instructions: Sequence[DecodedInstruction]) -> Iterable[PlaceNote]:
        """Return the engine's notes on instructions of a module, if the engine makes notes."""
        return () if self.place_notes is None else _load(self.place_notes)(module, instructions)

    def notes_on_probes(self, program: Program, resolved: ResolvedModule) -> Mapping[int, str]:
        """Return the engine's notes on probepoints of a module, by their indices."""
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
"""Capabilities of all engines of this version."""

_WRITING = frozenset({Capability.WRITE_REGISTER, Capability.WRITE_MEMORY, Capability.VERIFY_WRITE})

_INTERPRETED = (
    _COMMON
    | _WRITING
    | {Capability.SEGMENT_REGISTER, Capability.SEGMENTED, Capability.INTERPRETED_EXTENSION, Capability.USER_STACK}
    | {Capability.SKIP}
)
"""Capabilities of engines whose handlers run in Python."""

_PTRACE = EngineRow(
    name="ptrace",
    hit_time=100_000,
    factory="dprobes.engines.ptrace.ptrace_engine:engine_for",
    scopes=frozenset({ScopeKind.TREE}),
    capabilities=_INTERPRETED
    | {Capability.FLOATING_POINT, Capability.CPUID, Capability.COUNTER, Capability.PAGE_WATCHPOINT}
    | {Capability.LIVE_PATCH, Capability.ACCESS_CHECK},
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
        offer="-c and -p have an engine that needs neither",
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
        Capability.COUNTER_SAMPLER,
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
        found_by_trying=_WRITING
        | {
            Capability.KERNEL_MODULE,
            Capability.PORT_WATCHPOINT,
            Capability.KERNEL_SKIP,
            Capability.COUNTER,
            Capability.SWITCH_COUNTER,
        },
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
    capabilities=_PTRACE.capabilities - {Capability.LIVE_PATCH},
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
    how_to_ask="use --engine gdb=ENDPOINT, with the stub of such a machine or process",
    summary="probes the target of a GDB stub: HOST:PORT, a socket, a serial line, or |COMMAND",
)

_ROWS = (_PTRACE, _EBPF, _INLINE, _REPLAY, _GDB)

TOOL = EngineRow(
    name="tool",
    factory="dprobes.engines.tool_engine:ToolEngine",
    scopes=frozenset(ScopeKind),
    capabilities=frozenset(),
    shares_variables=True,
    is_managed=False,
)
"""The engine of programs without probes, which users do not choose."""


def rows() -> Sequence[EngineRow]:
    """Return the engines, those with the fewest requirements first."""
    return _ROWS


def engine_row(name: str) -> EngineRow:
    """Return the engine called ``name``; raise ``EngineError`` if there is none."""
    return _row_called(name, (*_ROWS, TOOL))


def _row_called(name: str, known: Sequence[EngineRow]) -> EngineRow:
    for row in known:
        if row.name == name:
            return row
    raise EngineError(f"there is no engine '{name}'", hint=f"engines are {', '.join(names())}")


def engine_that_probes(kind: ScopeKind) -> str:
    """Return the name of the first engine that probes a kind of scope; raise ``EngineError`` if none does."""
    for row in _ROWS:
        if kind in row.scopes:
            return row.name
    raise EngineError(f"no engine of this version probes {kind.value}")


def names() -> tuple[str, ...]:
    """Return the valid arguments of ``--engine``."""
    return (AUTO, *sorted(row.usage for row in _ROWS))


def named_engine(text: str) -> tuple[str, str | None]:
    """Return the name and the argument in the value of ``--engine``; raise ``EngineError`` if it is invalid."""
    name, equals, argument = text.partition("=")
    if name == AUTO and not equals:
        return name, None
    row = _row_called(name, _ROWS)
    if row.argument is None and equals:
        raise EngineError(f"the {name} engine takes no argument: '{text}'", hint=f"write --engine {name}")
    if row.argument is not None and not argument:
        raise EngineError(f"the {name} engine needs an argument", hint=f"write --engine {row.usage}")
    return name, argument or None


def candidates() -> tuple[EngineRow, ...]:
    """Return the engines that ``auto`` chooses from, those with the cheapest hits first."""
    weighed = [(row.candidacy.cost, row) for row in _ROWS if row.candidacy is not None]
    return tuple(row for _, row in sorted(weighed, key=lambda each: each[0]))


def faster_row(name: str) -> EngineRow | None:
    """Return the engine that can replace the engine ``name`` if it is faster, or None if there is none."""
    return next((row for row in _ROWS if row.speedup is not None and row.speedup.engine == name), None)


def fastest_engine() -> str:
    """Return the name of the engine whose hits take the least time."""
    return next(row.name for row in _ROWS if row.speedup is not None)


def code_listing(compiled: ResolvedProgram) -> Iterator[str]:
    """Iterate over the lines of a listing of a program's compiled handlers (``show --bpf``)."""
    path = next(row.code_listing for row in _ROWS if row.code_listing is not None)
    lines: Iterator[str] = _load(path)(compiled)
    return lines


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
