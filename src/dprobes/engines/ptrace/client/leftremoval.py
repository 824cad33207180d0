"""
The removal of what killed runs have left in a process: jumps, breakpoints beside them, and their memory.

It is listed in the process's memory (``leftmanifest``). What is listed by a run that lives is left alone: the mark in
its shared memory says so (``native.lifemark``).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.interface import LeftThings, Notice
from dprobes.engines.linux.procfs import process_field
from dprobes.engines.ptrace.client.jumpremoval import remove_jumps
from dprobes.engines.ptrace.client.memoryremoval import SHARED, unmap_left_memory
from dprobes.engines.ptrace.leftmanifest import ENTRIES, FILE_NAME, entries_in, length_in
from dprobes.engines.ptrace.tracer.native.patches import Patches
from dprobes.errors import DprobesError
from dprobes.native.lifemark import HAS_ENDED
from dprobes.target.processmaps import mappings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dprobes.engines.ptrace.leftmanifest import LeftEntry

__all__ = ["left_notice", "remove_all_left", "remove_left"]

_MAPPING = f"/memfd:{FILE_NAME}"


_LISTS_MAX = 64
"""How many lists of a process are read, each of megabytes: it could map as many as it likes, of its own making."""


def remove_left(pid: int) -> LeftThings | None:
    """Take out what killed runs have left in a process; None if there is nothing, or it may not be looked at."""
    found = _left_in(pid)
    if not found or int(process_field(pid, "TracerPid") or 0):
        return None
    # What could not be written at once was entered again.
    patches = list({(patch.writes, patch.originals): patch for entry in found for patch in entry.writes}.values())
    left = Patches({entry.memory.region: entry.memory for entry in found})
    for entry in found:
        left.code.setdefault(entry.memory.region, []).extend(entry.code)
    places = remove_jumps(pid, patches)
    return LeftThings(pid, places, unmap_left_memory(pid, left))


def remove_all_left() -> Iterator[LeftThings]:
    """Do so in all processes that may be looked at; give what was taken out of each that had something."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (left := remove_left(int(name))) is not None:
            yield left


def left_notice(left: LeftThings) -> Notice:
    """Say what was taken out."""
    return Notice(f"killed runs had left something in process {left.pid}: {left.said}", is_warning=False)


def _left_in(pid: int) -> list[LeftEntry]:
    """Return what is listed in the memory of a process by runs that have ended."""
    try:
        mappings = mappings_of(pid)
    except DprobesError:
        return []
    starts = [mapping.start for mapping in mappings if mapping.path.startswith(_MAPPING) and not mapping.offset]
    if not starts:
        return []
    shared = {mapping.start for mapping in mappings if mapping.path.startswith(SHARED)}
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
    Return whether the run has ended that shares memory with a process: that begins with its mark.

    Where it is not among the ``shared`` addresses any more, and its list is still there, its return was cut short.
    """
    if entry.memory.region not in shared:
        return True
    try:
        return bool(int.from_bytes(os.pread(memory, 4, entry.memory.region), "little") & HAS_ENDED)
    except (OSError, OverflowError):
        return False
