"""
The ids that threads have in a PID namespace of their process's own, for handlers in it: they find them there.

The C library of a process has nothing else, while records, tables and all that is said of threads have the ids of our
namespace. So each thread is entered into a table of its process (``native.processpage``) before it runs, and taken out
when it has ended, before somebody else can get the same ids. A process that is in no nested namespace has no table.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.native.localids import LocalIds
from dprobes.errors import reason_of
from dprobes.native.processpage import PROCESS_IS_NESTED, PROCESS_PID, THREAD, thread_window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace

__all__ = ["NO_ROOM", "begin_ids", "enter_thread", "lacks_ids", "leave_thread", "own_pages"]

NO_ROOM = "it has more threads than there is room for with their ids in its PID namespace"
_SHARED = "another process runs in its memory"


def own_pages(space: AddressSpace, pid: int) -> None:
    """Let handlers in the copy of a process know its id, and whether its threads have others there, before it runs."""
    space.local_ids = LocalIds.of(pid) if space.patches.memories else None
    for memory in space.patches.memories.values():
        with contextlib.suppress(OSError):
            _write_head(space, memory.page, pid)


def begin_ids(space: AddressSpace, page: int, pid: int, tids: Iterable[int]) -> str | None:
    """
    Let handlers that have a page in a process know its threads, all of them stopped; return why that cannot be.

    It takes nothing but a look for a process whose threads have the same ids there.
    """
    if space.local_ids is None or space.local_ids.pid not in space.pids:
        space.local_ids = LocalIds.of(pid)
    ids = space.local_ids
    if ids is None:
        return None
    if ids.pid != pid:
        return _SHARED
    try:
        _write_head(space, page, pid)
        for tid in tids:
            local = ids.local_of(tid)
            if local is not None and not _enter(space, page, local, tid):
                ids.is_full = True
    except OSError as error:
        return reason_of(error)
    return NO_ROOM if ids.is_full else None


def enter_thread(space: AddressSpace, pid: int, tid: int) -> bool:
    """Let handlers know a thread that has not run yet; return False if there is no room: then none may run there."""
    ids = space.local_ids
    if ids is None or ids.pid != pid:
        return True
    ids.by_thread.pop(tid, None)
    local = ids.local_of(tid)
    if local is None:
        return True
    for memory in space.patches.memories.values():
        with contextlib.suppress(OSError):  # it has been killed
            ids.is_full |= not _enter(space, memory.page, local, tid)
    return not ids.is_full


def leave_thread(space: AddressSpace, tid: int) -> None:
    """Take a thread out that has ended, and has not been waited for."""
    ids = space.local_ids
    if ids is None or (local := ids.by_thread.pop(tid, None)) is None:
        return
    for memory in space.patches.memories.values():
        with contextlib.suppress(OSError):
            for place, found, other in _places(space, memory.page, local):
                if (found, other) == (local, tid):
                    os.pwrite(space.memory, bytes(THREAD.size), place)


def lacks_ids(space: AddressSpace) -> bool:
    """Return whether there are threads in a space that handlers would not know."""
    return space.local_ids is not None and space.local_ids.is_full


def _write_head(space: AddressSpace, page: int, pid: int) -> None:
    space.write(page + PROCESS_IS_NESTED, int(space.local_ids is not None).to_bytes(4, "little"))
    space.write(page + PROCESS_PID, pid.to_bytes(4, "little"))


def _enter(space: AddressSpace, page: int, local: int, tid: int) -> bool:
    """Write a thread where a page has it already, or nothing; return whether there was such a place."""
    found = list(_places(space, page, local))
    place = next((place for place, known, _ in found if known == local), None)
    if place is None:
        place = next((place for place, known, _ in found if not known), None)
    if place is None:
        return False
    os.pwrite(space.memory, THREAD.pack(local, tid), place)
    return True


def _places(space: AddressSpace, page: int, local: int) -> Iterable[tuple[int, int, int]]:
    """Return where a page may have a thread, and what is there: a local id and ours."""
    window = thread_window(local)
    data = os.pread(space.memory, len(window) * window.step, page + window.start)
    pairs = THREAD.iter_unpack(data[: len(data) // THREAD.size * THREAD.size])
    return [(page + at, found, tid) for at, (found, tid) in zip(window, pairs, strict=False)]
