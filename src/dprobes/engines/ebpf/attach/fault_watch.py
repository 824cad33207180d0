"""
The program that tells the reader of signals for faults: the record of the instruction is not one of success.

A program on the tracepoint ``signal_deliver`` writes ``Entry.SIGNAL`` when a thread is about to get a signal for a
fault, and gives back what its hit has drawn (``hit_limits``). Where a uprobe had the instruction executed
out of line, the kernel has set the instruction pointer back by then (``arch_uprobe_abort_xol``), so ``ip`` is that of
the probepoint. A fault that the kernel resolves sends no signal.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, RingOutput, Size
from dprobes.bpf.map_layouts import (
    KIND_SHIFT,
    NOTE_HITS,
    PROBE_ENTRY_SIZE,
    REMOVED_BY,
    TICKETS_SHIFT,
    Entry,
    MapName,
    ProbeField,
    Status,
)
from dprobes.engines.ebpf.attach.process_programs import add_to_status
from dprobes.engines.ebpf.kernel.bpf_links import attach_typed_tracepoint
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.engine_interface import Notice
from dprobes.errors import TargetError
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.engines.ebpf.kernel.kernel_types import KernelTypes

__all__ = ["FaultWatch", "watch_signals"]

FAULTS = frozenset({signal.SIGILL, signal.SIGTRAP, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})
"""The signals that instructions bring about."""

R0, R1, R2, R3, R4 = (Register(number) for number in range(5))
R6, R7, R8, R10 = Register.R6, Register.R7, Register.R8, Register.R10

_ENTRY = -24
"""Where on the stack the entry is made: u32 kind, u32 thread id, u64 ip, u32 signal and tickets, u32 code."""


def signal_program(types: KernelTypes, *, in_scope: bool, casts: bool = False, entries: int | None = None) -> Assembled:
    """
    Return the program on ``signal_deliver(signal, info, action)``; with ``in_scope`` only threads of SCOPE count.

    ``entries`` is how many the probe table has, a power of two, if there are notes of hits whose tickets come back.

    Signals for which the ring has no room are counted in ``Status.UNSEEN``. With ``casts`` the kernel need not say that
    ``info`` is a pointer, but have ``bpf_rdonly_cast``.
    """
    code, ip = types.member_offset("kernel_siginfo", "si_code"), types.member_offset("pt_regs", "ip")
    asm = Assembler()
    end = asm.label()
    asm.load(R6, R1, 0)
    asm.load(R8, R1, 8)
    asm.mov(R3, 1)
    asm.alu(Alu.LSH, R3, R6)
    mask = sum(1 << number for number in FAULTS)
    asm.alu(Alu.AND, R3, mask)
    asm.jump_if(Jump.JEQ, R3, 0, end)
    # What a process sends has a code of at most 0 (SI_USER, SI_TKILL), a fault a positive one.
    if casts:
        asm.mov(R1, R8)
        asm.mov(R2, types.find(Kind.STRUCT, "kernel_siginfo"))
        asm.call_kfunc(types.find(Kind.FUNC, "bpf_rdonly_cast"))
        asm.mov(R8, R0)
    asm.load(R7, R8, code, Size.W)
    asm.jump_if(Jump.JSLE, R7, 0, end, wide=False)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.store(R10, _ENTRY + 4, R0, Size.W)
    if in_scope:
        asm.alu(Alu.RSH, R0, 32)
        asm.store(R10, _ENTRY, R0, Size.W)
        asm.load_map(R1, MapName.SCOPE)
        asm.mov(R2, R10)
        asm.alu(Alu.ADD, R2, _ENTRY)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, R0, 0, end)
    asm.store(R10, _ENTRY, Entry.SIGNAL << KIND_SHIFT, Size.W)
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    asm.mov(R1, R0)
    asm.call(Helper.TASK_PT_REGS)
    asm.load(R0, R0, ip)
    asm.store(R10, _ENTRY + 8, R0)
    asm.store(R10, _ENTRY + 16, R6, Size.W)
    asm.store(R10, _ENTRY + 20, R7, Size.W)
    if entries is not None:
        _give_back(asm, entries)
    asm.load_map(R1, MapName.RING)
    asm.mov(R2, R10)
    asm.alu(Alu.ADD, R2, _ENTRY)
    asm.mov(R3, -_ENTRY)
    asm.mov(R4, RingOutput.NO_WAKEUP)
    asm.call(Helper.RINGBUF_OUTPUT)
    asm.jump_if(Jump.JEQ, R0, 0, end)
    add_to_status(asm, Status.UNSEEN, 1)
    asm.place(end)
    asm.mov(R0, 0)
    asm.exit()
    return asm.assemble()


def _give_back(asm: Assembler, entries: int) -> None:
    """
    Give back what the last hit of the thread has drawn, if it was at the instruction that the entry names.

    Takes R0-R5 and R8.
    """
    done = asm.label()
    asm.load_map(R1, MapName.NOTES)
    asm.mov(R2, R10)
    asm.alu(Alu.ADD, R2, _ENTRY + 4)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.jump_if(Jump.JEQ, R0, 0, done)
    asm.mov(R8, R0)
    for pair in range(0, 16 * NOTE_HITS, 16):
        other = asm.label()
        asm.load(R1, R8, pair)
        asm.load(R2, R10, _ENTRY + 8)
        asm.jump_if(Jump.JNE, R1, R2, other)
        asm.store(R8, pair, 0)
        asm.load(R2, R10, _ENTRY + 16, Size.W)
        asm.alu(Alu.ADD, R2, 1 << TICKETS_SHIFT)
        asm.store(R10, _ENTRY + 16, R2, Size.W)
        asm.load(R2, R8, pair + 8)
        asm.alu(Alu.AND, R2, entries - 1)
        asm.alu(Alu.LSH, R2, PROBE_ENTRY_SIZE.bit_length() - 1)
        asm.load_value(R1, MapName.PROBES)
        asm.alu(Alu.ADD, R1, R2)
        # Without a breakpoint nobody empties the note of the hit before.
        asm.load(R2, R1, ProbeField.DISABLED, Size.W)
        asm.jump_if(Jump.JEQ, R2, 1, other)
        asm.mov(R2, -1)
        asm.atomic(Atomic.ADD, R1, ProbeField.HITS, R2)
        asm.load(R0, R10, _ENTRY + 4, Size.W)
        asm.alu(Alu.OR, R0, REMOVED_BY - (1 << 32), wide=False)
        asm.mov(R2, 0)
        asm.atomic(Atomic.CMPXCHG, R1, ProbeField.DISABLED, R2, size=Size.W)
        asm.place(other)
    asm.place(done)


def watch_signals(
    maps: Mapping[MapName, int], types: KernelTypes, *, in_scope: bool, entries: int | None = None
) -> int:
    """
    Attach the program and return the descriptor of its link.

    It needs STATUS and RING, ``in_scope`` SCOPE, and with ``entries`` NOTES and PROBES.

    OSError if the kernel lets no program read signals, ``TargetError`` if it does not say how.
    """

    def attach(*, casts: bool) -> int:
        program = signal_program(types, in_scope=in_scope, casts=casts, entries=entries)
        return attach_typed_tracepoint("signal_deliver", program, maps, types)

    try:
        return attach(casts=False)
    except PermissionError:
        # Some kernels take the argument for a number, because it may be one that stands for no information (seen with
        # 6.12.117 of Debian 12; the verifier says "marking pointer arg1 as scalar as it may encode error").
        return attach(casts=True)


# The watch on faults of a run: begun as soon as one of its probepoints depends on it.


_CONSEQUENCE = "records are emitted also where the instruction faults"


class FaultWatch:
    """What tells the reader of faults; with ``in_scope`` of those of processes in SCOPE only."""

    def __init__(self, installed: Installation, features: Features, *, in_scope: bool) -> None:
        self._installed = installed
        self._features = features
        self._in_scope = in_scope
        self._has_begun = False
        self._link = -1

    def begin(self) -> Notice | None:
        """Begin, once; return what is to be said if the kernel does not let us."""
        if self._has_begun:
            return None
        self._has_begun = True
        if Feature.TYPED_TRACEPOINT not in self._features:
            return Notice(f"this kernel shows no type information (BTF): {_CONSEQUENCE}")

        installed = self._installed
        entries = installed.entries if installed.notes_tickets else None
        try:
            self._link = watch_signals(
                installed.maps.descriptors, self._features.types, in_scope=self._in_scope, entries=entries
            )
        except (OSError, TargetError):
            return Notice(f"this kernel does not let programs look at signals: {_CONSEQUENCE}")
        return None

    def close(self) -> None:
        """End the watch."""
        if self._link >= 0:
            os.close(self._link)
            self._link = -1
