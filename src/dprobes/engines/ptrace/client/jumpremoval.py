"""
The removal of jumps from code from outside, when the tracer itself was killed.

Handlers in the process do no harm without a tracer, but nobody wants them any more. Code is changed while no thread of
the process runs: so each is seized once more, and stopped, until the bytes of the file are back.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import threads_of
from dprobes.engines.linux.stops import StopKind, classify_stop
from dprobes.engines.ptrace.client.watchpointremoval import PATIENCE, seize_again
from dprobes.engines.ptrace.sitepatch import without_jump
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.state import Thread, ThreadState, ThreadTable
from dprobes.engines.ptrace.tracer.stopper import Stopper
from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ptrace.sitepatch import SitePatch

__all__ = ["remove_jumps"]


def remove_jumps(pid: int, patches: Sequence[SitePatch]) -> int:
    """Put the bytes of the file back wherever a jump is in the memory of a process; return how many there were."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        present = [pieces for patch in patches if (pieces := _pieces_there(memory, patch))]
        return _remove(pid, memory, present) if present else 0
    finally:
        os.close(memory)


def _pieces_there(memory: int, patch: SitePatch) -> list[tuple[int, bytes]]:
    """
    Return what is to be written to take a jump out: address and bytes of each piece of it that is there.

    A jump that lies in two pages may have been written in part.
    """
    found = []
    for (address, data), original in zip(reversed(patch.writes), reversed(patch.originals), strict=True):
        with contextlib.suppress(OSError):
            there = os.pread(memory, len(data), address)
            left = without_jump(there, data, original)
            if left is not None and left != there:
                found.append((address, left))
    return found


def _remove(pid: int, memory: int, jumps: Sequence[list[tuple[int, bytes]]]) -> int:
    threads = ThreadTable()
    stopper = Stopper(threads, DebugRegisters(lambda _: None).program_and_report, lambda _: None)
    until = time.monotonic() + PATIENCE
    space = AddressSpace.closed(8)
    for tid in threads_of(pid):
        with contextlib.suppress(OSError):
            if seize_again(tid, until):
                threads[tid] = Thread(tid, pid, space, ThreadState.RUNNING)
    held = stopper.stop(list(threads.values()))
    for pieces in jumps:
        for address, original in pieces:
            with contextlib.suppress(OSError):
                os.pwrite(memory, original, address)
    for thread in held:
        with contextlib.suppress(OSError):
            stopper.waits.hide_interruption(thread)
            ptracecalls.detach(thread.tid)
    while stopper.deferred:
        tid, status = stopper.oldest_deferred()
        kind, number = classify_stop(status)
        if kind is not StopKind.EXITED:
            with contextlib.suppress(OSError):
                ptracecalls.detach(tid, number if kind is StopKind.SIGNAL else 0)
    return len(jumps)
