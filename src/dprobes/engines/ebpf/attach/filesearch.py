"""
Which files a run is about: those that the module's name means, for 64-bit and 32-bit programs, and in containers.

A file is kept open from the time when it is found: the process through which it is reached may end, and its name may
come to mean another file. Files that other users can change are read by another process, within limits (``examiner``).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.attach.handlers import basic_request
from dprobes.engines.ebpf.attach.mappers import FileId
from dprobes.engines.ebpf.attach.modulefiles import KEPT, module_files
from dprobes.engines.ebpf.attach.plannedfile import Findings, PlannedFile
from dprobes.engines.ebpf.attach.scopecontent import descendants
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.replaceable import ReplaceableSession
from dprobes.engines.foreign.users import ForeignUsers
from dprobes.engines.interface import Notice
from dprobes.engines.linux.procfs import living_thread
from dprobes.errors import EngineError, SourceError, TargetError
from dprobes.resolve.spaces import Space, space_of
from dprobes.target.elf.file import ElfFile
from dprobes.target.modules import find_module, root_of, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from dprobes.engines.ebpf.attach.modulefiles import ModuleFile
    from dprobes.engines.ebpf.attach.perfevents import EventProbe
    from dprobes.engines.ebpf.attach.planner import Planner
    from dprobes.engines.foreign.outlines import Question
    from dprobes.engines.interface import Event, Job
    from dprobes.resolve.probepoints import ResolvedModule

__all__ = [
    "doubts_about",
    "find_probes",
    "leave",
    "plan_module_file",
    "refused",
    "states_of",
]

_FOREIGN_TIME = 2.0
"""Seconds that reading files of other users may take before the run begins; what is left waits until then."""


def find_probes(planner: Planner, job: Job) -> Findings:
    """
    Find what a program is about; raise an error of ours if it cannot be served.

    The caller closes the descriptors of files.
    """
    if space_of(job.program) in (Space.PROCESSES, Space.SYSTEM):
        from dprobes.engines.ebpf.attach.perfevents import events_everywhere

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
        from dprobes.engines.ebpf.attach.perfevents import events_in_kernel

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
    with Descriptors(each for file in found for each in file.descriptors) as descriptors:
        # Those that take unknown time come last.
        for file in sorted(found, key=lambda file: file.owner is not None and file.path != own):
            is_late = time.monotonic() - began > _FOREIGN_TIME
            if file.owner is not None and file.path != own and is_late and files:
                is_partial = True
                continue
            known |= states_of(file.descriptors)
            try:
                planned = plan_module_file(planner, job, file, users, job.resolved if file.path == own else None)
                if planned is None:
                    continue
                files.append(planned)
                known.update(dict.fromkeys(states_of(file.descriptors), KEPT))
                if planned.plan.resolved is not job.resolved:
                    notices += doubts_about(planned)
            except (SourceError, TargetError) as error:
                if file.path == own:
                    raise
                refusals.append(error)
                notices.append(refused(file, error))
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
    Plan a file, whose descriptor goes to what is returned; return None if it is not meant, or not wanted any more.

    Raise an error of ours if it cannot be served.
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
        from dprobes.resolve.resolution import resolve

        module = planner.symbols.module_of(ElfFile.open(file.path, file.reached))
        resolved = resolve(job.program, module, diagnostics, allow_write=planner.allow_write)
    plan = planner.plan(job.program, resolved, diagnostics, _kept(job, file), str(file.reached))
    if warnings is None:
        warnings = "\n".join(warning.render() for warning in resolved.warnings)
    return PlannedFile(str(file.path), file.descriptor, plan, file.alias_descriptors, file.owner, warnings)


def _question(planner: Planner, job: Job, file: ModuleFile) -> Question:
    from dprobes.engines.foreign.outlines import Question

    return Question(
        str(file.path),
        job.program,
        planner.symbols,
        allow_write=planner.allow_write,
        soname=file.soname,
        wants_moves=not planner.exact,
    )


def states_of(descriptors: Iterable[int]) -> dict[FileId, int]:
    """Return which files are open, and when each was changed last, in nanoseconds."""
    return {FileId(status.st_dev, status.st_ino): status.st_ctime_ns for status in map(os.fstat, descriptors)}


def leave(owner: Descriptors, descriptors: Iterable[int]) -> None:
    """Leave descriptors to the caller."""
    for descriptor in descriptors:
        owner.remove(descriptor)


def _kept(job: Job, file: ModuleFile) -> frozenset[int]:
    """
    Return where the program that is replaced has breakpoints in a file.

    Were one of the new program behind it, a thread between the two when the programs change places would hit both.
    """
    old = job.replaces
    return old.breakpoints_in(file.descriptor) if isinstance(old, ReplaceableSession) else frozenset()


def _missing(name: str) -> EngineError:
    hint = "the ebpf engine probes files: one must be there when the run begins"
    return EngineError(
        f"there is no module '{name}' on this machine, and no process executes one", hint=suggestion(name) or hint
    )


def doubts_about(planned: PlannedFile) -> list[Notice]:
    """Return what was warned of that is due to the file."""
    message = f"{planned.path}: not everything in this file is as the program says"
    return [Notice(message, details=planned.warnings)] if planned.warnings else []


def refused(file: ModuleFile, error: SourceError | TargetError) -> Notice:
    """Return what to say of a file that cannot be served."""
    if isinstance(error, TargetError):
        return Notice(f"{file.path}: {error.message}", error.hint)
    return Notice(f"{file.path}: the program cannot be inserted here", details=error.message)


def _files(job: Job, found: Path | None, users: ForeignUsers) -> list[ModuleFile]:
    """Return the file ``found``, what the name means for the other word size, and what processes in scope execute."""
    name, scope = job.program.name, job.scope
    paths = [] if found is None else [found]
    is_about_to_exec = bool(scope.command) or (scope.program is not None and not root_of(scope.pid or 0))
    thread = None if scope.pid is None or is_about_to_exec else living_thread(scope.pid)
    # What the name means for the processor of the file that was found is that file.
    known = job.resolved.architecture.name if job.resolved is not None else None
    others = {8: {"x86_64"}, 4: {"i386"}}.get(job.program.word_size or 0, {"x86_64", "i386"})
    for architecture in others - {known}:
        command = scope.command[0] if scope.command else None
        path = find_module(name, pid=thread, command=command, architecture=architecture)
        # A program in PATH is found for whatever processor.
        if path is not None and path not in paths and ElfFile.open(path).machine == architecture:
            paths.append(path)
    pids: list[int] | None = [] if is_about_to_exec else None
    if scope.pid is not None and not is_about_to_exec:
        pids = [scope.pid, *(descendants(scope.pid) if scope.follow else ())]
    return module_files(name, paths, pids, users=users)
