"""
The ``cpuid`` instruction, executed by this process.

What it says is the same for every program of a machine, but for what differs between CPUs (the number of the CPU in
leaf 1, core types): that is of the CPU that the tracer runs on.
"""

from __future__ import annotations

import ctypes
from functools import cache

from dprobes.engines.linux.machinecode import map_code

__all__ = ["cpuid", "cpuid_of_leaf"]

# void code(uint32_t leaf, uint32_t subleaf, uint32_t result[4]) in the System V AMD64 ABI:
_CODE = bytes.fromhex(
    "53"  # push %rbx
    "89f8"  # mov %edi, %eax
    "89f1"  # mov %esi, %ecx
    "4989d0"  # mov %rdx, %r8
    "0fa2"  # cpuid
    "418900"  # mov %eax, (%r8)
    "41895804"  # mov %ebx, 4(%r8)
    "41894808"  # mov %ecx, 8(%r8)
    "4189500c"  # mov %edx, 12(%r8)
    "5b"  # pop %rbx
    "c3"  # ret
)

_Result = ctypes.c_uint32 * 4

# The leaves are numbered in ranges; the first of each says which is the last (Intel SDM, volume 2, CPUID).
_RANGE = 0xC0000000
_HYPERVISOR_RANGE = 0x40000000
_HYPERVISOR_PRESENT = 1 << 31


def cpuid(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
    """Return (eax, ebx, ecx, edx); raise OSError if this process may not map code."""
    result = _Result()
    _code()(leaf, subleaf, result)
    eax, ebx, ecx, edx = result
    return eax, ebx, ecx, edx


def cpuid_of_leaf(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
    """Return (eax, ebx, ecx, edx) of a leaf, or zeros if the processor does not have it."""
    first = leaf & _RANGE
    if first == _HYPERVISOR_RANGE and not cpuid(1)[2] & _HYPERVISOR_PRESENT:
        return 0, 0, 0, 0
    last = cpuid(first)[0]
    return cpuid(leaf, subleaf) if first <= leaf <= last else (0, 0, 0, 0)


@cache
def _code() -> ctypes._CFunctionType:
    return ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, _Result)(map_code(_CODE))
