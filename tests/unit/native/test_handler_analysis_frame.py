"""How much of its frame code uses is seen from its stores, its loads, and the addresses that it takes."""

from __future__ import annotations

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Alu, Register, Size
from dprobes.native.handler_analysis import FRAME_MAX, budget_place, frame_size, uses_budget

R = Register


def with_exit(asm: Assembler) -> Assembled:
    asm.exit()
    return asm.assemble()


def test_code_without_a_frame() -> None:
    asm = Assembler()
    asm.mov(R.R0, 0)
    assert frame_size(with_exit(asm)) == 0


def test_the_lowest_access_counts() -> None:
    asm = Assembler()
    asm.store(R.R10, -8, 0, Size.DW)
    asm.store(R.R10, -20, 0, Size.W)
    asm.load(R.R0, R.R10, -8)
    assert frame_size(with_exit(asm)) == 32


def test_an_address_counts_as_what_is_added_to_it() -> None:
    asm = Assembler()
    asm.mov(R.R2, R.R10)
    asm.alu(Alu.ADD, R.R2, -48)
    assert frame_size(with_exit(asm)) == 48


def test_an_address_that_goes_elsewhere_takes_all() -> None:
    asm = Assembler()
    asm.mov(R.R2, R.R10)
    asm.mov(R.R3, 1)
    assert frame_size(with_exit(asm)) == FRAME_MAX


def test_a_counter_of_passes_lies_below() -> None:
    asm = Assembler()
    out = asm.label()
    asm.store(R.R10, -16, 0, Size.DW)
    asm.may_goto(out)
    asm.place(out)
    assembled = with_exit(asm)
    assert uses_budget(assembled.code)
    assert budget_place(assembled.code) == -24
    assert frame_size(assembled) == 32
