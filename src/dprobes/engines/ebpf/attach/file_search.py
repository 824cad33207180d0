"""
Search for the files to which the module's name refers: for 64-bit and 32-bit processes, and in containers.

A file is opened when it is found, and kept open. The process through whose ``/proc`` entries it was reached may end,
and another file may get its name. Files that other users can change are read by a separate process, within limits
(``examiner``).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.code_mappers import FileId
from dprobes.engines.ebpf.attach.file_spec import KEPT, Findings, PlannedFile, conflicts_in, module_files
from dprobes.engines.ebpf.attach.handler_objects import basic_request
from dprobes.engines.ebpf.attach.run_scope import processes_of
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.engines.engine_interface import Notice
from dprobes.engines.foreign_users import ForeignUsers
from dprobes.errors import DprobesError, EngineError, SourceError, TargetError, reason_of_number
from dprobes.platform.linux.procfs import living_thread
from dprobes.resolve.probepoints import Space, space_of
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_lookup import find_module, root_of, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.engines.ebpf.attach.code_mappers import Conflict
    from dprobes.engines.ebpf.attach.file_spec import ModuleFile
    from dprobes.engines.ebpf.attach.perf_probes import EventProbe
    from dprobes.engines.ebpf.attach.site_planner import Planner
    from dprobes.engines.engine_interface import Event, Job
    from dprobes.platform.foreign.foreign_outlines import Question
    from dprobes.resolve.probepoints import ResolvedModule

__all__ = ["NewFiles", "find_probes"]

_SEARCH_TIME = 2.0
"""Maximum number of seconds for files of other users before the run begins. The remaining files are read afterwards."""


def find_probes(planner: Planner, job: Job) -> Findings:
    """
    Find the files or the kernel that a program probes; raise a ``DprobesError`` if none can be probed.

    The caller closes the descriptors of the files.
    """
    if space_of(job.program) in (Space.PROCESSES, Space.SYSTEM):
        from dprobes.engines.ebpf.attach.perf_probes import events_everywhere

        events, notices = events_everywhere(job.program, basic_request(planner.features, job.program))
        planner.plan_everywhere([event.probe for event in events], Diagnostics())
        return Findings(events=events, notices=notices)
    if space_of(job.program) is Space.KERNEL:
        return _in_kernel(planner, job)
    files, found = _planned_files(planner, job)
    return replace(found, files=files, events=[event for file in files for event in file.events])


def _in_kernel(planner: Planner, job: Job) -> Findings:
    if job.kernel is None:
        raise TargetError(f"'{job.program.name}' is not there: its probepoints in the kernel could not be found")
    planned = planner.plan_kernel(job.program, job.kernel, Diagnostics())
    events: tuple[EventProbe, ...] = ()
    if job.kernel.events:
        from dprobes.engines.ebpf.attach.perf_probes import events_in_kernel

        events = events_in_kernel(job.kernel)
    return Findings(kernel=planned, events=events)


def _planned_files(planner: Planner, job: Job) -> tuple[list[PlannedFile], Findings]:
    files: list[PlannedFile] = []
    notices: list[Event] = []
    own = job.resolved.module.path if job.resolved is not None else None
    refusals: list[SourceError | TargetError] = []
    users = ForeignUsers(job.program.name)
    found = _files(job, own, users)
    began, is_partial = time.monotonic(), False
    known: dict[FileId, int] = {}

    def is_foreign(file: ModuleFile) -> bool:
        return file.owner is not None and file.path != own

    with Descriptors(each for file in found for each in file.descriptors) as descriptors:
        for file in sorted(found, key=is_foreign):  # those that take unknown time come last
            if is_foreign(file) and files and time.monotonic() - began > _SEARCH_TIME:
                is_partial = True
                continue
            known |= states_of(file.descriptors)
            try:
                planned = plan_module_file(planner, job, file, users, job.resolved if file.path == own else None)
            except (SourceError, TargetError) as error:
                if file.path == own:
                    raise
                refusals.append(error)
                notices.append(refused(file, error))
                continue
            if planned is not None:
                files.append(planned)
                known.update(dict.fromkeys(states_of(file.descriptors), KEPT))
                if planned.plan.resolved is not job.resolved:
                    notices += doubts_about(planned)
        if not files:
            raise (refusals[0] if refusals else _missing(job.program.name))
        for planned in files:
            leave(descriptors, planned.descriptors)
    notices += users.notices()
    return files, Findings(notices=notices, known=known, users=users, is_partial=is_partial)


def plan_module_file(
    planner: Planner,
    job: Job,
    file: ModuleFile,
    users: ForeignUsers,
    resolved: ResolvedModule | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> PlannedFile | None:
    """
    Plan a file, and pass its descriptors to the result.

    Return None if it is not the module's file, or ``is_wanted`` returns False because the plan is no longer needed.
    Raise a ``DprobesError`` if the file cannot be probed.
    """
    diagnostics = Diagnostics()
    warnings: str | None = None
    if resolved is None and file.owner is not None:
        began = time.monotonic()
        try:
            examined = planner.features.examiner.examine(_question(planner, job, file), file.descriptor, is_wanted)
        finally:
            users.note_reading(file.owner, time.monotonic() - began)
        if examined is None or examined.resolved is None:
            return None
        resolved, warnings = examined.resolved, examined.warnings
    elif resolved is None:
        from dprobes.resolve.local_module import resolve

        module = planner.symbols.module_of(ElfFile.open(file.path, file.reached))
        resolved = resolve(job.program, module, diagnostics, allow_write=planner.allow_write)
    plan = planner.plan(job.program, resolved, diagnostics, _kept(job, file), str(file.reached))
    if warnings is None:
        warnings = "\n".join(warning.render() for warning in resolved.warnings)
    return PlannedFile(str(file.path), file.descriptor, plan, file.alias_descriptors, file.owner, warnings)


def _question(planner: Planner, job: Job, file: ModuleFile) -> Question:
    from dprobes.platform.foreign.foreign_outlines import Question

    return Question(
        str(file.path),
        job.program,
        planner.symbols,
        allow_write=planner.allow_write,
        soname=file.soname,
        wants_moves=not planner.exact,
    )


def states_of(descriptors: Iterable[int]) -> dict[FileId, int]:
    """Return the times of the last change (``st_ctime_ns``) of open files, keyed by their identity."""
    return {FileId(status.st_dev, status.st_ino): status.st_ctime_ns for status in map(os.fstat, descriptors)}


def leave(owner: Descriptors, descriptors: Iterable[int]) -> None:
    """Give up the ownership of descriptors: ``owner`` will not close them."""
    for descriptor in descriptors:
        owner.remove(descriptor)


def _kept(job: Job, file: ModuleFile) -> frozenset[int]:
    """
    Return the file offsets of the breakpoints in a file of the program to be replaced, or an empty set without one.

    New breakpoints are not moved past one of them. Otherwise, a thread in between would hit both programs at the
    switch-over.
    """
    if job.replaces is None:
        return frozenset()
    from dprobes.engines.ebpf.read.session_switchover import ReplaceableSession

    old: object = job.replaces
    return old.breakpoints_in(file.descriptor) if isinstance(old, ReplaceableSession) else frozenset()


def _missing(name: str) -> EngineError:
    hint = "the ebpf engine probes files: one must be there when the run begins"
    return EngineError(
        f"there is no module '{name}' on this machine, and no process executes one", hint=suggestion(name) or hint
    )


def doubts_about(planned: PlannedFile) -> list[Notice]:
    """Return one notice with all warnings from the plan of a file, in a list, or an empty list without warnings."""
    message = f"{planned.path}: this file does not match the program"
    return [Notice(message, details=planned.warnings)] if planned.warnings else []


def refused(file: ModuleFile, error: SourceError | TargetError) -> Notice:
    """Return the notice that the program cannot be inserted into a file of the module, because of ``error``."""
    if isinstance(error, TargetError):
        return Notice(f"{file.path}: {error.message}", error.hint)
    return Notice(f"{file.path}: the program cannot be inserted here", details=error.message)


def _files(job: Job, found: Path | None, users: ForeignUsers) -> list[ModuleFile]:
    """Return ``found``, if not None, the module's files for other processors, and those that processes execute."""
    name, scope = job.program.name, job.scope
    is_about_to_exec = bool(scope.command) or (scope.program is not None and not root_of(scope.pid or 0))
    thread = None if is_about_to_exec or scope.pid is None else living_thread(scope.pid)
    paths = [] if found is None else [found]
    paths += _of_other_processors(job, paths, thread)
    pids = [] if is_about_to_exec else processes_of(scope)
    return module_files(name, paths, pids if is_about_to_exec or pids else None, users=users)


def _of_other_processors(job: Job, known: Sequence[Path], thread: int | None) -> Iterator[Path]:
    """
    Iterate over the module's files on this machine for architectures that no file in ``known`` has.

    They are searched in the root directory of ``thread``, or of this process if it is None.
    """
    own = job.resolved.architecture.name if job.resolved is not None else None
    others = {8: {"x86_64"}, 4: {"i386"}}.get(job.program.word_size or 0, {"x86_64", "i386"})
    command = job.scope.command[0] if job.scope.command else None
    for architecture in others - {own}:
        path = find_module(job.program.name, pid=thread, command=command, architecture=architecture)
        # A program in PATH is found whatever its architecture.
        if path is not None and path not in known and ElfFile.open(path).machine == architecture:
            yield path


_FIRST_INTERVAL, _LOOK_INTERVAL = 0.1, 2.0
"""Minimum number of seconds between two searches for files, at first and later."""

_LOOK_SHARE = 50
"""Minimum ratio of the time between two searches to the duration of a search."""

_NEW_FILES_TIME = 10.0
"""Maximum number of seconds in a search for files of other users. The remaining files wait for the next search."""


class NewFile(NamedTuple):
    """A newly mapped file, and the places at which the code of processes differs from the file."""

    file: PlannedFile
    conflicts: tuple[Conflict, ...]


class NewFiles:
    """
    Search, in a thread, for files to which the module's name refers and that were not mapped when the run began.

    A container that is started later has its own C library, and an upgrade installs a new one. A search takes time, and
    other users can prolong it. So the run reads records meanwhile, and calls ``found`` between two readings.
    """

    def __init__(self, planner: Planner, job: Job, start: Findings) -> None:
        self._planner = planner
        self._job = job
        self._users = start.users or ForeignUsers(job.program.name)
        self._paths = [Path(file.reached) for file in start.files]
        self._known = dict(start.known)
        # A tree soon executes its files; without a tree, no certain process is expected.
        self._interval = _FIRST_INTERVAL if job.scope.is_tree else _LOOK_INTERVAL
        self._next = time.monotonic() + (0.0 if start.is_partial else self._interval)
        self._found: deque[NewFile | Notice] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_eager(self) -> bool:
        """True if a new process tree is expected to execute its files soon: call ``found`` often."""
        return self._interval < _LOOK_INTERVAL or self._thread is not None or bool(self._found)

    def found(self, pids: Callable[[], Iterable[int] | None]) -> Iterator[NewFile | Notice]:
        """
        Iterate over notices and at most one file, which is the last item. Call this often.

        If a search is due, start it in the processes that ``pids`` returns, or in all if it returns None. The caller
        passes the file to ``keep`` or ``discard``.
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
                return  # records have arrived meanwhile

    def keep(self, file: PlannedFile) -> None:
        """Record that the handlers of a file are attached, and that the caller closes its descriptors."""
        self._paths.append(Path(file.reached))

    def discard(self, file: PlannedFile) -> None:
        """Close a file that cannot be probed. It is examined again if it changes."""
        self._known |= states_of(file.descriptors)
        Descriptors(file.descriptors).close()

    def lack_room(self, file: PlannedFile) -> Iterator[Notice]:
        """
        Yield a notice that there is no room for the probepoints of a file.

        For foreign files, yield one for each user.
        """
        if file.owner is None:
            yield Notice(f"{file.path} is not probed: there was no room left for its probepoints")
        else:
            self._users.note_lack_of_room(file.owner)
            yield from self._users.notices()

    def close(self) -> None:
        """End the search, and close the files that ``found`` has not returned."""
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
            self._found.append(Notice(f"files that processes execute later are not searched for: {error}"))
        self._found.extend(self._users.notices())
        now = time.monotonic()
        self._interval = min(2 * self._interval, _LOOK_INTERVAL)
        self._next = now + max(self._interval, _LOOK_SHARE * (now - began))
        if pids is None:
            # All sessions search at the same moment, so that they share the mappings that one of them has read.
            self._next = math.ceil(self._next / _LOOK_INTERVAL) * _LOOK_INTERVAL

    def _find(self, pids: Iterable[int] | None, probed: Sequence[Path]) -> None:
        # A tree has few processes, and they may execute another program at any moment.
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
                if file.owner is not None and time.monotonic() - began > _NEW_FILES_TIME:
                    return
                known |= states_of(file.descriptors)
                if self._add(file):
                    known.update(dict.fromkeys(states_of(file.descriptors), KEPT))
                    leave(descriptors, file.descriptors)

    def _add(self, file: ModuleFile) -> bool:
        """Plan a file, and add it or a notice to the items for ``found``. Return True if the file can be probed."""
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
