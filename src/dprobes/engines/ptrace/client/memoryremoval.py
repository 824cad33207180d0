"""
The unmapping of memory that handlers ran in, from outside, when the tracer was killed before it could.

A thread of the process does that for us (``tracer.injection``), while all of them stand still and none can come back
into the memory. It is given back only if it still is what was mapped: the file in memory that was shared with it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import threads_of
from dprobes.engines.linux.stops import StopKind, classify_stop
from dprobes.engines.ptrace.client.watchpointremoval import PATIENCE, seize_again
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.injection import InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.nativeremoval import is_left, unmap_native
from dprobes.engines.ptrace.tracer.state import Thread, ThreadGoneError, ThreadState, ThreadTable
from dprobes.engines.ptrace.tracer.stopper import Stopper
from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters
from dprobes.errors import DprobesError
from dprobes.target.processmaps import parse_maps, read_maps

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.native.patches import Patches

__all__ = ["unmap_left_memory"]

_ATTEMPTS = 5
_PAUSE = 0.02
"""Seconds until it is looked again whether a thread is in the memory."""

_SHARED = "/memfd:dprobes"


def unmap_left_memory(pid: int, patches: Patches) -> bool:
    """Unmap in a process what is mapped for handlers; return False if that is not possible, and it stays."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE)
        if _unmap(pid, patches):
            return True
    return False


def _present(pid: int, patches: Patches) -> Patches | None:
    """Return what of some memory is mapped as it was, None if it is not ours any more."""
    try:
        mappings = parse_maps(read_maps(pid))
    except DprobesError:
        return None
    shared = {mapping.start for mapping in mappings if mapping.path.startswith(_SHARED)}
    memories = {number: each for number, each in patches.memories.items() if each.region in shared}
    code = [
        (start, end)
        for start, end in patches.code
        if any(m.start <= start and end <= m.end and m.permissions == "r-xp" and not m.inode for m in mappings)
    ]
    return type(patches)(memories, {}, code) if memories or code else None


def _unmap(pid: int, patches: Patches) -> bool:
    present = _present(pid, patches)
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
