"""
Code with our breakpoints in it that has come to another place: a program moved it (mremap(2)), or copied it.

A thread runs into a breakpoint there that nobody knows. Code that was moved is a mapping of its file still, in which
the probepoints are placed anew. In a copy the original byte is put back, which is what would be there without us.

A program that catches SIGTRAP is left alone: it may have put breakpoints of its own into code like ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from dprobes.engines.linux.procfs import process_field
from dprobes.engines.ptrace.tracer.processes import INT3

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.modulebreakpoints import ModuleWatcher
    from dprobes.engines.ptrace.tracer.processes import AddressSpace, Thread

__all__ = ["heal"]

_ALIKE = 16
"""How many bytes from a breakpoint on must be the same for a place to be a copy of it."""


def heal(thread: Thread, address: int, modules: ModuleWatcher) -> bool:
    """
    Take away a breakpoint of ours at which a thread has stopped, and which is at no address that we know.

    Return whether there was one; the thread is to be set back onto the instruction then.
    """
    space = thread.space
    if _catches_traps(thread.tid):
        return False
    modules.inherit(space, thread)
    if address in space.breakpoints or address in space.former:
        return True
    with contextlib.suppress(OSError):
        here = os.pread(space.memory, _ALIKE, address)
        original = _original(space, here)
        if original is not None and here[:1] == INT3:
            os.pwrite(space.memory, bytes([original.original]), address)
            return True
    return False


def _original(space: AddressSpace, copy: bytes) -> Breakpoint | None:
    """Return the breakpoint of which there is a copy with these bytes."""
    if len(copy) < _ALIKE:
        return None
    for breakpoint_ in space.breakpoints.values():
        with contextlib.suppress(OSError):
            if os.pread(space.memory, _ALIKE, breakpoint_.address) == copy:
                return breakpoint_
    return None


def _catches_traps(tid: int) -> bool:
    caught = process_field(tid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) & 1 << signal.SIGTRAP - 1)
