"""
Probepoints whose jumps have to wait: until a process has mapped its C library, which says where threads have their ids.

A program is probed as soon as it begins, and that is before its libraries are there. The tracer asks again when the
program's loader says that it has mapped something; a program that nobody hears of that from is looked at now and then.
"""

from __future__ import annotations

import time
from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Postponed"]

_FIRST_DELAY, _LAST_DELAY = 0.01, 20.0
"""Seconds until it is looked again, twice as long each time, and after which nobody waits any more."""


@dataclass(slots=True)
class _Waiting:
    """The probepoints that wait in a process."""

    probes: set[int] = field(default_factory=set)
    delay: float = _FIRST_DELAY
    due: float = 0.0


class Postponed:
    """What waits, by process."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(self, pid: int, probes: Iterable[int]) -> bool:
        """Let probepoints wait; return whether it makes sense."""
        waiting = self._waiting.setdefault(pid, _Waiting())
        if waiting.delay > _LAST_DELAY:
            return False
        waiting.probes.update(probes)
        if not waiting.due:
            waiting.due = time.monotonic() + waiting.delay
            waiting.delay *= 2
        return True

    @property
    def is_due(self) -> bool:
        """Whether something is to be tried again now."""
        waiting = tuple(self._waiting.values())
        return bool(waiting) and any(each.probes and time.monotonic() >= each.due for each in waiting)

    def take_due(self) -> tuple[int, set[int]] | None:
        """Return a process and those of its probepoints that have waited, and are to be tried again; None if none."""
        if not self._waiting:
            return None
        now = time.monotonic()
        for pid, waiting in self._waiting.items():
            if waiting.probes and now >= waiting.due:
                probes, waiting.probes, waiting.due = waiting.probes, set(), 0.0
                return pid, probes
        return None

    def drop(self, pid: int, probes: Iterable[int]) -> None:
        """Let probepoints wait no longer."""
        if (waiting := self._waiting.get(pid)) is not None:
            waiting.probes.difference_update(probes)
            if not waiting.probes:
                waiting.due = 0.0

    def forget(self, pid: int) -> None:
        """Begin anew with a process."""
        self._waiting.pop(pid, None)
