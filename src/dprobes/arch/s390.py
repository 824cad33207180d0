"""
S/390 (31 bit) and zSeries (64 bit): appendix B of the man page.

The man page lost ACR7-15 and CR_14-15 in page breaks; they continue the sequence (section 3.4 of the recovered
reference). No engine runs on these processors; the gdb engine probes what a stub has of them.
"""

from __future__ import annotations

from dataclasses import replace

from dprobes.arch.processor import Architecture, parse_register_table

__all__ = ["S390", "S390X"]

# index, name, bits, allowed: push u, push r, pop u, pop r
_APPENDIX_B = """
    00 pswmask    32 yynn
    01 pswaddr    32 yynn
    10 gpr<0-15>  32 yyyy
    20 acr<0-15>  32 yynn
    floating point:
    03 fpc        32 ynnn
    30 fpr<0-15>  64 ynnn
    system:
    40 cr_<0-15>  32 nynn
"""

# zSeries-Linux ELF ABI, section 1.2.5: %r2-%r6 hold the first five integer arguments, %r2 the return value.
_PORTABLE = {
    "arg0": "gpr2",
    "arg1": "gpr3",
    "arg2": "gpr4",
    "arg3": "gpr5",
    "arg4": "gpr6",
    "retval": "gpr2",
    "pc": "pswaddr",
    "sp": "gpr15",
}

_UNPROBEABLE = {0x0A: "svc", 0x82: "lpsw"}

_TABLE = parse_register_table(_APPENDIX_B)

S390 = Architecture("s390", 4, "big", _TABLE, _PORTABLE, _UNPROBEABLE)

S390X = Architecture(
    "s390x",
    8,
    "big",
    tuple(replace(r, bits=64) if r.name.startswith(("psw", "gpr", "cr_")) else r for r in _TABLE),
    _PORTABLE,
    _UNPROBEABLE,
)
