"""Single eBPF instructions as machine code, on registers that a test chooses."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled
from dprobes.bpf.bpf_instructions import Insn
from dprobes.native.ebpf_translator import Translator
from dprobes.native.generated_code import Surroundings
from dprobes.native.x86.x86_assembler import Gpr, Memory
from dprobes.native.x86.x86_operations import X86Operations, gpr
from support.ebpf_model import REGISTERS
from support.machine_code import SAVED, function_at, place, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["pieces"]

_BLOCK = Gpr.R12
"""The register with the address of the values: the JIT uses it for no eBPF register, and preserves it."""


def pieces(codes: Sequence[Sequence[Insn]], *_memory: tuple[int, int]) -> list[Callable[[Sequence[int]], list[int]]]:
    """Return a function for each sequence of instructions (``MakePieces``), which may access all memory."""
    room = 1 << 20
    address = reserve(room)
    asm = X86Operations(address)
    starts = [_write(asm, code) for code in codes]
    place(address, asm.assemble(), room)
    return [_function(start) for start in starts]


def _write(asm: X86Operations, code: Sequence[Insn]) -> int:
    start, out = asm.here, asm.label()
    for register in SAVED:
        asm.push(register)
    asm.mov(_BLOCK, Gpr.RDI)
    for number in REGISTERS:
        asm.load(gpr(number), Memory(_BLOCK, 8 * number))
    whole = (*code, Insn(0x95))
    Translator(asm, Assembled(whole, (), (-1,) * len(whole), (0,)), Surroundings({}, {}, {}), out).write()
    asm.place(out)
    for number in REGISTERS:
        asm.store(Memory(_BLOCK, 8 * number), gpr(number))
    for register in reversed(SAVED):
        asm.pop(register)
    asm.ret()
    return start


def _function(start: int) -> Callable[[Sequence[int]], list[int]]:
    function = function_at(start)

    def run(values: Sequence[int]) -> list[int]:
        block = (ctypes.c_uint64 * len(REGISTERS))(*values)
        function(ctypes.addressof(block))
        return list(block)

    return run
