"""
Files in the user's cache directory (XDG Base Directory Specification), which spare the next start some work.

What cannot be read is not there, and what cannot be written is not kept. Nobody else can put a file there: one counts
only if it, and the directory that it is in, belong to the user and can be changed by no other one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from _thread import get_ident

# Nothing that takes long is imported here: no pathlib, no typing.

__all__ = ["cache_directory", "make_room", "read_cached", "write_cached"]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE = 0o700


def cache_directory() -> str:
    """Return the directory of our files in the cache directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if base.startswith("/") else os.path.expanduser("~/.cache"), "dprobes")  # noqa: PTH111, PTH118


def read_cached(directory: str, name: str) -> bytes | None:
    """Return the bytes of a file, None if there is none that counts."""
    try:
        if not _is_ours(os.lstat(directory)):
            return None
        descriptor = os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not (stat.S_ISREG(status.st_mode) and _is_ours(status)):
                return None
            content = os.read(descriptor, status.st_size)
            return content if len(content) == status.st_size else None
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None


def write_cached(directory: str, name: str, content: bytes) -> bool:
    """Write a file as a whole, and make its directory; return whether that could be done."""
    # Others may do the same at this moment; each writes a file of its own, and the last one stays.
    draft = f"{directory}/{name}.{os.getpid()}.{get_ident()}"
    try:
        os.makedirs(directory, _PRIVATE, exist_ok=True)  # noqa: PTH103
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123
            file.write(content)
        os.replace(draft, f"{directory}/{name}")  # noqa: PTH105
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)  # noqa: PTH108
        return False
    return True


def make_room(directory: str, most: int) -> None:
    """Remove the oldest files of a directory, until there is room for one more of so many."""
    with contextlib.suppress(OSError):
        files = sorted(os.scandir(directory), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: 1 - most]:
            os.unlink(file.path)  # noqa: PTH108


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS
