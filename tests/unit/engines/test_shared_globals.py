"""Cells that others change at the same time: no change is lost."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines import shared_globals as shared
from dprobes.engines.shared_globals import AtomicCells, GlobalVariables, MappedCells, add_to_word, raise_word
from dprobes.rpn.compilation_passes import CompileOptions, check_program, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMES = 20_000


def cells_of(memory: mmap.mmap) -> AtomicCells:
    return AtomicCells(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def in_processes(work: Callable[[int], None]) -> None:
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            work(number)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3


def test_cells_and_their_low_halves_are_stored_and_added_to() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))
    cells[3] = (1 << 64) - 1
    cells.store(3, 7, 4)
    cells.add(4, -1, 4)
    cells.add(5, -2, 8)
    cells.store(6, 9, 8)
    assert [cells[n] for n in range(2, 8)] == [0, 0xFFFFFFFF_00000007, 0xFFFFFFFF, (1 << 64) - 2, 9, 0]
    assert len(cells) == 512
    assert cells.view()[6] == 9


def test_there_are_no_others_and_no_fewer() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))
    for index in (-1, 512):
        with pytest.raises(IndexError):
            cells.add(index, 1, 8)
    with pytest.raises(TypeError, match="the number of shared variables is fixed"):
        cells.append(1)


def test_adding_tells_what_was_there() -> None:
    memory = mmap.mmap(-1, 4096)
    cells = cells_of(memory)
    cells[0] = 40
    assert [add_to_word(cells._address, amount) for amount in (2, -43, 0)] == [40, 42, (1 << 64) - 1]


def test_no_addition_of_others_is_lost() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))

    def add(number: int) -> None:
        for _ in range(TIMES):
            cells.add(1, 1, 8)

    in_processes(add)
    assert cells[1] == 3 * TIMES


def test_the_greatest_number_stays_without_a_sign() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))

    def offer(number: int) -> None:
        for n in range(TIMES):
            raise_word(cells._address, n * 3 + number)

    in_processes(offer)
    assert cells[0] == 3 * (TIMES - 1) + 2
    raise_word(cells._address, 1 << 63)
    raise_word(cells._address, 5)
    assert cells[0] == 1 << 63


# Global variables in shared memory.


ADDITIONS = 20_000


@pytest.fixture(params=["map", "file"])
def variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GlobalVariables]:
    if request.param == "file":
        from dprobes.platform.linux import bpf_calls

        def refuse(*arguments: object) -> int:
            raise PermissionError(1, "on purpose")

        monkeypatch.setattr(bpf_calls, "create_map", refuse)
    with GlobalVariables(600) as made:
        if request.param == "map" and not made.is_map:
            pytest.skip("this user may not make BPF maps")
        assert made.is_map == (request.param == "map")
        yield made


def test_whoever_maps_the_descriptor_sees_the_same_cells(variables: GlobalVariables) -> None:
    one, other = variables.cells(), MappedCells(variables.descriptor, 600)
    one[599] = (1 << 64) - 1
    other.store(599, 5, 4)
    other.add(0, -1, 8)
    other.add(1, -1, 4)
    assert (len(one), one[599], one[0], one[1]) == (600, 0xFFFFFFFF_00000005, (1 << 64) - 1, 0xFFFFFFFF)
    for index in (-1, 600):
        with pytest.raises(IndexError):
            one[index] = 1
    for each in (one, other):
        each.close()


def test_no_addition_of_another_process_is_lost(variables: GlobalVariables) -> None:
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            cells = MappedCells(variables.descriptor, 600)
            for _ in range(ADDITIONS):
                cells.add(7, 1, 8)
                cells.add(8, number + 1, 4)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    cells = variables.cells()
    assert (cells[7], cells[8]) == (3 * ADDITIONS, 6 * ADDITIONS)
    cells.close()


@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize("runner", [Interpreter, Translator])
def test_handlers_use_shared_cells_as_their_own(
    variables: GlobalVariables, name: str, runner: type[Interpreter | Translator]
) -> None:
    text = (
        "name = x; gvars = 4; offset = 0; push 7; pop gv, 1; inc gv, 1; dec gv, 0; push 2; push 9; pop gv; push 3; "
        "push 2; move gv; push 0; push 4; log gv; exit"
    )
    context = FakeContext(name)
    diagnostics, options = Diagnostics(), CompileOptions()
    program = parse_source(SourceFile("handler.rpn", text), diagnostics, options)
    check_program(program, context.architecture, diagnostics, options)
    image = encode(program, context.architecture)
    plain = runner(image, context.architecture).run(image.handlers[0], prepare(program, 0, context), context)
    cells = MappedCells(variables.descriptor, 4)
    for index in range(4):
        cells[index] = 0
    context.global_variables = cells
    point = prepare(program, 0, FakeContext(name))
    assert runner(image, context.architecture).run(image.handlers[0], point, context) == plain
    assert list(cells)[1:] == [8, 3, 0]
    assert cells[0] == context.architecture.word_mask  # the low half of it, with 4-byte words
    cells.close()


def test_the_number_of_cells_is_fixed(variables: GlobalVariables) -> None:
    cells = variables.cells()
    with pytest.raises(TypeError, match="fixed"):
        cells.append(1)
    with pytest.raises(TypeError, match="fixed"):
        del cells[0]
    cells.close()
    assert shared.GlobalVariables(0).cells() is not None
