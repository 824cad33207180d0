"""
How much of a run other users may use up by what their processes map: so much for each of them, and no more.

Any user can name files as the probed module is named, and map as many as they like. Those of root and of the user who
runs this are taken as they come; of the others each may have some files read, and some time spent on what their
processes map. What is left out because of that is reported once for each user, and looked at again later.
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
"""Files of one user that are read at once, and how many more in each second after that."""

_ALL_FILES_MAX, _ALL_FILES_RATE = 128, 1.0
"""The same for all of them: users that may make user namespaces have many user ids."""

_LOOK_TIME = 2.0
"""Seconds of a look at all processes that those of one user may take."""

MAPS_MAX = 16 << 20
"""Bytes that are read of what one process of theirs maps: 65 530 mappings, the default maximum, have half of it."""


class ForeignUsers:
    """Keep what each of them has used up; ``name`` is that of the module."""

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
        """Return whose a file is if it is not to be trusted."""
        return foreign_owner(status)

    def may_have_file(self, owner: str) -> bool:
        """Return whether one more file of an owner is read now, and take note of it; else the user hears of it."""
        now = time.monotonic()
        if self._files[owner].has(1, now) and self._all_files.has(1, now):
            self._files[owner].use(1)
            self._all_files.use(1)
            return True
        self._say(
            owner,
            "files",
            f"{owner} has more files executed as '{self._name}' than are looked at: {FILES_MAX} at once, and "
            f"{_FILES_RATE * 60:.0f} a minute; the others are not probed until it is their turn",
        )
        return False

    def note_reading(self, owner: str, seconds: float) -> None:
        """Take note of how long it took to read a file of an owner: a second counts as a file."""
        self._files[owner].use(seconds)
        self._all_files.use(seconds)

    def note_lack_of_room(self, owner: str) -> None:
        """Tell that there is no room for the probepoints in files of an owner."""
        self._say(
            owner,
            "room",
            f"not all files of {owner} are probed: they came when there was no room left for their probepoints",
        )

    # Processes

    def bounded(self, pids: Iterable[int]) -> Iterator[tuple[int, int | None]]:
        """
        Iterate over processes, without those of users who have had their time.

        With each comes how many bytes are to be read of what it maps; it is looked at until the next one is asked for.
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
        """Look at no more processes."""
        self._is_ended = True

    # What to say

    def _say(self, owner: str, about: str, message: str) -> None:
        if (owner, about) not in self._said:
            self._said.add((owner, about))
            self._notices.append(Notice(message))

    def notices(self) -> Iterator[Notice]:
        """Iterate over what the user has not heard yet."""
        while self._notices:
            yield self._notices.pop(0)


def _owner_of_process(pid: int) -> str | None:
    """Return whose a process is, if not root's or ours; None also for one that has ended."""
    try:
        # The directory itself shows the effective user also of a process that cannot be dumped (task_dump_owner).
        user = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return None if user in (0, os.geteuid()) else f"user {user}"
