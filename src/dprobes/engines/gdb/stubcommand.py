"""A command (``-c``) that starts a stub with its target: gdbserver, or an emulator."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from dprobes.errors import EngineError, reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StubCommand"]

_PATIENCE = 5.0
"""Seconds in which a stub ends whose target has ended, or that is told to."""


class StubCommand:
    """The command as it runs; its input and output are ours."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._name = arguments[0]
        try:
            self._process = subprocess.Popen(arguments)
        except OSError as error:
            raise EngineError(f"'{self._name}' cannot be started: {reason_of(error)}") from None

    def problem(self) -> str | None:
        """Return a clause that says that it has ended, None if it has not."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
        return f"the command '{self._name}' {how}"

    def await_end(self) -> None:
        """Wait for its end, as the target has ended; one that goes on nevertheless is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self.end()

    def end(self) -> None:
        """End it if it has not ended."""
        for stop in (self._process.terminate, self._process.kill):
            if self._process.poll() is None:
                stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE)
