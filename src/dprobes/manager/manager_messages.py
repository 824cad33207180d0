"""
Requests and answers of the manager as dataclasses. docs/reference/manager.md describes the fields.

``answer`` is the JSON object that a client has received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dprobes.engines.engine_interface import Counts
from dprobes.manager.wire_protocol import LEFT_OUT, NOT_SENT, Codes, Range, wire
from dprobes.resolve.probepoints import ProbeState  # noqa: TC001 - the schema looks its fields' types up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.keyed.table_text import KeyedTable

__all__ = [
    "VERBS",
    "AddTargetArguments",
    "GetvarsArguments",
    "GlobalValues",
    "InsertArguments",
    "InsertedPrograms",
    "Insertion",
    "Killed",
    "LeftOutPlace",
    "ManagedHeader",
    "ManagedProbepoint",
    "ManagedProgram",
    "ManagedScope",
    "ManagedVariables",
    "ManagerStatus",
    "ProgramVariables",
    "QueryArguments",
    "Removal",
    "RemoveArguments",
    "RemoveTargetArguments",
    "ScopeArguments",
    "Selection",
    "StopArguments",
    "Stopped",
]


@dataclass(frozen=True, slots=True)
class NoArguments:
    """The arguments of a request whose verb has none."""


@dataclass(frozen=True, slots=True)
class ScopeArguments:
    """Processes to probe, in the arguments of ``insert``. The fields are those of ``Scope``."""

    pid: int | None = field(default=None, metadata=wire(bounds=(1, 1 << 22)))
    cgroup: str | None = None
    uid: int | None = field(default=None, metadata=wire(bounds=(0, 0xFFFF_FFFF)))
    follow: bool = True
    program: str | None = None


@dataclass(frozen=True, slots=True)
class InsertArguments:
    """Arguments of ``insert``. docs/reference/manager.md describes them."""

    ppdf: bytes
    name: str | None = field(default=None, metadata=wire("as"))
    merge: bool = False
    replace: bool = False
    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    scope: ScopeArguments = field(default_factory=ScopeArguments)
    engine: str = "auto"
    items: int = field(default=3, metadata=wire(bounds=(0, 0xFFFF)))
    allow_write: bool = False
    verify_opcodes: bool = True
    verify_build_id: bool = True
    own_symbols: bool = False
    exact: bool = False
    pid_namespace: bool = False
    ring_size: int | None = field(default=None, metadata=wire(bounds=(1 << 12, 1 << 30)))
    overhead: str | None = None
    core_directory: str = "."
    directory: str = "/"
    targets: tuple[str, ...] = ()
    format: str = "text"


@dataclass(frozen=True, slots=True)
class RemoveArguments:
    """The arguments of ``remove``: one of them is required. ``probe`` is a major and a minor code."""

    name: str | None = None
    all: bool = False
    probe: Codes | None = None


@dataclass(frozen=True, slots=True)
class QueryArguments:
    """Arguments of ``query``. Without ``name``, all programs are returned; with ``extended``, their PPDF, too."""

    name: str | None = None
    extended: bool = False


@dataclass(frozen=True, slots=True)
class GetvarsArguments:
    """
    Arguments of ``getvars``.

    ``name`` is the program whose ``local`` and CPU variables are requested, or None for all programs. ``index`` is the
    first and the last index. With ``reset``, the variables are set to zero afterwards. ``clear`` has patterns of the
    names of keyed tables that are emptied afterwards.
    """

    name: str | None = None
    local: bool = False
    wants_globals: bool = field(default=False, metadata=wire("global"))
    index: Range | None = None
    reset: bool = False
    clear: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AddTargetArguments:
    """Arguments of ``add-target``. ``name`` is the program whose records go to the log target, or None for all."""

    target: str
    name: str | None = None
    format: str = "text"


@dataclass(frozen=True, slots=True)
class RemoveTargetArguments:
    """The arguments of ``remove-target``; with ``name``, only the log target of this program is removed."""

    target: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class StopArguments:
    """Arguments of ``stop``. With ``manager``, the manager exits, too."""

    manager: bool = False


VERBS: dict[str, type] = {
    "status": NoArguments,
    "insert": InsertArguments,
    "remove": RemoveArguments,
    "query": QueryArguments,
    "getvars": GetvarsArguments,
    "add-target": AddTargetArguments,
    "remove-target": RemoveTargetArguments,
    "targets": NoArguments,
    "stop": StopArguments,
}
"""The verbs, in the order of docs/reference/manager.md, with their arguments."""


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """
    Status of a running manager.

    ``since`` is its start time in seconds since 1970, ``trace`` the path of its trace file. ``trace_problem`` is the
    reason why the trace file cannot be written at present, otherwise None.
    """

    version: str
    pid: int
    since: float
    trace: str
    programs: int
    probepoints: int
    trace_problem: str | None = None


@dataclass(frozen=True, slots=True)
class ManagedProbepoint:
    """
    Probepoint. ``where`` is its displayed place, ``path`` the file.

    ``definition`` is the index of its probe definition. ``at_return`` is True if it is hit immediately after the
    function's return. The fields after ``kind`` exist for some kinds only.
    """

    definition: int
    major: int
    minor: int
    state: ProbeState
    detail: str
    where: str
    path: str
    group: str | None
    types: tuple[str, ...]
    passcount: int
    maxhits: int
    at_return: bool = field(metadata=wire("return"))
    kind: str
    patch: str | None = field(default=None, metadata=LEFT_OUT)
    offset: int | None = field(default=None, metadata=LEFT_OUT)
    placed: int | None = field(default=None, metadata=LEFT_OUT)
    opcode: int | None = field(default=None, metadata=LEFT_OUT)
    instruction: str | None = field(default=None, metadata=LEFT_OUT)
    address: int | None = field(default=None, metadata=LEFT_OUT)
    length: int | None = field(default=None, metadata=LEFT_OUT)
    access: str | None = field(default=None, metadata=LEFT_OUT)
    frequency: int | None = field(default=None, metadata=LEFT_OUT)
    period: int | None = field(default=None, metadata=LEFT_OUT)
    counter: str | None = field(default=None, metadata=LEFT_OUT)
    counts: Counts = field(default_factory=Counts)
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False, metadata=NOT_SENT)


@dataclass(frozen=True, slots=True)
class ManagedScope:
    """Processes of a program: those that one of these fields selects, or all. ``endpoint`` is the engine's."""

    pid: int | None = field(default=None, metadata=LEFT_OUT)
    follow: bool | None = field(default=None, metadata=LEFT_OUT)
    cgroup: str | None = field(default=None, metadata=LEFT_OUT)
    uid: int | None = field(default=None, metadata=LEFT_OUT)
    endpoint: str | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class ManagedHeader:
    """The statements of an inserted program's file header, in replies of the manager."""

    modtype: str
    major: int
    id: int
    jmpmax: int
    logmax: int
    ex_logmax: int
    heapmax: int
    vars: int
    gvars: int
    cvars: int
    tvars: int
    autostacktrace: bool
    logonfault: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups and types of a compiled program that were inserted."""

    groups: tuple[str, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeftOutPlace:
    """The reason why a match of a definition's pattern has no probepoint; ``number`` is the definition's."""

    number: int
    path: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ManagedProgram:
    """
    An inserted program.

    ``name`` is its name, ``module`` the probed module. ``since`` is in seconds since 1970. ``problem`` is the reason
    why it has ended, unless that was requested. ``not_resolved`` are the numbers of definitions without a probepoint.
    ``pending`` of the counted records are not in the trace file yet. ``unwritten`` could not be written to it: they are
    among the lost ones. Handlers are executed for the hits that match all ``filters``. ``ppdf`` and ``selected`` exist
    if they were requested.
    """

    name: str
    module: str
    engine: str
    scope: ManagedScope
    since: float
    ended: bool
    problem: str | None
    header: ManagedHeader
    groups: tuple[str, ...]
    types: tuple[str, ...]
    probepoints: tuple[ManagedProbepoint, ...] = field(metadata=wire("probes"))
    not_resolved: tuple[int, ...]
    left_out: tuple[LeftOutPlace, ...]
    notices: tuple[str, ...]
    local_variables: tuple[int, ...] = field(metadata=wire("locals"))
    pending: int = 0
    unwritten: int = 0
    filters: tuple[str, ...] = ()
    ppdf: bytes | None = field(default=None, metadata=LEFT_OUT)
    selected: Selection | None = field(default=None, metadata=LEFT_OUT)
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False, metadata=NOT_SENT)


@dataclass(frozen=True, slots=True)
class Insertion:
    """The result of an insertion: the program, those it replaced, and why its engine was chosen (None: requested)."""

    program: ManagedProgram
    replaced: tuple[ManagedProgram, ...]
    reason: str | None
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False, metadata=NOT_SENT)


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a removal: programs, or the number of removed probepoints."""

    removed: tuple[ManagedProgram, ...] | None = field(default=None, metadata=LEFT_OUT)
    probepoints: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class InsertedPrograms:
    """The reply that lists the inserted programs."""

    programs: tuple[ManagedProgram, ...]


@dataclass(frozen=True, slots=True)
class GlobalValues:
    """The number of global variables in use, and the requested values."""

    count: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramVariables:
    """
    Variables of a single program. ``cpu`` has a list for each CPU.

    ``tables`` has its keyed tables in binary form (``keyed.table_codec``), or is None if it has none.
    """

    name: str
    local: tuple[int, ...] = field(metadata=wire("locals"))
    cpu: tuple[tuple[int, ...], ...]
    tables: bytes | None = field(default=None, metadata=LEFT_OUT)

    def keyed_tables(self) -> dict[str, KeyedTable]:
        """Return the keyed tables of the program by their names."""
        from dprobes.keyed.table_codec import decode_tables
        from dprobes.keyed.table_text import KeyedTable

        return {each.table.name: KeyedTable(each) for each in decode_tables(self.tables or bytes(4))}


@dataclass(frozen=True, slots=True)
class ManagedVariables:
    """
    Variables, from index ``first`` on.

    ``globals_in_use`` and ``own``, the programs with local or CPU variables or keyed tables, are None if they were not
    requested.
    """

    first: int
    globals_in_use: GlobalValues | None = field(default=None, metadata=wire("globals", is_left_out=True))
    own: tuple[ProgramVariables, ...] | None = field(default=None, metadata=wire("programs", is_left_out=True))
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False, metadata=NOT_SENT)

    @property
    def globals(self) -> tuple[int, ...] | None:
        """The values of the global variables, or None if they were not requested."""
        return None if self.globals_in_use is None else self.globals_in_use.values

    @property
    def programs(self) -> tuple[ProgramVariables, ...]:
        """The programs with local or CPU variables or keyed tables; empty if they were not requested."""
        return self.own or ()


@dataclass(frozen=True, slots=True)
class Stopped:
    """The number of stopped programs, and the names of those that have not ended yet."""

    count: int = field(metadata=wire("stopped"))
    unfinished: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Killed:
    """The process id of the former manager, and whether it had to be killed because it did not react to SIGTERM."""

    pid: int
    by_force: bool
