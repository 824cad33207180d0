"""
Which files a run is about: those that the module's name means, for 64-bit and 32-bit programs, and in containers.

A file is kept open from the time when it is found: the process through which it is reached may end, and its name may
come to mean another file.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.base import Notice
from dprobes.engines.ebpf.descriptors import Descriptors
from dprobes.engines.ebpf.events import events_everywhere, events_in, is_about_everything
from dprobes.engines.ebpf.files import module_files
from dprobes.engines.ebpf.handlers import basic_request
from dprobes.engines.ebpf.installation import PlannedFile
from dprobes.engines.ebpf.mappings import file_id
from dprobes.engines.ebpf.scoping import descendants
from dprobes.engines.procfs import living_thread
from dprobes.engines.resolve import resolve
from dprobes.errors import EngineError, SourceError, TargetError
from dprobes.target.elf import ElfFile
from dprobes.target.modules import find_module, near_modules, root_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.engines.base import Event, Job
    from dprobes.engines.ebpf.engine import EbpfEngine
    from dprobes.engines.ebpf.events import EventProbe
    from dprobes.engines.ebpf.files import ModuleFile
    from dprobes.engines.resolve import ResolvedModule

__all__ = ["Findings", "Latecomers", "find_probes"]

_FIRST_INTERVAL, _LOOK_INTERVAL = 0.1, 2.0
"""Seconds between two looks for files at least, at first and later."""

_LOOK_SHARE = 100
"""A look takes at most one part in so many of the time."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Hold the files that are to be probed, the events, and what the user should hear about others."""

    files: Sequence[PlannedFile] = ()
    events: Sequence[EventProbe] = ()
    notices: Sequence[Event] = ()


def find_probes(engine: EbpfEngine, job: Job) -> Findings:
    """
    Find what a program is about; raise an error of ours if it cannot be served.

    The caller closes the descriptors of files.
    """
    if is_about_everything(job.program):
        events, notices = events_everywhere(job.program, basic_request(engine.features, job.program))
        engine.plan_everywhere([event.probe for event in events], Diagnostics())
        return Findings((), events, notices)
    files, notices = _planned_files(engine, job)
    sampled = ((file.plan.resolved, file.all_reached) for file in files)
    return Findings(files, [event for resolved, paths in sampled for event in events_in(resolved, paths)], notices)


def _planned_files(engine: EbpfEngine, job: Job) -> tuple[list[PlannedFile], list[Event]]:
    files: list[PlannedFile] = []
    notices: list[Event] = []
    own = job.resolved.module.path if job.resolved is not None else None
    refusals: list[SourceError | TargetError] = []
    found = _files(job, own)
    with Descriptors(each for file in found for each in file.descriptors) as descriptors:
        for file in found:
            try:
                planned = _planned(engine, job, file, job.resolved if file.path == own else None)
                files.append(planned)
                if planned.plan.resolved is not job.resolved:
                    notices += _doubts(planned)
            except (SourceError, TargetError) as error:
                if file.path == own:
                    raise
                refusals.append(error)
                notices.append(_refused(file, error))
        if not files:
            raise (refusals[0] if refusals else _missing(job.program.name))
        for planned in files:
            _leave(descriptors, planned.descriptors)
    return files, notices


def _planned(engine: EbpfEngine, job: Job, file: ModuleFile, resolved: ResolvedModule | None = None) -> PlannedFile:
    """Plan a file, whose descriptor goes to what is returned; raise an error of ours if it cannot be served."""
    diagnostics = Diagnostics()
    if resolved is None:
        module = engine.symbols.module_of(ElfFile.open(file.path, file.reached))
        resolved = resolve(job.program, module, diagnostics, allow_write=engine.allow_write)
    plan = engine.plan(job.program, resolved, diagnostics, _kept(job, file), str(file.reached))
    return PlannedFile(str(file.path), file.descriptor, plan, file.alias_descriptors)


def _leave(owner: Descriptors, descriptors: Iterable[int]) -> None:
    """Leave descriptors to the caller."""
    for descriptor in descriptors:
        owner.remove(descriptor)


def _kept(job: Job, file: ModuleFile) -> frozenset[int]:
    """
    Return where the program that is replaced has breakpoints in a file.

    Were one of the new program behind it, a thread between the two when the programs change places would hit both.
    """
    old = job.replaces
    from dprobes.engines.ebpf.session import EbpfSession

    return old.breakpoints_in(file.descriptor) if isinstance(old, EbpfSession) else frozenset()


class Latecomers:
    """
    Look for files that the module's name means and that were not there when a run began.

    A container that is started later brings its own C library, and an upgrade a new one.
    """

    def __init__(self, engine: EbpfEngine, job: Job, known: Sequence[PlannedFile]) -> None:
        self._engine = engine
        self._job = job
        self._paths = [Path(file.reached) for file in known]
        self._known = {file_id(path) for path in self._paths}
        # What a tree is going to execute shows soon; elsewhere nobody waits for a certain process.
        self._interval = _FIRST_INTERVAL if job.scope.is_tree else _LOOK_INTERVAL
        self._next = time.monotonic() + self._interval

    @property
    def is_eager(self) -> bool:
        """Whether it is worth while to look often."""
        return self._interval < _LOOK_INTERVAL

    def look(self, pids: Iterable[int] | None) -> Iterator[PlannedFile | Notice]:
        """
        Iterate over what processes, by default all, have come to execute; to be called often.

        The caller closes the descriptors of files.
        """
        began = time.monotonic()
        if began < self._next:
            return
        # A tree is small, and what it is about to execute changes fast.
        recent = self._engine.features.maps if pids is None else None
        found = module_files(self._job.program.name, self._paths, pids, recent)
        with Descriptors(each for file in found for each in file.descriptors) as descriptors:
            for file in found:
                if file.identity in self._known:
                    continue
                self._known.add(file.identity)
                try:
                    planned = _planned(self._engine, self._job, file)
                except (SourceError, TargetError) as error:
                    yield _refused(file, error)
                else:
                    self._paths.append(file.reached)
                    yield from _doubts(planned)
                    _leave(descriptors, file.descriptors)
                    yield planned
        now = time.monotonic()
        self._interval = min(2 * self._interval, _LOOK_INTERVAL)
        self._next = now + max(self._interval, _LOOK_SHARE * (now - began))
        if pids is None:
            # All sessions look at the same moment, so that what one has read about processes serves the others.
            self._next = math.ceil(self._next / _LOOK_INTERVAL) * _LOOK_INTERVAL


def _missing(name: str) -> EngineError:
    near = near_modules(name)
    hint = "the ebpf engine probes files: one must be there when the run begins"
    return EngineError(
        f"there is no module '{name}' on this machine, and no process executes one",
        hint=f"did you mean '{near[0]}'?" if near else hint,
    )


def _doubts(planned: PlannedFile) -> list[Notice]:
    """Return what was warned of that is due to the file."""
    text = "\n".join(warning.render() for warning in planned.plan.resolved.warnings)
    return [Notice(f"{planned.path}: not everything in this file is as the program says\n{text}")] if text else []


def _refused(file: ModuleFile, error: SourceError | TargetError) -> Notice:
    if isinstance(error, TargetError):
        return Notice(f"{file.path}: {error.message}", error.hint)
    return Notice(f"{file.path}: the program cannot be inserted here\n{error.message}")


def _files(job: Job, found: Path | None) -> list[ModuleFile]:
    """Return the file ``found``, what the name means for the other word size, and what processes in scope execute."""
    name, scope = job.program.name, job.scope
    paths = [] if found is None else [found]
    is_about_to_exec = bool(scope.command) or (scope.program is not None and not root_of(scope.pid or 0))
    thread = None if scope.pid is None or is_about_to_exec else living_thread(scope.pid)
    # What the name means for the processor of the file that was found is that file.
    known = job.resolved.architecture.name if job.resolved is not None else None
    for architecture in {"x86_64", "i386"} - {known}:
        path = find_module(name, pid=thread, architecture=architecture)
        # A program in PATH is found for whatever processor.
        if path is not None and path not in paths and ElfFile.open(path).machine == architecture:
            paths.append(path)
    pids: list[int] | None = [] if is_about_to_exec else None
    if scope.pid is not None and not is_about_to_exec:
        pids = [scope.pid, *(descendants(scope.pid) if scope.follow else ())]
    return module_files(name, paths, pids)
