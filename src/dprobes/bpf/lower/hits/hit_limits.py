"""
Overload guard in a handler: it measures the CPU time that hits take, and skips handlers beyond a limit.

Each hit adds the cost of its trap to the trap time of its CPU, even if the hit is out of scope. One of
``MEASURED_EVERY`` handler runs is measured, and its time is multiplied by that number. User space reads these times
(the eBPF engine's ``table_watch``). If they are too high, it thins out a probepoint's handler, which then runs at one
of N hits. A brake acts without user space, which may be too slow: when handlers have taken ``Request.load_limit`` of
the present window, none runs on the CPU until the window is over.

A hit whose handler is skipped counts like every other hit, also for passcount and maxhits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.handler_host import CONTEXT
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.lower.state.handler_state import SCRATCH, Field
from dprobes.bpf.map_layouts import (
    CPU_LOAD_SIZE,
    LIMIT,
    LOAD_WINDOW,
    NOTE_SIZE,
    PROBE_LOAD_SIZE,
    REMOVE,
    REMOVED_BY,
    CpuLoad,
    MapName,
    ProbeField,
    ProbeLoad,
)

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.template_writer import Writer

__all__ = ["MEASURED_EVERY", "Overload", "Ticket", "ticket_of"]

# The tickets for passcount and maxhits, which are returned if the instruction faults.
#
# ``hits`` of a probepoint is the number of tickets drawn. A hit writes its probepoint and its address to NOTES. The
# thread may get a signal for a fault of that instruction. Then a program in the kernel (the eBPF engine's signal
# programs) returns the ticket before the thread can run on. So the number of tickets decides whether a limit is
# reached, never a flag. If the handler of such a hit executed ``remove``, that is undone in the same way.


_R = Register

_KEY, _EMPTY = -4, -96
"""Stack offsets of the key of a note, and of an empty note."""


def ticket_of(writer: Writer) -> Ticket | None:
    """
    Return the writer of a handler's ticket code.

    Return None if hits are not limited, or their instructions cannot fault.
    """
    request = writer.request
    if request.note is None or not (request.passcount or request.maxhits or writer.flow.uses("remove")):
        return None
    return Ticket(writer, request.note)


class Ticket:
    """
    A writer of code that numbers a probepoint's hits, so that a hit whose instruction then faults does not count.

    ``note`` is the index of the handler's pair in the note of a thread.
    """

    def __init__(self, writer: Writer, note: int) -> None:
        self._asm = writer.asm
        self._host = writer.host
        self._probe = writer.request.probe
        self._pair = 16 * note

    def open(self, busy: Label) -> None:
        """
        Set R7 to the thread's note, a new one if it has none, and clear the handler's pair in it. Clobbers R0-R5.

        Go to ``busy`` if NOTES has no room for the note.
        """
        asm, found = self._asm, self._asm.label()
        self._host.global_tid()
        asm.store(_R.R10, _KEY, _R.R0, Size.W)
        asm.look_up(MapName.NOTES, _R.R10, _KEY)
        asm.jump_if(Jump.JNE, _R.R0, 0, found)
        for offset in range(0, NOTE_SIZE, 8):
            asm.store(_R.R10, _EMPTY + offset, 0)
        asm.load_map(_R.R1, MapName.NOTES)
        asm.add(_R.R2, _R.R10, _KEY)
        asm.add(_R.R3, _R.R10, _EMPTY)
        asm.mov(_R.R4, 0)
        asm.call(Helper.MAP_UPDATE_ELEM)
        asm.look_up(MapName.NOTES, _R.R10, _KEY, busy)
        asm.place(found)
        asm.mov(_R.R7, _R.R0)
        asm.store(_R.R7, self._pair, 0)

    def draw(self, last: int | None, out: Label) -> None:
        """
        Draw a ticket into R2 and note it. Clobbers R3.

        R1 is the probe table entry, and R8 the attach cookie. Go to ``out`` if more than ``last`` tickets have been
        drawn, unless ``last`` is None.
        """
        asm = self._asm
        if last is not None:
            asm.mov(_R.R3, last)
            asm.jump_if_word(Jump.JGT, _R.R1, ProbeField.HITS, _R.R3, out, by=_R.R2)
        asm.mov(_R.R2, 1)
        asm.atomic(Atomic.ADD, _R.R1, ProbeField.HITS, _R.R2, fetch=True)
        if last is not None:
            # Another thread has drawn the last ticket meanwhile.
            drawn = asm.label()
            asm.jump_if(Jump.JLE, _R.R2, _R.R3, drawn)
            asm.mov(_R.R2, -1)
            asm.atomic(Atomic.ADD, _R.R1, ProbeField.HITS, _R.R2)
            asm.jump(out)
            asm.place(drawn)
        if self._probe is None:
            asm.mov(_R.R3, _R.R8, wide=False)
            asm.store(_R.R7, self._pair + 8, _R.R3)
        else:
            asm.store(_R.R7, self._pair + 8, self._probe)
        asm.copy_from(CONTEXT, REGISTER_OFFSETS["eip"], _R.R7, self._pair, by=_R.R3)

    def disable(self) -> None:
        """Disable the probepoint's handlers for the reason in R8. Clobbers R0-R5 and R9."""
        asm, disabled, for_good = self._asm, self._asm.label(), self._asm.label()
        asm.jump_if(Jump.JEQ, _R.R8, LIMIT, disabled)  # no ticket is left
        asm.jump_if(Jump.JNE, _R.R8, REMOVE, for_good)
        self._host.global_tid()
        asm.mov(_R.R3, _R.R0)
        asm.alu(Alu.OR, _R.R3, REMOVED_BY - (1 << 32), wide=False)
        self._host.probe_entry(_R.R1)
        asm.mov(_R.R0, 0)
        asm.atomic(Atomic.CMPXCHG, _R.R1, ProbeField.DISABLED, _R.R3, size=Size.W)
        asm.jump(disabled)
        asm.place(for_good)
        self._host.probe_entry(_R.R1)
        asm.store(_R.R1, ProbeField.DISABLED, 1, Size.W)
        asm.place(disabled)


MEASURED_EVERY = 8
"""
Handler runs per measured one, a power of two. Two reads of the clock take about 40 ns, often more than a small handler.
"""

_LONGEST = 1_000_000
"""Maximum time in nanoseconds that is added for a run: a longer run was preempted, or slept for a page."""

_BEGAN = -56
"""Stack offset of the time when the handler began, until there is a state."""


class Overload:
    """
    A writer of the overload guard's code in one handler, which limits the share of CPU time that hits take.

    Until there is a state, R8 has the attach cookie.
    """

    def __init__(self, writer: Writer, limit: int) -> None:
        self._writer = writer
        self._asm = writer.asm
        self._host = writer.host
        self._tables = writer.request.tables
        self._probe = writer.request.probe
        self._limit = limit

    def charge(self, *, is_foreign: bool = False) -> None:
        """
        Add the cost of a hit's trap to this CPU's trap time. Clobbers R0-R5.

        With ``is_foreign``, the hit is out of scope, and is counted as such.
        """
        asm = self._asm
        self._cpu_load(_R.R1)
        self._probe_load(_R.R2, _R.R8)
        asm.load(_R.R0, _R.R2, ProbeLoad.COST, Size.W)
        asm.increase(_R.R1, CpuLoad.TRAPS, _R.R0, by=_R.R3)
        if is_foreign:
            asm.count(_R.R2, ProbeLoad.FOREIGN, by=_R.R3)

    def admit(self, skipped: Label) -> None:
        """
        Go to ``skipped`` if this hit must not run its handler; otherwise store the start time.

        Clobbers R0-R5, and R7 or R9.
        """
        # In a handler without a claim, accesses by R7 are those to its state, and R9 counts no hits.
        asm, load = self._asm, _R.R9 if self._writer.is_small else _R.R7
        released, runs, done = asm.label(), asm.label(), asm.label()
        self._cpu_load(load)
        asm.jump_if_word(Jump.JEQ, load, CpuLoad.BRAKED, 0, released, by=_R.R2)
        # This clock can be read anywhere. The coarse one cannot: a probepoint may be inside the code that writes it.
        asm.call(Helper.KTIME_GET_NS)
        asm.load(_R.R2, load, CpuLoad.BRAKED)
        asm.jump_if(Jump.JLT, _R.R0, _R.R2, skipped)
        asm.store(load, CpuLoad.BRAKED, 0)
        asm.place(released)
        self._probe_load(_R.R1, _R.R8)
        asm.jump_if_word(Jump.JLE, _R.R1, ProbeLoad.THINNING, 1, runs, by=_R.R2, size=Size.W)
        asm.mov(_R.R3, 1)
        asm.atomic(Atomic.ADD, _R.R1, ProbeLoad.TURN, _R.R3, fetch=True)
        asm.alu(Alu.MOD, _R.R3, _R.R2)
        asm.jump_if(Jump.JNE, _R.R3, 0, skipped)
        asm.place(runs)
        asm.store(_R.R10, _BEGAN, 0)
        asm.load(_R.R2, load, CpuLoad.RUNS)
        asm.add(_R.R3, _R.R2, 1)
        asm.store(load, CpuLoad.RUNS, _R.R3)
        asm.alu(Alu.AND, _R.R2, MEASURED_EVERY - 1)
        asm.jump_if(Jump.JNE, _R.R2, 0, done)
        asm.call(Helper.KTIME_GET_NS)
        asm.store(_R.R10, _BEGAN, _R.R0)
        asm.load(_R.R2, load, CpuLoad.SINCE)
        asm.derive(Alu.SUB, _R.R3, _R.R0, _R.R2)
        asm.jump_if(Jump.JLT, _R.R3, LOAD_WINDOW, done)
        asm.store(load, CpuLoad.SINCE, _R.R0)
        asm.copy_from(load, CpuLoad.HANDLERS, load, CpuLoad.MARK, by=_R.R2)
        asm.place(done)

    def count_skipped(self) -> None:
        """Count a hit for which the guard has not let the handler run (``ProbeLoad.SKIPPED``). Clobbers R1 and R2."""
        asm = self._asm
        self._probe_load(_R.R1, _R.R8)
        asm.count(_R.R1, ProbeLoad.SKIPPED)

    def begin(self) -> None:
        """Copy the start time that ``admit`` has stored to the handler's state. Clobbers R1."""
        self._asm.copy_from(_R.R10, _BEGAN, SCRATCH, Field.BEGAN)

    def end(self) -> None:
        """
        Add the time since ``begin``, if this run is measured, to the CPU's and the probepoint's times.

        Beyond the limit, set the brake. Clobbers all but R6 and R7.
        """
        asm, done = self._asm, self._asm.label()
        short = asm.label()
        asm.jump_if_word(Jump.JEQ, SCRATCH, Field.BEGAN, 0, done)
        asm.call(Helper.KTIME_GET_NS)
        asm.mov(_R.R8, _R.R0)
        asm.load(_R.R1, SCRATCH, Field.BEGAN)
        asm.alu(Alu.SUB, _R.R8, _R.R1)
        asm.jump_if(Jump.JLE, _R.R8, _LONGEST, short)
        asm.mov(_R.R8, _LONGEST)
        asm.place(short)
        asm.alu(Alu.MUL, _R.R8, MEASURED_EVERY)
        if self._probe is None:
            asm.load(_R.R9, SCRATCH, Field.PROBE)
        self._probe_load(_R.R1, _R.R9)
        asm.atomic(Atomic.ADD, _R.R1, ProbeLoad.TIME, _R.R8)
        self._cpu_load(_R.R1)
        asm.increase(_R.R1, CpuLoad.HANDLERS, _R.R8, by=_R.R2)
        asm.load(_R.R3, _R.R1, CpuLoad.MARK)
        asm.alu(Alu.SUB, _R.R2, _R.R3)
        asm.jump_if(Jump.JLE, _R.R2, self._limit, done)
        asm.load(_R.R3, _R.R1, CpuLoad.SINCE)
        asm.alu(Alu.ADD, _R.R3, LOAD_WINDOW)
        asm.store(_R.R1, CpuLoad.BRAKED, _R.R3)
        asm.place(done)

    def _cpu_load(self, dst: Register) -> None:
        """Set a register to the address of this CPU's entry in CPU_LOAD. Clobbers R0-R5."""
        asm = self._asm
        asm.call(Helper.GET_SMP_PROCESSOR_ID)
        asm.point_to_element(dst, MapName.CPU_LOAD, _R.R0, self._tables.cpus, CPU_LOAD_SIZE)

    def _probe_load(self, dst: Register, cookie: Register) -> None:
        """Set a register to the address of the entry in PROBE_LOAD for an attach cookie. Clobbers R0."""
        asm = self._asm
        if self._probe is not None:
            asm.load_value(dst, MapName.PROBE_LOAD, self._probe * PROBE_LOAD_SIZE)
            return
        asm.mov(_R.R0, cookie)
        asm.point_to_element(dst, MapName.PROBE_LOAD, _R.R0, self._tables.probes, PROBE_LOAD_SIZE)
