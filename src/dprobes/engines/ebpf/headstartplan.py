"""
From what a run has asked of the kernel to a plan for the head start of the next one.

Only runs have one that just look, at one file, and that leave nothing to be looked at before a hit: see
``_may_start_early``.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.layout import MapName, Status
from dprobes.engines.ebpf.attach.plannedfile import places_of
from dprobes.engines.linux import kernelobjects
from dprobes.engines.linux.bpfcalls import Command
from dprobes.engines.linux.mapcalls import array_size
from dprobes.rpn.needs import dumps_core, logs_user_stacks, writing_instructions
from dprobes.rpn.program import calls_extensions
from dprobes.target.modules import root_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.engines.ebpf.attach.plannedfile import Findings
    from dprobes.engines.ebpf.headstart import Place, Plan, Step
    from dprobes.engines.ebpf.settings import Settings
    from dprobes.engines.interface import Job
    from dprobes.engines.linux.kernelobjects import Notes, Request

__all__ = ["Planning", "planning", "steps_of"]

PLACES_MAX = 64
"""At how many places an instruction is looked at in each process that maps the file, before anything is armed."""

_INSTRUCTIONS = 8  # the place of their address in the attributes of PROG_LOAD
_INSN_SIZE, _IMMEDIATE = 8, 4  # struct bpf_insn
_NUMBER = struct.Struct("=I")

_LOAD_64 = 0x18
_MAP_SOURCES = (1, 2)  # BPF_PSEUDO_MAP_FD, BPF_PSEUDO_MAP_VALUE
_JUMP_CLASSES, _EQUAL = (0x05, 0x06), (0x10, 0x50)


def planning(settings: Settings, job: Job, found: Findings) -> Planning | None:
    """Return what makes a plan of a run that begins now, None if nobody wants one, or the run can have none."""
    notes = kernelobjects.notes()
    return Planning(notes, job, found) if notes is not None and _may_start_early(settings, job, found) else None


def _may_start_early(settings: Settings, job: Job, found: Findings) -> bool:
    """
    Return whether a run can have a head start.

    It has nothing to be done between the making of maps and the first hit that is not in the notes, such as to see what
    processes map; and it changes nothing in processes.
    """
    scope, program = job.scope, job.program
    return (
        not (settings.planner.allow_write or settings.replaceable or settings.pid_namespace)
        and not (job.replaces or job.globals or job.principal or job.companions or job.images)
        and not (scope.command or scope.program or scope.cgroup)
        and found.kernel is None
        and not found.events
        and len(found.files) == 1
        and found.files[0].owner is None
        and not found.files[0].aliases
        and not (scope.pid is not None and root_of(scope.pid))
        and not logs_user_stacks(program)
        and not dumps_core(program)  # the guard of stopped processes comes first
        and not writing_instructions(program)
        and not calls_extensions(program)
    )


class Planning:
    """A plan in the making; ``finish`` makes it, when the run has begun."""

    def __init__(self, notes: Notes, job: Job, found: Findings) -> None:
        self._notes = notes
        self._job = job
        self._file = found.files[0]
        self._contents: list[tuple[int, int, bytes]] = []
        notes.before_arming = self._read

    def _read(self) -> None:
        """Read what arrays hold, as yet no hit has changed it."""
        for number, (request, descriptor) in enumerate(self._notes.steps):
            if request is None or descriptor < 0 or not (size := array_size(request)):
                continue
            with mmap.mmap(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, prot=mmap.PROT_READ) as memory:
                if content := memory[:size].rstrip(b"\0"):
                    self._contents.append((number, size, content))

    def finish(self, maps: Mapping[MapName, int], ring_size: int) -> None:
        """Leave the plan with the notes, if there can be one; ``maps`` are those of the run."""
        notes, file = self._notes, self._file
        made = {}
        for number, (request, descriptor) in enumerate(notes.steps):
            if request is not None and request.command == Command.MAP_CREATE:
                made[descriptor] = number
        scope, status, ring = (made.get(maps[name]) for name in (MapName.SCOPE, MapName.STATUS, MapName.RING))
        places = places_of(file)
        if scope is None or status is None or ring is None or notes.before_arming is not None:
            return
        if len(places) > PLACES_MAX:
            return
        own = os.getpid() if self._job.scope.pid is None else None
        identity = os.fstat(file.descriptor)
        path = str(file.plan.resolved.module.path)
        plan: Plan = (
            path,
            (identity.st_dev, identity.st_ino),
            tuple((place.offset, place.raw) for place in places),
            tuple(steps_of(notes, own)),
            None if self._job.scope.pid is None else (scope, status, int(Status.ALIVE), self._job.scope.follow),
            tuple(each for each in self._contents if each[0] != status),
            (ring, ring_size),
        )
        notes.plan = plan


def steps_of(notes: Notes, own: int | None) -> Iterator[Step]:
    """Iterate over what was asked for, with the places of descriptors, and of our process id ``own``."""
    steps: dict[int, int] = {}
    for number, (request, result) in enumerate(notes.steps):
        if request is None:
            yield -1, b"", {}, (), -1, False, 0, ()
            continue
        yield (
            int(request.command), request.attributes, dict(request.data), request.descriptors, request.path,
            request.in_proxy, max(0, -result), tuple(_numbers(request, steps, own)),
        )  # fmt: skip
        steps[result] = number


def _numbers(request: Request, steps: Mapping[int, int], own: int | None) -> Iterator[Place]:
    for place in request.descriptors:
        yield -1, place, steps[_NUMBER.unpack_from(request.attributes, place)[0]]
    if request.command != Command.PROG_LOAD:
        return
    code = request.data[_INSTRUCTIONS]
    is_second = False
    for start in range(0, len(code), _INSN_SIZE):
        operation, source, place = code[start], code[start + 1] >> 4, start + _IMMEDIATE
        number = _NUMBER.unpack_from(code, place)[0]
        if is_second:
            is_second = False
        elif operation == _LOAD_64:
            is_second = True
            if source in _MAP_SOURCES:
                yield _INSTRUCTIONS, place, steps[number]
        elif operation & 0x0F in _JUMP_CLASSES and operation & 0xF0 in _EQUAL and number == own:
            yield _INSTRUCTIONS, place, -1
