"""
The functions that just-in-time compilers have made, as they list them for perf: ``/tmp/perf-PID.map``.

A line is ``START SIZE name``, in hexadecimal. The file is the process's own, in its mount namespace, by its own number;
others can write into ``/tmp``, so only a file counts that belongs to the user of the process, or to root.
"""

from __future__ import annotations

import os
import re
import stat
import time
from bisect import bisect_right
from pathlib import Path

from dprobes.lazypattern import lazy_pattern
from dprobes.target.modules import root_of
from dprobes.target.names.codenames import LocatedFunction

__all__ = ["JitMap"]

_DIRECTORY = "/tmp"  # noqa: S108 - where perf has them
_TO_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_SIZE_MAX = 64 << 20
_ROWS_MAX = 1 << 20
_NAME_MAX = 1024
_INTERVAL = 0.1
"""Seconds until the file is looked at again for what it lacked."""
_LAST = 256
"""Bytes by which it is seen that a file was only appended to."""
_SHARE = 10
"""Of the time at most one part in so many is for reading it, however often it changes."""

_LINE = lazy_pattern(rb"^(?:0x)?([0-9a-fA-F]{1,16}) (?:0x)?([0-9a-fA-F]{1,8}) ([^\n]+)$", re.MULTILINE)


class JitMap:
    """The list of one process, which is read again as it grows."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of the last change, when the file was read."""
        self._read_to = 0
        """Up to where it was read: what is appended is read alone."""
        self._last = b""
        """What stands before that, by which a file is known that was written anew."""
        self._next_look = float("-inf")
        self._functions: dict[int, LocatedFunction] = {}
        self._starts: list[int] = []

    def function_at(self, address: int) -> LocatedFunction | None:
        """Return the function at an address; its extent is in addresses."""
        found = self._known(address)
        if found is None and (begun := time.monotonic()) >= self._next_look:
            self._read()
            now = time.monotonic()
            self._next_look = now + max(_INTERVAL, (now - begun) * _SHARE)
            found = self._known(address)
        return found

    def _known(self, address: int) -> LocatedFunction | None:
        number = bisect_right(self._starts, address) - 1
        found = self._functions[self._starts[number]] if number >= 0 else None
        return found if found is not None and address < found.end else None

    def _read(self) -> None:
        try:
            directory = os.open(
                root_of(self._pid) + _DIRECTORY, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
            )
        except OSError:
            return
        try:
            self._read_in(directory)
        except OSError:
            return
        finally:
            os.close(directory)

    def _read_in(self, directory: int) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(f"perf-{_own_number(self._pid)}.map", flags, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, _user_of(self._pid)) or state == self._seen:
                return
            begin = self._read_to - len(self._last)
            file.seek(begin)
            data = file.read(_SIZE_MAX - begin)
            if self._seen is None or self._seen[0] != status.st_ino or not data.startswith(self._last):
                self._read_to, self._last, self._functions = 0, b"", {}
                file.seek(0)
                data = file.read(_SIZE_MAX)
            self._seen = state
        data = data[len(self._last) : data.rfind(b"\n") + 1]
        self._read_to += len(data)
        self._last = data[-_LAST:] or self._last
        for match in _LINE.finditer(data):
            start, size = int(match[1], 16), int(match[2], 16)
            if len(self._functions) >= _ROWS_MAX:
                break
            name = match[3][:_NAME_MAX].decode("utf-8", "backslashreplace")
            self._functions[start] = LocatedFunction(start, start + max(size, 1), name)  # the last one counts
        self._starts = sorted(self._functions)


def _user_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def _own_number(pid: int) -> int:
    """Return the number of a process in its own namespace; proc(5), NSpid."""
    for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return pid
