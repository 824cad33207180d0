"""The arguments of the manager's verbs, as they are sent (``schema``); docs/manager.md says what they mean."""

from __future__ import annotations

from dataclasses import field

from dprobes.lazydataclass import dataclass
from dprobes.manager.schema import Codes, Range, wire

__all__ = [
    "VERBS",
    "AddTargetArguments",
    "GetvarsArguments",
    "InsertArguments",
    "NoArguments",
    "QueryArguments",
    "RemoveArguments",
    "RemoveTargetArguments",
    "ScopeArguments",
    "StopArguments",
]


@dataclass(frozen=True, slots=True)
class NoArguments:
    """The arguments of verbs that have none."""


@dataclass(frozen=True, slots=True)
class ScopeArguments:
    """The processes that an insertion is about; the fields are those of ``Scope``."""

    pid: int | None = field(default=None, metadata=wire(bounds=(1, 1 << 22)))
    cgroup: str | None = None
    uid: int | None = field(default=None, metadata=wire(bounds=(0, 0xFFFF_FFFF)))
    follow: bool = True
    program: str | None = None


@dataclass(frozen=True, slots=True)
class InsertArguments:
    """The arguments of ``insert``."""

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
    """The arguments of ``remove``."""

    name: str | None = None
    all: bool = False
    probe: Codes | None = None


@dataclass(frozen=True, slots=True)
class QueryArguments:
    """The arguments of ``query``."""

    name: str | None = None
    extended: bool = False


@dataclass(frozen=True, slots=True)
class GetvarsArguments:
    """The arguments of ``getvars``."""

    name: str | None = None
    local: bool = False
    wants_globals: bool = field(default=False, metadata=wire("global"))
    index: Range | None = None
    reset: bool = False
    clear: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AddTargetArguments:
    """The arguments of ``add-target``."""

    target: str
    name: str | None = None
    format: str = "text"


@dataclass(frozen=True, slots=True)
class RemoveTargetArguments:
    """The arguments of ``remove-target``."""

    target: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class StopArguments:
    """The arguments of ``stop``."""

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
"""The verbs, in the order of docs/manager.md, with their arguments."""
