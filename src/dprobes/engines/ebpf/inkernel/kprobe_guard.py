"""
Who takes lines out of ``kprobe_events`` when the process that has written them is killed.

The guard is a process of its own, in a session of its own, so that what a terminal kills leaves it alone. It waits for
the end of a pipe, which the kernel closes however this process ends. It is this very file, run without the package:
it has to be small, and nothing that it needs may be missing by then.
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
"""Seconds in which the kernel gets rid of events: it does so one by one, tens of milliseconds each."""
_BUSY = 16  # EBUSY: the events of a process that is being killed are closed a little later


class Guard:
    """A process that takes away the lines of a group when this one has ended, or leaves the context manager."""

    def __init__(self, group: str, directory: int) -> None:
        """Start it; ``directory`` is the descriptor of tracefs. OSError if that cannot be."""
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
    """Take away lines, each GROUP/EVENT; those that are in use are tried again for some seconds."""
    end = time.monotonic() + patience
    for line in lines:
        while _remove(directory, line) == _BUSY and time.monotonic() < end:
            time.sleep(_PAUSE)


def _remove(directory: int, line: str) -> int:
    """Take away a line; return the kernel's error number, 0 if it is gone."""
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
    """Return the lines of a group."""
    with open(os.open(_LINES, os.O_RDONLY, dir_fd=directory), encoding="utf-8") as file:
        names = [line.partition(":")[2].partition(" ")[0] for line in file]
    return [name for name in names if name.partition("/")[0] == group]


def main(group: str, pipe: int, directory: int) -> None:
    """Wait for the end of the pipe, and take away what is left of the group then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 1):
        pass
    # Who was killed while a line was being written has it written before the pipe ends.
    remove_lines(directory, _lines_of(directory, group))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
