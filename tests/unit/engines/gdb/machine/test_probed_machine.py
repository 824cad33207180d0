"""Each sampler is due once a period, however late it was looked at."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

from dprobes.engines.gdb.machine.probed_machine import SampleClocks
from dprobes.resolve.probepoints import ProbeKind, ProbeState
from dprobes.rpn.rpn_program import Sampler


class FakeProbe:
    """A probepoint, of which nothing counts but its state."""

    state = ProbeState.ACTIVE


def clocks(*frequencies: int | None) -> tuple[SampleClocks, list[Any]]:
    """Return the clocks of some probepoints, those with None being no samplers, and the probepoints."""
    probes = [FakeProbe() for _ in frequencies]
    places = [
        SimpleNamespace(kind=ProbeKind.BREAKPOINT)
        if frequency is None
        else SimpleNamespace(kind=ProbeKind.SAMPLER, sampler=Sampler(frequency))
        for frequency in frequencies
    ]
    return SampleClocks(cast("Any", probes), cast("Any", places)), probes


def test_what_is_no_sampler_is_never_due() -> None:
    made, _ = clocks(None, None)
    assert not made
    assert made.next(5.0) == math.inf
    assert made.take(5.0) == []


def test_a_sampler_is_due_a_period_after_it_was_looked_at_first() -> None:
    made, (_, sampler) = clocks(None, 4)
    assert made
    assert made.next(10.0) == 10.25
    assert made.take(10.125) == []
    assert made.take(10.25) == [sampler]
    assert made.next(10.25) == 10.5


def test_what_has_become_due_several_times_is_due_once() -> None:
    made, (sampler,) = clocks(4)
    made.next(10.0)
    assert made.take(11.125) == [sampler]
    assert made.take(11.125) == []
    assert made.next(11.125) == 11.25


def test_each_has_its_own_clock() -> None:
    made, (quick, slow) = clocks(4, 2)
    made.next(0.0)
    assert made.take(0.25) == [quick]
    assert made.take(0.5) == [quick, slow]


def test_one_that_is_not_active_is_not_due() -> None:
    made, (sampler,) = clocks(4)
    made.next(0.0)
    sampler.state = ProbeState.REMOVED
    assert made.take(1.0) == []
    assert made.next(1.0) == math.inf
