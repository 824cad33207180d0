"""The time of day as text."""

from __future__ import annotations

import time

__all__ = ["wall_time"]

_NANOSECONDS = 1_000_000_000


def wall_time(nanoseconds: int) -> str:
    """Return nanoseconds since 1970 as ISO 8601 has it, in UTC: ``2026-11-22T04:30:00.123456789Z``."""
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    try:
        date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds}.{rest:09}"
    return f"{date}.{rest:09}Z"
