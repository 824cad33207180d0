"""What is a call in eBPF, and few instructions here; registers that calls keep are kept, and more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.x86.assembler import Gpr, Memory, Operation
from dprobes.native.x86.registers import SCRATCH_1

if TYPE_CHECKING:
    from dprobes.native.memory import MapPlace
    from dprobes.native.x86.assembler import X86Assembler

__all__ = ["write_cpu", "write_value_address"]

_CPU_NODE_SELECTOR = 0x7B
"""The segment whose limit is what RDPID reads (GDT_ENTRY_CPUNODE in arch/x86/include/asm/segment.h)."""
_CPU_MASK = 0xFFF
_LSL_EAX_EAX = b"\x0f\x03\xc0"


def write_cpu(asm: X86Assembler, dst: Gpr, *, has_rdpid: bool) -> None:
    """Load the number of the CPU that the thread runs on to ``dst``; without RDPID that must be rax."""
    if has_rdpid:
        asm.rdpid(dst)
    else:
        assert dst is Gpr.RAX
        asm.mov_number(dst, _CPU_NODE_SELECTOR)
        asm.raw(_LSL_EAX_EAX)
    asm.calculate(Operation.AND, dst, _CPU_MASK, wide=False)


def write_value_address(asm: X86Assembler, place: MapPlace) -> None:
    """Let rax be the address of the value whose index, a u32 that is in bounds, is at rsi."""
    asm.load(Gpr.RAX, Memory(Gpr.RSI), 4)
    asm.multiply(Gpr.RAX, place.stride)
    asm.mov_number(SCRATCH_1, place.address)
    asm.calculate(Operation.ADD, Gpr.RAX, SCRATCH_1)
