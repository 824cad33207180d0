"""Routines are functions of this process."""

from __future__ import annotations

import gc
from pathlib import Path

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Helper, Register
from dprobes.engines.inline.shared_memory import own_function

_R = Register


def test_a_routine_takes_five_words_and_calls_others() -> None:
    called = Assembler()
    called.mov(_R.R0, _R.R1)
    called.alu(Alu.MUL, _R.R0, 10)
    called.exit()
    asm = Assembler()
    for register in (_R.R2, _R.R3, _R.R4, _R.R5):
        asm.alu(Alu.ADD, _R.R1, register)
    asm.mov(_R.R6, 3)
    asm.call(Helper.MAP_LOOKUP_ELEM)
    asm.alu(Alu.ADD, _R.R0, _R.R6)
    asm.exit()
    function = own_function(asm.assemble(), {Helper.MAP_LOOKUP_ELEM: called.assemble()})
    assert function(1, 2, 3, 4, 5) == 153
    assert function(1 << 62) == ((10 << 62) & (1 << 64) - 1) + 3
    assert function() == 3


def test_the_code_of_a_routine_goes_with_it() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:dprobes")

    asm = Assembler()
    asm.mov(_R.R0, 7)
    asm.exit()
    gc.collect()
    before = mapped()
    functions = [own_function(asm.assemble()) for _ in range(3)]
    assert [function() for function in functions] == [7] * 3
    assert mapped() == before + 3
    functions.clear()
    gc.collect()
    assert mapped() == before
