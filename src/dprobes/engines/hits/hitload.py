"""What hits of one probepoint take, where that is measured, and which of them run no handler because of that."""

from __future__ import annotations

__all__ = ["HitLoad"]


class HitLoad:
    """What the handler of one probepoint has taken so far, and at which hits it runs."""

    __slots__ = ("_turn", "in_handler", "thinning")

    def __init__(self) -> None:
        self.in_handler = 0.0
        """Seconds."""
        self.thinning = 1
        self._turn = 0

    def skips(self) -> bool:
        """Return whether this hit is to run no handler; to be asked once for each."""
        if self.thinning <= 1:
            return False
        turn, self._turn = self._turn, self._turn + 1
        return turn % self.thinning != 0
