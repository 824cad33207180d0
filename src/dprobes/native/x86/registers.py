"""Where the registers of eBPF are: as in the kernel's JIT (arch/x86/net/bpf_jit_comp.c), so that calls fit."""

from __future__ import annotations

from dprobes.native.x86.assembler import Gpr

__all__ = ["FRAME", "RESULT", "SCRATCH_1", "SCRATCH_2", "gpr"]

_REGISTERS = (
    Gpr.RAX, Gpr.RDI, Gpr.RSI, Gpr.RDX, Gpr.RCX, Gpr.R8, Gpr.RBX, Gpr.R13, Gpr.R14, Gpr.R15, Gpr.RBP,
)  # fmt: skip

RESULT, FRAME = Gpr.RAX, Gpr.RBP
SCRATCH_1, SCRATCH_2 = Gpr.R10, Gpr.R11
"""Registers that eBPF has no use for; an instruction may change them, and so may calls."""


def gpr(number: int) -> Gpr:
    """Return the register in which eBPF register ``number`` is."""
    return _REGISTERS[number]
