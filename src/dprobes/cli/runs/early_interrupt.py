"""A Ctrl-C that comes while a run starts: it is not left halfway, but ends as soon as it has begun."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["EarlyInterrupt"]


class EarlyInterrupt:
    """
    Note a SIGINT while the context manager is entered (``came``); a second one is KeyboardInterrupt.

    Where a command is to be started nothing is ``deferred``: a Ctrl-C before its start is to keep it from starting.
    """

    def __init__(self, *, deferred: bool) -> None:
        self.came = False
        self._deferred = deferred

    def __enter__(self) -> Self:
        if self._deferred:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._deferred:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
