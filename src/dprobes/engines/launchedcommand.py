"""The command of a session: a child process that waits until its programs are inserted, and then executes its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING

from dprobes.engines.interface import Scope
from dprobes.engines.launcher import Command
from dprobes.errors import EngineError, TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LaunchedCommand"]

_LOOK = 0.005
"""Seconds between two looks whether the command has ended."""


class LaunchedCommand:
    """
    Hold a command from the first program that is inserted for it to its end; any thread may use it.

    There is no process before ``scope`` is asked for, and none after ``close`` unless the command was let go.
    ``output`` is the descriptor that it gets as its standard output, by default ours.
    """

    def __init__(self, words: Sequence[str], *, follow: bool, output: int | None = None) -> None:
        self._words = list(words)
        self._follow = follow
        self._output = output
        self._command: Command | None = None
        self._has_begun = False
        self._wait_status: int | None = None
        self._changing = threading.Lock()

    @property
    def name(self) -> str:
        """Its first word."""
        return self._words[0]

    @property
    def has_begun(self) -> bool:
        """Whether it was let go."""
        return self._has_begun

    def scope(self) -> Scope:
        """Return what a program is inserted into: the process, which is started now and waits unless it has begun."""
        with self._changing:
            if self._has_begun:
                if self._command is None or self._ended(self._command):
                    raise EngineError(f"the command '{self.name}' has ended", hint="launch it again")
                return Scope(self._command.pid, follow=self._follow)
            if self._command is None:
                from dprobes.engines.linux.processcalls import allow_tracer

                self._command = Command(self._words, allow_tracer, self._output)
            path = os.path.abspath(shutil.which(self.name) or self.name)
            return Scope(self._command.pid, follow=self._follow, program=path)

    def go(self) -> None:
        """Let it execute its program, if it has not; raise ``TargetError`` if it cannot."""
        with self._changing:
            if self._has_begun or self._command is None:
                return
            self._has_begun = True
            self._command.go()
            try:
                self._command.check_started()
            except TargetError:
                self._command.close()
                self._command = None
                raise

    def wait(self, until: float | None) -> None:
        """Wait until it has ended, or until a time of the monotonic clock."""
        while self._has_begun and self.exit_status is None and self._command is not None:
            if until is not None and time.monotonic() >= until:
                return
            time.sleep(_LOOK)

    @property
    def exit_status(self) -> int | None:
        """Its exit status, negative for a signal; None as long as there is none."""
        status = self.wait_status
        return None if status is None else os.waitstatus_to_exitcode(status)

    @property
    def wait_status(self) -> int | None:
        """Its wait status; None as long as there is none."""
        with self._changing:
            is_known = self._wait_status is not None or not self._has_begun
            if not is_known and self._command is not None and self._ended(self._command):
                with contextlib.suppress(ChildProcessError):
                    self._wait_status = self._command.wait()
            return self._wait_status

    def _ended(self, command: Command) -> bool:
        try:
            return command.has_ended
        except ChildProcessError:  # somebody else has waited for it
            return True

    def end(self) -> int | None:
        """Ask it to end, and return its wait status; None if it has not begun, or does not end."""
        with self._changing:
            if self._command is not None and self._has_begun and self._wait_status is None:
                self._wait_status = self._command.end()
            return self._wait_status

    def close(self) -> None:
        """Let go of it: what waits still ends, what has begun goes on."""
        _ = self.exit_status
        with self._changing:
            if self._command is not None:
                self._command.close()
                self._command = None
