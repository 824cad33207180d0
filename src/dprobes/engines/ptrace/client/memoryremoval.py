"""
The unmapping of memory that handlers ran in, from outside, when the tracer was killed before it could.

A thread of the process does that for us (``tracer.injection``), while all of them stand still and none can come back
into the memory. It is given back only if it still is what was mapped: the file in memory that was shared with it. Some
of it may be gone already, in the order of ``tracer.native.nativeremoval``, if the tracer was killed in the middle.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import threads_of
from dprobes.engines.linux.stops import StopKind, classify_stop
from dprobes.engines.ptrace.client.watchpointremoval import PATIENCE, seize_again
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.injection import InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.nativeremoval import is_left, unmap_native
from dprobes.engines.ptrace.tracer.native.patches import NativeMemory
from dprobes.engines.ptrace.tracer.state import Thread, ThreadGoneError, ThreadState, ThreadTable
from dprobes.engines.ptrace.tracer.stopper import Stopper
from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters
from dprobes.errors import DprobesError
from dprobes.target.processmaps import mappings_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from dprobes.engines.ptrace.restorerwire import FilesShared
    from dprobes.engines.ptrace.tracer.native.patches import Patches

__all__ = ["SHARED", "UNMAPPING_PATIENCE", "unmap_left_memory"]

UNMAPPING_PATIENCE = 2.0
"""Seconds for which threads are let leave the memory: one may have to wait for a processor."""
_PAUSE, _PAUSE_MAX = 0.02, 0.2
"""Seconds until it is looked again whether a thread is in it: at first, and at most."""

SHARED = "/memfd:dprobes"
"""How the names of files in memory begin that are shared with processes."""


def unmap_left_memory(pid: int, patches: Patches, until: float | None = None, begun: FilesShared | None = None) -> bool:
    """
    Unmap in a process what is mapped for handlers; return False if that is not possible, and it stays.

    What was ``begun`` to be mapped is unmapped wherever it is. It is tried once, and again ``until`` a time of the
    monotonic clock.
    """
    until = time.monotonic() + UNMAPPING_PATIENCE if until is None else until
    pause = _PAUSE
    while not _unmap(pid, patches, begun):
        if time.monotonic() > until:
            return False
        # A thread gets nowhere if it is stopped whenever it has a processor.
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX)
    return True


def _present(pid: int, patches: Patches, begun: FilesShared | None) -> Patches | None:
    """Return what of some memory is mapped as it was, or was begun; None if there is nothing of ours any more."""
    try:
        mappings = mappings_of(pid)
    except DprobesError:
        return None
    ours = [mapping for mapping in mappings if mapping.path.startswith(SHARED)]
    shared = {mapping.start for mapping in ours}
    memories = {number: each for number, memory in patches.memories.items() if (each := _rest_of(memory, shared))}
    known = {start for memory in memories.values() for start, _ in memory.shared}
    if begun is not None:
        for mapping in ours:
            if (mapping.device, mapping.inode) in begun.files and mapping.start not in known:
                memories[mapping.start] = NativeMemory(0, 0, mapping.start, mapping.end - mapping.start)
        if _has_page(pid, *begun.page):
            memories[begun.page[0]] = NativeMemory(*begun.page, 0, 0)
    anonymous = [m for m in mappings if m.permissions == "r-xp" and not m.inode]
    code = {
        number: [(start, end) for start, end in ranges if any(m.start <= start and end <= m.end for m in anonymous)]
        for number, ranges in patches.code.items()
    }
    return type(patches)(memories, {}, code) if memories or any(code.values()) else None


def _has_page(pid: int, start: int, size: int) -> bool:
    """Return whether memory is there of which a child would not inherit the contents (``wf`` in smaps, proc(5))."""
    is_it = False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
        for line in file if size else ():
            name, _, rest = line.partition(" ")
            if "-" in name:
                is_it = [int(each, 16) for each in name.split("-")] == [start, start + size]
            elif is_it and name == "VmFlags:":
                return "wf" in rest.split()
    return False


def _rest_of(memory: NativeMemory, shared: Collection[int]) -> NativeMemory | None:
    """Return what of the memory of handlers is still there, where files in memory are mapped at ``shared``."""
    size, own = (memory.size, memory.own) if memory.region in shared else (0, 0)
    others = tuple(each for each in memory.others if each[0] in shared)
    manifest = memory.manifest if memory.manifest is not None and memory.manifest[0] in shared else None
    rest = replace(memory, own=own, size=size, others=others, manifest=manifest)
    return rest if size or others or manifest else None


def _unmap(pid: int, patches: Patches, begun: FilesShared | None) -> bool:
    present = _present(pid, patches, begun)
    if present is None:
        return True
    threads = ThreadTable()
    stopper = Stopper(threads, DebugRegisters(lambda _: None).program_and_report, lambda _: None)
    until = time.monotonic() + PATIENCE
    space = AddressSpace.of_thread(pid, 8)
    space.patches = present
    try:
        for tid in threads_of(pid):
            with contextlib.suppress(OSError):
                if seize_again(tid, until):
                    threads[tid] = Thread(tid, pid, space, ThreadState.RUNNING)
        held = stopper.stop(list(threads.values()))
        try:
            return _unmap_if_left(space, threads, held)
        finally:
            _let_go(stopper, held)
    finally:
        space.close()


def _unmap_if_left(space: AddressSpace, threads: ThreadTable, held: list[Thread]) -> bool:
    living = [thread for thread in threads.values() if thread.state is not ThreadState.ENDED]
    if len(held) < len(living) or not is_left(space, held):
        return False
    for thread in held:
        with contextlib.suppress(InjectionError, ThreadGoneError, OSError):
            if not may_inject(thread):
                return True
            with injecting(thread) as call:
                unmap_native(space, call)
            return True
    return False


def _let_go(stopper: Stopper, held: list[Thread]) -> None:
    for thread in held:
        with contextlib.suppress(OSError):
            stopper.waits.hide_interruption(thread)
            ptracecalls.detach(thread.tid)
    while stopper.deferred:
        tid, status = stopper.oldest_deferred()
        kind, number = classify_stop(status)
        if kind is not StopKind.EXITED:
            with contextlib.suppress(OSError):
                ptracecalls.detach(tid, number if kind is StopKind.SIGNAL and number != signal.SIGTRAP else 0)
