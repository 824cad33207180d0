"""Counts of probepoints: one rule for hits, whoever has missed them; what is not hit costs nothing."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.engines.ebpf.attach.map_objects import ProbeCounters
from dprobes.engines.ebpf.read.run_control import ProbeCounts
from dprobes.engines.engine_interface import Counts

if TYPE_CHECKING:
    from dprobes.engines.ebpf.attach.installation import Installation

BANK = 4


class Installed:
    """An installation with four probepoints at one site each; ``table`` is its probe table."""

    bank_size = BANK

    def __init__(
        self,
        table: dict[int, ProbeCounters],
        missed: Counter[int] | None = None,
        *,
        passcount: int = 0,
        maxhits: int = 0,
    ) -> None:
        definition = SimpleNamespace(passcount=passcount, maxhits=maxhits)
        self.probes = [SimpleNamespace(definition=definition)] * BANK
        self.giving_back: set[int] = set()
        self.kernel = SimpleNamespace(missed=lambda: missed or Counter(), executed=lambda site: site.executed)
        nothing = ProbeCounters(0, 0, 0, 0, 0)
        self.maps = SimpleNamespace(
            hit_entries=lambda: {entry for entry, counters in table.items() if counters.hits},
            counters=lambda entry: table.get(entry, nothing),
        )
        self.numbers = SimpleNamespace(
            sites={number: (SimpleNamespace(executed="ftrace"),) for number in range(BANK)},
            limit=lambda _: passcount + maxhits,
        )
        self.attachments = SimpleNamespace(hits=lambda number: table.get(number, nothing).hits)

    @staticmethod
    def entries_of(number: int) -> tuple[int, int]:
        return number, BANK + number


def counts_of(installed: Installed, **counters: Counter[int]) -> tuple[Counts, ...]:
    what: dict[str, Any] = {"faults": Counter(), "dropped": Counter(), "given_up": Counter(), **counters}
    return ProbeCounts(cast("Installation", installed), **what).all()


NOTHING = Counts(executed=("ftrace",))


def test_what_the_kernel_missed_are_hits_as_well() -> None:
    table = {1: ProbeCounters(10, 7, 1, 2, 0)}
    assert counts_of(Installed(table, Counter({1: 5, 2: 3}))) == (
        NOTHING,
        Counts(hits=15, records=7, lost=1, missed=7, executed=("ftrace",)),
        Counts(hits=3, missed=3, executed=("ftrace",)),
        NOTHING,
    )


def test_both_entries_of_a_probepoint_count() -> None:
    table = {1: ProbeCounters(10, 4, 0, 0, 1), BANK + 1: ProbeCounters(9, 5, 0, 0, 0)}
    assert counts_of(Installed(table))[1] == Counts(hits=10, records=9, skipped=1, executed=("ftrace",))


def test_the_kernels_misses_count_for_no_limit() -> None:
    table = {0: ProbeCounters(9, 2, 0, 0, 0)}
    found = counts_of(Installed(table, Counter({0: 4}), passcount=1, maxhits=2))[0]
    assert found == Counts(hits=7, records=2, passed=1, missed=4, executed=("ftrace",))
    found = counts_of(Installed({}, Counter({0: 4}), passcount=1))[0]
    assert found == Counts(hits=4, missed=4, executed=("ftrace",))


@pytest.mark.parametrize("gives_back", [False, True])
def test_hits_that_faulted_are_none(gives_back: bool) -> None:
    installed = Installed({} if gives_back else {3: ProbeCounters(2, 2, 0, 0, 0)})
    installed.giving_back = {3} if gives_back else set()
    found = counts_of(installed, faults=Counter({3: 2}), dropped=Counter() if gives_back else Counter({3: 2}))[3]
    assert found == Counts(faulted=2, executed=("ftrace",))


def test_records_that_were_given_up_are_lost() -> None:
    table = {2: ProbeCounters(6, 6, 0, 0, 0)}
    found = counts_of(Installed(table), given_up=Counter({2: 4}))[2]
    assert found == Counts(hits=6, records=2, lost=4, executed=("ftrace",))
