"""The pace of a sink: the size of its batches, the retries after a failure, and the reports of a problem."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.sinks.interface import Sink

__all__ = ["Pace", "Problems"]

_RETRY = 1.0
"""Seconds between two tries of a target that fails, at first and at the end; up to which they double is below."""

_RETRY_MAX = 60.0

_WAIT_MAX = 3600.0
"""Seconds that a target is left alone at most when it asks for that."""

_PIECE_FIRST, _PIECE_MIN, _PIECE_MAX = 64, 8, 1 << 14
"""Records that a sink gets at once: so many that it takes about as long as below, so that its progress can be seen."""

_PIECE_TIME = 0.5

_BY_RECORD = 1.5
"""Of twice as many records: how much longer they take if it is they that take the time, and not the call."""

_FADING = 0.5
"""By what a time is reduced each time that more records are not tried for it: sinks change."""

_SAY_AGAIN = 600.0
"""Seconds after which the same problem, if it has gone meanwhile and is back, is reported once more."""

_SAID_MAX = 100
"""Problems to remember: there may be a changing number in them."""


class Pace:
    """Follow how fast a sink is, and how often it fails."""

    def __init__(self) -> None:
        self._piece = _PIECE_FIRST
        self._seconds: dict[int, float] = {}
        """How long a piece of each size took, when it was last tried."""
        self._tried = 0.0
        self._failures = 0

    def piece(self, sink: Sink | None) -> int:
        """Return how many records a sink is to get at once; one whose progress can be seen anyway gets many."""
        return self._piece if getattr(sink, "steps", None) is None else _PIECE_MAX

    def took(self, count: int, seconds: float) -> None:
        """
        Note how long ``count`` records took.

        If they took long, half as many are tried. Where that takes as long, as with a server that is far away, it is
        the call that costs time: then more records at once are better, not less.
        """
        if count != self._piece:
            if seconds > _PIECE_TIME:
                self._piece = max(1 << (count.bit_length() - 1), _PIECE_MIN)
            return
        self._seconds[count] = seconds
        if seconds > _PIECE_TIME:
            self._piece = self._better(count, seconds)
        elif seconds < _PIECE_TIME / 4:
            self._piece = min(2 * count, _PIECE_MAX)

    def _better(self, count: int, seconds: float) -> int:
        """Return how many records to try if ``count`` of them take long."""
        half, double = self._seconds.get(count // 2), self._seconds.get(2 * count)
        if count > _PIECE_MIN and (half is None or seconds > _BY_RECORD * half):
            return count // 2
        if double is not None and double > _BY_RECORD * seconds:
            self._seconds[2 * count] = double * _FADING
            return count
        return min(2 * count, _PIECE_MAX)

    def tried(self) -> None:
        """Note that the sink is opened."""
        self._tried = time.monotonic()

    def succeeded(self) -> None:
        """Note that the sink works."""
        self._failures = 0

    def failed(self, wait: float, *, at_end: bool) -> float:
        """
        Note that the sink does not work; return how many seconds to wait until the next try.

        One that has worked for a while is tried again at once: a connection that is closed in order is no trouble.
        ``wait`` is for how many seconds it asks to be left alone. ``at_end`` there is no time for long pauses.
        """
        self._failures += 1
        if self._failures == 1:
            pause = max(self._tried + _RETRY - time.monotonic(), 0.0)
        else:
            pause = _RETRY if at_end else min(_RETRY * 2.0 ** min(self._failures - 2, 10), _RETRY_MAX)
        return max(pause, min(wait, _WAIT_MAX))


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
