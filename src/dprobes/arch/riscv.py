"""
RISC-V (64 bit): a table like those of the man page's appendices; the processor is younger than it.

Registers are x0 to x31 and f0 to f31; the names of the calling convention stand for the same ones.
"""

from __future__ import annotations

from dprobes.arch.processor import Architecture, parse_register_table

__all__ = ["ABI_NAMES", "FLOATING_ABI_NAMES", "RISCV64"]

# index, name, bits, allowed: push u, push r, pop u, pop r
_TABLE = """
    00 pc         64 yynn
    10 x<0-2>     64 yynn
    13 x<3-31>    64 yyyy
    floating point:
    01 fflags     32 ynnn
    02 frm        32 ynnn
    03 fcsr       32 ynnn
    40 f<0-31>    64 ynnn
"""

_ARGUMENTS = [f"a{n}" for n in range(8)]
_SAVED = [f"s{n}" for n in range(2, 12)]
_SCRATCH = [f"t{n}" for n in range(3, 7)]

# RISC-V ELF psABI, "Register Convention": what x0 to x31, and f0 to f31, are for.
ABI_NAMES = ("zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", *_ARGUMENTS, *_SAVED, *_SCRATCH)
"""The names that the calling convention gives x0 to x31."""
FLOATING_ABI_NAMES = (
    *(f"ft{n}" for n in range(8)),
    "fs0",
    "fs1",
    *(f"f{name}" for name in _ARGUMENTS),
    *(f"f{name}" for name in _SAVED),
    *(f"ft{n}" for n in range(8, 12)),
)
"""The names that it gives f0 to f31."""

_NAMES = (
    {name: f"x{n}" for n, name in enumerate(ABI_NAMES)}
    | {name: f"f{n}" for n, name in enumerate(FLOATING_ABI_NAMES)}
    | {f"arg{n}": f"x{n + 10}" for n in range(6)}
    | {"retval": "x10", "fp": "x8"}
)

RISCV64 = Architecture("riscv64", 8, "little", parse_register_table(_TABLE), _NAMES, unprobeable={})
