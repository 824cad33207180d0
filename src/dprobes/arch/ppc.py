"""
PowerPC, 32 and 64 bit: appendix C of the man page, its dotted rows (R3-R31, FPR3-FPR31) written out.

No engine runs on these processors; the gdb engine probes what a stub has of them.
"""

from __future__ import annotations

from dataclasses import replace

from dprobes.arch.processor import Architecture, parse_register_table

__all__ = ["PPC", "PPC64"]

# index, name, bits, allowed: push u, push r, pop u, pop r
_APPENDIX_C = """
    01 nip        32 yynn
    02 msr        32 yynn
    03 ctr        32 yynn
    04 lnk        32 yynn
    05 xer        32 yynn
    06 ccr        32 yynn
    07 mq         32 yynn
    08 dar        32 yynn
    09 dsisr      32 yynn
    0a fpc        32 yynn
    0b cpuid      32 yynn
    10 r<0-31>    32 yyyy
    floating point:
    30 fpr<0-31>  64 ynnn
"""

# PowerPC ELF ABI: r3-r8 hold the first six integer arguments, r3 the return value, r1 is the stack pointer.
_PORTABLE = {f"arg{n}": f"r{n + 3}" for n in range(6)} | {"retval": "r3", "pc": "nip", "sp": "r1"}

_32_BIT_ON_PPC64 = {"xer", "ccr", "dsisr", "fpc", "cpuid"}

_TABLE = parse_register_table(_APPENDIX_C)

PPC = Architecture("ppc", 4, "big", _TABLE, _PORTABLE, unprobeable={})

PPC64 = Architecture(
    "ppc64",
    8,
    "big",
    tuple(r if r.name in _32_BIT_ON_PPC64 else replace(r, bits=64) for r in _TABLE),
    _PORTABLE,
    unprobeable={},
)
