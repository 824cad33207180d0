"""
AArch64 (64 bit, little endian): a table like those of the man page's appendices; the processor is younger than it.

The names are the assembler's; ``pstate`` is what debuggers call ``cpsr``.
"""

from __future__ import annotations

from dprobes.arch.processor import Architecture, parse_register_table

__all__ = ["AARCH64"]

# index, name, bits, allowed: push u, push r, pop u, pop r
_TABLE = """
    00 pc         64 yynn
    01 sp         64 yynn
    02 pstate     32 yynn
    10 x<0-30>    64 yyyy
    floating point:
    30 fpsr       32 ynnn
    31 fpcr       32 ynnn
    40 v<0-31>   128 ynnn
"""

# AAPCS64, sections 6.1.1 and 6.8.2: x0-x7 hold the first integer arguments, x0 the result, x30 the return address.
_NAMES = {f"arg{n}": f"x{n}" for n in range(6)} | {"retval": "x0", "fp": "x29", "lr": "x30", "cpsr": "pstate"}

AARCH64 = Architecture("aarch64", 8, "little", parse_register_table(_TABLE), _NAMES, unprobeable={})
