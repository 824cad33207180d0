"""Handlers that differ by the numbers of their probepoints alone are made from a few that were compiled."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_pieces import HandlerFamily, NumberedCode, handler_codes
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile


def code(number: int, constant: int = 7, *, twice: bool = False) -> Assembled:
    asm = Assembler()
    asm.mov(Register.R1, 128 * number)
    asm.mov(Register.R2, constant)
    if twice:
        asm.mov(Register.R3, number)
    asm.mov(Register.R0, -3 * number)
    asm.exit()
    return asm.assemble()


def test_numbers_that_grow_are_found_and_others_stay() -> None:
    found = NumberedCode.learnt([(2, code(2)), (5, code(5)), (100, code(100))])
    assert found is not None
    assert found.places == ((0, 128), (2, -3))
    assert found.of(1000) == code(1000)
    assert found.of(0) == code(0)


def test_code_that_differs_otherwise_is_not_made_of_others() -> None:
    assert NumberedCode.learnt([(2, code(2)), (3, code(3, twice=True))]) is None
    assert NumberedCode.learnt([(2, code(2, 10)), (5, code(5, 11))]) is None  # a third of it for each number
    assert NumberedCode.learnt([(2, code(2, 10)), (3, code(3, 11)), (4, code(4, 13))]) is None


def test_a_family_compiles_a_few_of_its_members() -> None:
    compiled, family = [], HandlerFamily()

    def made(number: int) -> Assembled:
        def compile_at(start: int, distance: int) -> Assembled:
            compiled.append((number, start, distance == 0))
            return code(number)

        return family.handler(number, 10 * number, compile_at).of(number)

    assert [made(number) for number in range(9)] == [code(number) for number in range(9)]
    assert compiled == [(0, 0, True), (1, 10, True), (2, 20, True), (2, 20, False), (2, 0, True)]


@pytest.mark.parametrize("depends_on", ["address", "start"])
def test_handlers_that_depend_on_their_place_are_all_compiled(depends_on: str) -> None:
    compiled, family = [], HandlerFamily()

    def place(number: int) -> int:
        return 10 * number if depends_on == "start" else 0

    def made(number: int) -> Assembled:
        def compile_at(start: int, distance: int) -> Assembled:
            compiled.append(number)
            return code(number, start + distance)

        return family.handler(number, place(number), compile_at).of(number)

    assert [made(number) for number in range(6)] == [code(number, place(number)) for number in range(6)]
    assert set(compiled) == set(range(6))


PROGRAM = """name = "m"
vars = 1
offset = 0x10
minor = 1
inc lv, 0
exit
offset = 0x20
minor = 2
push 7
skip: jmp skip
offset = 0x30
minor = 3
inc lv, 0
exit
offset = 0x40
minor = 4
call p
exit
offset = 0x50
minor = 5
call p
exit
offset = 0x60
minor = 6
push there
exit
offset = 0x70
minor = 7
push there
exit
offset = 0x80
minor = 8
push here
exit
proc p
  inc lv, 0
  ret
endproc
"""


def test_equal_handlers_of_several_definitions_have_one_content() -> None:
    """But for calls, which are encoded as distances, and for addresses that are filled in later."""
    program = parse_source(SourceFile("equal.rpn", PROGRAM), Diagnostics())
    codes = handler_codes(encode(program, architecture("x86_64")))
    first, other, third, calling, calling_too, there, there_too, here = codes
    assert first == third
    assert len({first, other, calling, calling_too, there, here}) == 6
    assert there == there_too
