"""What a run says when its hits take too much of a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.overload import Verdict
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["OverloadNotices"]

_NAMED = 3
"""How many probepoints are named after one look, those first that took most."""

_THINNED = "the other hits are counted as skipped; '--overhead off' runs it at each hit"
_DISABLED = "allow more, as in '--overhead 50%', or any overhead with 'off'; or probe a place that is hit less often"


class OverloadNotices:
    """
    The messages about a program's ``probes``, of which there may come to be more; ``major`` is its code.

    That a handler runs at some hits only is reported once for each.
    """

    def __init__(self, budget: float, major: int, probes: Sequence[Probepoint]) -> None:
        self._budget = f"{100 * budget:.3g}%"
        self._major = major
        self._probes = probes
        self._thinned: set[int] = set()

    def of(self, verdict: Verdict, rates: Mapping[int, float]) -> Iterator[Notice]:
        """Iterate over what is to be said of a decision; ``rates`` are hits a second, by probepoint."""
        new = {number: n for number, n in verdict.thinned.items() if n > 1 and number not in self._thinned}
        self._thinned |= new.keys()
        worst, more = self._worst(list(new), verdict.shares)
        for number in worst:
            cause = self.cause(rates[number], verdict.shares[number])
            what = f"its handler runs at one hit of {new[number]} from now on"
            yield Notice(f"{self._place(number)}: {cause}: {what}", _THINNED)
        if more:
            yield Notice(f"the handlers of {more} more probepoints run at some of their hits only", _THINNED)
        worst, more = self._worst(verdict.disabled, verdict.shares)
        for number in worst:
            yield Notice(
                f"{self._place(number)} is disabled: {self.cause(rates[number], verdict.shares[number])}", _DISABLED
            )
        if more:
            yield Notice(f"{more} more probepoints are disabled for the same reason", _DISABLED)

    def _place(self, number: int) -> str:
        probe = self._probes[number]
        return f"{self._major},{probe.definition.minor} at {probe.where}" + (" (return)" if probe.at_return else "")

    def cause(self, rate: float, share: float) -> str:
        """Return what took too much, as a clause."""
        return f"{rate:.0f} hits a second took {100 * min(share, 1):.3g}% of a CPU, where {self._budget} are allowed"

    @staticmethod
    def _worst(numbers: Sequence[int], shares: Mapping[int, float]) -> tuple[list[int], int]:
        found = sorted(numbers, key=lambda number: -shares[number])
        return found[:_NAMED], len(found[_NAMED:])
