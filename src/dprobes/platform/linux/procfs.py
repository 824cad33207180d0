"""Look-ups in ``/proc`` about processes and threads; see proc(5)."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "SPARED",
    "ThreadIdentity",
    "catches_signal",
    "children_of",
    "copy_score",
    "first_stack_of",
    "identity_of",
    "ids_of",
    "living_thread",
    "process_field",
    "process_of",
    "program_of",
    "set_score",
    "spare_process",
    "start_time",
    "system_call_of",
    "thread_state",
    "threads_of",
    "without_waiting",
]


def without_waiting(path: str, flags: int) -> int:
    """Open a file of a process with O_NONBLOCK, as an ``opener`` of ``open``: a FIFO may have replaced the file."""
    return os.open(path, flags | os.O_NONBLOCK)


def process_field(tid: int, name: str) -> str:
    """
    Return the value of a field of ``/proc/TID/status``, such as "Uid".

    Return "" if the thread or the field does not exist.
    """
    with contextlib.suppress(OSError), open(f"/proc/{tid}/status", encoding="utf-8", errors="replace") as file:
        for line in file.read().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
    return ""


def ids_of(tid: int) -> tuple[int, ...]:
    """
    Return the ids of a thread in all its PID namespaces, from that of ``/proc`` to the thread's.

    Return an empty tuple if the thread has ended, or the kernel has no PID namespaces.
    """
    return tuple(map(int, process_field(tid, "NSpid").split()))


def catches_signal(tid: int, number: int) -> bool:
    """Return True if a thread's process has a handler for a signal (SigCgt); False if the thread has ended."""
    caught = process_field(tid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> number - 1 & 1)


def thread_state(tid: int) -> str:
    """Return the state of a thread as a letter of proc(5): S, D, Z ...; X if it has ended."""
    try:
        descriptor = os.open(f"/proc/{tid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _STAT_MAX).rpartition(b")")[2].split()[0].decode()
        finally:
            os.close(descriptor)
    except OSError:
        return "X"


def process_of(tid: int) -> int:
    """Return the id of a thread's process; ``tid`` itself if there is no such thread."""
    return int(process_field(tid, "Tgid") or tid)


def start_time(pid: int) -> int:
    """Return the start time of a process, in ticks since the boot; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def first_stack_of(pid: int) -> int | None:
    """
    Return the address of the bottom of a process's initial stack (proc(5), startstack).

    Return None if reading it is not permitted, or the process has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # proc(5): field 28, which is 0 or 1 for a reader who may not trace the process.
            start = int(file.read().rpartition(b")")[2].split()[25])
    except (OSError, IndexError):
        return None
    return start if start > 1 else None


def system_call_of(tid: int) -> int | None:
    """
    Return the number of the system call that a thread sleeps in, -1 if it sleeps elsewhere.

    Return None if it runs or has ended. Source: ``proc_pid_syscall`` in ``fs/proc/base.c``.
    """
    try:
        with open(f"/proc/{tid}/syscall", "rb") as file:
            first = file.read().split()[0]
    except (OSError, IndexError):
        return None
    return None if first == b"running" else int(first)


_STAT_MAX = 4096
"""Maximum size of ``/proc/TID/stat`` in bytes: a name of at most 64 and fifty numbers."""


def children_of(pid: int, tid: int) -> list[int]:
    """Return the ids of the processes that a thread has started and that have not been waited for."""
    try:
        with open(f"/proc/{pid}/task/{tid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def threads_of(pid: int) -> set[int]:
    """Return the ids of the threads of a process; raise ``ProcessLookupError`` if it has ended."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error


def living_thread(pid: int) -> int:
    """
    Return the id of a thread of the process that has not ended, or ``pid`` if there is none.

    When the first thread ends before the others, ``/proc/PID`` no longer shows the memory of the process.
    """
    if thread_state(pid) not in ("Z", "X"):
        return pid
    with contextlib.suppress(OSError):
        for tid in sorted(threads_of(pid)):
            if thread_state(tid) not in ("Z", "X"):
                return tid
    return pid


_STATUS_MAX = 4096
_UID = b"\nUid:\t"


class ThreadIdentity(NamedTuple):
    """Name of a thread (comm), and its real user id; ``program`` is device and inode of its process's executable."""

    pid: int
    tid: int
    name: bytes
    uid: int
    program: tuple[int, int] | None = None


def identity_of(pid: int, tid: int) -> ThreadIdentity | None:
    """Return the identity of a thread; None if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        name = _read(f"/proc/{pid}/task/{tid}/comm").rstrip(b"\n")
        status = _read(f"/proc/{pid}/task/{tid}/status")
        return ThreadIdentity(pid, tid, name, int(status.partition(_UID)[2].split(None, 1)[0]))
    return None


def program_of(pid: int) -> tuple[int, int] | None:
    """Return device and inode of the executable of a process; None if they cannot be read."""
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


# Scores of our processes for the out-of-memory killer (``oom_score_adj``, proc(5)).
#
# The tracer must not be killed before others: it uses little memory, and its end may end the traced processes.


SPARED = -900
"""Score of a tracer: nearly all other processes are killed first, except in a memory cgroup without others."""


def set_score(pid: int, score: int) -> None:
    """Set the score of a process; raise OSError if that is not permitted (lowering it requires CAP_SYS_RESOURCE)."""
    _file(pid).write_text(f"{score}\n")


def spare_process() -> None:
    """Set the score of this process to that of a tracer, if permitted; ``dprobes doctor`` shows whether it is."""
    with contextlib.suppress(OSError):
        set_score(os.getpid(), SPARED)


def copy_score(source: int, pid: int) -> None:
    """Set the score of ``pid`` to that of the process ``source``; do nothing if that has ended, or on an error."""
    with contextlib.suppress(OSError):
        _file(pid).write_text(_file(source).read_text())


def _file(pid: int) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")
