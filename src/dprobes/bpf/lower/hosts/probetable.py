"""The entry of a handler's probepoint in the probe table, and the ring that its records go to, in eBPF."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, RingOutput
from dprobes.bpf.layout import PROBE_ENTRY_SIZE, MapName, ProbeField, Status
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembler
    from dprobes.bpf.lower.request import Request

__all__ = ["ProbeTable"]


class ProbeTable:
    """Write what looks at the entry, counts in it, and fills the ring."""

    _asm: Assembler
    _request: Request

    def probe_entry(self, dst: Register) -> None:
        """Let a register point to the probepoint's entry in the probe table; uses R9."""
        asm = self._asm
        if self._request.probe is not None:
            asm.load_value(dst, MapName.PROBES, self._request.probe * PROBE_ENTRY_SIZE)
            return
        asm.load(Register.R9, SCRATCH, Field.PROBE)
        self.entry_at(dst, Register.R9)

    def entry_at(self, dst: Register, index: Register) -> None:
        """Let a register point to the entry with an index, which is changed."""
        asm = self._asm
        asm.alu(Alu.AND, index, self._request.tables.probes - 1)
        asm.alu(Alu.LSH, index, PROBE_ENTRY_SIZE.bit_length() - 1)
        asm.load_value(dst, MapName.PROBES)
        asm.alu(Alu.ADD, dst, index)

    def probe_offset(self, dst: Register) -> None:
        """Load the file offset of the probepoint's written place, or of a sample; uses R9."""
        if self._request.module is not None:
            self._asm.load(dst, SCRATCH, Field.PLACE)
            return
        self.probe_entry(dst)
        self._asm.load(dst, dst, ProbeField.OFFSET)

    def count(self, field: ProbeField) -> None:
        """Add one to a counter of the probepoint; takes R1, R2 and R9."""
        asm = self._asm
        self.probe_entry(Register.R1)
        asm.mov(Register.R2, 1)
        asm.atomic(Atomic.ADD, Register.R1, field, Register.R2)

    def output(self, *, wakes: bool = False) -> None:
        """Put R3 bytes at R2 into the ring; R0 is 0 if there was room. Takes R1-R5; wakes the reader if that sleeps."""
        asm = self._asm
        if self._request.abilities.polled:
            asm.mov(Register.R4, RingOutput.NO_WAKEUP)
        elif wakes:
            asm.mov(Register.R4, RingOutput.FORCE_WAKEUP)
        else:
            awake = asm.label()
            asm.mov(Register.R4, RingOutput.NO_WAKEUP)
            asm.load_value(Register.R1, MapName.STATUS, Status.WAITING)
            asm.load(Register.R5, Register.R1, 0)
            asm.jump_if(Jump.JEQ, Register.R5, 0, awake)
            asm.mov(Register.R5, 0)
            asm.atomic(Atomic.XCHG, Register.R1, 0, Register.R5)
            asm.mov(Register.R4, RingOutput.FORCE_WAKEUP)
            asm.place(awake)
        asm.load_map(Register.R1, MapName.RING)
        asm.call(Helper.RINGBUF_OUTPUT)
