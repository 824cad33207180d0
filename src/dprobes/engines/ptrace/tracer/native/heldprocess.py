"""The holding of a process while its memory changes, with a thread that can make system calls for us."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.state import ThreadGoneError, ThreadState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.tracer.state import Thread, ThreadTable
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["process_held"]


@contextlib.contextmanager
def process_held(threads: ThreadTable, stopper: Stopper, pid: int) -> Iterator[list[Thread]]:
    """
    Hold all threads that run in the memory of a process; give one that can make system calls now, if there is any.

    That is one that has stopped for nothing else, one that waits for jumps, or one that has just run into a
    breakpoint: its trap is taken already, and it stands where it can go on.
    """
    mine = threads.of_process(pid)
    held = stopper.stop(threads.in_space(mine[0].space)) if mine else []
    ready: list[Thread] = []
    for thread in held:
        with contextlib.suppress(ProcessLookupError, ThreadGoneError):
            stopper.waits.hide_interruption(thread)
            ready.append(thread)
            break
    if not ready:
        ready = [thread for thread in mine if thread.awaits_jumps and thread.state is ThreadState.STOPPED][:1]
    if not ready:
        ready = [thread for thread in mine if thread.trapped and thread.tid in stopper.deferred][:1]
    try:
        yield ready
    finally:
        for thread in held:
            with contextlib.suppress(ProcessLookupError):
                stopper.release(thread)
