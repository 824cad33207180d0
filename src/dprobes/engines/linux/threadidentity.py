"""What a thread is called and whose it is, as ``/proc`` says it: also of one that has ended and is waited for."""

from __future__ import annotations

import contextlib
import os

from dprobes.lazydataclass import dataclass

__all__ = ["ThreadIdentity", "identity_of", "program_of"]

_STATUS_MAX = 4096
_UID = b"\nUid:\t"


@dataclass(frozen=True, slots=True)
class ThreadIdentity:
    """Hold the name of a thread, and its real user id; ``program`` is what its process executes: device and inode."""

    pid: int
    tid: int
    name: bytes
    uid: int
    program: tuple[int, int] | None = None


def identity_of(pid: int, tid: int) -> ThreadIdentity | None:
    """Return the identity of a thread, None if it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        name = _read(f"/proc/{pid}/task/{tid}/comm").rstrip(b"\n")
        status = _read(f"/proc/{pid}/task/{tid}/status")
        return ThreadIdentity(pid, tid, name, int(status.partition(_UID)[2].split(None, 1)[0]))
    return None


def program_of(pid: int) -> tuple[int, int] | None:
    """Return device and inode of the file that a process executes, None if nobody knows."""
    try:
        found = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STATUS_MAX)
    finally:
        os.close(descriptor)
