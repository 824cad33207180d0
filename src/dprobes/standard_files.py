"""
Standard output and standard error of a DProbes process, whose termination a slow reader cannot delay.

A write waits for the reader until a signal that ends the process arrives (SIGINT, SIGTERM, SIGHUP). From then on no
write waits: data without room are buffered, and written when there is room. Before the process exits, ``settle`` waits
as long as the reader makes progress; the remaining data are lost, and a message reports that.

For this, a pipe or terminal is opened anew as a nonblocking file: O_NONBLOCK on the original descriptor would affect
all processes that share the open file description. If that is not permitted, writes are limited to the room that there
certainly is (pipe(7), PIPE_BUF). Signals are detected through a pipe (``signal.set_wakeup_fd``): a thread that waits
here may hold a lock that the main thread waits for, and then no Python handler can run.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import stat
import sys
import time
from _thread import allocate_lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from _typeshed import ReadableBuffer

__all__ = ["PATIENCE", "EndingSignals", "WaitingFile", "give_up", "own_standard_files", "settle", "waiting_file_of"]

# No slow imports here: no typing, no threading.


PATIENCE = 10.0
"""Seconds without progress of the reader after which ``settle`` gives up."""

_GIVEN_UP = "its reader did not read in time"

_HELD_MAX = 64 << 20
"""Maximum number of buffered bytes; further writes wait for the reader, which must make progress."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WRITING = select.POLLOUT | select.POLLERR | select.POLLHUP | select.POLLNVAL


class EndingSignals:
    """The arrival of signals that end this process and have a Python handler; created in the main thread."""

    def __init__(self) -> None:
        self.descriptor, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._have_come = False

    @property
    def have_come(self) -> bool:
        """True if one of the signals has arrived."""
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(self.descriptor, 1 << 12):
                self._have_come |= not set(_ENDING).isdisjoint(numbers)
        return self._have_come


class WaitingFile(io.RawIOBase):
    """
    A file whose reader may be slow: a pipe, a terminal, a socket; also any other file.

    With ``is_owned``, ``close`` closes ``descriptor`` as well.
    """

    _close_descriptor = staticmethod(os.close)
    """``os.close``, also while the interpreter ends and has cleared this module's names."""

    def __init__(self, descriptor: int, name: str, ending: EndingSignals, *, is_owned: bool = False) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._is_owned = is_owned
        self.name = name
        self.mode = "wb"
        self.ending = ending
        self.written = 0
        """Number of bytes written to the file."""
        self.has_lost = False
        """True if some output was lost."""
        self.is_given_up = False
        self.problem: str | None = None
        """The reason for the loss, or None if the reader has closed the file."""
        kind = os.fstat(descriptor).st_mode
        self._waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(descriptor)
        self._own = _opened_anew(descriptor) if self._waits and not stat.S_ISSOCK(kind) else -1
        self._held = bytearray()
        self._lock = allocate_lock()
        """Held only briefly, never during a wait."""

    def fileno(self) -> int:
        """Return the original descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True: the text layer requires it of a binary file for output."""
        return True

    @property
    def is_holding(self) -> bool:
        """True if data are buffered."""
        return bool(self._held)

    def write(self, data: ReadableBuffer) -> int:
        """
        Write all data.

        When the process is to end, buffer data for which there is no room. Raise OSError on failure.
        """
        view = memoryview(data).cast("B")
        place = 0
        while place < len(view):
            if self.is_given_up:
                self.has_lost = True
                break
            place += self._put(view[place:])
            if place < len(view):
                if self.ending.have_come:
                    self._hold(view[place:])
                    break
                try:
                    self._await_room()
                except BaseException:  # raised by a signal handler
                    self.has_lost = True
                    self.give_up(_GIVEN_UP)
                    raise
        return len(view)

    def close(self) -> None:
        """Close the descriptor that was opened anew; the original one is closed only if it is owned."""
        if not self.closed:
            if self._own >= 0:
                self._close_descriptor(self._own)
            if self._is_owned:
                self._close_descriptor(self._descriptor)
        super().close()

    def end_wait(self) -> bool:
        """Discard buffered output and end a wait; return whether there was any. Signal handlers may call it."""
        if not self._held:
            return False
        self.give_up(_GIVEN_UP)
        return True

    def settle(self, patience: float = PATIENCE) -> bool:
        """
        Write buffered data; return whether all were written.

        After ``patience`` seconds in which the reader has accepted no byte, call ``give_up``.
        """
        until = time.monotonic() + patience
        while self._held and not self.is_given_up:
            before = self.written
            self._put(memoryview(b""))
            if self.written > before:
                until = time.monotonic() + patience
            elif (left := until - time.monotonic()) <= 0:
                self.give_up(f"no data was accepted for {patience:.0f} s" if patience else _GIVEN_UP)
            else:
                _is_ready(self._descriptor, min(left, _LOOK))
        return not self.is_given_up

    def give_up(self, problem: str | None = None) -> None:
        """Stop writing: buffered and further data are lost, for the reason ``problem``. Signal handlers may call it."""
        self.is_given_up = True
        self.problem = self.problem or problem
        self.has_lost |= bool(self._held)
        self._held = bytearray()

    def _hold(self, view: memoryview) -> None:
        if len(self._held) + len(view) > _HELD_MAX and not self.settle():
            self.has_lost = True
            return
        with self._lock:
            self._held += view

    def _put(self, view: memoryview) -> int:
        """Write buffered data, then as much of ``view`` as has room; return how many bytes of ``view`` were written."""
        with self._lock:
            held = self._held
            while held:
                count = self._taken(memoryview(bytes(held[: 1 << 16])))
                if not count:
                    return 0
                del held[:count]
            return self._taken(view) if view else 0

    def _taken(self, view: memoryview) -> int:
        if self._own < 0 and self._waits:
            if not _is_ready(self._descriptor, 0):
                return 0
            view = view[: select.PIPE_BUF]
        try:
            count = os.write(self._own if self._own >= 0 else self._descriptor, view)
        except BlockingIOError:
            return 0
        self.written += count
        return count

    def _await_room(self) -> None:
        """Wait until the file is writable, or a signal has arrived."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.register(self.ending.descriptor, select.POLLIN)
        poll.poll()


_LOOK = 0.1
"""Maximum seconds of a wait before ``is_given_up`` is checked."""


def _is_ready(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & _WRITING for _, events in poll.poll(seconds * 1000))


def _opened_anew(descriptor: int) -> int:
    """Return a new nonblocking descriptor of a pipe or terminal; -1 if opening it is not permitted."""
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return -1


def own_standard_files() -> None:
    """
    Replace standard output and standard error by files that do not delay the end of the process.

    Only for the owner of the process: the original files are closed with the new ones. With PYTHONUNBUFFERED Python
    ignores incomplete writes; the buffer here writes the rest.
    """
    ending = EndingSignals()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                whole = io.BufferedWriter(WaitingFile(stream.fileno(), stream.name, ending))
                buffered = stream.line_buffering or stream.write_through
                text = io.TextIOWrapper(whole, stream.encoding, stream.errors, line_buffering=buffered)
                setattr(sys, name, text)


def waiting_file_of(stream: TextIO) -> WaitingFile | None:
    """Return the ``WaitingFile`` that a stream writes to, or None if it writes to another kind of file."""
    found = getattr(getattr(stream, "buffer", None), "raw", None)
    return found if isinstance(found, WaitingFile) else None


def give_up(stream: TextIO) -> None:
    """Stop all output of a stream: buffered data are lost, also when the stream is closed."""
    if (file := waiting_file_of(stream)) is not None:
        file.give_up()
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def settle(*, is_patient: bool) -> Sequence[str]:
    """
    Write buffered output before the process exits; return a message for each file with lost output.

    Without ``is_patient``, data that cannot be written at once are lost.
    """
    problems: list[str] = []
    for stream, name in ((sys.stdout, "standard output"), (sys.stderr, "standard error")):
        if (file := waiting_file_of(stream)) is None or stream.closed:  # pygls closes its output at the end
            continue
        try:
            stream.flush()
            stream.buffer.flush()  # click's wrapper of a stream whose reader has gone ignores the error
            file.settle(PATIENCE if is_patient else 0)
        except OSError as error:
            file.give_up()
            if error.errno != errno.EPIPE and stream is sys.stdout:  # nowhere to report the other one
                file.problem = file.problem or os.strerror(error.errno or errno.EIO).lower()
                file.has_lost = True
        if file.has_lost and file.problem is not None:
            problems.append(f"{name}: {file.problem}; the remaining output is lost")
    return problems
