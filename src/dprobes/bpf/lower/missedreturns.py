"""
A program at the entries of functions whose returns are probed: it counts the calls whose return will not be seen.

The kernel awaits a limited number of returns of a function at the same time. For each it puts the address of its
trampoline in the place of the return address, before programs run at the entry that were attached earlier. So a return
address that is another one is that of a call for which there was no room (``pre_handler_kretprobe`` in
kernel/kprobes.c, ``arch_rethook_prepare`` in arch/x86/kernel/rethook.c).

Not counted are calls at whose entry the trampoline stands for somebody else: of another tracer of the function's
returns, or of a function that has jumped here in the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.layout import PROBE_ENTRY_SIZE, MapName, ProbeField
from dprobes.bpf.lower.hits.scopefilter import write_filter
from dprobes.bpf.lower.hosts.host import CONTEXT
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.bpf.lower.request import Request

__all__ = ["missed_returns"]

_R = Register
_ADDRESS = -8
_WORD = 8


def missed_returns(request: Request, trampolines: Sequence[int]) -> Assembled:
    """Return the program for the scope and the tables of a request; one of ``trampolines`` is the kernel's."""
    asm = Assembler()
    out = asm.label()

    def load_process() -> None:
        asm.call(Helper.GET_CURRENT_PID_TGID)
        asm.alu(Alu.RSH, _R.R0, 32)

    asm.mov(CONTEXT, _R.R1)
    write_filter(asm, request.filter, load_process, out)
    asm.store(_R.R10, _ADDRESS, 0)
    asm.mov(_R.R1, _R.R10)
    asm.alu(Alu.ADD, _R.R1, _ADDRESS)
    asm.mov(_R.R2, _WORD)
    asm.load(_R.R3, CONTEXT, REGISTER_OFFSETS["esp"])
    asm.call(Helper.PROBE_READ_KERNEL)
    asm.jump_if(Jump.JNE, _R.R0, 0, out)
    asm.load(_R.R1, _R.R10, _ADDRESS)
    for trampoline in trampolines:
        asm.mov(_R.R2, trampoline)
        asm.jump_if(Jump.JEQ, _R.R1, _R.R2, out)
    asm.mov(_R.R1, CONTEXT)
    asm.call(Helper.GET_ATTACH_COOKIE)
    asm.alu(Alu.AND, _R.R0, request.tables.probes - 1)
    asm.mov(_R.R3, _R.R0)
    asm.alu(Alu.LSH, _R.R0, PROBE_ENTRY_SIZE.bit_length() - 1)
    asm.load_value(_R.R1, MapName.PROBES)
    asm.alu(Alu.ADD, _R.R1, _R.R0)
    asm.load(_R.R2, _R.R1, ProbeField.DISABLED, Size.W)
    asm.jump_if(Jump.JNE, _R.R2, 0, out)
    asm.load_value(_R.R1, MapName.UNSEEN_RETURNS)
    asm.alu(Alu.LSH, _R.R3, _WORD.bit_length() - 1)
    asm.alu(Alu.ADD, _R.R1, _R.R3)
    asm.mov(_R.R2, 1)
    asm.atomic(Atomic.ADD, _R.R1, 0, _R.R2)
    asm.place(out)
    asm.mov(_R.R0, 0)
    asm.exit()
    return asm.assemble()
