"""
What happened at each probepoint: put together from the probe table, the kernel's counts, and what became of records.

There may be thousands of probepoints, and most of them are not hit: those cost next to nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import Counts

if TYPE_CHECKING:
    from collections import Counter

    from dprobes.engines.ebpf.attach.installation import Installation

__all__ = ["ProbeCounts"]


class ProbeCounts:
    """
    The counts of an installation; any thread may ask.

    By probepoint, ``faults`` are hits that did not complete their instruction, ``dropped`` their records, which were
    not given out, and ``given_up`` those that nobody waited for at the end.
    """

    def __init__(
        self, installed: Installation, faults: Counter[int], dropped: Counter[int], given_up: Counter[int]
    ) -> None:
        self._installed = installed
        self._faults = faults
        self._dropped = dropped
        self._given_up = given_up

    def all(self) -> tuple[Counts, ...]:
        """Return the counts of all probepoints, in the order of their numbers."""
        installed = self._installed
        missed = installed.kernel.missed()
        hit = {entry % installed.bank_size for entry in installed.maps.hit_entries()}
        hit.update(missed, list(self._faults), list(self._dropped), list(self._given_up))
        nothing: dict[tuple[str, ...], Counts] = {}
        found = []
        for number in range(len(installed.probes)):
            executed = self._executed(number)
            if number in hit:
                found.append(self._of(number, missed[number], executed))
            else:
                found.append(nothing.setdefault(executed, Counts(executed=executed)))
        return tuple(found)

    def _executed(self, number: int) -> tuple[str, ...]:
        sites = self._installed.numbers.sites.get(number, ())
        executed = self._installed.kernel.executed
        return (executed(sites[0]),) if len(sites) == 1 else tuple(sorted({executed(site) for site in sites}))

    def _of(self, number: int, missed_by_kernel: int, executed: tuple[str, ...]) -> Counts:
        installed = self._installed
        definition = installed.probes[number].definition
        entries = [installed.maps.counters(entry) for entry in installed.entries_of(number)]
        faults, given_up = self._faults[number], self._given_up[number]
        hits = installed.attachments.hits(number)
        if definition.maxhits:
            hits = min(hits, installed.numbers.limit(number))
        if number not in installed.giving_back:
            hits -= faults
        return Counts(
            hits=hits + missed_by_kernel,
            records=sum(entry.records for entry in entries) - self._dropped[number] - given_up,
            lost=sum(entry.lost for entry in entries) + given_up,
            passed=min(hits, definition.passcount),
            missed=sum(entry.missed for entry in entries) + missed_by_kernel,
            skipped=sum(entry.skipped for entry in entries),
            faulted=faults,
            executed=executed,
        )
