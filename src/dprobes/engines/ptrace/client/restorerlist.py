"""
What a killed tracer may have left in processes, and its removal: breakpoints, watchpoints, jumps, and their memory.

The list is kept by a process that outlives tracer and client (``restorerprocess``). Nothing is written where memory
does not show what the tracer has written.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.client.crashrestorer import CrashRestorer
from dprobes.engines.ptrace.client.jumpremoval import remove_jumps
from dprobes.engines.ptrace.client.memoryremoval import SHARED, UNMAPPING_PATIENCE, unmap_left_memory
from dprobes.engines.ptrace.reports import Removed
from dprobes.engines.ptrace.restorerwire import FilesShared, JumpsCopied, JumpsPlanned, MemoryUnmapped, PagesMapped
from dprobes.engines.ptrace.tracer.native.patches import Patches
from dprobes.errors import DprobesError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.native.lifemark import HAS_ENDED
from dprobes.target.processmaps import mappings_of

if TYPE_CHECKING:
    from dprobes.engines.ptrace.sitepatch import SitePatch

__all__ = ["Restored", "RestorerList"]

_SLOTS = -1
"""What pages for copies of instructions are noted by, which belong to no region."""


class Restored(NamedTuple):
    """
    Say what was restored: places of breakpoints and jumps.

    ``cleared`` are the threads whose debug registers were cleared, ``left`` those for which that was not possible.
    """

    places: int = 0
    cleared: int = 0
    left: int = 0


class RestorerList:
    """The list; ``restored`` is what has been restored so far."""

    def __init__(self) -> None:
        self.restored = Restored()
        self._restorer = CrashRestorer()
        self._jumps: dict[int, Patches] = {}
        """By process; what belongs together in it is known by its region."""
        self._planned: dict[int, dict[int, list[SitePatch]]] = {}
        """The jumps, by process and region."""
        self._files: dict[int, FilesShared] = {}
        """The files that a process was about to map, as long as nobody has said where it has them."""

    def note(self, message: object) -> None:
        """Note what a message of the tracer says; most say nothing that matters here."""
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
            case JumpsCopied(pid, parent):
                self._copy_jumps(pid, parent)
            case Removed(pid, ()):
                self._jumps.pop(pid, None)
                self._planned.pop(pid, None)
                self._files.pop(pid, None)
                self._restorer.note(message)
            case _:
                self._restorer.note(message)

    def _copy_jumps(self, pid: int, parent: int) -> None:
        """Note that a process has a copy of its parent's memory."""
        if parent in self._jumps:
            former = self._jumps[parent]
            code = {region: list(ranges) for region, ranges in former.code.items()}
            self._jumps[pid] = Patches(dict(former.memories), dict(former.by_site), code)
            planned = self._planned.get(parent, {})
            self._planned[pid] = {region: list(patches) for region, patches in planned.items()}

    def _forget_memory(self, pid: int, region: int) -> None:
        """Note that a region is not mapped in a process any more, nor what belonged to it, and has no jumps."""
        gone = set(self._planned.get(pid, {}).pop(region, ()))
        if (mine := self._jumps.get(pid)) is not None:
            mine.forget_program(region)
            mine.by_site = {address: patch for address, patch in mine.by_site.items() if patch not in gone}

    def restore_breakpoints(self, tracer: int = 0) -> None:
        """Put bytes back, and let no handler begin any more; the dying ``tracer``, if it is held, has its threads."""
        for pid, patches in self._jumps.items():
            _disable(pid, patches)
        self._count(self._restorer.restore(self._jumps, tracer, self._copy_jumps), 0, 0)

    def remove_the_rest(self) -> None:
        """Take out what needs threads that stand still, once the tracer has let go of them."""
        cleared, left = self._restorer.clear()
        places = 0
        for pid, planned in self._planned.items():
            with contextlib.suppress(OSError):  # its threads cannot be stopped: another tracer was quicker
                places += remove_jumps(pid, [patch for patches in planned.values() for patch in patches])
        self._count(places, cleared, left)

    def unmap(self) -> None:
        """Unmap what nobody is in any more: a tracer that comes to its end in peace may find a thread in it."""
        until = time.monotonic() + UNMAPPING_PATIENCE  # for all of them: the client waits
        for pid in self._jumps.keys() | self._files.keys():
            with contextlib.suppress(OSError):
                unmap_left_memory(pid, self._jumps.get(pid) or Patches(), until, self._files.get(pid))

    def _count(self, places: int, cleared: int, left: int) -> None:
        before = self.restored
        self.restored = Restored(before.places + places, before.cleared + cleared, before.left + left)


def _disable(pid: int, patches: Patches) -> None:
    """
    Write the mark of the end, with which the shared memory begins (``inline.memory.lifemark``).

    It may be unmapped already, and the process have something of its own there: the tracer says nothing at its end.
    """
    with contextlib.suppress(OSError, DprobesError):
        mapped = {each.start for each in mappings_of(pid) if each.path.startswith(SHARED)}
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for each in patches.memories.values():
                if each.region in mapped:
                    os.pwrite(memory, HAS_ENDED.to_bytes(4, "little"), each.region)
        finally:
            os.close(memory)
