"""What code touches is known, or all of it is: never less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.map_layouts import MapName
from dprobes.native.handler_analysis import CONTEXT_WORDS, footprint

if TYPE_CHECKING:
    from collections.abc import Callable

R = Register
ALL = set(CONTEXT_WORDS)


def of(write: Callable[[Assembler], None]) -> tuple[set[int], set[int], set[int], bool]:
    asm = Assembler()
    asm.mov(R.R6, R.R1)
    write(asm)
    asm.mov(R.R0, 0)
    asm.exit()
    found = footprint(asm.assemble())
    return set(found.registers), set(found.reads), set(found.writes), found.calls


def nothing(asm: Assembler) -> None:
    pass


def test_what_only_returns_touches_little() -> None:
    assert of(nothing) == ({0, 1, 6}, set(), set(), False)


@pytest.mark.parametrize(
    ("offset", "size", "words"),
    [(112, Size.DW, {112}), (116, Size.W, {112}), (119, Size.B, {112}), (116, Size.DW, {112, 120}), (0, Size.H, {0})],
)
def test_loads_and_stores_of_the_context(offset: int, size: Size, words: set[int]) -> None:
    assert of(lambda asm: asm.load(R.R2, R.R6, offset, size)) == ({0, 1, 2, 6}, words, set(), False)
    is_whole = size is Size.DW and len(words) == 1
    read = set() if is_whole else words
    assert of(lambda asm: asm.store(R.R6, offset, R.R3, size)) == ({0, 1, 3, 6}, read, words, False)
    assert of(lambda asm: asm.store(R.R6, offset, 5, size)) == ({0, 1, 6}, read, words, False)


def test_an_atomic_operation_reads_and_writes() -> None:
    found = of(lambda asm: asm.atomic(Atomic.ADD, R.R6, 80, R.R2))
    assert found == ({0, 1, 2, 6}, {80}, {80}, False)


def test_calls_take_the_registers_that_they_do_not_keep() -> None:
    found = of(lambda asm: asm.call(Helper.KTIME_GET_NS))
    assert found == ({0, 1, 2, 3, 4, 5, 6}, set(), set(), True)


def kept_elsewhere(asm: Assembler) -> None:
    asm.mov(R.R2, R.R6)


def passed_on(asm: Assembler) -> None:
    asm.mov(R.R1, R.R6)
    asm.call(Helper.GET_STACK)


def stored(asm: Assembler) -> None:
    asm.store(R.R10, -8, R.R6)


def added_to(asm: Assembler) -> None:
    asm.alu(Alu.ADD, R.R6, 8)


def added_from(asm: Assembler) -> None:
    asm.alu(Alu.ADD, R.R3, R.R6)


def exchanged(asm: Assembler) -> None:
    asm.atomic(Atomic.XCHG, R.R10, -8, R.R6)


def loaded(asm: Assembler) -> None:
    asm.load_value(R.R6, MapName.LOCALS)


@pytest.mark.parametrize("write", [kept_elsewhere, passed_on, stored, added_to, added_from, exchanged, loaded])
def test_a_context_that_is_seen_elsewhere_is_touched_as_a_whole(write: Callable[[Assembler], None]) -> None:
    _, reads, writes, _ = of(write)
    assert (reads, writes) == (ALL, ALL)


def test_r1_is_the_context_where_it_is_not_moved_first() -> None:
    asm = Assembler()
    asm.load(R.R2, R.R1, 96)
    asm.store(R.R1, 80, R.R2)
    asm.mov(R.R0, 0)
    asm.exit()
    found = footprint(asm.assemble())
    assert (set(found.reads), set(found.writes)) == ({96}, {80})
    for helper, seen in ((Helper.GET_STACK, ALL), (Helper.KTIME_GET_NS, set())):
        asm = Assembler()
        asm.call(helper)
        asm.exit()
        assert set(footprint(asm.assemble()).reads) == seen


def test_behind_the_context_is_nothing() -> None:
    assert of(lambda asm: asm.load(R.R2, R.R6, 168))[1] == set()


def test_operands_that_are_numbers_are_no_registers() -> None:
    def write(asm: Assembler) -> None:
        label = asm.label()
        asm.jump_if(Jump.JEQ, R.R4, 1, label)
        asm.alu(Alu.ADD, R.R5, 1)
        asm.place(label)

    assert of(write)[0] == {0, 1, 4, 5, 6}
