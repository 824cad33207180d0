"""The clock page says what the time stamp counter means."""

from __future__ import annotations

import time

from dprobes.engines.inline.handler_hits import Clock, _look
from dprobes.engines.inline.shared_memory import Region

ERROR = 5_000_000
"""Nanoseconds by which the computed time may differ: more than a measured rate is wrong by in the tests' time."""


def shown(clock: Clock) -> int:
    """Return the time of now, as routines compute it."""
    version, *readings = clock._page.words
    counter, then, rate = readings[3 * (version & 1) :][:3]
    now, _ = _look()
    return int(then + ((now - counter) * rate >> 32))


def is_right(clock: Clock) -> bool:
    """Return whether the page shows a time between two readings of the clock, however far they are apart."""
    before, time_of_page, after = time.monotonic_ns(), shown(clock), time.monotonic_ns()
    return before - ERROR < time_of_page < after + ERROR


def test_the_page_shows_the_monotonic_clock() -> None:
    with Region(1 << 16) as region:
        clock = Clock(region)
        assert is_right(clock)
        time.sleep(0.05)
        clock.correct()
        assert is_right(clock)
        clock.close()


def test_what_others_write_there_is_written_over() -> None:
    with Region(1 << 16) as region:
        clock = Clock(region)
        for number in range(len(clock._page.words)):
            clock._page.words[number] = (1 << 64) - 1
        clock.correct()
        assert is_right(clock)
        clock.close()
