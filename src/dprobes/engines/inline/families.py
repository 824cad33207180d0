"""
Which processes have copies of one memory: a process, and those that it has forked since it mapped memory for handlers.

What was planned for one of them holds for all: they have the same code at the same addresses. Nothing of it is needed
when the last one has ended, or executes another program.
"""

from __future__ import annotations

from itertools import count

__all__ = ["Families"]


class Families:
    """Processes by family; families have numbers."""

    def __init__(self) -> None:
        self._numbers = count()
        self._of: dict[int, int] = {}

    def of(self, pid: int) -> int:
        """Return the family of a process, which is the first one of a new family if it is not known."""
        if pid not in self._of:
            self._of[pid] = next(self._numbers)
        return self._of[pid]

    def copied(self, pid: int, parent: int) -> None:
        """Take notice that a process has a copy of its parent's memory."""
        if parent in self._of:
            self._of[pid] = self._of[parent]

    def left(self, pid: int) -> int | None:
        """Take notice that a process has its memory no longer; return its family if it was the last one there."""
        family = self._of.pop(pid, None)
        return None if family in self._of.values() else family
