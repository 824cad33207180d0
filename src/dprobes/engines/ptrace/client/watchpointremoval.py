"""
The removal of watchpoints from debug registers from outside, when the tracer itself was killed.

The kernel lets a dead tracer's threads run on with their debug registers set, and an access would end the program by a
SIGTRAP. So every thread is seized once more, stopped, cleared, and let go. Threads that are born meanwhile need
nothing: the kernel gives them empty registers.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import process_field, threads_of
from dprobes.engines.linux.stops import StopKind, classify_stop
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.state import Thread, ThreadState, ThreadTable
from dprobes.engines.ptrace.tracer.stopper import Stopper, await_stop
from dprobes.engines.ptrace.tracer.watchpoints import DebugRegisters
from dprobes.engines.x86.debugregs import CONTROL, SLOTS, STATUS, decode, slot_mask, slots_hit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.x86.debugregs import Watch

__all__ = ["PATIENCE", "clear_processes", "seize_again"]

PATIENCE = 2.0
"""Seconds to wait for the kernel to let go of a dead tracer's threads, and for a thread that cannot stop now."""

_PAUSE = 0.0002


def clear_processes(watches: Mapping[int, tuple[Watch, ...]]) -> tuple[int, int]:
    """
    Take the watches of each process out of the registers of all its threads.

    Return how many threads were cleared, and how many may still have them because they could not be stopped.
    """
    threads = ThreadTable()
    stopper = Stopper(threads, DebugRegisters(lambda _: None).program_and_report, lambda _: None)
    missed = 0
    until = time.monotonic() + PATIENCE
    for pid in watches:
        space = AddressSpace.closed(8)
        with contextlib.suppress(OSError):
            for tid in threads_of(pid):
                try:
                    if seize_again(tid, until):
                        threads[tid] = Thread(tid, pid, space, ThreadState.RUNNING)
                except OSError:
                    missed += 1
    cleared = 0
    while threads:
        for thread in stopper.stop([t for t in threads.values() if t.state is ThreadState.RUNNING]):
            with contextlib.suppress(OSError):
                cleared += _let_go(thread, watches[thread.pid], stopper)
            del threads[thread.tid]
        while stopper.deferred:
            tid, status = stopper.oldest_deferred()
            thread = threads.pop(tid)
            with contextlib.suppress(OSError):
                cleared += _let_go_at(thread, status, watches[thread.pid], stopper)
        for thread in [t for t in threads.values() if t.state is ThreadState.ENDED]:
            del threads[thread.tid]
        if time.monotonic() > until:
            missed += len(threads)
            break
    return cleared, missed


def seize_again(tid: int, until: float) -> bool:
    """Seize a thread as soon as its dead tracer has let go of it; return False if it has ended."""
    while True:
        try:
            ptracecalls.seize(tid, follow=False)
        except OSError as error:
            if error.errno == errno.ESRCH or process_field(tid, "State")[:1] in ("Z", "X", ""):
                return False
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)
        else:
            return True


def _let_go(thread: Thread, watches: tuple[Watch, ...], stopper: Stopper) -> bool:
    """Clear the registers of a thread that stopped because we asked for it, and detach it; return if any was set."""
    was_set, hit = _clear(thread.tid, watches)
    if hit and _has_pending_trap(thread.tid):
        # The trap comes before the thread runs any code.
        ptracecalls.resume(thread.tid)
        status = await_stop(thread.tid)
        return _let_go_at(thread, status, watches, stopper) or was_set
    stopper.waits.hide_interruption(thread)
    ptracecalls.detach(thread.tid)
    return was_set


def _let_go_at(thread: Thread, status: int, watches: tuple[Watch, ...], stopper: Stopper) -> bool:
    """Clear the registers of a thread that stopped for a reason of its own, and detach it; return if any was set."""
    kind, number = classify_stop(status)
    if kind is StopKind.EXITED:
        return False
    was_set, _ = _clear(thread.tid, watches)
    deliver = number if kind is StopKind.SIGNAL else 0
    if deliver == signal.SIGTRAP:
        code = ptracecalls.get_signal_info(thread.tid, ptracecalls.SignalInfo())
        if code == ptracecalls.TRAP_HWBKPT:
            deliver = 0
    stopper.waits.hide_interruption(thread, deliver)
    ptracecalls.detach(thread.tid, deliver)
    return was_set


def _clear(tid: int, watches: tuple[Watch, ...]) -> tuple[bool, bool]:
    """Clear our slots; return whether there were any, and whether one of them was hit."""
    control = before = ptracecalls.get_debug_register(tid, CONTROL)
    mine = [s for s in SLOTS if decode(control, s, ptracecalls.get_debug_register(tid, s)) in watches]
    for slot in mine:
        control &= ~slot_mask(slot)
    if control != before:
        ptracecalls.set_debug_register(tid, CONTROL, control)
    hit = slots_hit(ptracecalls.get_debug_register(tid, STATUS))
    return bool(mine), any(slot in mine for slot in hit)


def _has_pending_trap(tid: int) -> bool:
    pending = process_field(tid, "SigPnd")
    return bool(pending) and bool(int(pending, 16) & 1 << (signal.SIGTRAP - 1))
