"""Which files a thread reads the contents of, for whoever keeps what followed from them."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["FileState", "note_file", "noted_files", "state_of"]

FileState: TypeAlias = tuple[int, int, int, int, int]
"""What tells a file with its contents from others: device, inode, size, and when contents and attributes changed."""


class _Noting(threading.local):
    seen: dict[str, FileState | None] | None = None


_noting = _Noting()


@contextlib.contextmanager
def noted_files() -> Iterator[dict[str, FileState | None]]:
    """Note the paths of files that this thread reads meanwhile, and their states; None for what cannot be read."""
    before, _noting.seen = _noting.seen, {}
    try:
        yield _noting.seen
    finally:
        _noting.seen = before


def note_file(path: Path, status: os.stat_result | None) -> None:
    """Say that a file was opened to be read, or could not be."""
    if _noting.seen is not None:
        _noting.seen[str(path)] = None if status is None else state_of(status)


def state_of(status: os.stat_result) -> FileState:
    """Return the state of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
