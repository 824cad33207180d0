"""The wall clock when it is set while records come."""

from __future__ import annotations

import time

import pytest

from dprobes.record.record_origin import WallClock

SECOND = 1_000_000_000


class Clocks:
    """Stand for the machine's clocks."""

    def __init__(self) -> None:
        self.monotonic = 5 * SECOND
        self.offset = 1_790_000_000 * SECOND

    def monotonic_ns(self) -> int:
        return self.monotonic

    def time_ns(self) -> int:
        return self.monotonic + self.offset


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(time, "monotonic_ns", made.monotonic_ns)
    monkeypatch.setattr(time, "time_ns", made.time_ns)
    return made


def test_a_clock_that_is_set_shows_and_one_that_wavers_does_not(clocks: Clocks) -> None:
    clock = WallClock()
    first = clocks.offset
    assert clock.look() == first
    clocks.monotonic += 60 * SECOND
    clocks.offset += SECOND // 200  # 5 ms, as when it is read between two instructions
    assert clock.look() == first
    clocks.offset = first - 3600 * SECOND
    assert clock.look() == first - 3600 * SECOND
    clocks.offset += SECOND // 50
    assert clock.look() == clocks.offset
