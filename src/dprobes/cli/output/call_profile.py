"""
Profiles of calls: calls, inclusive and exclusive wall time of functions and of call edges, and their output.

A *call edge* is a pair of a function and one that it calls. The times of a function are sums over the edges to it. If
all calls from outside have ended, the exclusive times of all functions add up to the inclusive times of these calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.escapes import json_text
from dprobes.keyed.table_text import quantity
from dprobes.rpn.keyed_tables import Unit
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "OUTSIDE",
    "TEXT_HEADER",
    "CallEdge",
    "CallProfile",
    "FunctionTimes",
    "callgrind_lines",
    "json_lines",
    "since",
    "text_rows",
]

OUTSIDE = ""
"""The caller of a call that no profiled function has made."""


class CallEdge(NamedTuple):
    """
    Calls of ``callee`` by ``caller``, which is ``OUTSIDE`` for calls from other code.

    ``inclusive`` is the time in nanoseconds from entry to return, ``exclusive`` the part of it that is not in calls of
    profiled functions. Calls that have not ended are not included.
    """

    caller: str
    callee: str
    calls: int
    inclusive: int
    exclusive: int


class FunctionTimes(NamedTuple):
    """
    Calls and times of a function in nanoseconds.

    ``inclusive`` counts recursive calls once, within the outermost call. ``left`` is the number of calls that ended
    without a return.
    """

    name: str
    calls: int
    inclusive: int
    exclusive: int
    left: int


class CallProfile(NamedTuple):
    """
    Profile of the calls in one module.

    ``recursive`` maps a function to the inclusive time, in nanoseconds, of its calls within a call of itself. ``left``
    maps a function to the number of its calls that ended without a return, by ``longjmp`` or by an exception.
    """

    module: str
    edges: tuple[CallEdge, ...]
    recursive: dict[str, int]
    left: dict[str, int]

    def functions(self) -> list[FunctionTimes]:
        """Return the functions that were called, the one with the greatest exclusive time first."""
        sums: dict[str, list[int]] = {}
        for edge in self.edges:
            mine = sums.setdefault(edge.callee, [0, 0, 0])
            for place, value in enumerate((edge.calls, edge.inclusive, edge.exclusive)):
                mine[place] += value
        found = [
            FunctionTimes(name, calls, inclusive - self.recursive.get(name, 0), exclusive, self.left.get(name, 0))
            for name, (calls, inclusive, exclusive) in sums.items()
        ]
        return sorted(found, key=lambda each: (-each.exclusive, each.name))

    @property
    def calls(self) -> int:
        """The number of calls that have ended."""
        return sum(edge.calls for edge in self.edges)

    @property
    def exclusive(self) -> int:
        """The sum of the exclusive times, in nanoseconds."""
        return sum(edge.exclusive for edge in self.edges)


def since(before: CallProfile, after: CallProfile) -> CallProfile:
    """Return the profile of the calls that have ended between two profiles of the same run."""
    known = {(edge.caller, edge.callee): edge for edge in before.edges}
    edges = []
    for edge in after.edges:
        old = known.get((edge.caller, edge.callee), CallEdge(edge.caller, edge.callee, 0, 0, 0))
        if edge.calls > old.calls:
            numbers = edge.calls - old.calls, edge.inclusive - old.inclusive, edge.exclusive - old.exclusive
            edges.append(CallEdge(edge.caller, edge.callee, *numbers))
    recursive = {name: time - before.recursive.get(name, 0) for name, time in after.recursive.items()}
    left = {name: count - before.left.get(name, 0) for name, count in after.left.items()}
    return CallProfile(after.module, tuple(edges), recursive, left)


def _time(nanoseconds: int) -> str:
    return quantity(nanoseconds, Unit.NANOSECONDS)


def text_rows(profile: CallProfile, limit: int | None = None) -> Iterator[tuple[str, ...]]:
    """Iterate over the rows of the table of functions, without its header; ``limit`` is their greatest number."""
    whole = profile.exclusive
    for each in profile.functions()[:limit]:
        share = f"{100 * each.exclusive / whole:.1f}" if whole > 0 else "0.0"
        average = _time(round(each.exclusive / each.calls)) if each.calls else ""
        yield each.name, str(each.calls), _time(each.inclusive), _time(each.exclusive), share, average


TEXT_HEADER = ("function", "calls", "inclusive", "exclusive", "%", "exclusive a call")


def json_lines(profile: CallProfile) -> Iterator[str]:
    """Iterate over the lines of JSON: one object for each function, then one for each edge; times in nanoseconds."""
    for each in profile.functions():
        yield json_text({"module": profile.module, "function": each.name, **_fields(each), "left": each.left})
    for edge in sorted(profile.edges):
        yield json_text(
            {"module": profile.module, "caller": edge.caller or None, "callee": edge.callee, **_fields(edge)}
        )


def _fields(times: FunctionTimes | CallEdge) -> dict[str, Any]:
    return {"calls": times.calls, "inclusive": times.inclusive, "exclusive": times.exclusive}


def callgrind_lines(profile: CallProfile, command: Sequence[str]) -> Iterator[str]:
    """
    Iterate over the lines of a file in callgrind's format, which KCachegrind and callgrind_annotate read.

    The cost is in nanoseconds. There are no lines of sources: the line of all costs is 0 (valgrind's manual, "Callgrind
    Format Specification").
    """
    yield "# callgrind format"
    yield "version: 1"
    yield f"creator: dprobes {__version__}"
    if command:
        yield f"cmd: {_plain(' '.join(command))}"
    yield "positions: line"
    yield "events: Nanoseconds"
    yield f"summary: {max(0, profile.exclusive)}"
    calls: dict[str, list[CallEdge]] = {}
    for edge in sorted(profile.edges):
        if edge.caller != OUTSIDE:
            calls.setdefault(edge.caller, []).append(edge)
    own = {each.name: each.exclusive for each in profile.functions()}
    for name in sorted({*own, *calls}):
        yield ""
        yield f"ob={_plain(profile.module)}"
        yield "fl=???"
        yield f"fn={_plain(name)}"
        yield f"0 {max(0, own.get(name, 0))}"
        for edge in calls.get(name, ()):
            yield f"cfn={_plain(edge.callee)}"
            yield f"calls={edge.calls} 0"
            yield f"0 {max(0, edge.inclusive)}"


def _plain(name: str) -> str:
    """Return a name without the control characters that would end its line."""
    return "".join(character if character.isprintable() else "?" for character in name)
