"""The standard input of a command as a log target: lines of text, or frames (``record.line_frames``)."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import termios
from collections import deque
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.sinks.text_sinks import byte_sink, write_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks import Sink, SinkOptions

__all__ = ["CommandOutlet", "open"]

_PATIENCE = 30.0
"""Seconds without progress after which a command that does not read is terminated and restarted."""

_LAST_WORDS = 5.0
"""Seconds to wait for a command's exit after the end of its input."""

_TERMINATING = 1.0
"""Seconds to wait for a command's exit after SIGTERM."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Start the command in the argument; raise ``SinkError`` if that fails."""
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise SinkError(f"log target 'command:{argument}': {str(error).lower()}") from error
    if not words:
        raise SinkError("log target 'command' needs a command: command:CMD ARGS")
    return byte_sink(CommandOutlet(words), options)


class CommandOutlet:
    """
    A command, started without a shell and in a session of its own, so that Ctrl-C does not end it prematurely.

    Records that it has not read when it exits are counted as lost.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._name = f"command '{words[0]}'"
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise SinkError(f"{self._name} cannot be started: {reason_of(error)}") from error
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._in_pipe: deque[int] = deque()
        """The sizes of the last records that were written, at least of those that may still be in the pipe."""
        self._in_pipe_bytes = 0
        self._capacity = fcntl.fcntl(self._pipe, fcntl.F_GETPIPE_SZ)

    def write(self, parts: Sequence[bytes]) -> None:
        """Write encoded records to the command's standard input; raise ``SinkError`` if it closes it early."""
        written = write_parts(self._pipe, parts, _PATIENCE)
        self._note(parts[: written.parts])
        if written.problem is None:
            return
        status = self._ended()
        problem = f"{self._name}: {written.problem}" if status is None else f"{self._name} {_what(status)}"
        raise SinkError(problem, taken=written.parts, lost=self._unread(self._pipe, written.extra))

    def _note(self, parts: Sequence[bytes]) -> None:
        sizes = [len(part) for part in parts]
        self._in_pipe += sizes
        self._in_pipe_bytes += sum(sizes)
        while self._in_pipe and self._in_pipe_bytes - self._in_pipe[0] >= self._capacity:
            self._in_pipe_bytes -= self._in_pipe.popleft()

    def _unread(self, pipe: int, extra: int = 0) -> int:
        """
        Return and reset the number of unread records among ``pipe`` unread bytes of the pipe.

        ``extra`` further bytes belong to a record that was written incompletely.
        """
        found = array.array("i", [0])
        fcntl.ioctl(pipe, termios.FIONREAD, found)
        left, count = found[0] - extra, 0
        for size in reversed(self._in_pipe):
            if left <= 0:
                break
            left -= size
            count += 1
        self._in_pipe.clear()
        return count

    def _ended(self) -> int | None:
        """
        Return the exit status of the command, or None if it has not exited within 0.2 seconds.

        A command that has closed its standard input is about to exit.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)
        return None

    def flush(self) -> None:
        """Do nothing: written data are readable at once."""

    def close(self) -> None:
        """
        Close the command's input, wait for its exit, and terminate it if that takes too long.

        Raise ``SinkError`` if it has failed, or has not read all records.
        """
        assert self._process.stdin is not None
        # Another descriptor of the pipe, to count unread bytes at the end.
        reader = os.open(f"/proc/self/fd/{self._pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._process.stdin.close()
        try:
            what = _what(self._process.wait(_LAST_WORDS))
        except subprocess.TimeoutExpired:
            self._end()
            what = f"did not end within {_LAST_WORDS:.0f} s after its input, and was ended"
        unread = self._unread(reader)
        os.close(reader)
        if unread or self._process.returncode:
            raise SinkError(f"{self._name} {what}", lost=unread)

    def abort(self) -> None:
        """Terminate the command; a thread that is blocked in a write to it gets an error."""
        if self._process.poll() is None:
            self._end()

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATING)
                return


def _what(status: int) -> str:
    if status >= 0:
        return f"has ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
