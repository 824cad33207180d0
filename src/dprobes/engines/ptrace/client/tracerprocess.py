"""Starting a tracer, and waiting for what it sends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING

from dprobes.engines import refusals
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.ptrace.wire import Start

__all__ = ["readable", "start_tracer"]

_PIPE_SIZE = 1 << 20
"""What the pipe for records is to hold, in bytes; the most that an ordinary user gets (pipe(7))."""


def start_tracer(start: Start, module: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """
    Start a tracer whose first program ``start`` describes, and which is for ``module``.

    Return it with two descriptors: what it sends is read from the first one, what it is sent goes into the second one.
    Raise ``EngineError`` if it cannot be started.
    """
    their_input, to_tracer = os.pipe2(os.O_CLOEXEC)
    from_tracer, their_output = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(their_output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    shared = [descriptor for descriptor in (start.counters, start.globals) if descriptor >= 0]
    try:
        # A session of its own: neither the terminal's signals nor the end of ours reach the tracer by themselves.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", refusals.TRACER, str(their_input), str(their_output), module],
            pass_fds=[their_input, their_output, *shared],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        os.close(to_tracer)
        os.close(from_tracer)
        reason = (error.strerror or str(error)).lower()
        raise EngineError(
            f"the tracer cannot be started: '{sys.executable}': {reason}",
            hint="this user must be able to execute the Python that runs dprobes",
        ) from error
    finally:
        os.close(their_input)
        os.close(their_output)
    return process, from_tracer, to_tracer


def readable(descriptors: list[int], seconds: float | None) -> list[int]:
    """Wait until one of some descriptors can be read, and return those that can; None is for ever."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]
