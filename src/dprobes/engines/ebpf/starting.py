"""
Let a command that waits become its program, and stop there: what our copy of Python does before is not to be hit.

Until then the child runs code of the very libraries that are probed, so its process comes into scope only at the exec.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.syscalls import Event, StopKind, classify_stop
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.launch import Command

__all__ = ["start_command"]


def start_command(command: Command, arrived: Callable[[int], None]) -> None:
    """
    Let a command execute its program, and call ``arrived`` with its process id before the first instruction.

    It is not called if the program cannot be executed, which ``Command.wait`` tells.
    """
    pid = command.pid
    try:
        syscalls.seize(pid)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EngineError(
            f"the command cannot be stopped at its start (ptrace): {reason}", hint="dprobes doctor says what is missing"
        ) from error
    command.go()
    while True:
        # A child that has ended is left to whoever waits for the command.
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        if state is None or state.si_code != os.CLD_TRAPPED:
            return
        kind, number = classify_stop(os.waitpid(pid, syscalls.WALL)[1])
        if (kind, number) == (StopKind.EVENT, Event.EXEC):
            arrived(pid)
            syscalls.detach(pid)
            return
        syscalls.resume(pid, number if kind is StopKind.SIGNAL else 0)
