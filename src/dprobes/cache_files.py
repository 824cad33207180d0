"""
Files in the user's cache directory (XDG Base Directory Specification), which make later starts faster.

They are data, and never executed or unpickled. An unreadable file counts as missing, and a failed write is ignored.

Other users cannot add files, or cause files of another directory to be read, written or removed. The directory is
therefore opened component by component from the root. Each component must belong to the user or to root, and no other
user may be able to write it. All later operations are relative to the descriptor. If root's environment names another
user's home directory (``sudo -E``), nothing is cached.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "cache_directory",
    "cached_names",
    "is_trusted",
    "keep_newest",
    "mark_used",
    "read_cached",
    "trusted_directory",
    "write_cached",
]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE = 0o700
_LINKS_MAX = 40
"""Maximum number of symbolic links in a path, as in the kernel (MAXSYMLINKS)."""
_SIZE_MAX = 512 << 20
"""Maximum size in bytes of a file that is read; symbols and types of a kernel take some 20 MiB."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def cache_directory() -> str:
    """Return the absolute path of the directory for files of DProbes, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return str(Path(base if base.startswith("/") else "~/.cache").expanduser() / "dprobes")


def read_cached(directory: str, name: str) -> bytes | None:
    """Return the contents of a file, or None if it is missing, too large, or writable by other users."""
    with contextlib.suppress(OSError, ValueError), trusted_directory(directory) as parent:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not (stat.S_ISREG(status.st_mode) and is_trusted(status) and status.st_size <= _SIZE_MAX):
                return None
            content = file.read(status.st_size)
            return content if len(content) == status.st_size else None
    return None


def write_cached(directory: str, name: str, content: bytes) -> bool:
    """Write a file atomically, and create its directory if necessary; return whether that succeeded."""
    # Other processes may do the same at this moment; each writes its own temporary file, and the last rename wins.
    draft = f"{name}.{os.urandom(8).hex()}"
    with contextlib.suppress(OSError, ValueError), trusted_directory(directory, is_made=True) as parent:
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
    """Return the names in a directory that begin with ``prefix``; none if the directory cannot be used."""
    with contextlib.suppress(OSError, ValueError), trusted_directory(directory) as parent:
        return [name for name in os.listdir(parent) if name.startswith(prefix)]  # noqa: PTH208 - a descriptor
    return []


def mark_used(directory: str, name: str) -> None:
    """Set the modification time of a file to now, which marks it as used; failures are ignored."""
    with contextlib.suppress(OSError, ValueError), trusted_directory(directory) as parent:
        os.utime(name, dir_fd=parent, follow_symlinks=False)


def keep_newest(directory: str, prefix: str, most: int) -> None:
    """
    Remove files whose names begin with ``prefix``, except the ``most`` recently written or used.

    Failures are ignored.
    """
    with contextlib.suppress(OSError, ValueError), trusted_directory(directory) as parent:
        found = [
            (os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime_ns, name)
            for name in os.listdir(parent)  # noqa: PTH208 - a descriptor
            if name.startswith(prefix)
        ]
        for _, name in sorted(found, reverse=True)[most:]:
            os.unlink(name, dir_fd=parent)


@contextlib.contextmanager
def trusted_directory(path: str, *, is_made: bool = False) -> Iterator[int]:
    """
    Open a directory by its absolute path; it and all parent directories must be writable by the user and root only.

    With ``is_made`` missing directories are created. Raise OSError if it does not exist, ``PermissionError`` if others
    can change it.
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
                with contextlib.suppress(FileExistsError):  # another process has just created it
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
    """
    Return whether only the user and root can change an open directory.

    A sticky directory such as /tmp is also safe unless it ``is_last``.
    """
    status = os.fstat(descriptor)
    if not _is_owned(status):
        return False
    if os.geteuid() == 0 and os.fstatvfs(descriptor).f_flag & os.ST_NOSUID and not _is_in_memory(descriptor):
        # Removable media, such as a USB stick, may contain arbitrary files with root as owner.
        return False
    # In a sticky directory like /tmp only owners can rename or remove entries.
    return not status.st_mode & _OTHERS or (bool(status.st_mode & stat.S_ISVTX) and not is_last)


def _is_in_memory(descriptor: int) -> bool:
    """Return whether the file system of an open directory is a tmpfs, which is empty when it is mounted."""
    facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").split()
    number = facts[facts.index("mnt_id:") + 1]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [each.partition(" - ")[2].split()[0] for each in mounts if each.split()[0] == number] == ["tmpfs"]


def is_trusted(status: os.stat_result) -> bool:
    """Return whether only the user and root can change the file with this status."""
    return _is_owned(status) and not status.st_mode & _OTHERS


def _is_owned(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())
