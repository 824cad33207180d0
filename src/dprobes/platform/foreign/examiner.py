"""
Client of the process that reads foreign files within limits of memory and time (``examination``).

Several threads may call it; files are examined one after the other. The process is started for the first question, and
exits after 30 seconds without questions.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.platform.foreign.examination import LENGTH, Limits, Outcome
from dprobes.platform.foreign.foreign_outlines import ANSWER_MAX, read_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.platform.foreign.foreign_outlines import Examined, Question

__all__ = ["Examiner"]

_LOOK = 0.1
"""Seconds between two calls of ``is_wanted`` while waiting for an answer."""

_SPARE_TIME = 10.0
"""Seconds for the start of the process, in addition to those for reading a file."""

_HINT = "if you trust the file, make root its owner and only writer"


class Examiner:
    """
    Client of the process that examines other users' files, each within the same limits.

    It may be used by several threads.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def examine(
        self, question: Question, descriptor: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Examined | None:
        """
        Examine an open file and return the result.

        Return None if its SONAME is not the requested one, or if ``is_wanted`` returns False meanwhile. Raise
        ``TargetError`` or ``SourceError`` if the program cannot be inserted there, or if the limits do not suffice to
        read the file.
        """
        payload = pickle.dumps((question, self._limits))
        while not self._lock.acquire(timeout=_LOOK):
            if not is_wanted():
                return None
        try:
            data = self._ask(question.path, payload, descriptor, is_wanted)
        except BaseException:
            self._end()  # a late answer would be taken for that of the next question
            raise
        finally:
            self._lock.release()
        return None if data is None else read_answer(data, question)

    def close(self) -> None:
        """Kill the process if it exists; a later question starts a new one."""
        with self._lock:
            self._end()

    def _ask(self, path: str, payload: bytes, descriptor: int, is_wanted: Callable[[], bool]) -> bytes | None:
        until = time.monotonic() + self._limits.time + _SPARE_TIME
        for is_first in (True, False):
            connection = self._connected()
            try:
                socket.send_fds(connection, [LENGTH.pack(len(payload))], [descriptor])
                connection.sendall(payload)
                if not self._await(connection, until, is_wanted):
                    self._end()
                    if is_wanted():
                        raise self._too_long(path)
                    return None
                outcome, answers = _receive(connection)
            except (BrokenPipeError, ConnectionResetError):
                outcome, answers = b"", []
            if outcome:
                return self._outcome(path, Outcome(outcome), answers)
            self._end()  # it had been idle for too long, and ended at the same time
            if not is_first:
                break
        raise TargetError(f"'{path}' is not probed: the process that read it has been killed")

    def _outcome(self, path: str, outcome: Outcome, answers: list[int]) -> bytes:
        match outcome:
            case Outcome.NO_TIME:
                raise self._too_long(path)
            case Outcome.NO_MEMORY:
                raise TargetError(
                    f"'{path}' is not probed: reading it takes more memory than is allowed for "
                    f"a file of another user: {self._limits.memory >> 20} MiB",
                    hint=_HINT,
                )
            case Outcome.FAILED:
                raise TargetError(f"'{path}' is not probed: its contents are not valid")
            case Outcome.ANSWER:
                try:
                    return os.pread(answers[0], ANSWER_MAX, 0)
                finally:
                    for answer in answers:
                        os.close(answer)

    def _too_long(self, path: str) -> TargetError:
        return TargetError(
            f"'{path}' is not probed: reading it takes longer than is allowed for a file "
            f"of another user: {self._limits.processor_time} s of processor time, {self._limits.time} s in all",
            hint=_HINT,
        )

    def _connected(self) -> socket.socket:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dprobes.platform.foreign.examination", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = ours
        return ours

    def _await(self, connection: socket.socket, until: float, is_wanted: Callable[[], bool]) -> bool:
        """
        Wait for an answer until the monotonic time ``until``.

        Return False if none arrives, or ``is_wanted`` returns False.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while not poll.poll(_LOOK * 1000):
            if time.monotonic() > until or not is_wanted():
                return False
        return True

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            # Its process group is the process and the child that reads a file; both may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """
    Receive one byte with its attached descriptors, which the caller must close.

    The byte is empty at the end of the stream.
    """
    numbers = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for _, _, content in ancillary:
        with contextlib.suppress(ValueError):
            numbers.frombytes(content)
    return data, list(numbers)
