"""
All files that the name of a module means, where every process counts: a uprobe belongs to a file, not to a name.

Containers bring their own C library, and an upgrade leaves the old one in the processes that run. So the files that
processes execute under the module's name are added to the one that is found on this machine. What is executed is known
when this is asked; a container that starts later has to be looked for again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dprobes.engines.ebpf.mappings import RecentMaps, file_id, processes
from dprobes.errors import TargetError
from dprobes.target.contents import file_contents
from dprobes.target.elf import ElfFile
from dprobes.target.maps import executable_mappings
from dprobes.target.modules import is_made_by_kernel, matches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ebpf.mappings import FileId
    from dprobes.target.maps import Mapping

__all__ = ["ModuleFile", "descriptor_path", "module_files"]


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """
    Hold a file of a module, kept open: ``path`` is for people, and may stop leading to it at any time.

    ``descriptor`` is opened with O_PATH, for the process through which the file was found may end at once; the caller
    closes it. ``aliases`` are paths to files of their own that show the same contents, as overlay file systems have
    them for the containers of one image: a uprobe in one is in all of them. They are kept open likewise.
    """

    path: Path
    identity: FileId
    descriptor: int = field(compare=False)
    aliases: tuple[Path, ...] = ()
    alias_descriptors: tuple[int, ...] = field(default=(), compare=False)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that the caller closes."""
        return self.descriptor, *self.alias_descriptors

    @property
    def reached(self) -> Path:
        """A path to the very file, as long as it is open."""
        return descriptor_path(self.descriptor)


def descriptor_path(descriptor: int) -> Path:
    """Return the path that leads to a file which is open in this process."""
    return Path(f"/proc/self/fd/{descriptor}")


def module_files(
    name: str,
    known: Iterable[Path] = (),
    pids: Iterable[int] | None = None,
    recent: RecentMaps | None = None,
) -> list[ModuleFile]:
    """
    Return the files ``known``, which ``find_module`` found, and the others that processes execute under the name.

    ``pids`` are the processes in scope, by default all. Files of other mount namespaces have paths through
    ``/proc/PID/root``; those that were removed or replaced, through ``/proc/PID/map_files``. A name with a slash is a
    path as each process sees it. ``recent`` is asked what processes map, where others ask as well.
    """
    found = _Collection()
    for own in known:
        found.add(own)
    if is_made_by_kernel(name):
        return found.files
    chosen = _ByPath(name) if "/" in name else _ByName(name)
    recent = recent or RecentMaps()
    seen: set[tuple[int, int, str]] = set()
    for pid in processes() if pids is None else pids:
        thread, text, root = recent.of(pid)
        for mapping in chosen.candidates(text, root):
            key = (mapping.device, mapping.inode, mapping.path)
            if key in seen:
                continue
            path = _reachable(thread, root, mapping)
            # Where a process has ended meanwhile, another one may show the same file.
            if path is not None and (not chosen.is_meant(path, mapping) or found.add(path)):
                seen.add(key)
    return found.files


def _executed(text: str, *parts: str) -> list[Mapping]:
    """Return the mappings of code in whose lines one of ``parts`` stands."""
    # Most processes have none of them, which is quickly known.
    if not any(part in text for part in parts):
        return []
    return executable_mappings("\n".join(line for line in text.split("\n") if any(part in line for part in parts)))


class _ByPath:
    """Choose the file that a path leads to in each process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._wanted: dict[str, FileId | None] = {}

    def candidates(self, text: str, root: str) -> list[Mapping]:
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

    def is_meant(self, _path: Path, _mapping: Mapping) -> bool:
        return True


class _ByName:
    """Choose the files with a file name or SONAME, or with a link of that name beside them."""

    def __init__(self, name: str) -> None:
        self._name = name
        # A library is called libNAME.so.1.2 or libNAME-1.2.so where its SONAME is libNAME.so.1.
        self._stem = name.partition(".so")[0] or name

    def candidates(self, text: str, _root: str) -> list[Mapping]:
        return _executed(text, f"/{self._stem}")

    def is_meant(self, path: Path, mapping: Mapping) -> bool:
        name = self._name
        base = mapping.path.rpartition("/")[2]
        if matches(name, mapping.path, None) or matches(name, path, None):
            return True
        is_likely = base.startswith(self._stem) and not base[len(self._stem) : len(self._stem) + 1].isalpha()
        return is_likely and ".so" in name and _soname(path, name) == name


def _reachable(thread: int, root: str, mapping: Mapping) -> Path | None:
    """Return a path that leads to the file of a mapping, and not to one that has taken its place."""
    exact = Path(f"/proc/{thread}/map_files/{mapping.start:x}-{mapping.end:x}")
    plain = Path(root + mapping.path)
    try:
        identity = file_id(exact)
    except PermissionError:
        # Not ours to use: the path is as good as it gets.
        return plain if not mapping.deleted and plain.is_file() else None
    except OSError:
        return None  # the process has ended, and what its path means to us may be another file
    try:
        return plain if file_id(plain) == identity else exact
    except OSError:
        return exact


def _soname(path: Path, wanted: str) -> str | None:
    """Return the SONAME of a file if it may be ``wanted``."""
    try:
        data = file_contents(path, "a mapped file")
        return ElfFile.of_bytes(path, data).soname if data.find(os.fsencode(wanted) + b"\0") >= 0 else None
    except TargetError:
        return None


class _Collection:
    """Gather files, each once."""

    def __init__(self) -> None:
        self.files: list[ModuleFile] = []
        self._seen: set[FileId] = set()

    def add(self, path: Path) -> bool:
        """Add the file of ``path`` unless it is there already; return False if it has gone."""
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        reached = descriptor_path(descriptor)
        identity = file_id(reached)
        if identity in self._seen:
            os.close(descriptor)
            return True
        self._seen.add(identity)
        for index, file in enumerate(self.files):
            if _share_pages(reached, file.reached):
                self.files[index] = replace(
                    file, aliases=(*file.aliases, path), alias_descriptors=(*file.alias_descriptors, descriptor)
                )
                return True
        self.files.append(ModuleFile(path, identity, descriptor))
        return True


_PAGE_FRAME = (1 << 55) - 1
"""The bits of a ``/proc/PID/pagemap`` entry that hold the page frame number; 0 without CAP_SYS_ADMIN."""


def _share_pages(one: Path, other: Path) -> bool:
    """
    Return whether two files have their contents in the same memory, and so are one file to the kernel's uprobes.

    Nothing else tells it of the files of an overlay file system: device and inode are the overlay's.
    """
    try:
        a, b = one.stat(), other.stat()
        if (a.st_size, a.st_mtime_ns) != (b.st_size, b.st_mtime_ns) or not a.st_size:
            return False
        with _FirstPage(one) as first, _FirstPage(other) as second:
            # Pages may be moved at any time, but hardly twice between three looks.
            frames = (first.frame(), second.frame(), first.frame())
    except OSError:
        return False
    return frames[1] != 0 and frames[1] in (frames[0], frames[2])


class _FirstPage:
    """Map the first page of a file into this process."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Private, so that it may be writable, which ctypes wants; it is never written.
            self._mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapping.close()

    def frame(self) -> int:
        """Return the number of the page frame, 0 if it is not ours to know."""
        view = ctypes.c_char.from_buffer(self._mapping)
        address = ctypes.addressof(view)
        del view
        self._mapping[:1]
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entry = os.pread(descriptor, 8, address // mmap.PAGESIZE * 8)
        finally:
            os.close(descriptor)
        return int.from_bytes(entry, "little") & _PAGE_FRAME
