"""A compiled program and the bytes of its file are two forms of one thing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import architecture
from dprobes.ppdf.ppdf_file import decode, encode
from dprobes.ppdf.ppdf_model import Ppdf
from dprobes.rpn.program_needs import writing_instructions
from dprobes.target.kernel.kernel_symbols import CarriedKernel, KernelArea, KernelPlace, KernelSymbol
from support.random_programs import RandomPrograms

SEEDS = st.integers(0, (1 << 32) - 1)


@pytest.mark.parametrize("name", ["x86_64", "i386"])
@given(seed=SEEDS)
def test_a_random_program_comes_back_from_its_bytes(name: str, seed: int) -> None:
    generator = RandomPrograms(Random(seed), architecture(name))
    for program in (generator.wild(), generator.defined()):
        ppdf = Ppdf(program, (name,), needs_write=bool(writing_instructions(program)))
        data = encode(ppdf)
        assert decode(data) == ppdf
        assert encode(decode(data)) == data


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/."), min_size=1, max_size=20)
WORDS = st.integers(0, (1 << 64) - 1)
LETTERS = st.sampled_from("aAbBdDrRtTvVwW")


@st.composite
def kernels(draw: st.DrawFn, identity: str) -> CarriedKernel:
    module = draw(st.just("") | NAMES)
    return CarriedKernel(
        identity,
        draw(NAMES),
        module,
        tuple(draw(st.lists(st.builds(KernelArea, NAMES, WORDS, WORDS), min_size=1, max_size=4))),
        tuple(draw(st.lists(st.builds(KernelSymbol, NAMES, WORDS, LETTERS, st.just(module)), max_size=9))),
        tuple(draw(st.lists(st.builds(KernelPlace, st.just(0), WORDS, st.binary(max_size=15), NAMES), max_size=4))),
    )


@given(first=kernels("1"), second=kernels("2"), seed=SEEDS)
def test_what_is_known_of_kernels_comes_back(first: CarriedKernel, second: CarriedKernel, seed: int) -> None:
    program = RandomPrograms(Random(seed), architecture("x86_64")).defined()
    ppdf = Ppdf(program, ("x86_64",), needs_write=bool(writing_instructions(program)), kernels=(first, second))
    assert decode(encode(ppdf)) == ppdf
