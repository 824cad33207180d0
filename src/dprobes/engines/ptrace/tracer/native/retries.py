"""What could not be done just then, and is tried again: ever more rarely, and not for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.engines.ptrace.requests import PatchSites, ShareMemory

__all__ = ["Retries"]

_PAUSE, _PAUSE_MAX = 0.01, 2.0
"""Seconds until what could not be done is tried again: at first, and at most, as each pause is twice the last one."""
_ATTEMPTS = 18
"""How often something is tried: for about twenty seconds."""


class _Retry(NamedTuple):
    """A request that is tried again at a time of the monotonic clock."""

    message: ShareMemory | PatchSites
    due: float
    attempts: int


class Retries:
    """The requests that are tried again."""

    def __init__(self) -> None:
        self._waiting: list[_Retry] = []

    def add(self, message: ShareMemory | PatchSites, attempts: int) -> bool:
        """Note what is to be tried again; return False if it was tried often enough."""
        if attempts >= _ATTEMPTS:
            return False
        pause = min(_PAUSE * 2**attempts, _PAUSE_MAX)
        self._waiting.append(_Retry(message, time.monotonic() + pause, attempts + 1))
        return True

    def take_due(self) -> list[tuple[ShareMemory | PatchSites, int]]:
        """Return what is to be tried again now, each with how often it was tried."""
        if not self._waiting:
            return []
        now = time.monotonic()
        due = [(each.message, each.attempts) for each in self._waiting if each.due <= now]
        self._waiting = [each for each in self._waiting if each.due > now]
        return due

    def delay(self) -> float | None:
        """Return in how many seconds something is to be tried again, None if nothing is."""
        now = time.monotonic() if self._waiting else 0.0
        return min((max(0.0, each.due - now) for each in self._waiting), default=None)
