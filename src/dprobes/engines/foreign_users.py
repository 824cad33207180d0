"""
Limits on the work that files and mappings of other users may cause in a run.

Any user can give files the name of the probed module, and map as many as they like. Files of root and of the user of
this process are always read. For each other user, a limited number of files is read, and a limited time is spent on the
mappings of their processes. Files left out are reported once for each user, and retried later.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Notice
from dprobes.target.other_users import Allowance, foreign_owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FILES_MAX", "MAPS_MAX", "ForeignUsers"]

FILES_MAX, _FILES_RATE = 32, 0.2
"""Number of files of one user that are read at once, and the number added in each second after that."""

_ALL_FILES_MAX, _ALL_FILES_RATE = 128, 1.0
"""The same limits for all foreign users together: a user who may create user namespaces has many user ids."""

_LOOK_TIME = 2.0
"""Seconds that the processes of one user may take of a scan of all processes."""

MAPS_MAX = 16 << 20
"""Maximum number of bytes read of a foreign process's mappings; the default maximum of 65 530 mappings takes half."""


class ForeignUsers:
    """Accounts of the work that each foreign user has caused; ``name`` is the name of the module."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: defaultdict[str, Allowance] = defaultdict(lambda: Allowance(FILES_MAX, _FILES_RATE))
        self._all_files = Allowance(_ALL_FILES_MAX, _ALL_FILES_RATE)
        self._look_times: defaultdict[str | None, float] = defaultdict(float)
        self._said: set[tuple[str, str]] = set()
        self._notices: list[Notice] = []
        self._is_ended = False

    # Files

    def owner_of(self, status: os.stat_result) -> str | None:
        """Return the owner of a file if it is a foreign user; None for root and the user of this process."""
        return foreign_owner(status)

    def may_have_file(self, owner: str) -> bool:
        """Return True if one more file of an owner may be read now, and charge it; else add a notice."""
        now = time.monotonic()
        if self._files[owner].has(1, now) and self._all_files.has(1, now):
            self._files[owner].use(1)
            self._all_files.use(1)
            return True
        self._say(
            owner,
            "files",
            f"{owner} has more files executed as '{self._name}' than are searched: {FILES_MAX} at once, and "
            f"{_FILES_RATE * 60:.0f} a minute; the others are probed later",
        )
        return False

    def note_reading(self, owner: str, seconds: float) -> None:
        """Charge the seconds that it took to read a file of an owner; a second counts as a file."""
        self._files[owner].use(seconds)
        self._all_files.use(seconds)

    def note_lack_of_room(self, owner: str) -> None:
        """Add a notice that there is no room for the probepoints in files of an owner."""
        self._say(
            owner,
            "room",
            f"not all files of {owner} are probed: there was no room left for their probepoints",
        )

    # Processes

    def bounded(self, pids: Iterable[int]) -> Iterator[tuple[int, int | None]]:
        """
        Iterate over processes, without those of users who have used up their time.

        Each comes with the number of bytes to read of its mappings, None for no limit. The time until the next one is
        requested is charged to its owner.
        """
        self._look_times.clear()
        for pid in pids:
            if self._is_ended:
                return
            owner = _owner_of_process(pid)
            if self._has_time(owner):
                began = time.monotonic()
                yield pid, None if owner is None else MAPS_MAX
                self._note_look(owner, time.monotonic() - began)

    def _has_time(self, owner: str | None) -> bool:
        if owner is None or self._look_times[owner] < _LOOK_TIME:
            return True
        self._say(
            owner,
            "processes",
            f"what the processes of {owner} map takes longer to look through than the {_LOOK_TIME:.0f} s that each "
            f"user has: files that they execute as '{self._name}' may not be probed",
        )
        return False

    def _note_look(self, owner: str | None, seconds: float) -> None:
        self._look_times[owner] += seconds

    def end(self) -> None:
        """End the iteration over processes."""
        self._is_ended = True

    # Notices

    def _say(self, owner: str, about: str, message: str) -> None:
        if (owner, about) not in self._said:
            self._said.add((owner, about))
            self._notices.append(Notice(message))

    def notices(self) -> Iterator[Notice]:
        """Iterate over the notices that the user has not seen yet."""
        while self._notices:
            yield self._notices.pop(0)


def _owner_of_process(pid: int) -> str | None:
    """Return the owner of a process unless that is root or this user; None also for a process that has ended."""
    try:
        # The owner of the directory is the effective user, also if the process is not dumpable (task_dump_owner).
        user = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return None if user in (0, os.geteuid()) else f"user {user}"
