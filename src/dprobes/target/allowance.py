"""
How much somebody may use of what is everybody's: so much at once, and then so much a second.

Knows no clock: whoever asks says what time it is, in seconds that only grow.
"""

from __future__ import annotations

__all__ = ["Allowance"]


class Allowance:
    """Hold up to ``size`` units, of which ``rate`` come back in a second; it is full at first."""

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
