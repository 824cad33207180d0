"""The offset from CLOCK_MONOTONIC, which records carry, to the time of day."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID

__all__ = ["BOOT_ID", "WallClock", "boot_id", "boot_uuid", "wall_offset", "wall_time"]

# What tells this start of the machine from others.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The file with the number that the kernel makes up at each start (random(4))."""


def boot_id() -> str:
    """Return the number of this start; nothing if the kernel does not say."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def boot_uuid() -> UUID:
    """Return the same as a UUID; any other one where the kernel does not say."""
    from uuid import UUID, uuid4

    try:
        return UUID(boot_id())
    except ValueError:
        return uuid4()


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


# The time of day as text.

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
