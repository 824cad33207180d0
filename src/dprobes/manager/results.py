"""
What the manager's answers mean, as data: JSON objects to frozen dataclasses.

``answer`` of each is the object itself, which docs/manager.md describes; it has more than what most users ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from dprobes.engines.interface import Counts
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Insertion",
    "Killed",
    "ManagedProbepoint",
    "ManagedProgram",
    "ManagedVariables",
    "ManagerStatus",
    "ProgramVariables",
    "Stopped",
    "insertion",
    "managed_program",
    "parsed",
    "variables",
]

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
    """
    Say what is known of one place; ``where`` is it for people, ``path`` the file.

    ``definition`` is the number of its probe definition. ``at_return`` says that it is hit just after the function's
    return.
    """

    major: int
    minor: int
    state: ProbeState
    detail: str
    where: str
    path: str
    kind: str
    counts: Counts
    definition: int
    at_return: bool
    answer: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ManagedProgram:
    """
    Say what is known of a program that is inserted.

    ``name`` is what it is called, ``module`` what it probes. ``since`` is in seconds since 1970. ``problem`` says why
    it has ended, if not because it was asked to. ``not_resolved`` are the numbers of definitions without a probepoint.
    ``pending`` of the records that are counted are not in the trace file yet. ``unwritten`` could not be written to it:
    they are among those that are lost.
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
    not_resolved: tuple[int, ...]
    pending: int
    unwritten: int
    answer: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Insertion:
    """Say what was inserted, what it replaced, and why its engine was chosen (None: it was asked for)."""

    program: ManagedProgram
    replaced: tuple[ManagedProgram, ...]
    reason: str | None
    answer: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ProgramVariables:
    """Hold the variables that a program has for itself; ``cpu`` has a list for each CPU."""

    name: str
    local: tuple[int, ...]
    cpu: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ManagedVariables:
    """
    Hold variables, those from index ``first`` on.

    ``globals`` is None if they were not asked for. ``programs`` are those that have variables of their own.
    """

    first: int
    globals: tuple[int, ...] | None
    programs: tuple[ProgramVariables, ...]
    answer: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Say how many programs were stopped, and which of them have not ended yet."""

    count: int
    unfinished: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Killed:
    """Say which process was the manager, and whether it had to be killed because it did not end when asked to."""

    pid: int
    by_force: bool


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
        not_resolved=tuple(message["not_resolved"]),
        pending=message.get("pending", 0),
        unwritten=message.get("unwritten", 0),
        answer=message,
    )


def insertion(message: dict[str, Any]) -> Insertion:
    """Return what the manager says of an insertion."""
    replaced = tuple(managed_program(each) for each in message["replaced"])
    return Insertion(managed_program(message["program"]), replaced, message["reason"], message)


def variables(message: dict[str, Any]) -> ManagedVariables:
    """Return what the manager says of variables."""
    programs = tuple(
        ProgramVariables(each["name"], tuple(each["locals"]), tuple(tuple(values) for values in each["cpu"]))
        for each in message.get("programs", ())
    )
    found = tuple(message["globals"]["values"]) if "globals" in message else None
    return ManagedVariables(message["first"], found, programs, message)


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
        definition=message["definition"],
        at_return=message["return"],
        answer=message,
    )
