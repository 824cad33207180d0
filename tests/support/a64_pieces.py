"""Single eBPF instructions as machine code of AArch64, on registers that a test chooses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembled
from dprobes.bpf.bpf_instructions import Insn
from dprobes.native.a64.a64_operations import A64Operations, gpr
from dprobes.native.ebpf_translator import Translator
from dprobes.native.generated_code import Surroundings
from support.a64_processor import A64Processor
from support.ebpf_model import REGISTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["pieces"]

_CODE = 0x40_0000
_NOP = 0xD503_201F


def pieces(codes: Sequence[Sequence[Insn]], *memory: tuple[int, int]) -> list[Callable[[Sequence[int]], list[int]]]:
    """
    Return a function for each sequence of instructions, from the initial to the final values of R0 to R9.

    ``memory`` are start address and size of pages of this process that the code may access.
    """
    processor = A64Processor(memory)
    asm = A64Operations(_CODE)
    places = [_write(asm, code) for code in codes]
    processor.put(_CODE, asm.assemble())
    return [partial(_run, processor, start, end) for start, end in places]


def _write(asm: A64Operations, code: Sequence[Insn]) -> tuple[int, int]:
    start, out = asm.here, asm.label()
    whole = (*code, Insn(0x95))
    assembled = Assembled(whole, (), (-1,) * len(whole), (0,))
    Translator(asm, assembled, Surroundings({}, {}, {}), out).write()
    asm.place(out)
    end = asm.here
    asm.word(_NOP)
    return start, end


def _run(processor: A64Processor, start: int, end: int, values: Sequence[int]) -> list[int]:
    processor.set_registers({gpr(n).value: value for n, value in zip(REGISTERS, values, strict=True)})
    processor.run(start, end)
    after = processor.registers()
    return [after[gpr(n).value] for n in REGISTERS]
