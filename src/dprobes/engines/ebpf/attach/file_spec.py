"""
Files to which the name of a module refers. A uprobe belongs to a file, not to a name.

Containers have their own C library, and running processes keep the old one after an upgrade. So the files that
processes execute under the module's name are probed besides the file that is found on this machine. A search finds the
files that are executed at that moment. Containers that start later need another search.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Self

from dprobes.engines.ebpf.attach.code_mappers import (
    BEFORE,
    FileId,
    Place,
    RecentMaps,
    file_id,
    find_conflicts,
    processes,
)
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptor
from dprobes.engines.foreign_users import ForeignUsers
from dprobes.platform.linux.process_calls import RemoteMemory
from dprobes.platform.linux.procfs import without_waiting
from dprobes.target.code.machine_code import first_instructions
from dprobes.target.module_lookup import has_soname, is_made_by_kernel, matches
from dprobes.target.process_maps import executable_mappings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dprobes.engines.ebpf.attach.code_mappers import Conflict
    from dprobes.engines.ebpf.attach.perf_probes import EventProbe
    from dprobes.engines.ebpf.attach.site_spec import FilePlan, Site
    from dprobes.engines.ebpf.inkernel.kernel_spec import PlannedKernel
    from dprobes.engines.engine_interface import Event
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint, ResolvedModule
    from dprobes.target.elf.file_contents import Contents
    from dprobes.target.process_maps import Mapping as MemoryMapping

__all__ = [
    "KEPT",
    "Findings",
    "ModuleFile",
    "PlannedFile",
    "conflicts_in",
    "descriptor_path",
    "module_files",
    "places_of",
]

KEPT = -1
"""Placeholder for the change time of a file that is kept open: no other file can get its inode number."""


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """
    File of a module, kept open. ``path`` is for users, and may lead to another file later.

    ``descriptor`` was opened with O_PATH, because the process through which the file was found may end; the caller
    closes it. ``aliases`` are paths of other files that share the page cache with this one, and ``alias_descriptors``
    their descriptors: a uprobe in one file is in all of them. Overlay file systems have such files for the containers
    of one image.

    ``owner`` is another user who can change the file, in the form for messages, or None if only root and this user can.
    The work for such a file is limited. It is used only if its SONAME is ``soname``, unless that is None.
    """

    path: Path
    identity: FileId
    descriptor: int = field(compare=False)
    aliases: tuple[Path, ...] = ()
    alias_descriptors: tuple[int, ...] = field(default=(), compare=False)
    owner: str | None = None
    soname: str | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors that the caller must close."""
        return self.descriptor, *self.alias_descriptors

    @property
    def reached(self) -> Path:
        """Path to this file while the descriptor is open, even if ``path`` now leads to another file."""
        return descriptor_path(self.descriptor)


def descriptor_path(descriptor: int) -> Path:
    """Return the path in ``/proc/self/fd`` to a file that is open in this process."""
    return Path(f"/proc/self/fd/{descriptor}")


def module_files(
    name: str,
    known: Iterable[Path] = (),
    pids: Iterable[int] | None = None,
    recent: RecentMaps | None = None,
    users: ForeignUsers | None = None,
    passed_over: Mapping[FileId, int] = MappingProxyType({}),
) -> list[ModuleFile]:
    """
    Return the files ``known`` from ``find_module``, and other files that processes execute under the module's name.

    ``pids`` has the processes in scope, by default all. Files of other mount namespaces have paths through
    ``/proc/PID/root``; files that were removed or replaced have paths through ``/proc/PID/map_files``. A name with a
    slash is a path in the mount namespace of each process. ``recent`` is a shared cache of mappings. ``users`` limits
    the work for other users.

    Files in ``passed_over`` are not returned, except those in ``known``. The value is KEPT, or the time of the last
    change (``st_ctime_ns``), by which a file with a reused inode number is recognized.
    """
    users = users or ForeignUsers(name)
    found = _Collection(users, passed_over)
    for own in known:
        found.add_known(own)
    if is_made_by_kernel(name):
        return found.files
    chosen = _ByPath(name) if "/" in name else _ByName(name)
    recent = recent or RecentMaps()
    seen: set[tuple[int, int, str]] = set()
    for pid, limit in users.bounded(processes() if pids is None else pids):
        thread, text, root = recent.of(pid, limit)
        for mapping in chosen.candidates(text, root):
            key = (mapping.device, mapping.inode, mapping.path)
            path = None if key in seen else _reachable(thread, root, mapping)
            if path is not None:
                meaning = chosen.meaning(path, mapping)
                # If a process has ended meanwhile, another one may show the same file.
                if meaning is _Meaning.NONE or found.add(path, name if meaning is _Meaning.BY_SONAME else None):
                    seen.add(key)
    return found.files


def _executed(text: str, *parts: str) -> list[MemoryMapping]:
    """Return the executable mappings in the contents of a ``maps`` file whose lines contain one of ``parts``."""
    # Most processes have none of them, which this test finds quickly.
    if not any(part in text for part in parts):
        return []
    return executable_mappings("\n".join(line for line in text.split("\n") if any(part in line for part in parts)))


class _Meaning(Enum):
    """Condition under which a module's name refers to a file."""

    NONE = "not at all"
    BY_NAME = "by its name"
    BY_SONAME = "if that is its SONAME"


class _ByPath:
    """Module name that is a path: it refers to the files at this path in the mount namespaces of processes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._wanted: dict[str, FileId | None] = {}

    def candidates(self, text: str, root: str) -> list[MemoryMapping]:
        if root and not self._name.startswith("/"):
            return []
        if root not in self._wanted:
            self._wanted[root] = None
            with contextlib.suppress(OSError):
                self._wanted[root] = file_id(root + self._name)
        wanted = self._wanted[root]
        shown = self._name.replace("\n", "\\012")
        parts = (shown,) if wanted is None else (shown, f" {wanted.inode} ")
        executed = _executed(text, *parts)
        return [m for m in executed if m.path == self._name or (m.device, m.inode) == wanted]

    def meaning(self, _path: Path, _mapping: MemoryMapping) -> _Meaning:
        return _Meaning.BY_NAME


class _ByName:
    """Module name without a path: it refers to files with this name or SONAME, or with a symbolic link of this name."""

    def __init__(self, name: str) -> None:
        self._name = name
        # A library with the SONAME libNAME.so.1 is called libNAME.so.1.2 or libNAME-1.2.so.
        self._stem = name.partition(".so")[0] or name

    def candidates(self, text: str, _root: str) -> list[MemoryMapping]:
        return _executed(text, f"/{self._stem}")

    def meaning(self, path: Path, mapping: MemoryMapping) -> _Meaning:
        name = self._name
        base = mapping.path.rpartition("/")[2]
        if matches(name, mapping.path, None) or matches(name, path, None):
            return _Meaning.BY_NAME
        is_likely = base.startswith(self._stem) and not base[len(self._stem) : len(self._stem) + 1].isalpha()
        return _Meaning.BY_SONAME if is_likely and ".so" in name else _Meaning.NONE


def _reachable(thread: int, root: str, mapping: MemoryMapping) -> Path | None:
    """Return a path to the mapped file, or None if no path leads to it. Another file may have its name by now."""
    exact = Path(f"/proc/{thread}/map_files/{mapping.start:x}-{mapping.end:x}")
    plain = Path(root + mapping.path)
    try:
        identity = file_id(exact)
    except PermissionError:
        # This user may not access the exact path, so the plain path is used.
        return plain if not mapping.deleted and plain.is_file() else None
    except OSError:
        return None  # the process has ended, and its path may mean another file here
    try:
        return plain if file_id(plain) == identity else exact
    except OSError:
        return exact


class _Collection:
    """Collection of the files that were found, without duplicates."""

    def __init__(self, users: ForeignUsers, passed_over: Mapping[FileId, int]) -> None:
        self.files: list[ModuleFile] = []
        self._users = users
        self._passed_over = passed_over
        self._seen: set[FileId] = set()

    def add_known(self, path: Path) -> None:
        """Add the file at ``path`` without a check of its owner."""
        with contextlib.suppress(OSError), Descriptor(os.open(path, os.O_PATH | os.O_CLOEXEC)) as descriptor:
            status = os.fstat(descriptor.fd)
            self._add(path, descriptor, FileId(status.st_dev, status.st_ino), None, None)

    def add(self, path: Path, soname: str | None) -> bool:
        """
        Add the file at ``path`` unless it is included already. Return False if it no longer exists.

        ``soname`` is the SONAME that the file must have, or None. If the owner has reached the limit of files, the file
        is left for a later search.
        """
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        with Descriptor(opened) as descriptor:
            status = os.fstat(opened)
            identity = FileId(status.st_dev, status.st_ino)
            if identity in self._seen or self._passed_over.get(identity) in (KEPT, status.st_ctime_ns):
                return True
            if not stat.S_ISREG(status.st_mode):
                return True
            owner = self._users.owner_of(status)
            if owner is None:
                if soname is not None and not has_soname(descriptor_path(opened), soname):
                    self._seen.add(identity)
                    return True
                soname = None
            elif not self._users.may_have_file(owner):
                return True
            self._add(path, descriptor, identity, owner, soname)
        return True

    def _add(self, path: Path, opened: Descriptor, identity: FileId, owner: str | None, soname: str | None) -> None:
        if identity in self._seen:
            return
        self._seen.add(identity)
        descriptor = opened.detach()
        reached = descriptor_path(descriptor)
        for index, file in enumerate(self.files):
            if _share_pages(reached, file.reached):
                self.files[index] = replace(
                    file, aliases=(*file.aliases, path), alias_descriptors=(*file.alias_descriptors, descriptor)
                )
                return
        self.files.append(ModuleFile(path, identity, descriptor, owner=owner, soname=soname))


_PAGE_FRAME = (1 << 55) - 1
"""Mask of the page frame number in an entry of ``/proc/PID/pagemap``. Without CAP_SYS_ADMIN, the number reads as 0."""


def _share_pages(one: Path, other: Path) -> bool:
    """
    Return whether two files share their pages in the page cache, and so are the same file to the kernel's uprobes.

    Files of an overlay file system can only be identified by this: their device and inode number are the overlay's.
    """
    try:
        a, b = one.stat(), other.stat()
        if (a.st_size, a.st_mtime_ns) != (b.st_size, b.st_mtime_ns) or not a.st_size:
            return False
        with _FirstPage(one) as first, _FirstPage(other) as second:
            # Pages may be moved at any time, but hardly twice during three reads.
            frames = (first.frame(), second.frame(), first.frame())
    except OSError:
        return False
    return frames[1] != 0 and frames[1] in (frames[0], frames[2])


class _FirstPage:
    """The first page of a file, mapped into this process."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb", opener=without_waiting) as file:
            # Private, so that it may be writable, which ctypes requires; it is never written.
            self._mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapping.close()

    def frame(self) -> int:
        """Return the page frame number, or 0 if the kernel hides it from this process, or the page cannot be read."""
        view = ctypes.c_char.from_buffer(self._mapping)
        address = ctypes.addressof(view)
        del view
        # The kernel reads the page, and gets an error where this process would get SIGBUS: the file may be truncated.
        RemoteMemory().read(os.getpid(), address, 1)
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entry = os.pread(descriptor, 8, address // mmap.PAGESIZE * 8)
        finally:
            os.close(descriptor)
        return int.from_bytes(entry, "little") & _PAGE_FRAME


class PlannedFile(NamedTuple):
    """
    Plan of a file, and the descriptors of the file.

    ``path``, ``descriptor``, ``aliases`` and ``owner`` are as in ``ModuleFile``. ``warnings`` has the warnings about
    the file.
    """

    path: str
    descriptor: int
    plan: FilePlan
    aliases: tuple[int, ...] = ()
    owner: str | None = None
    warnings: str = ""

    @property
    def reached(self) -> str:
        """Path for the kernel to open this file, even if ``path`` now leads to another file."""
        return str(descriptor_path(self.descriptor))

    @property
    def resolved(self) -> ResolvedModule:
        """The module as resolved from the file."""
        return self.plan.resolved

    @property
    def probes(self) -> Sequence[tuple[Probepoint, tuple[Site, ...]]]:
        """Probepoints, each with its sites."""
        return self.plan.probes

    @property
    def left_out(self) -> Sequence[LeftOutProbe]:
        """Functions that match a pattern and have no probepoint."""
        return self.plan.left_out

    def conflicts(self) -> Iterator[Conflict]:
        """Iterate over the places where the code of processes differs from the file."""
        return conflicts_in(self)

    def original(self) -> tuple[tuple[int, int], Contents]:
        """Return device and inode of the file, and its bytes."""
        status = os.fstat(self.descriptor)
        return (status.st_dev, status.st_ino), self.plan.resolved.module.elf.data

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the owner must close."""
        return self.descriptor, *self.aliases

    @property
    def all_reached(self) -> tuple[str, ...]:
        """Paths to this file, and to the files that share its pages."""
        return tuple(str(descriptor_path(descriptor)) for descriptor in self.descriptors)

    @property
    def events(self) -> tuple[EventProbe, ...]:
        """Samplers and watchpoints of the program for this file."""
        if not self.plan.resolved.events:
            return ()
        from dprobes.engines.ebpf.attach.perf_probes import events_in

        return events_in(self.plan.resolved, self.all_reached)


if TYPE_CHECKING:
    PlannedCode = PlannedFile | PlannedKernel


@dataclass(frozen=True, slots=True)
class Findings:
    """
    Files or kernel to be probed, perf events, and notices about files that cannot be probed.

    ``known`` has all examined files, in the form of ``passed_over`` of ``module_files``. If ``is_partial`` is True,
    further files must be examined after the run has begun.
    """

    files: Sequence[PlannedFile] = ()
    kernel: PlannedKernel | None = None
    events: Sequence[EventProbe] = ()
    notices: Sequence[Event] = ()
    known: Mapping[FileId, int] = field(default_factory=dict)
    users: ForeignUsers | None = None
    is_partial: bool = False


def conflicts_in(file: PlannedFile, users: ForeignUsers | None = None) -> Iterator[Conflict]:
    """Iterate over the conflicts of processes with a planned file; ``users`` is as for ``find_conflicts``."""
    if places := places_of(file.plan):
        for path in file.all_reached:
            yield from find_conflicts(path, places, users=users)


def places_of(plan: FilePlan) -> list[Place]:
    """Return the places of a plan's uprobes, with the file's bytes."""
    offsets = tuple(dict.fromkeys(site.offset for _, sites in plan.probes for site in sites))
    module = plan.resolved.module
    return [
        Place(found.offset, found.raw, bytes(module.elf.data[max(0, found.offset - BEFORE) : found.offset]))
        for found in first_instructions(module, offsets)
    ]
