"""
How much somebody may use of what is everybody's: so much at once, and then so much a second.

Knows no clock: whoever asks says what time it is, in seconds that only grow.
"""

from __future__ import annotations

import os
import stat

__all__ = ["Allowance", "foreign_owner"]


class Allowance:
    """Up to ``size`` units, of which ``rate`` come back in a second; it is full at first."""

    def __init__(self, size: float, rate: float) -> None:
        self._size = size
        self._rate = rate
        self._left = size
        self._seen: float | None = None

    def has(self, units: float, now: float) -> bool:
        """Return whether so many units are there."""
        if self._seen is not None:
            self._left = min(self._size, self._left + self._rate * max(0.0, now - self._seen))
        self._seen = now
        return self._left >= units

    def use(self, units: float) -> None:
        """Take units, also such as are not there: what is missing has to come back first."""
        self._left -= units


def foreign_owner(status: os.stat_result) -> str | None:
    """
    Return who besides root and the user of this process can change a file; None if nobody.

    Such a *foreign* owner may have made a file only to keep us busy. Names of users are not looked up: that may ask a
    server.
    """
    if status.st_uid not in {0, os.geteuid()}:
        return f"user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in {0, os.getegid()}:
        return f"group {status.st_gid}"
    return None
