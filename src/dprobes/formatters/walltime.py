"""The time of day as text."""

from __future__ import annotations

import time

__all__ = ["wall_time"]

_NANOSECONDS = 1_000_000_000


def wall_time(time_: int | None, wall_offset: int) -> str | None:
    """
    Return a record's time as ISO 8601 has it, in UTC: ``2026-11-22T04:30:00.123456789Z``.

    None if the record has none, or nobody knows the offset to the time of day, so that it is 0.
    """
    return None if time_ is None or not wall_offset else _iso(time_ + wall_offset)


def _iso(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    try:
        date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds}.{rest:09}"
    return f"{date}.{rest:09}Z"
