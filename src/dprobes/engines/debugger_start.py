"""
Actions after an ``exit 1``: start a debugger on the stopped process, or tell the user how to attach one.

The process is in a group stop (SIGSTOP). A debugger that attaches can run it, but the kernel stops the process again
when the debugger detaches. So dprobes then sends SIGCONT. One debugger runs at a time; further processes wait stopped.

At a terminal the debugger is a job of its own, as if a shell had started it. Input at the terminal, above all Ctrl-C,
must not reach a stopped process that shares the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Notice
from dprobes.errors import reason_of
from dprobes.platform.linux.procfs import process_field, thread_state, threads_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import Event, HandedOver

__all__ = ["LOOK", "Debuggers"]

LOOK = 0.05
"""Seconds between two checks of a debugger and its process (``Debuggers.look``)."""

_STOPPING_TIME = 1.0
"""Maximum number of seconds to wait until the threads of a process have stopped."""


class Debuggers:
    """
    Runner of the debugger ``command`` on each process that is handed to it; None: the processes stay stopped.

    In the words of the command, ``%p`` is replaced by the process id, and ``%%`` by a percent sign. With ``keep_input``
    the debugger inherits standard input, else its input is /dev/null.
    """

    def __init__(self, command: Sequence[str] | None, *, keep_input: bool) -> None:
        self._command = command
        self._keep_input = keep_input
        self._waiting: deque[HandedOver] = deque()
        self._current: HandedOver | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._was_attached = False
        self._has_terminal = False
        self._next_look = 0.0

    @property
    def is_running(self) -> bool:
        """True while a debugger runs."""
        return self._process is not None

    @property
    def is_idle(self) -> bool:
        """True if no debugger runs and no process waits for one."""
        return self._current is None and not self._waiting

    def add(self, process: HandedOver) -> Iterator[Event]:
        """Add a process for ``look``; without a debugger's command, yield a notice with the address of its stop."""
        if self._command is None:
            yield _stopped_notice(process)
        else:
            self._waiting.append(process)

    def look(self) -> Iterator[Event]:
        """Start the next debugger, or check the running one; yield notices. Call it about every ``LOOK`` seconds."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK / 2
        if self._current is None and self._waiting:
            yield from self._start(self._waiting.popleft())
        elif self._current is not None and self._process is not None:
            yield from self._watch(self._current, self._process)

    def _start(self, target: HandedOver) -> Iterator[Event]:
        import shlex
        import shutil
        import subprocess

        assert self._command is not None
        words = [_expand(word, target.pid) for word in self._command]
        _await_stop(target.pid)
        where = _where(target)
        if shutil.which(words[0]) is None:
            yield Notice(f"'{words[0]}' is not installed")
            yield _stopped_notice(target)
            return
        yield Notice(f"{where}: starting {shlex.join(words)}", is_warning=False)
        self._has_terminal = self._keep_input and _is_foreground()
        try:
            self._process = subprocess.Popen(
                words,
                stdin=None if self._keep_input else subprocess.DEVNULL,
                process_group=0 if self._has_terminal else None,
            )
        except OSError as error:
            yield Notice(f"'{words[0]}' cannot be started: {reason_of(error)}")
            yield _stopped_notice(target)
            return
        self._current = target
        self._was_attached = False
        if self._has_terminal:
            _give_terminal(self._process.pid)

    def _watch(self, target: HandedOver, process: subprocess.Popen[bytes]) -> Iterator[Event]:
        status = process.poll()
        if self._has_terminal and (status is not None or thread_state(process.pid) == "T"):
            _give_terminal(os.getpgrp())
            if status is None:
                # Ctrl-Z: stop as well, so that the shell takes the terminal until it continues this process.
                os.kill(os.getpid(), signal.SIGSTOP)
                _give_terminal(process.pid)
        is_attached = _is_traced(target.pid)
        if (status is not None or self._was_attached) and not is_attached:
            yield from _let_go_on(target)
        self._was_attached = is_attached
        if status is None:
            return
        self._current = self._process = None
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            yield Notice(f"the debugger of process {target.pid} ({target.name}) {how}; the process continues")


def _expand(word: str, pid: int) -> str:
    return "%".join(part.replace("%p", str(pid)) for part in word.split("%%"))


def _where(target: HandedOver) -> str:
    side = "after" if target.has_executed else "before"
    return f"process {target.pid} ({target.name}) is stopped at {target.address:#x}, {side} the probed instruction"


def _stopped_notice(target: HandedOver) -> Notice:
    return Notice(
        _where(target),
        f"examine it with 'gdb -p {target.pid}', then continue it with 'kill -CONT {target.pid}'",
    )


def _is_foreground() -> bool:
    """Return True if standard input is a terminal, and this process is in its foreground job."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _give_terminal(group: int) -> None:
    """
    Make a process group the terminal's foreground job.

    Continue it, unless it is that of this process: SIGTTIN or SIGTTOU may have stopped it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGCONT)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _states(pid: int) -> set[str]:
    """Return the state letters (proc_pid_stat(5)) of a process's threads, without Z and X; empty if it has ended."""
    with contextlib.suppress(OSError):
        return {thread_state(tid) for tid in threads_of(pid)} - {"Z", "X"}
    return set()


def _await_stop(pid: int) -> None:
    """Wait up to a second until all threads have stopped; a thread that sleeps in the kernel stops when it wakes up."""
    until = time.monotonic() + _STOPPING_TIME
    while _states(pid) - {"T"} and time.monotonic() < until:
        time.sleep(0.001)


def _is_traced(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(process_field(tid, "TracerPid") not in ("", "0") for tid in threads_of(pid))
    return False


def _let_go_on(target: HandedOver) -> Iterator[Event]:
    """Send SIGCONT to a process that is stopped; yield a notice if this user may not."""
    if "T" not in _states(target.pid):
        return
    try:
        os.kill(target.pid, signal.SIGCONT)
    except PermissionError:
        yield Notice(
            f"process {target.pid} ({target.name}) is stopped, and this user may not continue it",
            f"as root: kill -CONT {target.pid}",
        )
    except ProcessLookupError:
        pass
