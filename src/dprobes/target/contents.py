"""
The bytes of a file, as something that can be sliced, searched and unpacked from.

Knows nothing of what the bytes mean. A file up to ``READ_LIMIT`` is read, which costs less than a millisecond per few
megabytes, leaves no descriptor open and cannot fault when someone truncates the file; a larger one is mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from typing import TYPE_CHECKING, TypeAlias

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["READ_LIMIT", "Contents", "file_contents", "file_head"]

Contents: TypeAlias = bytes | mmap.mmap
"""Bytes with slicing, ``find`` and the buffer protocol."""

READ_LIMIT = 64 << 20
"""Size in bytes from which on a file is mapped instead of read."""

_REASONS = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "does not exist",
    errno.EACCES: "cannot be read: permission denied",
    errno.EPERM: "cannot be read: permission denied",
    errno.ELOOP: "cannot be read: too many levels of symbolic links",
    errno.ENAMETOOLONG: "cannot be read: the name is too long",
}


def file_contents(path: Path, expected: str) -> Contents:
    """Return the bytes of the regular file ``path``; ``expected`` names in errors what it should have been."""
    with _Opened(path, expected) as (descriptor, size):
        if size <= READ_LIMIT:
            return _read(descriptor, size)
        if sys.version_info >= (3, 13):
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def file_head(path: Path, count: int) -> bytes:
    """Return the first ``count`` bytes of the regular file ``path``, fewer if it is shorter."""
    with _Opened(path, "a file") as (descriptor, _):
        return _read(descriptor, count)


class _Opened:
    """Open a regular file for the length of a ``with``, and turn every failure in it into ``TargetError``."""

    def __init__(self, path: Path, expected: str) -> None:
        self._path = path
        self._expected = expected
        self._descriptor = -1

    def __enter__(self) -> tuple[int, int]:
        path = self._path
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._descriptor)
        except (OSError, ValueError) as e:
            raise _unreadable(path, e) from e
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            found = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise TargetError(f"'{path}' is {found}, expected {self._expected}")
        return self._descriptor, status.st_size

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, (OSError, ValueError)):
            raise _unreadable(self._path, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> TargetError:
    if not isinstance(error, OSError):  # a NUL in the name
        return TargetError(f"{str(path)!r} is not a file name: {error}")
    reason = _REASONS.get(error.errno or 0) or f"cannot be read: {(error.strerror or str(error)).lower()}"
    return TargetError(f"'{path}' {reason}")


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
