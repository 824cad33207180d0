"""The offset between CLOCK_MONOTONIC, the clock of records, and the wall clock."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID

__all__ = ["BOOT_ID", "WallClock", "boot_id", "boot_uuid", "wall_offset", "wall_time"]

# Identification of the current boot of the machine.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The file with the random boot id that the kernel generates at each boot (random(4))."""


def boot_id() -> str:
    """Return the boot id of the current boot; an empty string if the kernel does not provide one."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def boot_uuid() -> UUID:
    """Return the boot id as a UUID; a random UUID if the kernel does not provide one."""
    from uuid import UUID, uuid4

    try:
        return UUID(boot_id())
    except ValueError:
        return uuid4()


_STEP = 10_000_000
"""Smallest change of the wall clock, in nanoseconds, that counts as a step or a drift."""


def wall_offset() -> int:
    """Return the offset in nanoseconds that converts CLOCK_MONOTONIC to nanoseconds since 1970-01-01 UTC."""
    return time.time_ns() - time.monotonic_ns()


class WallClock:
    """
    The offset from CLOCK_MONOTONIC to the wall clock, updated only if the clock was set or has drifted.

    Between updates the offset is constant, and converted times stay in order.
    """

    def __init__(self) -> None:
        self.offset = wall_offset()

    def look(self) -> int:
        """Return the current offset in nanoseconds."""
        offset = wall_offset()
        if abs(offset - self.offset) > _STEP:
            self.offset = offset
        return self.offset


# The time of day as text.

_NANOSECONDS = 1_000_000_000


def wall_time(time_: int | None, wall_offset: int) -> str | None:
    """
    Return a record's time in ISO 8601 format, in UTC: ``2026-11-22T04:30:00.123456789Z``.

    Return None if the record has no time, or if the offset is 0, which means unknown.
    """
    return None if time_ is None or not wall_offset else _iso(time_ + wall_offset)


def _iso(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    try:
        date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds}.{rest:09}"
    return f"{date}.{rest:09}Z"
