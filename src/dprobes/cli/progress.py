"""
A progress line for operations that take more than a second: on standard error, at a terminal only.

The cursor is left at the beginning of the line, so that other output overwrites it. The line is cleared when the
operation ends, at the latest with the command. It bypasses Python's streams: a process that is forked meanwhile must
not inherit their locks in a locked state.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Progress"]

_PATIENCE = 1.0
"""Seconds before the line is shown."""

_INTERVAL = 0.5

_STANDARD_ERROR = 2

_CLEAR = "\r\x1b[K"
"""Move the cursor to the beginning of the line, and erase it (ECMA-48, 8.3.41, "erase in line")."""


class Progress:
    """A progress line; as a context manager, for the duration of its block."""

    def __init__(self, what: str = "") -> None:
        self._what = what
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of_command(cls) -> Self:
        """Return a progress line that ends with the current command, before the command's error is printed."""
        from click import get_current_context

        progress = cls()
        get_current_context().call_on_close(progress.end)
        return progress

    def __enter__(self) -> Self:
        self.begin(self._what)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, what: str) -> None:
        """Show the operation ``what`` if it lasts longer than ``_PATIENCE`` seconds from now on."""
        self.end()
        if os.isatty(_STANDARD_ERROR) and os.environ.get("TERM", "dumb") != "dumb":
            self._ended = threading.Event()
            self._thread = threading.Thread(target=_show, args=(what, self._ended), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Clear the line."""
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join(_PATIENCE)  # the timeout is for a stopped terminal
            self._ended = self._thread = None


def _show(what: str, ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_PATIENCE):
        return
    while True:
        _write(f"\r{what} ... {time.monotonic() - began:.0f} s\x1b[K\r")
        if ended.wait(_INTERVAL):
            break
    _write(_CLEAR)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STANDARD_ERROR, text.encode())
