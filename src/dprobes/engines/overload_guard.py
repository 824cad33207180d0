"""
Overload guard, which limits the share of a CPU that hits take.

Engines measure the load, and apply the verdicts of this module, which identifies probepoints by number and reads no
clock. First a handler is *thinned*: it runs only at every n-th hit. If the traps alone take too much time, thinning
does not help, and the probepoint is *disabled*.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.engine_interface import Notice, ScopeKind
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import Space, space_of
from dprobes.rpn.rpn_program import Access

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.engine_interface import Scope
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import Program

__all__ = [
    "DEFAULT_OVERHEAD",
    "LOOK_INTERVAL",
    "UNLIMITED",
    "Load",
    "OverloadNotices",
    "OverloadPolicy",
    "Verdict",
    "budget_of",
    "check_overhead",
    "overhead_of",
]

# The overhead that a run may have, as a share of a CPU: the user's option, and the default.


DEFAULT_OVERHEAD = 25.0
"""
Default limit in percent of a CPU, if all processes or the kernel are probed.

It allows half a million hits a second on each CPU if a hit takes half a microsecond, and 20 000 if it takes twelve
microseconds (single-stepped instructions).
"""

UNLIMITED = 0.0
"""Value of the overhead that means no limit."""

_WORDS = ("off", "none")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%?")


def overhead_of(text: str) -> float:
    """
    Return the percentage in an option such as "10%", or ``UNLIMITED`` for "off".

    Raise ``EngineError`` for others.
    """
    if text in _WORDS:
        return UNLIMITED
    found = _PERCENT.fullmatch(text.strip())
    return check_overhead(float(found[1]) if found else -1.0, text)


def check_overhead(percent: float, shown: object = None) -> float:
    """Return ``percent`` if it is in (0, 100] or ``UNLIMITED``; otherwise raise ``EngineError``, naming ``shown``."""
    if percent != UNLIMITED and not 0 < percent <= 100:
        raise EngineError(
            f"an overhead is more than 0 and at most 100 percent of a CPU, not '{percent if shown is None else shown}'",
            hint="write it as 10% or 10; 'off' is for no limit",
        )
    return percent


def budget_of(overhead: float | None, scope: Scope, program: Program) -> float | None:
    """Return the share of a CPU, from 0 to 1, that hits of a program may take, or None if there is no limit."""
    if overhead is None:
        is_guarded = scope.kind is ScopeKind.EVERYWHERE or space_of(program) is Space.KERNEL
        overhead = DEFAULT_OVERHEAD if is_guarded else UNLIMITED
    return overhead / 100 if overhead != UNLIMITED else None


# The decisions


LOOK_INTERVAL = 0.5
"""Seconds between two measurements by an engine."""

_AIM = 0.75
"""Part of the budget that hits should take after a decision. The rest is a margin for variations."""

_LEAST = 0.125
"""Minimum part of the budget that handlers get while thinning is tried."""

_CALM = 0.5
"""Part of the budget below which thinned handlers may run more often again."""

_TRIES = 4
"""Number of consecutive measurements over the budget in spite of thinning, after which a probepoint is disabled."""

_THINNEST = 1 << 20


class Load(NamedTuple):
    """
    Load of probepoint ``number`` between two measurements.

    Times are in seconds, summed over all CPUs: in its handler, and outside of the handler (traps). The handler runs at
    one of ``thinning`` hits.
    """

    number: int
    hits: int
    in_handler: float
    in_traps: float
    thinning: int = 1

    @property
    def total(self) -> float:
        """Seconds inside and outside of the handler."""
        return self.in_handler + self.in_traps


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    Decision about probepoints, by their numbers.

    ``thinned`` has the new ``Load.thinning`` of handlers, and ``disabled`` the probepoints to be disabled. ``shares``
    has, for both, the share of the busiest CPU that each probepoint took.
    """

    thinned: Mapping[int, int] = field(default_factory=dict)
    disabled: Sequence[int] = ()
    shares: Mapping[int, float] = field(default_factory=dict)


class OverloadPolicy:
    """Policy for one program. ``budget`` is the share of a CPU that its hits may take."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._looks = 0
        """Number of consecutive measurements over the budget."""
        self._thinned = False

    @property
    def is_watching(self) -> bool:
        """True if the next call of ``judge`` needs the loads of the probepoints."""
        return self._looks > 0 or self._thinned

    def judge(self, share: float, loads: Sequence[Load]) -> Verdict:
        """
        Return the verdict after an interval in which hits took ``share`` of the busiest CPU.

        The first measurement over the budget changes nothing, and needs no ``loads``, because a burst of hits may end
        before a change takes effect.
        """
        if share <= self._budget:
            self._looks = 0
            return self._relax(share, loads) if self._thinned and share < _CALM * self._budget else Verdict()
        self._looks += 1
        present = [load for load in loads if load.total > 0]
        if self._looks == 1 or not present:
            return Verdict()
        scale = share / sum(load.total for load in present)
        in_traps = scale * sum(load.in_traps for load in present)
        aim = _AIM * self._budget
        thinned: Mapping[int, int] = {}
        disabled: Sequence[int] = ()
        if self._thinned and in_traps > aim:
            disabled = _most_costly(present, (in_traps - aim) / scale)
        elif self._looks > 1 + _TRIES:
            disabled = [max(present, key=lambda load: load.total).number]
        else:
            thinned = _thinned(present, max(aim - in_traps, _LEAST * self._budget) / scale)
        self._thinned = True
        if disabled:
            self._looks = 1  # the remaining probepoints are judged again
        shares = {load.number: scale * load.total for load in present if load.number in {*thinned, *disabled}}
        return Verdict(thinned, disabled, shares)

    def _relax(self, share: float, loads: Sequence[Load]) -> Verdict:
        """
        Return a verdict that lets handlers run twice as often which run only at some hits, if the budget allows it.

        ``share`` is the part of a CPU that all hits take now, ``loads`` are the measurements of the probepoints.
        """
        thinned = [load for load in loads if load.thinning > 1]
        self._thinned = bool(thinned)
        total = sum(load.total for load in loads)
        more = share / total * sum(load.in_handler for load in thinned) if total else 0.0
        if share + more > _AIM * self._budget:
            return Verdict()
        return Verdict({load.number: load.thinning // 2 for load in thinned})


def _most_costly(loads: Sequence[Load], excess: float) -> list[int]:
    """Return the fewest probepoints whose traps take at least ``excess`` seconds together, the most costly first."""
    found = []
    for load in sorted(loads, key=lambda load: load.in_traps, reverse=True):
        if excess <= 0:
            break
        excess -= load.in_traps
        found.append(load.number)
    return found


def _thinned(loads: Sequence[Load], allowed: float) -> dict[int, int]:
    """Return the new ``Load.thinning`` of the handlers to be thinned. All handlers together get ``allowed`` seconds."""
    rest = sorted(loads, key=lambda load: load.in_handler)
    while rest and rest[0].in_handler <= allowed / len(rest):
        allowed -= rest.pop(0).in_handler
    return {
        load.number: min(_THINNEST, math.ceil(load.thinning * load.in_handler * len(rest) / allowed)) for load in rest
    }


# Notices of a run whose hits take too much of a CPU.


_NAMED = 3
"""Maximum number of probepoints named after one measurement, the most costly ones first."""

_THINNED = "the other hits are counted as skipped; '--overhead off' runs it at each hit"
_DISABLED = "allow more, as in '--overhead 50%', or any overhead with 'off'; or probe a place that is hit less often"


class OverloadNotices:
    """
    Notices about a program's ``probes``, whose number may grow. ``major`` is the program's major code.

    Thinning is reported once for each probepoint.
    """

    def __init__(self, budget: float, major: int, probes: Sequence[Probepoint]) -> None:
        self._budget = f"{100 * budget:.3g}%"
        self._major = major
        self._probes = probes
        self._thinned: set[int] = set()

    def of(self, verdict: Verdict, rates: Mapping[int, float]) -> Iterator[Notice]:
        """Iterate over the notices about a verdict. ``rates`` has the hits a second of each probepoint."""
        new = {number: n for number, n in verdict.thinned.items() if n > 1 and number not in self._thinned}
        self._thinned |= new.keys()
        worst, more = self._worst(list(new), verdict.shares)
        for number in worst:
            cause = self.cause(number, rates, verdict.shares)
            what = f"its handler runs at one hit of {new[number]} from now on"
            yield Notice(f"{self._place(number)}: {cause}: {what}", _THINNED)
        if more:
            yield Notice(f"the handlers of {more} more probepoints run at some of their hits only", _THINNED)
        worst, more = self._worst(verdict.disabled, verdict.shares)
        for number in worst:
            yield Notice(f"{self._place(number)} is disabled: {self.cause(number, rates, verdict.shares)}", _DISABLED)
        if more:
            yield Notice(f"{more} more probepoints are disabled for the same reason", _DISABLED)

    def _place(self, number: int) -> str:
        probe = self._probes[number]
        return f"{self._major},{probe.definition.minor} at {probe.where}" + (" (return)" if probe.at_return else "")

    def cause(self, number: int, rates: Mapping[int, float], shares: Mapping[int, float]) -> str:
        """
        Return the cause of a verdict about a probepoint as a clause: the rate of its hits and their share of a CPU.

        The rate of a watchpoint on writes includes its neighbours, the other writes to its protected pages.
        """
        hits = "hits and neighbours" if self._probes[number].definition.watchpoint is Access.WRITE else "hits"
        percent = f"{100 * min(shares[number], 1):.3g}%"
        return f"{rates[number]:.0f} {hits} a second took {percent} of a CPU, where {self._budget} are allowed"

    @staticmethod
    def _worst(numbers: Sequence[int], shares: Mapping[int, float]) -> tuple[list[int], int]:
        found = sorted(numbers, key=lambda number: -shares[number])
        return found[:_NAMED], len(found[_NAMED:])
