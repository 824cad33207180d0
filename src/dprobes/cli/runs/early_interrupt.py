"""Ctrl-C during the start of a run: the start is completed, and the run ends immediately afterwards."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["EarlyInterrupt"]


class EarlyInterrupt:
    """
    A context manager that records a SIGINT (``came``); a second one raises KeyboardInterrupt.

    If a command is to be started, the signal is not ``deferred``: a Ctrl-C before the start must prevent it.
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
