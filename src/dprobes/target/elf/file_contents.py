"""
Bytes of a file, for slicing, searching and unpacking, independent of their meaning.

A file up to ``READ_LIMIT`` is read. This takes less than a millisecond for a few megabytes, keeps no descriptor open,
and cannot fault if the file is truncated. A larger file is mapped, or read if other users can write it. A larger file
that consists mostly of holes is refused: any user can make one of any size without disk space, and reading it is slow.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, overload

from dprobes.errors import TargetError, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["READ_LIMIT", "Contents", "KnownBytes", "file_contents", "file_head"]


class KnownBytes:
    """File of ``size`` bytes of which only ``pieces`` at some offsets are known."""

    def __init__(self, size: int, pieces: Mapping[int, bytes]) -> None:
        self._size = size
        self._pieces = pieces

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> bytes: ...

    def __getitem__(self, place: int | slice) -> int | bytes:
        """
        Return known bytes. A slice that does not begin where a piece begins is empty.

        A slice beyond the end of its piece is truncated.
        """
        if isinstance(place, int):
            return self._pieces[place][0]
        start, stop, _ = place.indices(self._size)
        return self._pieces.get(start, b"")[: max(0, stop - start)]

    def find(self, _sought: bytes, _start: int = 0, _end: int = 0) -> int:
        """Return -1: unknown bytes cannot be searched."""
        return -1


FileBytes: TypeAlias = bytes | mmap.mmap
"""All bytes of a file: types with slicing, ``find`` and the buffer protocol."""

Contents: TypeAlias = FileBytes | KnownBytes
"""All bytes of a file, or the known ones."""

READ_LIMIT = 64 << 20
"""Maximum size in bytes of a file that is always read. A larger file is mapped if that is safe."""

_HOLE_SHARE = 8
"""Maximum ratio of a file's size to its size on disk. Compression by the file system stays below it."""

_BLOCK = 512  # bytes: the unit of st_blocks on all file systems

_REASONS = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "does not exist",
    errno.EACCES: "cannot be read: permission denied",
    errno.EPERM: "cannot be read: permission denied",
    errno.ELOOP: "cannot be read: too many levels of symbolic links",
    errno.ENAMETOOLONG: "cannot be read: the name is too long",
}


def file_contents(path: Path, expected: str, shown: Path | None = None) -> FileBytes:
    """
    Return the bytes of a regular file.

    ``expected`` is the expected kind of file, for errors. Errors contain the path ``shown``, if that is given.
    """
    with _opened(path, expected, shown or path) as (descriptor, status):
        if status.st_size <= READ_LIMIT:
            return _read(descriptor, status.st_size)
        if _is_hole(descriptor, status):
            raise TargetError(
                f"'{shown or path}' is a hole for the most part: {_BLOCK * status.st_blocks} of its {status.st_size} "
                f"bytes are on disk, expected {expected}"
            )
        if not _is_only_ours(status):
            return _read(descriptor, status.st_size)  # its owner may truncate it, and a mapping would raise SIGBUS
        if sys.version_info >= (3, 13):
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def file_head(path: Path, count: int) -> bytes:
    """Return the first ``count`` bytes of the regular file ``path``, fewer if it is shorter."""
    with _opened(path, "a file", path) as (descriptor, _):
        return _read(descriptor, count)


@contextmanager
def _opened(path: Path, expected: str, shown: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file for the length of a ``with``, and convert every OSError or ValueError to ``TargetError``."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                found = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise TargetError(f"'{shown}' is {found}, expected {expected}")
            yield descriptor, status
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise _unreadable(shown, error) from error


def _is_only_ours(status: os.stat_result) -> bool:
    """Return whether only root, this user and this user's group can write to a file."""
    others = stat.S_IWOTH if status.st_gid == os.getegid() else stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others


def _is_hole(descriptor: int, status: os.stat_result) -> bool:
    """Return whether a file has so few blocks for its size that most of it is a hole, which reads as zeros."""
    if status.st_blocks:
        return _HOLE_SHARE * _BLOCK * status.st_blocks < status.st_size
    # Not every file system counts blocks. One without support for holes reports data at the beginning.
    try:
        os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def _unreadable(path: Path, error: OSError | ValueError) -> TargetError:
    if not isinstance(error, OSError):
        reason = "it contains a NUL byte" if "\0" in str(path) else str(error)  # Python's text differs between versions
        return TargetError(f"{str(path)!r} is not a file name: {reason}")
    reason = _REASONS.get(error.errno or 0) or f"cannot be read: {reason_of(error)}"
    return TargetError(f"'{path}' {reason}")


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
