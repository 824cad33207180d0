"""How much a sink gets at once, when one that failed is tried again, and how often a problem is said."""

from __future__ import annotations

import time

__all__ = ["Pace", "Problems"]

_RETRY = 1.0
"""Seconds until a target that failed is tried again at first, and up to which this doubles below."""

_RETRY_MAX = 60.0

_PIECE_MIN, _PIECE_MAX = 8, 1 << 14
"""Records that a sink gets at once: so many that it takes about as long as below, so that its progress can be seen."""

_PIECE_TIME = 0.5

_SAY_AGAIN = 600.0
"""Seconds after which the same problem, if it has gone meanwhile and is back, is said once more."""

_SAID_MAX = 100
"""Problems to remember: there may be a changing number in them."""


class Pace:
    """Follow how fast a sink is, and how often it fails."""

    def __init__(self) -> None:
        self.piece = 64
        self._retry = _RETRY

    def took(self, count: int, seconds: float) -> None:
        """Note how long ``count`` records took."""
        if seconds > _PIECE_TIME:
            self.piece = max(count // 2, _PIECE_MIN)
        elif count == self.piece and seconds < _PIECE_TIME / 4:
            self.piece = min(2 * count, _PIECE_MAX)

    def succeeded(self) -> None:
        """Note that the sink works."""
        self._retry = _RETRY

    def failed(self) -> float:
        """Note that the sink does not work; return how many seconds to wait until the next try."""
        wait, self._retry = self._retry, min(2 * self._retry, _RETRY_MAX)
        return wait


class Problems:
    """Remember which problems were said."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def is_new(self, problem: str) -> bool:
        """Return whether a problem is to be said, which then it is."""
        now = time.monotonic()
        if now - self._said.get(problem, -_SAY_AGAIN) < _SAY_AGAIN:
            return False
        if len(self._said) >= _SAID_MAX:
            self._said.clear()
        self._said[problem] = now
        return True
