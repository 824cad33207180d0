"""The clock page says what the time stamp counter means."""

from __future__ import annotations

import time

from dprobes.engines.inline.handler_hits import Clock, _look
from dprobes.engines.inline.shared_memory import Region

NEAR = 5_000_000
"""Nanoseconds: what a busy machine may take between two looks."""


def shown(clock: Clock) -> int:
    """Return the time of now, as routines compute it."""
    version, *readings = clock._page.words
    counter, then, rate = readings[3 * (version & 1) :][:3]
    now, _ = _look()
    return int(then + ((now - counter) * rate >> 32))


def test_the_page_shows_the_monotonic_clock() -> None:
    with Region(1 << 16) as region:
        clock = Clock(region)
        assert abs(shown(clock) - time.monotonic_ns()) < NEAR
        time.sleep(0.05)
        clock.correct()
        assert abs(shown(clock) - time.monotonic_ns()) < NEAR
        clock.close()


def test_what_others_write_there_is_written_over() -> None:
    with Region(1 << 16) as region:
        clock = Clock(region)
        for number in range(len(clock._page.words)):
            clock._page.words[number] = (1 << 64) - 1
        clock.correct()
        assert abs(shown(clock) - time.monotonic_ns()) < NEAR
        clock.close()
