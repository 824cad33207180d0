"""
Files that the module's name means and that were not there when a run began: a thread looks for them.

A container that is started later brings its own C library, and an upgrade a new one. To look takes time, and more if
somebody wants it to; so records are taken meanwhile, and what was found is inserted between two of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.filesearch import doubts_about, leave, plan_module_file, refused, states_of
from dprobes.engines.ebpf.attach.modulefiles import KEPT, module_files
from dprobes.engines.ebpf.attach.plannedfile import conflicts_in
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.foreign.users import ForeignUsers
from dprobes.engines.interface import Notice
from dprobes.errors import DprobesError, SourceError, TargetError, reason_of_number
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.engines.ebpf.attach.conflicts import Conflict
    from dprobes.engines.ebpf.attach.modulefiles import ModuleFile
    from dprobes.engines.ebpf.attach.plannedfile import Findings, PlannedFile
    from dprobes.engines.ebpf.attach.planner import Planner
    from dprobes.engines.interface import Job

__all__ = ["NewFile", "NewFiles"]

_FIRST_INTERVAL, _LOOK_INTERVAL = 0.1, 2.0
"""Seconds between two looks for files at least, at first and later."""

_LOOK_SHARE = 50
"""A look takes at most one part in so many of the time."""

_FOREIGN_TIME = 10.0
"""Seconds of a look in which files of other users are read; what is left waits for the next one."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that was found late, and where processes hold other code than it."""

    file: PlannedFile
    conflicts: tuple[Conflict, ...]


class NewFiles:
    """
    Look for files now and then, in a thread; ``found`` gives what was found.

    Whoever has one calls ``close`` at the end.
    """

    def __init__(self, planner: Planner, job: Job, start: Findings) -> None:
        self._planner = planner
        self._job = job
        self._users = start.users or ForeignUsers(job.program.name)
        self._paths = [Path(file.reached) for file in start.files]
        self._known = dict(start.known)
        # What a tree is going to execute shows soon; elsewhere nobody waits for a certain process.
        self._interval = _FIRST_INTERVAL if job.scope.is_tree else _LOOK_INTERVAL
        self._next = time.monotonic() + (0.0 if start.is_partial else self._interval)
        self._found: deque[NewFile | Notice] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_eager(self) -> bool:
        """Whether it is worth while to ask often."""
        return self._interval < _LOOK_INTERVAL or self._thread is not None or bool(self._found)

    def found(self, pids: Callable[[], Iterable[int] | None]) -> Iterator[NewFile | Notice]:
        """
        Iterate over what there is to say, up to the next file; to be called often.

        A look is begun when it is time for one, at the processes ``pids``, or at all if these are None. The caller
        closes the descriptors of files.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and not self._found and time.monotonic() >= self._next:
            self._thread = threading.Thread(
                target=self._look, args=(pids(), tuple(self._paths)), name="looking for files", daemon=True
            )
            self._thread.start()
        while self._found:
            each = self._found.popleft()
            yield each
            if isinstance(each, NewFile):
                return  # records have come meanwhile

    def keep(self, file: PlannedFile) -> None:
        """Know that a file is probed, and kept open."""
        self._paths.append(Path(file.reached))

    def discard(self, file: PlannedFile) -> None:
        """Close a file that cannot be probed; it is looked at again if it changes."""
        self._known |= states_of(file.descriptors)
        Descriptors(file.descriptors).close()

    def lack_room(self, file: PlannedFile) -> Iterator[Notice]:
        """Say that there is no room for the probepoints of a file, of other users' once for each user."""
        if file.owner is None:
            yield Notice(f"{file.path} is not probed: it came when there was no room left for its probepoints")
        else:
            self._users.note_lack_of_room(file.owner)
            yield from self._users.notices()

    def close(self) -> None:
        """Look no more, and forget what nobody has asked for."""
        self._is_closed = True
        self._users.end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for each in self._found:
            if isinstance(each, NewFile):
                Descriptors(each.file.descriptors).close()
        self._found.clear()

    # The thread

    def _look(self, pids: Iterable[int] | None, probed: Sequence[Path]) -> None:
        began = time.monotonic()
        try:
            self._find(pids, probed)
        except (DprobesError, OSError) as error:
            self._found.append(Notice(f"no files are looked for that processes come to execute: {error}"))
        self._found.extend(self._users.notices())
        now = time.monotonic()
        self._interval = min(2 * self._interval, _LOOK_INTERVAL)
        self._next = now + max(self._interval, _LOOK_SHARE * (now - began))
        if pids is None:
            # All sessions look at the same moment, so that what one has read about processes serves the others.
            self._next = math.ceil(self._next / _LOOK_INTERVAL) * _LOOK_INTERVAL

    def _find(self, pids: Iterable[int] | None, probed: Sequence[Path]) -> None:
        # A tree is small, and what it is about to execute changes fast.
        recent = self._planner.features.maps if pids is None else None
        known = self._known
        files = module_files(self._job.program.name, probed, pids, recent, self._users, known)
        began = time.monotonic()
        with Descriptors(each for file in files for each in file.descriptors) as descriptors:
            for file in sorted(files, key=lambda file: file.owner is not None):
                if self._is_closed:
                    return
                if known.get(file.identity) == KEPT:
                    known.update(dict.fromkeys(states_of(file.alias_descriptors), KEPT))
                    continue
                if file.owner is not None and time.monotonic() - began > _FOREIGN_TIME:
                    return
                known |= states_of(file.descriptors)
                if self._add(file):
                    known.update(dict.fromkeys(states_of(file.descriptors), KEPT))
                    leave(descriptors, file.descriptors)

    def _add(self, file: ModuleFile) -> bool:
        """Plan a file; return whether it can be inserted."""
        try:
            planned = plan_module_file(
                self._planner, self._job, file, self._users, is_wanted=lambda: not self._is_closed
            )
            if planned is None:
                return False
            conflicts = conflicts_in(planned, self._users)
        except (SourceError, TargetError) as error:
            self._found.append(refused(file, error))
            return False
        except OSError as error:
            reason = reason_of_number(error.errno or 0)
            self._found.append(Notice(f"{file.path} is not probed: {reason}"))
            return False
        self._found.extend(doubts_about(planned))
        self._found.append(NewFile(planned, tuple(conflicts)))
        return True
