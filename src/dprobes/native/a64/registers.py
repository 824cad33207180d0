"""Where the registers of eBPF are: as in the kernel's JIT (arch/arm64/net/bpf_jit_comp.c), so that calls fit."""

from __future__ import annotations

from dprobes.native.a64.assembler import Gpr

__all__ = ["CALL_CHANGED", "FRAME", "RESULT", "SCRATCH_1", "SCRATCH_2", "SCRATCH_3", "gpr"]

_REGISTERS = (
    Gpr.X7, Gpr.X0, Gpr.X1, Gpr.X2, Gpr.X3, Gpr.X4, Gpr.X19, Gpr.X20, Gpr.X21, Gpr.X22, Gpr.X25,
)  # fmt: skip

RESULT, FRAME = Gpr.X7, Gpr.X25
SCRATCH_1, SCRATCH_2, SCRATCH_3 = Gpr.X9, Gpr.X10, Gpr.X11
"""Registers that eBPF has no use for; an instruction may change them, and so may calls."""

CALL_CHANGED = frozenset({
    Gpr.X0, Gpr.X1, Gpr.X2, Gpr.X3, Gpr.X4, Gpr.X7, Gpr.X8, SCRATCH_1, SCRATCH_2, SCRATCH_3, Gpr.X16, Gpr.X17,
    Gpr.X30,
})  # fmt: skip
"""What routines may change: arguments and the result, and what is nothing of eBPF's."""


def gpr(number: int) -> Gpr:
    """Return the register in which eBPF register ``number`` is."""
    return _REGISTERS[number]
