"""Taking over a process that runs already: all its threads, and a vfork child that runs in its memory."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Literal

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import children_of, process_field, thread_state, threads_of
from dprobes.engines.ptrace.tracer.processes import AddressSpace, ThreadState
from dprobes.engines.x86.debugregs import CONTROL

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.processes import Thread
    from dprobes.engines.ptrace.tracer.processtree import Family
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["Seizer"]


class Seizer:
    """Seize threads and enter them in the table."""

    def __init__(self, threads: dict[int, Thread], family: Family, stopper: Stopper) -> None:
        self._threads = threads
        self._family = family
        self._stopper = stopper

    def seize_all(self, pid: int) -> list[Thread]:
        """
        Seize and stop all threads of a process; return those that stopped for no other reason.

        A thread that is making a new thread or process at this moment has finished when it stops; so no breakpoint can
        get into a child that is not traced. New threads may appear meanwhile, so until none is new.
        """
        held: list[Thread] = []
        space: AddressSpace | None = None
        while True:
            new: list[Thread] = []
            for tid in sorted(threads_of(pid) - self._threads.keys(), key=lambda tid: tid != pid):
                try:
                    ptracecalls.seize(tid)
                except OSError as error:
                    # A thread may have ended, the first one as a zombie. All others must be ours: a breakpoint is
                    # deadly for a thread that is not traced.
                    has_ended = error.errno == errno.ESRCH or thread_state(tid) in ("Z", "X")
                    if has_ended and threads_of(pid) != {tid}:
                        continue
                    if process_field(tid, "TracerPid") == str(os.getpid()):
                        continue  # born of a thread that is ours already, which has yet to tell of it
                    raise
                if space is None:
                    space = AddressSpace.of_thread(tid, _word_size_of(tid))
                    space.pids.add(pid)
                new.append(self._family.enter(tid, pid, space))
            if not new:
                break
            held += self._stopper.stop(new)
            for thread in new:
                with contextlib.suppress(OSError):  # it has not stopped
                    thread.debug.has_foreign = bool(ptracecalls.get_debug_register(thread.tid, CONTROL))
            for thread in new:
                if thread.state is ThreadState.RUNNING and thread.tid not in self._stopper.deferred:
                    held += self._seize_vfork_child(thread)
        if space is None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return held

    def _seize_vfork_child(self, parent: Thread) -> list[Thread]:
        """Seize the child that runs in the memory of ``parent``, which cannot stop because it waits for that."""
        held: list[Thread] = []
        for pid in children_of(parent.pid, parent.tid):
            if not ptracecalls.same_memory(parent.tid, pid) or pid in self._threads:
                continue
            ptracecalls.seize(pid)
            parent.state = ThreadState.VFORKING
            parent.space.pids.add(pid)
            held += self._stopper.stop([self._family.enter(pid, pid, parent.space)])
        return held


def _word_size_of(tid: int) -> Literal[4, 8]:
    """Return the word size of the program that a thread runs, which need not be stopped."""
    with open(f"/proc/{tid}/exe", "rb") as file:
        return 4 if file.read(5)[4:] == b"\x01" else 8  # EI_CLASS: ELFCLASS32
