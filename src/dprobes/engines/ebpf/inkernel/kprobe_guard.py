"""
Guard process that removes lines from ``kprobe_events`` if the process that has written them is killed.

The guard has its own session, so that signals of a terminal do not reach it. It reads a pipe until its end: the kernel
closes the other end when the writer is killed or exits. The guard runs this file without the package, so it is small,
and needs no other file, which may be missing later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

__all__ = ["Guard", "remove_lines"]

_LINES = "kprobe_events"
_PAUSE = 0.05
_PATIENCE = 60.0
"""Maximum number of seconds to remove events: the kernel takes tens of milliseconds for each, one after the other."""
_BUSY = 16  # EBUSY: the events of a process that is being killed are closed a little later


class Guard:
    """Guard process for a group of events. It removes their lines when this process ends or leaves the context."""

    def __init__(self, group: str, directory: int) -> None:
        """Start the process; raise OSError if that fails. ``directory`` is the descriptor of tracefs."""
        theirs, self._ours = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, group, str(theirs), str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs, directory),
                start_new_session=True,
                cwd="/",
            )
        except OSError:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    def __enter__(self) -> None:
        return

    def __exit__(self, *exception: object) -> None:
        os.close(self._ours)
        self._process.wait()


def remove_lines(directory: int, lines: list[str], patience: float = _PATIENCE) -> None:
    """
    Remove lines from ``kprobe_events``. For up to ``patience`` seconds, retry those that are in use.

    ``lines`` has the names GROUP/EVENT. ``directory`` is a descriptor of tracefs.
    """
    end = time.monotonic() + patience
    for line in lines:
        while _remove(directory, line) == _BUSY and time.monotonic() < end:
            time.sleep(_PAUSE)


def _remove(directory: int, line: str) -> int:
    """Remove the kprobe event GROUP/EVENT from tracefs; return the error number, or 0 if the event is gone."""
    try:
        descriptor = os.open(_LINES, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.write(descriptor, f"-:{line}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.errno or 0
    return 0


def _lines_of(directory: int, group: str) -> list[str]:
    """Return the names (GROUP/EVENT) of the lines of a group in ``kprobe_events``."""
    with open(os.open(_LINES, os.O_RDONLY, dir_fd=directory), encoding="utf-8") as file:
        names = [line.partition(":")[2].partition(" ")[0] for line in file]
    return [name for name in names if name.partition("/")[0] == group]


def main(group: str, pipe: int, directory: int) -> None:
    """
    Wait until the other end of ``pipe`` is closed, then remove the remaining kprobe events of ``group``.

    ``directory`` is a descriptor of tracefs.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 1):
        pass
    # If the other process is killed while it writes a line, the line exists before the kernel closes the pipe.
    remove_lines(directory, _lines_of(directory, group))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
