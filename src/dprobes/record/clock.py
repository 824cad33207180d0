"""The offset from CLOCK_MONOTONIC, which records carry, to the time of day."""

from __future__ import annotations

import time

__all__ = ["WallClock", "wall_offset"]

_STEP = 10_000_000
"""Nanoseconds by which the wall clock has to be set, or to drift, until that is noted."""


def wall_offset() -> int:
    """Return what is to be added to CLOCK_MONOTONIC to get nanoseconds since 1970."""
    return time.time_ns() - time.monotonic_ns()


class WallClock:
    """Follow the wall clock when it is set; between that, the offset stays the same, so that times stay in order."""

    def __init__(self) -> None:
        self.offset = wall_offset()

    def look(self) -> int:
        """Return the offset of now."""
        offset = wall_offset()
        if abs(offset - self.offset) > _STEP:
            self.offset = offset
        return self.offset
