"""
Being asked before the tracer dies.

The kernel lets the threads of a dead tracer run at once, and they come to breakpoints before anyone outside can know
(measured: 3 to 70 ms). So the client traces the tracer, for one thing: PTRACE_O_TRACEEXIT holds a process that is about
to end, killed by SIGKILL as well, until its own tracer lets it go on; ``do_exit`` does so before it gives anything up.
Meanwhile the code is restored at leisure. Where the tracer cannot be traced, its end shows only afterwards.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import Event, StopKind, classify_stop

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TracerGuard"]

_STOPS = (os.CLD_TRAPPED, os.CLD_STOPPED)


class TracerGuard:
    """
    Watch over a tracer that is a child of this process.

    Should it be killed, ``before`` is called while it still holds its threads, and ``after`` when it lets go of them,
    both by a thread of the guard.
    """

    def __init__(self, process: subprocess.Popen[bytes], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._process = process
        # A request of ptrace(2) must come from the thread that began it. Only the thread knows whom to call: else who
        # made the guard would live on in a cycle of references, with descriptors.
        self._thread = threading.Thread(target=_watch, args=(process, before, after), name="dprobes-guard", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of the tracer and return its exit code; raise ``subprocess.TimeoutExpired``."""
        # Who waits for the process itself would take the stops that are for the guard.
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired(self._process.args, seconds or 0)
        return self._process.wait(seconds)


def _watch(process: subprocess.Popen[bytes], before: Callable[[], None], after: Callable[[], None]) -> None:
    pid = process.pid
    try:
        ptracecalls.seize_for_exit(pid)
    except OSError:
        return
    while True:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | ptracecalls.WALL)
        if found is None or found.si_code not in _STOPS:
            return
        with contextlib.suppress(OSError):  # killed once more
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | ptracecalls.WALL)
            kind, number = classify_stop(found.si_status << 8 | 0x7F)
            if kind is StopKind.GROUP_STOP:
                ptracecalls.listen(pid)
            elif kind is StopKind.SIGNAL:
                ptracecalls.resume(pid, number)
            elif kind is StopKind.EVENT and number == Event.EXIT and ptracecalls.event_message(pid):
                try:
                    before()
                finally:
                    with contextlib.suppress(OSError):
                        ptracecalls.resume(pid)
                after()
            else:
                ptracecalls.resume(pid)
