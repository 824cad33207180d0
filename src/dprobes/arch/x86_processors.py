"""
i386 and x86-64: appendix A of the man page, completed.

The rows that the man page lost in a page break (cr4, dr0-dr7) and the index of ``tr``, which it misprints, are from
section 3.4 of the recovered reference. Indices from 0x60 up are our own: the registers that x86-64 added, and the
portable names. On x86-64 the i386 names stand for the full 64-bit registers.
"""

from __future__ import annotations

from dataclasses import replace

from dprobes.arch.processor import Architecture, Direction, Register, parse_register_table

__all__ = ["ACCESSED", "I386", "PORT_MAX", "WATCHPOINTS", "WATCHPOINT_LENGTHS", "X86_64", "X86_64_GO"]

WATCHPOINTS = 4
"""Number of watchpoints for which there are registers (DR0 to DR3)."""

WATCHPOINT_LENGTHS = (1, 2, 4, 8)
"""Possible sizes in bytes of a data watchpoint (Intel SDM, volume 3, "Debug Control Register (DR7)")."""

ACCESSED = "accessed"
"""Name of the register that has the distance of the accessed memory from a range, where this is checked."""

PORT_MAX = 0xFFFF
"""The highest I/O port."""

# index, name, bits ("parts*bits", "+selector cells"), allowed: push u, push r, pop u, pop r
_APPENDIX_A = """
    segment:
    00 cs       16  yynn
    01 ds       16  yyyy
    02 es       16  yyyy
    03 fs       16  yyyy
    04 gs       16  yyyy
    05 ss       16  yynn
    general:
    06 eax      32  yyyy
    07 ebx      32  yyyy
    08 ecx      32  yyyy
    09 edx      32  yyyy
    0a edi      32  yyyy
    0b esi      32  yyyy
    0c eflags   32  yynn
    0d eip      32  yynn
    0e esp      32  yynn
    0f ebp      32  yyyy
    system:
    20 tr       16  nynn
    21 ldtr     16  nynn
    22 gdtr   2*32  nynn
    23 idtr   2*32  nynn
    24 cr0      32  nynn
    26 cr2      32  nynn
    27 cr3      32  nynn
    28 cr4      32  nynn
    2c dr<0-3>  32  nynn
    32 dr<6-7>  32  nynn
    3d msr      64+1  yynn
    cpuid:
    3c cpuid  4*32+1  yynn
    floating point:
    3e fr<0-7>  80  ynnn
    46 fcw      16  ynnn
    47 fsw      16  ynnn
    48 ftw      16  ynnn
    49 fip      32  ynnn
    4a fcs      16  ynnn
    4b fdp      32  ynnn
    4c fds      16  ynnn
    4d xmm<0-7> 128 ynnn
    55 mxcsr    32  ynnn
"""

_ADDED_BY_X86_64 = """
    60 r<8-15>    64  yyyy
    floating point:
    68 xmm<8-15>  128 ynnn
    70 ymm<0-15>  256 ynnn
    segment:
    80 fs_base    64  yynn
    81 gs_base    64  yynn
    checked access:
    82 accessed   64  nynn
"""

# Registers that have 64 bits on x86-64.
_WIDE = {"eax", "ebx", "ecx", "edx", "edi", "esi", "eflags", "eip", "esp", "ebp", "fip", "fdp"} | {
    *(f"cr{n}" for n in range(5)),
    *(f"dr{n}" for n in range(8)),
}

_X86_64_NAMES = {
    "rax": "eax",
    "rbx": "ebx",
    "rcx": "ecx",
    "rdx": "edx",
    "rdi": "edi",
    "rsi": "esi",
    "rflags": "eflags",
    "rip": "eip",
    "rsp": "esp",
    "rbp": "ebp",
}

# System V AMD64 ABI, section 3.2.3: the first six integer arguments, and the first integer return value.
_X86_64_PORTABLE = {
    "arg0": "edi",
    "arg1": "esi",
    "arg2": "edx",
    "arg3": "ecx",
    "arg4": "r8",
    "arg5": "r9",
    "retval": "eax",
    "pc": "eip",
    "sp": "esp",
}

_READ_ONLY = frozenset({Direction.PUSH_USER, Direction.PUSH_CURRENT})

# Go's ABIInternal on amd64 (cmd/compile/abi-internal.md): the integer arguments, and results, in this order.
_GO_ARGUMENTS = ("eax", "ebx", "ecx", "edi", "esi", "r8", "r9", "r10", "r11")

# System V i386 ABI, section 2.2.3: at a function's entry the arguments are above the return address.
_I386_ARGUMENTS = tuple(Register(f"arg{n}", 0x100 + n, 32, _READ_ONLY, memory_offset=4 * (n + 1)) for n in range(6))

_UNPROBEABLE = {0xCC: "int3", 0xCD: "int", 0xCE: "into", 0x9B: "wait"}

_BASE = parse_register_table(_APPENDIX_A)

I386 = Architecture(
    name="i386",
    word_size=4,
    byte_order="little",
    registers=_BASE + _I386_ARGUMENTS,
    aliases={"retval": "eax", "pc": "eip", "sp": "esp"},
    unprobeable=_UNPROBEABLE,
)

X86_64 = Architecture(
    name="x86_64",
    word_size=8,
    byte_order="little",
    registers=tuple(replace(r, bits=64) if r.name in _WIDE else r for r in _BASE)
    + parse_register_table(_ADDED_BY_X86_64),
    aliases=_X86_64_NAMES | _X86_64_PORTABLE,
    unprobeable=_UNPROBEABLE,
)

X86_64_GO = replace(
    X86_64,
    aliases=_X86_64_NAMES | _X86_64_PORTABLE | {f"arg{n}": register for n, register in enumerate(_GO_ARGUMENTS)},
    convention="Go",
)
"""x86-64 with Go's calling convention, which has more argument registers, and other ones."""
