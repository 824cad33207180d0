"""
Processors other than x86: appendices B and C of the man page, and similar tables for newer ones.

No engine runs on PowerPC and zSeries; the gdb engine probes the registers that a stub has.
"""

from __future__ import annotations

from dataclasses import replace

from dprobes.arch.processor import Architecture, parse_register_table

__all__ = ["AARCH64", "ABI_NAMES", "FLOATING_ABI_NAMES", "PPC", "PPC64", "RISCV64", "S390", "S390X"]

# AArch64 (64 bit, little endian): the names are the assembler's; ``pstate`` is ``cpsr`` in debuggers.


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

# AAPCS64, sections 6.1.1 and 6.8.2: x0-x7 contain the first integer arguments, x0 the result, x30 the return address.
_NAMES = {f"arg{n}": f"x{n}" for n in range(6)} | {"retval": "x0", "fp": "x29", "lr": "x30", "cpsr": "pstate"}

AARCH64 = Architecture("aarch64", 8, "little", parse_register_table(_TABLE), _NAMES, unprobeable={})


# PowerPC, 32 and 64 bit: appendix C of the man page, its dotted rows (R3-R31, FPR3-FPR31) written out.


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

# PowerPC ELF ABI: r3-r8 contain the first six integer arguments, r3 the return value, r1 is the stack pointer.
_PORTABLE = {f"arg{n}": f"r{n + 3}" for n in range(6)} | {"retval": "r3", "pc": "nip", "sp": "r1"}

_32_BIT_ON_PPC64 = {"xer", "ccr", "dsisr", "fpc", "cpuid"}

_PPC_TABLE = parse_register_table(_APPENDIX_C)

PPC = Architecture("ppc", 4, "big", _PPC_TABLE, _PORTABLE, unprobeable={})

PPC64 = Architecture(
    "ppc64",
    8,
    "big",
    tuple(r if r.name in _32_BIT_ON_PPC64 else replace(r, bits=64) for r in _PPC_TABLE),
    _PORTABLE,
    unprobeable={},
)


# index, name, bits, allowed: push u, push r, pop u, pop r
_RISCV_TABLE = """
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

# RISC-V ELF psABI, "Register Convention": the uses of x0 to x31, and of f0 to f31.
ABI_NAMES = ("zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", *_ARGUMENTS, *_SAVED, *_SCRATCH)
"""Names of x0 to x31 in the calling convention."""
FLOATING_ABI_NAMES = (
    *(f"ft{n}" for n in range(8)),
    "fs0",
    "fs1",
    *(f"f{name}" for name in _ARGUMENTS),
    *(f"f{name}" for name in _SAVED),
    *(f"ft{n}" for n in range(8, 12)),
)
"""Names of f0 to f31 in the calling convention."""

_RISCV_NAMES = (
    {name: f"x{n}" for n, name in enumerate(ABI_NAMES)}
    | {name: f"f{n}" for n, name in enumerate(FLOATING_ABI_NAMES)}
    | {f"arg{n}": f"x{n + 10}" for n in range(6)}
    | {"retval": "x10", "fp": "x8"}
)

RISCV64 = Architecture("riscv64", 8, "little", parse_register_table(_RISCV_TABLE), _RISCV_NAMES, unprobeable={})


# S/390 (31 bit) and zSeries (64 bit): appendix B of the man page, which lost ACR7-15 and CR_14-15 in page breaks; they
# continue the sequence (section 3.4 of the recovered reference).


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

# zSeries-Linux ELF ABI, section 1.2.5: %r2-%r6 contain the first five integer arguments, %r2 the return value.
_S390_PORTABLE = {
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

_S390_TABLE = parse_register_table(_APPENDIX_B)

S390 = Architecture("s390", 4, "big", _S390_TABLE, _S390_PORTABLE, _UNPROBEABLE)

S390X = Architecture(
    "s390x",
    8,
    "big",
    tuple(replace(r, bits=64) if r.name.startswith(("psw", "gpr", "cr_")) else r for r in _S390_TABLE),
    _S390_PORTABLE,
    _UNPROBEABLE,
)
