"""
Which processes execute the code of a file: from ``/proc/*/maps``, in whatever mount namespace they are.

A file is known by its device and inode. Processes that end meanwhile are skipped, and those that this user may not
look at.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.foreign_users import ForeignUsers
from dprobes.errors import TargetError
from dprobes.platform.linux.map_query import MapQuestion
from dprobes.platform.linux.procfs import living_thread
from dprobes.target.module_lookup import root_of
from dprobes.target.process_maps import executable_mappings, read_maps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.target.process_maps import Mapping

__all__ = ["FileId", "Mapper", "RecentMaps", "file_id", "find_mappers", "processes"]

_QUESTIONS_MAX = 1 << 16
_LINE = 64
"""How many mappings of a process are asked for at most, and how many bytes a line about one has at least."""


class FileId(NamedTuple):
    """A file by the numbers that ``os.stat`` gives."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Mapper:
    """
    A process and its executable mappings of a file, in order of addresses.

    ``thread`` is the one whose ``/proc`` entries show the memory, ``text`` what its ``maps`` file says.
    """

    pid: int
    thread: int
    mappings: tuple[Mapping, ...]
    text: str


class RecentMaps:
    """
    What ``/proc/PID/maps`` says of processes, at most ``age`` seconds old; any thread may ask.

    Many sessions look for files at the same time, and to read about a process takes longer than to search that.
    """

    def __init__(self, age: float = 0.2) -> None:
        self._age = age
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[float, int, str, str]] = {}
        self._swept = 0.0

    def of(self, pid: int, limit: int | None = None) -> tuple[int, str, str]:
        """
        Return what a process maps, nothing if it has ended, and its root directory as ``root_of`` does.

        The number is that of the thread whose entries in ``/proc`` show both. ``limit`` is that of ``read_maps``.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._swept > self._age:
                self._swept = now
                self._seen = {each: seen for each, seen in self._seen.items() if now - seen[0] <= self._age}
            seen = self._seen.get(pid)
            if seen is None:
                thread, text = _maps_of(pid, limit)
                seen = self._seen[pid] = (now, thread, text, root_of(thread))
            return seen[1:]


def _maps_of(pid: int, limit: int | None) -> tuple[int, str]:
    """
    Return what ``/proc/PID/maps`` says of a process; nothing if it has ended or is not ours to see.

    When the first thread has ended, another one shows the memory.
    """
    thread, text = pid, ""
    with contextlib.suppress(TargetError):
        text = read_maps(pid, limit)
    if not text and (thread := living_thread(pid)) != pid:
        with contextlib.suppress(TargetError):
            text = read_maps(thread, limit)
    return thread, text


def file_id(path: str | os.PathLike[str]) -> FileId:
    """Return which file a path leads to; raise ``OSError`` if it leads to none."""
    status = os.stat(path)
    return FileId(status.st_dev, status.st_ino)


def processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def find_mappers(
    path: str | os.PathLike[str], pids: Iterable[int] | None = None, users: ForeignUsers | None = None
) -> list[Mapper]:
    """
    Return which of the processes ``pids`` (by default of all) map the file ``path`` executable, as far as we may see.

    ``users`` bounds the time that is spent on those of other users.
    """
    wanted = file_id(path)
    base = os.path.basename(os.path.realpath(path))
    found: list[Mapper] = []
    question = MapQuestion.about(os.fspath(path), wanted.inode, base)
    for pid, limit in (users or ForeignUsers(base)).bounded(processes() if pids is None else pids):
        with contextlib.suppress(PermissionError):
            if _is_likely(question, pid, limit) and (mapper := _mapper(pid, wanted, base, limit)) is not None:
                found.append(mapper)
    return found


def _is_likely(question: MapQuestion, pid: int, limit: int | None) -> bool:
    """Return whether what a process maps is worth a look; raise ``PermissionError`` if it is not ours to see."""
    try:
        return question.answer(pid, _QUESTIONS_MAX if limit is None else limit // _LINE) is not False
    except ProcessLookupError:
        # Of a process whose first thread has ended, the other threads show the memory. A kernel thread has none.
        return living_thread(pid) != pid


def _mapper(pid: int, wanted: FileId, base: str, limit: int | None) -> Mapper | None:
    thread, text = _maps_of(pid, limit)
    if f" {wanted.inode} " not in text and base not in text:
        return None
    mappings = tuple(m for m in executable_mappings(text) if _shows(thread, m, wanted, base))
    return Mapper(pid, thread, mappings, text) if mappings else None


def _shows(pid: int, mapping: Mapping, wanted: FileId, base: str) -> bool:
    if (mapping.device, mapping.inode) == wanted:
        return True
    if mapping.inode != wanted.inode and not mapping.path.endswith(f"/{base}"):
        return False
    # On some file systems (btrfs, overlayfs) maps shows other numbers than stat.
    try:
        return file_id(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}") == wanted
    except OSError:
        return False
