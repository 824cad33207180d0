"""
Limits on the work that files and mappings of other users may cause in a run.

Any user can create many files with the name of the probed module, and map them. Files of root and of this process's
user are always read. For each other user, the number of files and the time for the mappings of processes are limited.
Files that are left out are reported once for each user, and tried again later.
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
"""Number of files of one user that may be read at once, and number by which it grows in each second."""

_ALL_FILES_MAX, _ALL_FILES_RATE = 128, 1.0
"""The same limits for all foreign users together: a user who may create user namespaces has many user ids."""

_LOOK_TIME = 2.0
"""Maximum number of seconds for the processes of one user in a scan of all processes."""

MAPS_MAX = 16 << 20
"""Maximum number of bytes read from /proc/PID/maps of a foreign user. 65 530 mappings, the default limit, take half."""


class ForeignUsers:
    """Accounts of the work that each foreign user has caused in a run. ``name`` is the name of the probed module."""

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
        """Return the owner of a file, as in messages, or None if it is root or the user of this process."""
        return foreign_owner(status)

    def may_have_file(self, owner: str) -> bool:
        """Charge one file to an owner and return True. If no file may be read now, add a notice and return False."""
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
        """Charge the seconds spent on reading a file to its owner. A second counts as one file."""
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
        Iterate over process ids, except those of users who have used up their time.

        With each process id, yield the maximum number of bytes to read of its mappings, or None for no limit. Its owner
        is charged the time until the next process id is requested.
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
        """End the iteration of ``bounded`` before its next process. Another thread may call this."""
        self._is_ended = True

    # Notices

    def _say(self, owner: str, about: str, message: str) -> None:
        if (owner, about) not in self._said:
            self._said.add((owner, about))
            self._notices.append(Notice(message))

    def notices(self) -> Iterator[Notice]:
        """Iterate over the notices added since the last call, and remove them."""
        while self._notices:
            yield self._notices.pop(0)


def _owner_of_process(pid: int) -> str | None:
    """Return the owner of a process, in the form for messages, or None if it is root or this user, or has ended."""
    try:
        # The owner of the directory is the effective user, also if the process is not dumpable (task_dump_owner).
        user = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return None if user in (0, os.geteuid()) else f"user {user}"
