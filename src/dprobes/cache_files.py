"""
Files in the user's cache directory (XDG Base Directory Specification), which spare the next start some work.

They are data, and never anything that is executed or unpickled. What cannot be read is not there, and what cannot be
written is not kept. Nobody else can put a file there, or have one of another directory read, written or removed: the
directory is opened from the root on, one component after the other, and each of them belongs to the user or to root and
can be changed by no other one. Where root's environment names the home of somebody else (``sudo -E``) nothing is kept.
All that follows is done below the descriptor.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cache_directory", "cached_names", "keep_newest", "mark_used", "read_cached", "write_cached"]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE = 0o700
_LINKS_MAX = 40
"""How many symbolic links a path may lead through, as in the kernel (MAXSYMLINKS)."""
_SIZE_MAX = 512 << 20
"""Bytes of the largest file that is read; symbols and types of a kernel take some 20 MiB."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def cache_directory() -> str:
    """Return the directory of our files in the cache directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return str(Path(base if base.startswith("/") else "~/.cache").expanduser() / "dprobes")


def read_cached(directory: str, name: str) -> bytes | None:
    """Return the bytes of a file, None if there is none that counts."""
    with contextlib.suppress(OSError, ValueError), _opened(directory) as parent:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not (stat.S_ISREG(status.st_mode) and _is_trusted(status) and status.st_size <= _SIZE_MAX):
                return None
            content = file.read(status.st_size)
            return content if len(content) == status.st_size else None
    return None


def write_cached(directory: str, name: str, content: bytes) -> bool:
    """Write a file as a whole, and make its directory; return whether that could be done."""
    # Others may do the same at this moment; each writes a file of its own, and the last one stays.
    draft = f"{name}.{os.urandom(8).hex()}"
    with contextlib.suppress(OSError, ValueError), _opened(directory, is_made=True) as parent:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(draft, flags, 0o600, dir_fd=parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.unlink(draft, dir_fd=parent)
            return False
        return True
    return False


def cached_names(directory: str, prefix: str) -> list[str]:
    """Return the names in a directory that begin so."""
    with contextlib.suppress(OSError, ValueError), _opened(directory) as parent:
        return [name for name in os.listdir(parent) if name.startswith(prefix)]  # noqa: PTH208 - a descriptor
    return []


def mark_used(directory: str, name: str) -> None:
    """Have a file count as one that was used now."""
    with contextlib.suppress(OSError, ValueError), _opened(directory) as parent:
        os.utime(name, dir_fd=parent, follow_symlinks=False)


def keep_newest(directory: str, prefix: str, most: int) -> None:
    """Remove the files whose names begin so, but for as many that were written or used last."""
    with contextlib.suppress(OSError, ValueError), _opened(directory) as parent:
        found = [
            (os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime_ns, name)
            for name in os.listdir(parent)  # noqa: PTH208 - a descriptor
            if name.startswith(prefix)
        ]
        for _, name in sorted(found, reverse=True)[most:]:
            os.unlink(name, dir_fd=parent)


@contextlib.contextmanager
def _opened(path: str, *, is_made: bool = False) -> Iterator[int]:
    """
    Open a directory, by its absolute path, that only the user and root can change, as all directories that lead to it.

    With ``is_made`` what is missing is made. OSError if it is not there, ``PermissionError`` if others can change it.
    """
    parts = [part for part in reversed(path.split("/")) if part]
    current = os.open("/", _DIRECTORY)
    links = 0
    try:
        while parts:
            part = parts.pop()
            try:
                status = os.stat(part, dir_fd=current, follow_symlinks=False)
            except FileNotFoundError:
                if not is_made:
                    raise
                with contextlib.suppress(FileExistsError):  # somebody else does the same
                    os.mkdir(part, _PRIVATE, dir_fd=current)
                status = os.stat(part, dir_fd=current, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                if not _is_owned(status) or (links := links + 1) > _LINKS_MAX:
                    raise PermissionError(f"'{path}' leads through a link of another user")
                target = os.readlink(part, dir_fd=current)
                parts += [each for each in reversed(target.split("/")) if each]
                following = os.open("/", _DIRECTORY) if target.startswith("/") else os.dup(current)
            else:
                following = os.open(part, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = following
            if not _is_safe_directory(current, is_last=not parts):
                raise PermissionError(f"others can change '{path}'")
        yield current
    finally:
        os.close(current)


def _is_safe_directory(descriptor: int, *, is_last: bool) -> bool:
    """Return whether an open directory can be changed by the user and root only."""
    status = os.fstat(descriptor)
    if not _is_owned(status):
        return False
    if os.geteuid() == 0 and os.fstatvfs(descriptor).f_flag & os.ST_NOSUID and not _is_in_memory(descriptor):
        # A medium that was written elsewhere, such as a USB stick, may name root as owner of anything.
        return False
    # In a directory like /tmp each name is its owner's.
    return not status.st_mode & _OTHERS or (bool(status.st_mode & stat.S_ISVTX) and not is_last)


def _is_in_memory(descriptor: int) -> bool:
    """Return whether a file system (tmpfs) was empty when it was mounted."""
    facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").split()
    number = facts[facts.index("mnt_id:") + 1]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [each.partition(" - ")[2].split()[0] for each in mounts if each.split()[0] == number] == ["tmpfs"]


def _is_trusted(status: os.stat_result) -> bool:
    return _is_owned(status) and not status.st_mode & _OTHERS


def _is_owned(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())
