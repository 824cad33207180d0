"""What is left out is what nobody looks at, on no way; the rest does what it did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler, MapReference
from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.map_layouts import MapName
from dprobes.native.handler_analysis import check_code, is_first_argument_used, trimmed

if TYPE_CHECKING:
    from collections.abc import Callable

R = Register


def left(write: Callable[[Assembler], None]) -> list[int]:
    """Return the opcodes that are left of what is written, without ``exit``."""
    asm = Assembler()
    write(asm)
    asm.mov(R.R0, 0)
    asm.exit()
    found = trimmed(asm.assemble())
    check_code(found)
    assert len(found.origins) == len(found.code)
    return [insn.opcode for insn in found.code[:-1]]


def test_what_nobody_looks_at_goes() -> None:
    def write(asm: Assembler) -> None:
        asm.mov(R.R6, R.R1)
        asm.load(R.R2, R.R6, 112)
        asm.alu(Alu.ADD, R.R2, 5)
        asm.load_value(R.R3, MapName.LOCALS)
        asm.alu(Alu.DIV, R.R3, R.R2)

    assert left(write) == []


def test_what_is_stored_stays_with_all_that_it_is_made_of() -> None:
    def write(asm: Assembler) -> None:
        asm.mov(R.R6, R.R1)
        asm.load(R.R2, R.R6, 112)
        asm.load_value(R.R3, MapName.LOCALS)
        asm.mov(R.R4, 1)
        asm.store(R.R3, 0, R.R2)

    assert left(write) == [0xBF, 0x79, 0x18, 0, 0x7B]


def test_a_value_that_one_of_two_ways_looks_at_stays() -> None:
    def write(asm: Assembler) -> None:
        other = asm.label()
        asm.mov(R.R2, 7)
        asm.mov(R.R3, 8)
        asm.jump_if(Jump.JEQ, R.R1, 0, other)
        asm.store(R.R10, -8, R.R2)
        asm.place(other)

    assert left(write) == [0xB7, 0x15, 0x7B]


def test_a_value_that_the_next_pass_of_a_loop_looks_at_stays() -> None:
    def write(asm: Assembler) -> None:
        again, out = asm.label(), asm.label()
        asm.mov(R.R2, 7)
        asm.place(again)
        asm.may_goto(out)
        asm.store(R.R10, -8, R.R2)
        asm.mov(R.R2, 8)
        asm.mov(R.R3, 9)
        asm.jump(again)
        asm.place(out)

    assert left(write) == [0xB7, 0xE5, 0x7B, 0xB7, 0x05]


@pytest.mark.parametrize(
    ("helper", "count"),
    [(Helper.KTIME_GET_NS, 0), (Helper.SEND_SIGNAL, 1), (Helper.MAP_LOOKUP_ELEM, 2), (Helper.RINGBUF_OUTPUT, 3),
     (Helper.MAP_UPDATE_ELEM, 5), (Helper.GET_STACK, 5)],
)  # fmt: skip
def test_arguments_stay_as_many_as_there_are(helper: Helper, count: int) -> None:
    def write(asm: Assembler) -> None:
        for register in (R.R1, R.R2, R.R3, R.R4, R.R5):
            asm.mov(register, 1)
        asm.call(helper)

    assert left(write) == [0xB7] * count + [0x85]


def test_what_a_call_changes_nobody_has_looked_at() -> None:
    def write(asm: Assembler) -> None:
        asm.mov(R.R2, 1)
        asm.mov(R.R7, 1)
        asm.call(Helper.KTIME_GET_NS)
        asm.store(R.R10, -8, R.R2)
        asm.store(R.R10, -16, R.R7)

    assert left(write) == [0xB7, 0x85, 0x7B, 0x7B]


@pytest.mark.parametrize("operation", [Atomic.ADD, Atomic.XCHG, Atomic.CMPXCHG])
def test_what_an_atomic_operation_takes_stays(operation: Atomic) -> None:
    def write(asm: Assembler) -> None:
        asm.mov(R.R0, 1)
        asm.mov(R.R2, 2)
        asm.mov(R.R3, 3)
        asm.atomic(operation, R.R10, -8, R.R2)

    assert left(write) == [0xB7, 0xB7, 0xDB] if operation is Atomic.CMPXCHG else [0xB7, 0xDB]


def test_maps_and_jumps_are_where_they_belong() -> None:
    asm = Assembler()
    out = asm.label()
    asm.load_value(R.R2, MapName.GLOBALS)
    asm.load_value(R.R3, MapName.LOCALS)
    asm.jump_if(Jump.JEQ, R.R1, 0, out)
    asm.mov(R.R4, 1)
    asm.store(R.R3, 0, 1, Size.W)
    asm.place(out)
    asm.exit()
    found = trimmed(asm.assemble())
    assert found.maps == (MapReference(0, MapName.LOCALS, is_value=True),)
    assert [insn.off for insn in found.code] == [0, 0, 1, 0, 0]


def test_whether_the_first_argument_is_used() -> None:
    cases: list[tuple[Callable[[Assembler], None], bool]] = [
        (lambda asm: asm.mov(R.R6, R.R1), False),
        (lambda asm: asm.load(R.R2, R.R1, 0), False),
        (lambda asm: asm.store(R.R1, 0, 5), True),
        (lambda asm: asm.load_value(R.R1, MapName.LOCALS), False),
        (lambda asm: asm.call(Helper.GET_STACK), True),
        (lambda asm: asm.call(Helper.KTIME_GET_NS), False),
    ]
    for write, expected in cases:
        asm = Assembler()
        write(asm)
        asm.exit()
        assert is_first_argument_used(asm.assemble().code) is expected
