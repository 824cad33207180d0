"""The overload guard of programs whose handlers run in this process, on made-up times."""

from __future__ import annotations

import pytest

from dprobes.engines.hits.probe_hits import Moment, ProgramGuard
from dprobes.resolve.probepoints import ProbeState
from support.ptrace_programs import inserted_program, probe_of

BUDGET = 0.1


class Guarded:
    """A program with two probepoints, and a clock that the test moves."""

    def __init__(self) -> None:
        self.time = self.busy = 100.0
        self.others = 0
        self.guard = ProgramGuard(BUDGET, lambda hits: Moment(self.time, self.busy, hits))
        program = inserted_program()
        self.probes = {number: probe_of(program, number) for number in (0, 1)}
        for probe in self.probes.values():
            probe.load = self.guard.new_load()

    def look(
        self, hits: tuple[int, int], busy: float, in_handler: tuple[float, float] = (0, 0)
    ) -> tuple[str, list[int]]:
        """Let half a second pass with so many hits and so much work; return what is thinned and what is disabled."""
        self.time += 0.5
        self.busy += busy
        for number, probe in self.probes.items():
            assert probe.load is not None
            probe.counts.hits += hits[number]
            probe.load.in_handler += in_handler[number]
        all_hits = self.others + sum(probe.counts.hits for probe in self.probes.values())
        verdict, self.rates = self.guard.look(self.probes, all_hits)
        return ", ".join(f"{number}: {n}" for number, n in verdict.thinned.items()), list(verdict.disabled)

    @property
    def thinning(self) -> list[int]:
        return [probe.load.thinning for probe in self.probes.values() if probe.load is not None]


NOTHING: tuple[str, list[int]] = ("", [])


def test_it_is_due_every_half_second() -> None:
    guarded = Guarded()
    assert guarded.guard.due_in(100.2) == pytest.approx(0.3)
    guarded.look((0, 0), 0)
    assert guarded.guard.due_in(100.5) == pytest.approx(0.5)


def test_a_handler_that_takes_too_long_is_thinned() -> None:
    guarded = Guarded()
    assert guarded.look((100, 1), 0.2, (0.19, 0.0)) == NOTHING  # it may be a burst
    assert guarded.look((100, 1), 0.2, (0.19, 0.0)) == ("0: 7", [])
    assert guarded.thinning == [7, 1]
    assert guarded.rates == {0: 200, 1: 2}
    assert guarded.look((100, 1), 0.03, (0.02, 0.0)) == NOTHING
    assert guarded.look((0, 1), 0.001) == ("0: 3", [])  # though it is not hit any more
    assert guarded.thinning == [3, 1]


def test_hits_that_take_too_long_whatever_handlers_do_are_disabled() -> None:
    guarded = Guarded()
    found = [guarded.look((10_000, 10), 0.4, (0.01, 0.0)) for _ in range(3)]
    assert found == [NOTHING, ("0: 2", []), ("", [0])]
    guarded.probes[0].state = ProbeState.DISABLED
    assert guarded.look((0, 10), 0.4, (0.0, 0.39)) == ("1: 15", [])


def test_of_what_takes_long_a_program_has_the_part_of_its_hits() -> None:
    guarded = Guarded()
    for _ in range(9):
        guarded.others += 990
        assert guarded.look((10, 0), 0.5) == NOTHING  # a hundredth of all the work


def test_work_without_hits_is_nobodys() -> None:
    guarded = Guarded()
    assert [guarded.look((0, 0), 0.5) for _ in range(9)] == [NOTHING] * 9


def test_neighbours_of_watchpoints_count_as_hits() -> None:
    guarded = Guarded()
    guarded.look((0, 0), 0)
    verdicts = []
    for _ in range(3):
        guarded.probes[1].counts.neighbours += 1000
        guarded.others += 1000
        verdicts.append(guarded.look((0, 0), 0.2))
    assert verdicts == [NOTHING, NOTHING, ("", [1])]
    assert guarded.rates == {1: 2000}
