"""
Launcher of the command to be probed, and of a debugger after an ``exit 1``.

The command is a child of this process, in the same session and with the same terminal, as if the shell had started it.
The child calls execve(2) only when the engine is ready, so that the command is probed from its first instruction on.

After an ``exit 1``, a debugger is started on the stopped process, or the user is told how to attach one. The process is
in a group stop (SIGSTOP). A debugger that attaches can run it, but the kernel stops the process again when the debugger
detaches. So dprobes then sends SIGCONT. One debugger runs at a time; further processes wait stopped.

On a terminal, the debugger is a job of its own, as if a shell had started it. Terminal input, above all Ctrl-C, must
not reach a stopped process that shares the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dprobes.engines.engine_interface import Notice, Scope
from dprobes.errors import DprobesError, EngineError, TargetError, reason_of, reason_of_number
from dprobes.platform.linux.procfs import process_field, thread_state, threads_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.engine_interface import Event, HandedOver

__all__ = ["LOOK", "Command", "Debuggers", "LaunchedCommand"]

# Signals that Python ignores in its own process; the command must not inherit that.
_CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

_READY = b"r"
_TEXT = b"="
"""First byte of a reason that is a text, and not an error number."""
_ANSWER_MAX = 1024
"""Maximum size in bytes of a child's message to its parent."""
_GO, _END = b"g", b"e"
_STANDARD_OUTPUT = 1

_PATIENCE = 2.0
"""Maximum number of seconds to wait for a child's end after SIGTERM."""


class Command:
    """
    Child process that waits before it executes ``arguments``.

    The child calls ``prepare`` with the parent's process id before the constructor returns. The child's standard output
    is the descriptor ``output``, by default the parent's. Raise ``TargetError`` if ``prepare`` raises an exception, or
    if the child exits or is killed before it is ready.
    """

    def __init__(
        self, arguments: Sequence[str], prepare: Callable[[int], None] | None = None, output: int | None = None
    ) -> None:
        self._arguments = list(arguments)
        self._prepare = prepare
        self._output = output
        self._status: int | None = None
        client = os.getpid()
        go_read, self._go = os.pipe2(os.O_CLOEXEC)
        self._failure, failure_write = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            self._become(client, go_read, failure_write)
        os.close(go_read)
        os.close(failure_write)
        answer = self._answer()  # sent after the preparation, or the reason of its failure
        if answer != _READY:
            self.close()
            reason = f"the preparation failed: {self._reason(answer)}" if answer else "it was killed before"
            raise TargetError(f"'{self._arguments[0]}' cannot be started: {reason}")

    def go(self) -> None:
        """Release the child to call execve. If that fails, ``wait`` and ``check_started`` raise an error."""
        if self._go < 0:
            return
        with contextlib.suppress(BrokenPipeError):  # it was killed; ``wait`` reports that
            os.write(self._go, _GO)
        os.close(self._go)
        self._go = -1
        # The other pipe is closed by a successful execve, or yields the errno of a failed one. Do not wait for that
        # here: an engine may have to handle the new program first.

    @property
    def has_gone(self) -> bool:
        """True if the child was released to call execve, or told to exit."""
        return self._go < 0

    def wait(self) -> int:
        """Wait for the child's end and return its wait status; raise ``TargetError`` if execve failed."""
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
            if answer := self._answer():
                raise TargetError(f"'{self._arguments[0]}' cannot be started: {self._reason_of_exec(answer)}")
        return self._status

    def check_started(self) -> None:
        """Wait until the child has called execve; raise ``TargetError`` if that failed."""
        if answer := self._answer():
            self._status = os.waitpid(self.pid, 0)[1]
            raise TargetError(f"'{self._arguments[0]}' cannot be started: {self._reason_of_exec(answer)}")

    def _answer(self) -> bytes:
        """Read the child's message: _READY, the reason of a failure, or nothing if it has ended."""
        return os.read(self._failure, _ANSWER_MAX)

    @staticmethod
    def _reason(answer: bytes) -> str:
        """Return the reason of a failure of the child: it has written an error number, or a text."""
        return answer[1:].decode(errors="replace") if answer.startswith(_TEXT) else reason_of_number(int(answer))

    def _reason_of_exec(self, answer: bytes) -> str:
        """
        Return the reason why execve failed.

        For ENOENT it names the ELF interpreter (dynamic loader) if that is the missing file.
        """
        if answer == str(errno.ENOENT).encode():
            from dprobes.target.elf.elf_file import ElfFile
            from dprobes.target.module_lookup import executable_of

            with contextlib.suppress(DprobesError):
                loader = ElfFile.open(executable_of(self._arguments[0])).interpreter
                if loader is not None and not Path(loader).exists():
                    return f"'{loader}', which loads it, does not exist"
        return self._reason(answer)

    @property
    def has_ended(self) -> bool:
        """True if the child has ended, so that ``wait`` returns at once."""
        if self._status is None:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def end(self) -> int | None:
        """Send SIGTERM to the child and return its wait status, or None if it was not released or survives 2 s."""
        if self._go >= 0:
            return None
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if not self.has_ended:
                process = os.pidfd_open(self.pid)
                try:
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    signal.pidfd_send_signal(process, signal.SIGCONT)  # in case it is stopped
                    ending = select.poll()
                    ending.register(process, select.POLLIN)
                    if not ending.poll(1000 * _PATIENCE):
                        return None
                finally:
                    os.close(process)
            return self.wait()
        return self._status

    def close(self) -> None:
        """Close the pipes. If the child was not released, make it exit, and wait for its end."""
        if self._go >= 0:
            # Closing the pipe may not wake the child: another child, forked in the meantime, may hold a copy of the
            # descriptor.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._go, _END)
            os.close(self._go)
            self._go = -1
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        os.close(self._failure)

    def _become(self, client: int, go: int, failure: int) -> NoReturn:
        try:
            os.close(self._go)
            os.close(self._failure)
            for number in _CHANGED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores it
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self._prepare is not None:
                self._prepare(client)
            if self._output is not None:
                os.dup2(self._output, _STANDARD_OUTPUT)
            os.write(failure, _READY)
            if os.read(go, 1) == _GO:
                os.execvp(self._arguments[0], self._arguments)  # noqa: S606 - no shell on purpose
        except Exception as error:  # noqa: BLE001 - the parent reports it
            code = error.errno if isinstance(error, OSError) else None
            text = (reason_of(error) or type(error).__name__).encode(errors="replace")
            os.write(failure, str(code).encode() if code is not None else (_TEXT + text)[:_ANSWER_MAX])
        finally:
            os._exit(127)


# The command of a session: a child process that calls execve when all probe programs are inserted.


_LOOK = 0.005
"""Seconds between two checks whether the command has ended."""


class LaunchedCommand:
    """
    Command of a session, for several probe programs. It may be used by several threads.

    The first call of ``scope`` creates the process. ``close`` ends it, unless it has executed the command. With
    ``follow``, the processes that it starts are in scope, too. ``output`` is the descriptor of the command's standard
    output, by default that of this process.
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
        """The first word of the command."""
        return self._words[0]

    @property
    def has_begun(self) -> bool:
        """True if the process was released to execute the command."""
        return self._has_begun

    def scope(self) -> Scope:
        """
        Return the scope of a probe program: the process, which the first call creates, and which waits for ``go``.

        Raise ``EngineError`` if the command has ended.
        """
        with self._changing:
            if self._has_begun:
                if self._command is None or self._ended(self._command):
                    raise EngineError(f"the command '{self.name}' has ended", hint="launch it again")
                return Scope(self._command.pid, follow=self._follow)
            if self._command is None:
                from dprobes.platform.linux.process_calls import allow_tracer

                self._command = Command(self._words, allow_tracer, self._output)
            path = os.path.abspath(shutil.which(self.name) or self.name)
            return Scope(self._command.pid, follow=self._follow, program=path)

    def go(self) -> None:
        """Make the process execute the command; raise ``TargetError`` if that fails. A second call does nothing."""
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
        """Wait until the command has ended, or until the monotonic time ``until`` in seconds if it is not None."""
        while self._has_begun and self.exit_status is None and self._command is not None:
            if until is not None and time.monotonic() >= until:
                return
            time.sleep(_LOOK)

    @property
    def exit_status(self) -> int | None:
        """Exit status of the command, or the negative number of the signal that killed it, or None before its end."""
        status = self.wait_status
        return None if status is None else os.waitstatus_to_exitcode(status)

    @property
    def wait_status(self) -> int | None:
        """The wait status of the command (wait(2)), or None before its end, or if other code has waited for it."""
        with self._changing:
            is_known = self._wait_status is not None or not self._has_begun
            if not is_known and self._command is not None and self._ended(self._command):
                with contextlib.suppress(ChildProcessError):
                    self._wait_status = self._command.wait()
            return self._wait_status

    def _ended(self, command: Command) -> bool:
        try:
            return command.has_ended
        except ChildProcessError:  # other code has waited for it
            return True

    def end(self) -> int | None:
        """Send SIGTERM to the command and return its wait status, or None if it was not released or survives 2 s."""
        with self._changing:
            if self._command is not None and self._has_begun and self._wait_status is None:
                self._wait_status = self._command.end()
            return self._wait_status

    def close(self) -> None:
        """Release the resources. A process that still waits exits; a process that executes the command continues."""
        _ = self.exit_status
        with self._changing:
            if self._command is not None:
                self._command.close()
                self._command = None


LOOK = 0.05
"""Seconds between two checks of a debugger and its process (``Debuggers.look``)."""

_STOPPING_TIME = 1.0
"""Maximum number of seconds to wait until the threads of a process have stopped."""


class Debuggers:
    """
    Runner of the debugger ``command`` on each process that is handed to it. If it is None, the processes stay stopped.

    In the words of the command, ``%p`` is replaced by the process id, and ``%%`` by a percent sign. With
    ``keep_input``, the debugger inherits standard input; otherwise its input is /dev/null.
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
        """True while a debugger that was started for a stopped process runs."""
        return self._process is not None

    @property
    def is_idle(self) -> bool:
        """True if no debugger runs and no process waits for one."""
        return self._current is None and not self._waiting

    def add(self, process: HandedOver) -> Iterator[Event]:
        """Add a process for ``look``. Without a debugger's command, yield a notice with the address of its stop."""
        if self._command is None:
            yield _stopped_notice(process)
        else:
            self._waiting.append(process)

    def look(self) -> Iterator[Event]:
        """
        Start the next debugger, or check the running one, and yield notices.

        Call it about every ``LOOK`` seconds.
        """
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

    Unless it is that of this process, continue it, because SIGTTIN or SIGTTOU may have stopped it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGCONT)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _states(pid: int) -> set[str]:
    """Return the state letters (proc_pid_stat(5)) of a process's threads, without Z and X."""
    with contextlib.suppress(OSError):
        return {thread_state(tid) for tid in threads_of(pid)} - {"Z", "X"}
    return set()


def _await_stop(pid: int) -> None:
    """Wait up to a second until all threads have stopped. A thread that sleeps in the kernel stops when it wakes up."""
    until = time.monotonic() + _STOPPING_TIME
    while _states(pid) - {"T"} and time.monotonic() < until:
        time.sleep(0.001)


def _is_traced(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(process_field(tid, "TracerPid") not in ("", "0") for tid in threads_of(pid))
    return False


def _let_go_on(target: HandedOver) -> Iterator[Event]:
    """Send SIGCONT to a process that is stopped. If this user may not, yield a notice."""
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
