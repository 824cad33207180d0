"""
What handlers have left without an end, and others wait for: entries of rings, claims of states, locks.

A signal handler of the program may interrupt a handler, and jump away from it (siglongjmp). From here such a one looks
like a thread that does not run just now. So what has stayed as it is for a while is noted, and the tracer asked to see
each thread outside of handlers once: what was there before that, and still is, has been left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.engines.inline.handlermaps import HandlerMaps

__all__ = ["LeftThings"]

_LOOK = 0.1
"""Seconds between looks."""
_PATIENCE, _PATIENCE_MAX = 0.5, 30.0
"""Seconds after which something counts as left at first, and if it often turned out that it was not."""


_WORD = -1


class LeftThings:
    """A watch over the memory of handlers."""

    def __init__(self, maps: HandlerMaps) -> None:
        self._maps = maps
        self._looked = 0.0
        self._since: dict[tuple[int, int], float] = {}
        """Since when each thing is as it is: a ring at a position, or for _WORD a word that is not 0."""
        self._ends: list[int] | None = None
        """Where the rings ended when the tracer was asked, which has not answered yet."""
        self._patience = _PATIENCE

    def are_suspected(self, now: float) -> bool:
        """Return whether it is time to ask the tracer; ``note_asking`` follows then."""
        if now < self._looked + _LOOK or self._ends is not None:
            return False
        self._looked = now
        rings = enumerate(ring.stalled_at for ring in self._maps.rings.rings)
        present = [(number, position) for number, position in rings if position is not None]
        present += [(_WORD, place) for place in self._maps.held_words]
        self._since = {thing: self._since.get(thing, now) for thing in present}
        return any(now >= since + self._patience for since in self._since.values())

    def note_asking(self) -> tuple[tuple[int, int], ...]:
        """Remember how far the rings are; return the words to be released, by offset and size."""
        self._ends = [ring.end for ring in self._maps.rings.rings]
        until = self._looked - self._patience
        return tuple((place, 8) for (kind, place), since in self._since.items() if kind == _WORD and since <= until)

    def note_answer(self, *, is_done: bool) -> None:
        """Take notice whether each thread has been seen outside of handlers."""
        ends, self._ends = self._ends, None
        self._since.clear()
        if not is_done:
            self._patience = min(2 * self._patience, _PATIENCE_MAX)
            return
        self._patience = _PATIENCE
        for ring, end in zip(self._maps.rings.rings, ends or (), strict=True):
            ring.leave(end)

    @property
    def entries(self) -> int:
        """How many entries of rings were given up."""
        return sum(ring.skipped for ring in self._maps.rings.rings)
