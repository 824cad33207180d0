"""
Limits on the resources that other users' processes can make dprobes use, as token buckets.

The module reads no clock: callers pass the time in seconds, which must not decrease.
"""

from __future__ import annotations

import os
import stat

__all__ = ["Allowance", "foreign_owner"]


class Allowance:
    """A token bucket of ``size`` units, full at first, which regains ``rate`` units a second."""

    def __init__(self, size: float, rate: float) -> None:
        self._size = size
        self._rate = rate
        self._left = size
        self._seen: float | None = None

    def has(self, units: float, now: float) -> bool:
        """Return True if the bucket has ``units`` at the time ``now`` in seconds. Do not take them."""
        if self._seen is not None:
            self._left = min(self._size, self._left + self._rate * max(0.0, now - self._seen))
        self._seen = now
        return self._left >= units

    def use(self, units: float) -> None:
        """Take ``units`` from the bucket. If it has fewer, its content becomes negative."""
        self._left -= units


def foreign_owner(status: os.stat_result) -> str | None:
    """
    Return the user or group, other than root and this process's, that can change a file, or None if there is none.

    Such a *foreign* owner may have made a file only to waste the time of dprobes. Names of users are not looked up,
    because that may query a server.
    """
    if status.st_uid not in {0, os.geteuid()}:
        return f"user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in {0, os.getegid()}:
        return f"group {status.st_gid}"
    return None
