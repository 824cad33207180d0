"""
Connection of a run to its stub, from the start of the stub's command, if any, to the removal of the last breakpoint.

While the connection is open, a restorer process waits. It removes the breakpoints if this process is killed.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_restorer import Restorer
from dprobes.engines.gdb.stub_transports import open_transport
from dprobes.errors import EngineError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.engines.gdb.stub_target import StubTarget

__all__ = ["StubCommand", "StubConnection"]

_PATIENCE = 5.0
"""
Timeout in seconds for connecting to a stub, and for its command to exit.

The command has this time after its target has ended, and after each signal.
"""


class StubCommand:
    """A command (``-c``) that starts a stub with its target; it inherits this process' input and output."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._name = arguments[0]
        try:
            self._process = subprocess.Popen(arguments)
        except OSError as error:
            raise EngineError(f"'{self._name}' cannot be started: {reason_of(error)}") from None

    def problem(self) -> str | None:
        """Return a clause about the command's end; None while the command runs."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
        return f"the command '{self._name}' {how}"

    def await_end(self) -> None:
        """Wait for the command's end, after the target's; terminate the command if it continues."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self.end()

    def end(self) -> None:
        """Terminate the command if it still runs."""
        for stop in (self._process.terminate, self._process.kill):
            if self._process.poll() is None:
                stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE)


_RETURN_PATIENCE = 2.0
"""Seconds to wait for a stub to listen again after its connection was lost."""


class StubConnection:
    """
    Connection to the stub at an ``endpoint``. The command ``arguments``, if there are any, starts the stub.

    The owner sets ``target`` and ``warn``, which sends a message to the user, as soon as they are known.
    """

    def __init__(self, endpoint: str, arguments: Sequence[str] = ()) -> None:
        self.endpoint, self._arguments = endpoint, arguments
        self.warn: Callable[[str, str | None], None] = lambda _, __: None
        self._command: StubCommand | None = None
        self._restorer: Restorer | None = None
        self._stub: Stub | None = None
        self.target: StubTarget | None = None

    def open(self) -> Stub:
        """Return the connected stub; raise ``EngineError`` if there is none."""
        if self._stub is not None:
            return self._stub
        if self._arguments:
            self._command = StubCommand(self._arguments)
        try:
            return self._connect(_PATIENCE)
        except EngineError as error:
            problem = None if self._command is None else self._command.problem()
            raise EngineError(f"{error.message}; {problem}" if problem else error.message, hint=error.hint) from None

    def _connect(self, patience: float) -> Stub:
        transport = open_transport(self.endpoint, patience)
        stub = self._stub = Stub(transport)
        stub.start()
        self._restorer = Restorer(transport)
        self.tell(f"acknowledgements {stub.has_acknowledgements:d}")
        self.tell(f"signals {stub.raises_signals:d}")
        return stub

    def reopen(self) -> Stub | None:
        """Return the stub after the connection has been lost, None if it cannot be reached any more."""
        if self._restorer is not None:
            self._restorer.close()
        if self._stub is not None:
            self._stub.close()
        self._restorer = self._stub = self.target = None
        if self.endpoint.startswith("|") or (self._command is not None and self._command.problem() is not None):
            return None
        try:
            return self._connect(_RETURN_PATIENCE)
        except EngineError:
            return None

    def tell(self, line: str) -> None:
        """Send a line about a change of the target to the restorer process, which undoes the changes after a crash."""
        if self._restorer is not None:
            self._restorer.tell(line)

    def abandon(self) -> None:
        """Close the connection before the run has begun, and terminate a command that was started for it."""
        self.close()
        if self._command is not None:
            self._command.end()

    def close(self) -> None:
        """Remove all breakpoints and close the connection; the target continues."""
        restorer, self._restorer = self._restorer, None
        target, self.target = self.target, None
        try:
            if target is not None and not target.is_over:
                target.let_go()
        except EngineError as error:
            self.warn(f"breakpoints may be left in the target: {error.message}", None)
            if restorer is not None:
                restorer.leave_to_it()
                restorer = None
        finally:
            if restorer is not None:
                restorer.close()
            if self._stub is not None:
                self._stub.close()
        if self._command is not None and (target is None or target.is_over):
            self._command.await_end()
