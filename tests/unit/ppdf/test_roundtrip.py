"""A compiled program and the bytes of its file are two forms of one thing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import architecture
from dprobes.ppdf.model import Ppdf
from dprobes.ppdf.reader import decode
from dprobes.ppdf.writer import encode
from dprobes.rpn.needs import writing_instructions
from random_programs import RandomPrograms

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
