"""The assembler: labels, ranges, code that cannot be reached, functions, maps, origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler, MapReference
from dprobes.bpf.bpf_disassembler import disassemble
from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register
from dprobes.bpf.map_layouts import MapName

if TYPE_CHECKING:
    from collections.abc import Callable

R0, R1, R2, R10 = (Register(n) for n in (0, 1, 2, 10))


def listing(asm: Assembler) -> list[str]:
    return [line.text for line in disassemble(asm.assemble().code)]


def test_labels_lead_forwards_and_backwards() -> None:
    asm = Assembler()
    again, done = asm.label(), asm.label()
    asm.mov(R0, 9)
    asm.place(again)
    asm.alu(Alu.SUB, R0, 1)
    asm.jump_if(Jump.JEQ, R0, 0, done)
    asm.jump(again)
    asm.place(done)
    asm.exit()
    assert listing(asm) == ["r0 = 9", "r0 -= 1", "if r0 == 0 goto +1 <4>", "goto -3 <1>", "exit"]


def test_code_that_cannot_be_reached_is_left_out_and_jumps_over_it_are_shorter() -> None:
    asm = Assembler()
    done, never = asm.label(), asm.label()
    asm.jump_if(Jump.JNE, R1, 0, done)
    asm.jump(done)
    asm.place(never)
    asm.load_map(R1, MapName.RING)
    asm.jump(never)
    asm.place(done)
    asm.exit()
    assert listing(asm) == ["if r1 != 0 goto +1 <2>", "goto +0 <2>", "exit"]
    assert asm.assemble().maps == ()


def test_map_references_and_origins_are_those_of_the_code_that_is_left() -> None:
    asm = Assembler()
    done = asm.label()
    asm.jump(done)
    asm.origin = 3
    asm.mov(R0, 1)
    asm.place(done)
    asm.origin = 7
    asm.load_map(R1, MapName.RING)
    asm.load_value(R2, MapName.LOCALS, 64)
    asm.origin = -1
    asm.exit()
    assembled = asm.assemble()
    assert assembled.maps == (MapReference(1, MapName.RING, False), MapReference(3, MapName.LOCALS, True))
    assert assembled.origins == (-1, 7, 7, 7, 7, -1)
    assert len(assembled.code) == len(assembled.origins)


def test_functions_are_kept_if_something_refers_to_them() -> None:
    asm = Assembler()
    used, unused = asm.label(), asm.label()
    asm.load_function(R2, used)
    asm.exit()
    asm.function(unused)
    asm.exit()
    asm.function(used)
    asm.mov(R0, 1)
    asm.exit()
    assembled = asm.assemble()
    assert assembled.functions == (0, 3)
    assert [line.text for line in disassemble(assembled.code)] == ["r2 = function <3>", "exit", "r0 = 1", "exit"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "r0 = 0"),
        (-1, "r0 = -1"),
        (0x7FFF_FFFF, "r0 = 2147483647"),
        (-0x8000_0000, "r0 = -2147483648"),
        (0x8000_0000, "w0 = -2147483648"),
        (0xFFFF_FFFF, "w0 = -1"),
        (0x1_0000_0000, "r0 = 0x100000000 ll"),
        (-0x8000_0001, "r0 = 0xffffffff7fffffff ll"),
        (0xFFFF_FFFF_FFFF_FFFF, "r0 = 0xffffffffffffffff ll"),
    ],
)
def test_numbers_are_loaded_by_the_shortest_instruction_that_can_hold_them(value: int, text: str) -> None:
    asm = Assembler()
    asm.mov(R0, value)
    asm.exit()
    assert listing(asm) == [text, "exit"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda asm: asm.load(R1, R2, 0x8000), "offset 32768 does not fit into 16 bits"),
        (lambda asm: asm.store(R1, -0x8001, 0), "offset -32769 does not fit into 16 bits"),
        (lambda asm: asm.alu(Alu.ADD, R1, 1 << 31), "immediate 2147483648 does not fit into 32 bits"),
        (lambda asm: asm.store(R1, 0, 1 << 31), "immediate 2147483648 does not fit into 32 bits"),
        (lambda asm: asm.jump_if(Jump.JEQ, R1, -(1 << 31) - 1, asm.label()),
         "immediate -2147483649 does not fit into 32 bits"),
        (lambda asm: asm.call(1 << 40), "immediate 1099511627776 does not fit into 32 bits"),
    ],
)  # fmt: skip
def test_a_number_that_does_not_fit_names_its_field(write: Callable[[Assembler], None], message: str) -> None:
    with pytest.raises(OverflowError) as caught:
        write(Assembler())
    assert str(caught.value) == message


@pytest.mark.parametrize(("distance", "fits"), [(0x7FFF, True), (0x8000, False)])
def test_jumps_reach_32767_instructions(distance: int, fits: bool) -> None:
    asm = Assembler()
    done = asm.label()
    asm.jump_if(Jump.JEQ, R1, 0, done)
    for _ in range(distance):
        asm.mov(R0, 0)
    asm.place(done)
    asm.exit()
    if fits:
        assert asm.assemble().code[0].off == distance
        return
    with pytest.raises(OverflowError) as caught:
        asm.assemble()
    assert str(caught.value) == "a jump over 32768 eBPF instructions is too long: 32767 is the most"


def test_a_label_is_placed_once_and_before_the_end() -> None:
    asm = Assembler()
    label = asm.label()
    asm.jump(label)
    with pytest.raises(AssertionError, match=r"^a label is used that was never placed$"):
        asm.assemble()
    asm.place(label)
    with pytest.raises(AssertionError, match=r"^a label is placed twice$"):
        asm.place(label)
    with pytest.raises(AssertionError, match=r"^the code runs off its end$"):
        asm.assemble()


def test_helpers_are_called_by_number() -> None:
    asm = Assembler()
    asm.call(Helper.KTIME_GET_NS)
    asm.may_goto(label := asm.label())
    asm.place(label)
    asm.exit()
    assert listing(asm) == ["call ktime_get_ns#5", "may_goto +0 <2>", "exit"]


def _calling(function_code: int) -> Assembler:
    asm = Assembler()
    function = asm.label()
    asm.mov(R0, 5)
    asm.call_function(function)
    asm.load_function(R1, function)
    asm.exit()
    asm.function(function)
    asm.mov(R0, function_code)
    asm.exit()
    return asm


def test_what_is_included_leads_to_its_functions_behind_everything() -> None:
    first, second = _calling(7).assemble(), _calling(8).assemble()
    asm = Assembler()
    labels = [asm.label()], [asm.label()]
    asm.include(first, labels[0])
    asm.include(second, labels[1])
    asm.include_functions(first, labels[0])
    asm.include_functions(second, labels[1])
    assembled = asm.assemble()
    assert assembled.functions == (0, 10, 12)
    assert [line.text for line in disassemble(assembled.code)] == [
        *("r0 = 5", "call pc+8 <10>", "r1 = function <10>", "exit"),
        *("r0 = 5", "call pc+5 <12>", "r1 = function <12>", "exit"),
        *("r0 = 7", "exit", "r0 = 8", "exit"),
    ]
