"""Handlers that differ by the numbers of their probepoints alone are made from a few that were compiled."""

from __future__ import annotations

from dprobes.bpf.bpf_assembler import Assembled, Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.engines.inline.handler_pieces import HandlerFamily, NumberedCode


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

    def made(number: int, *, knows_place: bool = False) -> Assembled:
        def compile_at(distance: int) -> Assembled:
            compiled.append(number)
            return code(number, distance if knows_place else 7)

        return family.handler(number, compile_at)

    assert [made(number) for number in range(9)] == [code(number) for number in range(9)]
    assert compiled == [0, 1, 2, 2]


def test_handlers_that_know_where_they_are_are_all_compiled() -> None:
    compiled, family = [], HandlerFamily()

    def made(number: int) -> Assembled:
        def compile_at(distance: int) -> Assembled:
            compiled.append(number)
            return code(number, distance)

        return family.handler(number, compile_at)

    assert [made(number) for number in range(6)] == [code(number, 0) for number in range(6)]
    assert compiled == [0, 1, 2, 2, 3, 4, 5]
