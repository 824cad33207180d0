"""What the manager's answers mean, as data: JSON objects (docs/manager.md) to frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dprobes.engines.base import Counts, ProbeState

__all__ = ["ManagedProbepoint", "ManagedProgram", "ManagerStatus", "managed_program", "parsed"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """Say which manager answers: its version and process, since when, its trace file, and how much is inserted."""

    version: str
    pid: int
    since: float
    trace: str
    programs: int
    probepoints: int
    trace_problem: str | None = None


@dataclass(frozen=True, slots=True)
class ManagedProbepoint:
    """Say what is known of one place; ``where`` is it for people, ``path`` the file."""

    major: int
    minor: int
    state: ProbeState
    detail: str
    where: str
    path: str
    kind: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class ManagedProgram:
    """
    Say what is known of a program that is inserted.

    ``name`` is what it is called, ``module`` what it probes. ``since`` is in seconds since 1970. ``problem`` says why
    it has ended, if not because it was asked to.
    """

    name: str
    module: str
    engine: str
    since: float
    ended: bool
    problem: str | None
    probepoints: tuple[ManagedProbepoint, ...]
    local_variables: tuple[int, ...]
    notices: tuple[str, ...]


def parsed(kind: type[_T], message: dict[str, Any]) -> _T:
    """Return what the members of a JSON object say; those that this version does not know are passed over."""
    return kind(**{field.name: message[field.name] for field in fields(kind) if field.name in message})  # type: ignore[arg-type]


def managed_program(message: dict[str, Any]) -> ManagedProgram:
    """Return what the manager says of a program."""
    return ManagedProgram(
        name=message["name"],
        module=message["module"],
        engine=message["engine"],
        since=message["since"],
        ended=message["ended"],
        problem=message["problem"],
        probepoints=tuple(_probepoint(each) for each in message["probes"]),
        local_variables=tuple(message["locals"]),
        notices=tuple(message["notices"]),
    )


def _probepoint(message: dict[str, Any]) -> ManagedProbepoint:
    counts = dict(message.get("counts", {}))
    counts["executed"] = tuple(counts.get("executed", ()))
    return ManagedProbepoint(
        major=message["major"],
        minor=message["minor"],
        state=ProbeState(message["state"]),
        detail=message["detail"],
        where=message["where"],
        path=message["path"],
        kind=message["kind"],
        counts=parsed(Counts, counts),
    )
