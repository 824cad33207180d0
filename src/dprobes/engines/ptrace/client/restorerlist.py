"""
What a killed tracer may have left in processes, and its removal: breakpoints, watchpoints, jumps, and their memory.

The list is kept by a process that outlives tracer and client (``restorerprocess``). Nothing is written where memory
does not show what the tracer has written.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.client.crashrestorer import CrashRestorer
from dprobes.engines.ptrace.client.jumpremoval import remove_jumps
from dprobes.engines.ptrace.client.memoryremoval import unmap_left_memory
from dprobes.engines.ptrace.restorerwire import JumpsCopied, JumpsPlanned, PagesMapped
from dprobes.engines.ptrace.tracer.native.patches import Patches
from dprobes.engines.ptrace.wire import Removed
from dprobes.lazynamedtuple import NamedTuple
from dprobes.native.lifemark import HAS_ENDED

if TYPE_CHECKING:
    from dprobes.engines.ptrace.sitepatch import SitePatch

__all__ = ["Restored", "RestorerList"]


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
        self._planned: dict[int, list[SitePatch]] = {}

    def note(self, message: object) -> None:
        """Note what a message of the tracer says; most say nothing that matters here."""
        match message:
            case JumpsPlanned(pid, memory, pages, patches):
                mine = self._jumps.setdefault(pid, Patches())
                mine.memories[memory.region] = memory
                mine.code += pages
                mine.by_site.update((address, patch) for patch in patches for address in patch.addresses)
                self._planned.setdefault(pid, []).extend(patches)
            case PagesMapped(pid, pages):
                self._jumps.setdefault(pid, Patches()).code += pages
            case JumpsCopied(pid, parent):
                self._copy_jumps(pid, parent)
            case Removed(pid, ()):
                self._jumps.pop(pid, None)
                self._planned.pop(pid, None)
                self._restorer.note(message)
            case _:
                self._restorer.note(message)

    def _copy_jumps(self, pid: int, parent: int) -> None:
        """Note that a process has a copy of its parent's memory."""
        if parent in self._jumps:
            former = self._jumps[parent]
            self._jumps[pid] = Patches(dict(former.memories), dict(former.by_site), list(former.code))
            self._planned[pid] = list(self._planned.get(parent, ()))

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
                places += remove_jumps(pid, planned)
        self._count(places, cleared, left)

    def unmap(self) -> None:
        """Unmap what nobody is in any more: a tracer that comes to its end in peace may find a thread in it."""
        for pid, patches in self._jumps.items():
            with contextlib.suppress(OSError):
                unmap_left_memory(pid, patches)

    def _count(self, places: int, cleared: int, left: int) -> None:
        before = self.restored
        self.restored = Restored(before.places + places, before.cleared + cleared, before.left + left)


def _disable(pid: int, patches: Patches) -> None:
    """Write the mark of the end, with which the shared memory begins (``inline.memory.lifemark``)."""
    with contextlib.suppress(OSError):
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for each in patches.memories.values():
                os.pwrite(memory, HAS_ENDED.to_bytes(4, "little"), each.region)
        finally:
            os.close(memory)
