"""
The debug registers of the traced threads: bringing them in line with the watchpoints, and reading what was hit.

Every thread has registers of its own, empty when it is born and after an exec, and the kernel keeps them when a tracer
goes away. So each thread is armed before it runs the first time, and disarmed before it is let go.

Only slots that are ours are touched. One that somebody set before us stays as it is; its hits are the program's.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.ptrace.wire import ProbeStatus
from dprobes.engines.x86.debugregs import CONTROL, SLOTS, STATUS, assign, control_bits, is_enabled, slot_mask, slots_hit
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer.processes import Thread, Watchpoint

__all__ = ["Armer", "Refusal"]

Refusal = tuple[ProbeState, str]
"""Why a watchpoint has no debug register: the state to report, and the reason."""


class Armer:
    """Set and read the debug registers of stopped threads; ``report`` takes what the client is to hear."""

    def __init__(self, report: Callable[[ProbeStatus], None]) -> None:
        self._report = report

    def arm(self, thread: Thread) -> dict[Watchpoint, Refusal]:
        """Make a stopped thread watch what its address space has watchpoints for; return what was refused."""
        watchpoints = thread.space.watchpoints
        wanted = tuple(w for w in watchpoints if thread.pid in w.probe.program.reach.pids)
        refused = self._set(thread, wanted)
        thread.debug.armed = watchpoints
        return refused

    def bring_in_line(self, thread: Thread) -> None:
        """Arm a thread that is about to run, and report what was refused."""
        for watchpoint, (state, reason) in self.arm(thread).items():
            missed = f"{reason}; accesses by thread {thread.tid} are not seen"
            probe = watchpoint.probe
            self._report(ProbeStatus(probe.program.number, (probe.number,), thread.pid, state, reason=missed))

    def disarm(self, thread: Thread) -> None:
        """Take our watchpoints out of the registers of a stopped thread."""
        if thread.debug.slots:
            self._set(thread, ())

    def take_hits(self, thread: Thread) -> tuple[list[Watchpoint], bool]:
        """
        Return the watchpoints that a stopped thread has hit since the last call, and whether it hit others' as well.

        A watchpoint that was taken away while its trap was under way is among them.
        """
        hit = slots_hit(ptracecalls.get_debug_register(thread.tid, STATUS))
        if not hit:
            return [], False
        ptracecalls.set_debug_register(thread.tid, STATUS, 0)  # the processor only ever adds bits
        debug = thread.debug
        found = []
        foreign = False
        for slot in hit:
            watchpoint = debug.superseded.get(slot) or debug.slots.get(slot)
            if watchpoint is None:
                foreign = True
            else:
                found.append(watchpoint)
        debug.superseded.clear()
        return found, foreign

    def _set(self, thread: Thread, wanted: tuple[Watchpoint, ...]) -> dict[Watchpoint, Refusal]:
        tid, debug = thread.tid, thread.debug
        control = before = ptracecalls.get_debug_register(tid, CONTROL)
        # A new thread shows its parent's DR7, but has none of the addresses: nothing is watched there.
        watching = {s for s in SLOTS if is_enabled(control, s) and ptracecalls.get_debug_register(tid, s)}
        foreign = watching - debug.slots.keys()
        slots, without = assign(debug.slots, wanted, foreign)
        dropped = {slot: old for slot, old in debug.slots.items() if slots.get(slot) is not old}
        if dropped:
            hit = slots_hit(ptracecalls.get_debug_register(tid, STATUS))
            debug.superseded.update((slot, old) for slot, old in dropped.items() if slot in hit)
        for slot in SLOTS:
            if slot in dropped or slot not in watching:
                control &= ~slot_mask(slot)
        # The old length is forgotten before the new address is set, which would not fit it else.
        if control != before:
            ptracecalls.set_debug_register(tid, CONTROL, control)
        refused = {w: _all_in_use(tid, by_others=bool(foreign)) for w in without}
        for slot, watchpoint in slots.items():
            if debug.slots.get(slot) is watchpoint:
                continue
            bits = control_bits(slot, watchpoint.watch)
            try:
                ptracecalls.set_debug_register(tid, slot, watchpoint.watch.address)
                ptracecalls.set_debug_register(tid, CONTROL, control | bits)
            except ProcessLookupError:
                raise
            except OSError as error:
                refused[watchpoint] = _refusal(error, watchpoint)
            else:
                control |= bits
        debug.slots = {slot: w for slot, w in slots.items() if w not in refused}
        return refused


def _all_in_use(tid: int, *, by_others: bool) -> Refusal:
    reason = "the programs for this process watch with all four debug registers already"
    if by_others:
        reason = f"another debugger has left the debug registers of thread {tid} in use"
    return ProbeState.DEBUGREG_UNAVAIL, reason


def _refusal(error: OSError, watchpoint: Watchpoint) -> Refusal:
    if error.errno == errno.EINVAL:
        return ProbeState.INVALID_OFFSET, f"no program can have the address {watchpoint.watch.address:#x}"
    if error.errno == errno.ENOSPC:
        return ProbeState.DEBUGREG_UNAVAIL, "perf has the debug registers in use"
    reason = (error.strerror or str(error)).lower()
    return ProbeState.DEBUGREG_UNAVAIL, f"the kernel refuses the debug register ({reason})"
