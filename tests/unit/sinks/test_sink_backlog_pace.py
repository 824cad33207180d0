"""How many records a sink gets at once, and when one that has failed is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dprobes.sinks.sink_backlog import Pace

if TYPE_CHECKING:
    from collections.abc import Callable


def settled(pace: Pace, seconds_of: Callable[[int], float], calls: int = 80) -> int:
    """Return how many records a sink gets at once after a while."""
    for _ in range(calls):
        count = pace.piece(None)
        pace.took(count, seconds_of(count))
    return pace.piece(None)


def test_a_sink_that_is_slow_by_record_gets_few_so_that_its_progress_can_be_seen() -> None:
    pace = Pace()
    assert settled(pace, lambda count: count * 0.01) in (16, 32)
    assert settled(pace, lambda count: count * 1.0) in (8, 16)
    assert settled(pace, lambda count: count * 1e-5) == 1 << 14


@pytest.mark.parametrize("latency", [0.6, 3.0])
def test_a_sink_that_is_slow_by_call_gets_many(latency: float) -> None:
    pace = Pace()
    assert settled(pace, lambda count: latency + count * 1e-5) >= 1 << 13
    assert settled(pace, lambda count: latency + count * 0.01) <= 1 << 10
    assert settled(pace, lambda count: latency + count * 1e-5) >= 1 << 13


def test_a_sink_that_turns_slow_gets_few_also_if_less_waits_than_it_may_get() -> None:
    pace = Pace()
    settled(pace, lambda count: count * 1e-5)
    pace.took(500, 5.0)
    assert pace.piece(None) == 256


def test_a_sink_that_shows_its_progress_gets_many_at_once() -> None:
    class Sink:
        steps = 0

    assert Pace().piece(Sink()) == 1 << 14  # type: ignore[arg-type] # it is not called


def test_what_has_worked_for_a_while_is_tried_at_once_and_what_goes_on_failing_later_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("dprobes.sinks.sink_backlog.time", SimpleNamespace(monotonic=lambda: now))
    pace = Pace()
    pace.tried()
    now = 100.25
    assert pace.failed(0, at_end=False) == 0.75
    pace.succeeded()
    now = 200.0
    assert [pace.failed(0, at_end=False) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pace.failed(0, at_end=True) == 1
    assert pace.failed(7, at_end=True) == 7
    assert pace.failed(1e9, at_end=False) == 3600
