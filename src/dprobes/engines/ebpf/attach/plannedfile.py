"""A file that is to be probed: its plan, and how it is reached; and all that was found when a run begins."""

from __future__ import annotations

import os
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from dprobes.engines.ebpf.attach.conflicts import BEFORE, Place, find_conflicts
from dprobes.engines.ebpf.attach.modulefiles import descriptor_path
from dprobes.lazydataclass import dataclass
from dprobes.target.code.instructions import first_instructions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.engines.ebpf.attach.conflicts import Conflict
    from dprobes.engines.ebpf.attach.mappers import FileId
    from dprobes.engines.ebpf.attach.perfevents import EventProbe
    from dprobes.engines.ebpf.attach.siteplan import FilePlan, Site
    from dprobes.engines.ebpf.inkernel.plannedkernel import PlannedKernel
    from dprobes.engines.foreign.users import ForeignUsers
    from dprobes.engines.interface import Event
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedCode, ResolvedModule
    from dprobes.target.elf.contents import Contents

__all__ = ["Findings", "PlannedCode", "PlannedFile", "conflicts_in", "places_of"]


class PlannedCode(Protocol):
    """Code that is to be probed, of a file or of the kernel: where each probepoint in it stands, and how it is told."""

    @property
    def path(self) -> str:
        """What people call it."""

    @property
    def reached(self) -> str:
        """A path to the very file for the kernel; empty if the code is in none."""

    @property
    def owner(self) -> str | None:
        """Who else can change it."""

    @property
    def resolved(self) -> ResolvedCode:
        """What is known of it."""

    @property
    def probes(self) -> Sequence[tuple[Probepoint, tuple[Site, ...]]]:
        """The probepoints, each with its sites; without any where it is not inserted."""

    def conflicts(self) -> Iterator[Conflict]:
        """Iterate over the places where other code is found."""

    def original(self) -> tuple[tuple[int, int], Contents] | None:
        """Return device and inode of the file with its bytes; None if the code is in no file."""

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """
    A file's plan, and how the file is reached.

    ``path`` is for people, and may lead to another file later; ``descriptor`` is that of the file, opened with O_PATH.
    ``aliases`` are such descriptors of files that show the same contents: a uprobe in one is in all of them. ``owner``
    is who else can change the file, ``warnings`` what was warned of that is due to it.
    """

    path: str
    descriptor: int
    plan: FilePlan
    aliases: tuple[int, ...] = ()
    owner: str | None = None
    warnings: str = ""

    @property
    def reached(self) -> str:
        """A path to the very file for the kernel."""
        return str(descriptor_path(self.descriptor))

    @property
    def resolved(self) -> ResolvedModule:
        """What is known of the file."""
        return self.plan.resolved

    @property
    def probes(self) -> Sequence[tuple[Probepoint, tuple[Site, ...]]]:
        """The probepoints, each with its sites."""
        return self.plan.probes

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """What matches a pattern and has no probepoint."""
        return self.plan.left_out

    def conflicts(self) -> Iterator[Conflict]:
        """Iterate over the places where processes hold other code than the file."""
        return conflicts_in(self)

    def original(self) -> tuple[tuple[int, int], Contents]:
        """Return device and inode of the file, and its bytes."""
        status = os.fstat(self.descriptor)
        return (status.st_dev, status.st_ino), self.plan.resolved.module.elf.data

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What is to be closed when the file is not needed any more."""
        return self.descriptor, *self.aliases

    @property
    def all_reached(self) -> tuple[str, ...]:
        """Paths to the very file, and to those that show the same contents."""
        return tuple(str(descriptor_path(descriptor)) for descriptor in self.descriptors)

    @property
    def events(self) -> tuple[EventProbe, ...]:
        """The samplers and watchpoints of the program for this file."""
        if not self.plan.resolved.events:
            return ()
        from dprobes.engines.ebpf.attach.perfevents import events_in

        return events_in(self.plan.resolved, self.all_reached)


@dataclass(frozen=True, slots=True)
class Findings:
    """
    The files, or the kernel, that are to be probed, the events, and what the user should hear about others.

    ``known`` are all files that were looked at, as ``passed_over`` of ``module_files``. With ``is_partial`` some are
    left to be looked at when the run has begun.
    """

    files: Sequence[PlannedFile] = ()
    kernel: PlannedKernel | None = None
    events: Sequence[EventProbe] = ()
    notices: Sequence[Event] = ()
    known: Mapping[FileId, int] = field(default_factory=dict)
    users: ForeignUsers | None = None
    is_partial: bool = False


def conflicts_in(file: PlannedFile, users: ForeignUsers | None = None) -> Iterator[Conflict]:
    """Iterate over the places where processes hold other code than a file; see ``find_conflicts`` for ``users``."""
    if places := places_of(file.plan):
        for path in file.all_reached:
            yield from find_conflicts(path, places, users=users).found


def places_of(plan: FilePlan) -> list[Place]:
    """Return the places of a plan where uprobes are to be, with the bytes that the file has there."""
    offsets = tuple(dict.fromkeys(site.offset for _, sites in plan.probes for site in sites))
    module = plan.resolved.module
    return [
        Place(found.offset, found.raw, bytes(module.elf.data[max(0, found.offset - BEFORE) : found.offset]))
        for found in first_instructions(module, offsets)
    ]
