"""
Removal of all changes that a killed tracer has left in processes: breakpoints, watchpoints, jumps, handlers' memory.

A process that outlives tracer and client has the list of them (``restorer_process``). Bytes are restored only where
memory has the bytes that the tracer wrote.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.engine_interface import LeftThings, Notice
from dprobes.engines.ptrace.client.crash_restorer import CrashRestorer
from dprobes.engines.ptrace.client.outside_removal import (
    SHARED_MEMORY,
    UNMAPPING_PATIENCE,
    remove_jumps,
    unmap_left_memory,
)
from dprobes.engines.ptrace.restorer_messages import (
    ENTRIES,
    MANIFEST_FILE_NAME,
    FilesShared,
    JumpsPlanned,
    MemoryUnmapped,
    entries_in,
    length_in,
)
from dprobes.engines.ptrace.site_patches import Patches
from dprobes.engines.ptrace.tracer_messages import MemoryCopied, PagesMapped, PagesUnmapped, Removed
from dprobes.errors import DprobesError
from dprobes.native.process_page import HAS_ENDED
from dprobes.platform.linux.procfs import process_field
from dprobes.target.process_maps import mappings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dprobes.engines.ptrace.restorer_messages import LeftEntry
    from dprobes.engines.ptrace.site_patches import SitePatch

__all__ = ["Restored", "RestorerList", "left_notice", "remove_all_left", "remove_left"]

_SLOTS = -1
"""Key, in place of a region, of pages for copies of instructions."""


class Restored(NamedTuple):
    """
    Numbers of restored breakpoints and jumps (``places``) and threads.

    ``cleared`` is the number of threads whose debug registers were cleared, ``left`` the number of threads for which
    that failed.
    """

    places: int = 0
    cleared: int = 0
    left: int = 0


class RestorerList:
    """List of bytes and registers to be restored; ``restored`` counts those restored so far."""

    def __init__(self) -> None:
        self.restored = Restored()
        self._restorer = CrashRestorer()
        self._jumps: dict[int, Patches] = {}
        """Jumps by process; the number in ``Patches`` is the region."""
        self._planned: dict[int, dict[int, list[SitePatch]]] = {}
        """Jumps by process and region."""
        self._files: dict[int, FilesShared] = {}
        """Files that a process was about to map, until their addresses are reported."""

    def note(self, message: object) -> None:
        """Record a message of the tracer about changes of processes; others are ignored."""
        match message:
            case FilesShared(pid):
                self._files[pid] = message
            case JumpsPlanned(pid, memory, pages, patches):
                self._files.pop(pid, None)
                mine = self._jumps.setdefault(pid, Patches())
                mine.memories[memory.region] = memory
                mine.code.setdefault(memory.region, []).extend(pages)
                mine.by_site.update((address, patch) for patch in patches for address in patch.addresses)
                self._planned.setdefault(pid, {}).setdefault(memory.region, []).extend(patches)
            case MemoryUnmapped(pid, region):
                self._forget_memory(pid, region)
            case PagesMapped(pid, pages):
                self._jumps.setdefault(pid, Patches()).code.setdefault(_SLOTS, []).extend(pages)
            case PagesUnmapped(pid, pages):
                if pid in self._jumps:
                    code = self._jumps[pid].code
                    code[_SLOTS] = [each for each in code.get(_SLOTS, ()) if each not in pages]
            case MemoryCopied(pid, parent):
                self._copy_jumps(pid, parent)
            case Removed(pid, ()):
                self._jumps.pop(pid, None)
                self._planned.pop(pid, None)
                self._files.pop(pid, None)
                self._restorer.note(message)
            case _:
                self._restorer.note(message)

    def _copy_jumps(self, pid: int, parent: int) -> None:
        """Record for the forked process ``pid`` the jumps and the memory of handlers that ``parent`` has."""
        if parent in self._jumps:
            former = self._jumps[parent]
            code = {region: list(ranges) for region, ranges in former.code.items()}
            self._jumps[pid] = Patches(dict(former.memories), dict(former.by_site), code)
            planned = self._planned.get(parent, {})
            self._planned[pid] = {region: list(patches) for region, patches in planned.items()}

    def _forget_memory(self, pid: int, region: int) -> None:
        """Record that a process has unmapped a region and the pages that belonged to it, and has no jumps to it."""
        gone = set(self._planned.get(pid, {}).pop(region, ()))
        if (mine := self._jumps.get(pid)) is not None:
            mine.forget_program(region)
            mine.by_site = {address: patch for address, patch in mine.by_site.items() if patch not in gone}

    def restore_breakpoints(self, tracer: int = 0) -> None:
        """Restore the bytes of breakpoints, and disable all handlers; ``tracer`` is a tracer held at its exit, or 0."""
        for pid, patches in self._jumps.items():
            _disable(pid, patches)
        self._count(self._restorer.restore(self._jumps, tracer, self._copy_jumps), 0, 0)

    def remove_the_rest(self) -> None:
        """Remove jumps and watchpoints after the tracer has released its threads, which must be stopped for that."""
        cleared, left = self._restorer.clear()
        places = 0
        for pid, planned in self._planned.items():
            with contextlib.suppress(OSError):  # its threads cannot be stopped: another tracer has attached first
                places += remove_jumps(pid, [patch for patches in planned.values() for patch in patches])
        self._count(places, cleared, left)

    def unmap(self) -> None:
        """Unmap memory of handlers that no thread uses. A tracer that ends normally may have left it, too."""
        until = time.monotonic() + UNMAPPING_PATIENCE  # one deadline for all processes, because the client waits
        for pid in self._jumps.keys() | self._files.keys():
            with contextlib.suppress(OSError):
                unmap_left_memory(pid, self._jumps.get(pid) or Patches(), until, self._files.get(pid))

    def _count(self, places: int, cleared: int, left: int) -> None:
        before = self.restored
        self.restored = Restored(before.places + places, before.cleared + cleared, before.left + left)


def _disable(pid: int, patches: Patches) -> None:
    """
    End the life mark (``native.process_page``) in each shared memory that is still mapped: handlers then do nothing.

    The mappings are checked first: ``patches`` may be stale, because a killed tracer reports no more changes.
    """
    with contextlib.suppress(OSError, DprobesError):
        mapped = {each.start for each in mappings_of(pid) if each.path.startswith(SHARED_MEMORY)}
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for each in patches.memories.values():
                if each.region in mapped:
                    os.pwrite(memory, HAS_ENDED.to_bytes(4, "little"), each.region)
        finally:
            os.close(memory)


# Removal of the remains of killed runs in a process: jumps, the breakpoints of their program, and memory of handlers.
#
# A manifest in the process's memory lists them (``restorer_messages``). Entries of a running dprobes are ignored: the
# life mark in the shared memory shows whether a run has ended (``native.process_page``).


_MAPPING = f"/memfd:{MANIFEST_FILE_NAME}"


_LISTS_MAX = 64
"""Maximum number of manifests read from a process, 4 MiB each at most: the process itself can map any number."""


def remove_left(pid: int) -> LeftThings | None:
    """
    Remove the breakpoints, jumps and memory that killed runs have left in a process; return a description of them.

    Return None if there are none, access is denied, or the process is traced.
    """
    found = _left_in(pid)
    if not found or int(process_field(pid, "TracerPid") or 0):
        return None
    # A write that failed and was repeated is listed twice.
    patches = list({(patch.writes, patch.originals): patch for entry in found for patch in entry.writes}.values())
    left = Patches({entry.memory.region: entry.memory for entry in found})
    for entry in found:
        left.code.setdefault(entry.memory.region, []).extend(entry.code)
    places = remove_jumps(pid, patches)
    return LeftThings(pid, places, unmap_left_memory(pid, left))


def remove_all_left() -> Iterator[LeftThings]:
    """Call ``remove_left`` for all processes; iterate over the results of those that had something."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (left := remove_left(int(name))) is not None:
            yield left


def left_notice(left: LeftThings) -> Notice:
    """Return the notice about the remains of a killed run that ``remove_left`` has removed."""
    return Notice(f"killed runs left something in process {left.pid}: {left.said}", is_warning=False)


def _left_in(pid: int) -> list[LeftEntry]:
    """Return the manifest entries, in the memory of a process, of runs whose tracer has ended."""
    try:
        mappings = mappings_of(pid)
    except DprobesError:
        return []
    starts = [mapping.start for mapping in mappings if mapping.path.startswith(_MAPPING) and not mapping.offset]
    if not starts:
        return []
    shared = {mapping.start for mapping in mappings if mapping.path.startswith(SHARED_MEMORY)}
    found: list[LeftEntry] = []
    with contextlib.suppress(OSError):
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in starts[:_LISTS_MAX]:
                length = length_in(os.pread(memory, ENTRIES, start))
                if length is not None:
                    entries = list(entries_in(os.pread(memory, length, start + ENTRIES)))
                    found += (entry for entry in entries if _has_ended(memory, entry, shared))
        finally:
            os.close(memory)
    return found


def _has_ended(memory: int, entry: LeftEntry, shared: Collection[int]) -> bool:
    """
    Return whether the run of an entry has ended, by the mark at the start of its shared memory.

    ``shared`` are the addresses of mapped memory files. If the memory is not among them, the run was killed while it
    unmapped the memory: the manifest is unmapped last.
    """
    if entry.memory.region not in shared:
        return True
    try:
        return bool(int.from_bytes(os.pread(memory, 4, entry.memory.region), "little") & HAS_ENDED)
    except (OSError, OverflowError):
        return False
