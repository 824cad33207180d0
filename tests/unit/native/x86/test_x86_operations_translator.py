"""
Handlers as machine code do what the interpreter does.

Every case runs so too (``conftest.COMPILED``); here are random programs and random bytes, with random demands.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from random import Random

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import Placement
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext
from dprobes.vm import Point
from support.differential_runs import Demand, MappedHereError, bytes_agree, compared, program_agrees, random_demand
from support.native_backend import NativeStage
from support.rounds import rounds

ROUNDS = rounds(10_000)
FEWER = rounds(2_000)
NAMES = pytest.mark.parametrize("name", ["i386", "x86_64"])
KINDS = pytest.mark.parametrize("kind", ["defined", "wild"])
STAGE = NativeStage()


def native_demand(seed: int) -> Demand:
    """Return a demand of a kind that there is in a process: at an instruction, or at a return."""
    demand = random_demand(Random(seed))
    placement = Random(seed).choice((Placement.BREAKPOINT, Placement.RET_SITE))
    moved = demand.request.moved if placement is Placement.BREAKPOINT else 0
    return replace(demand, request=replace(demand.request, placement=placement, moved=moved))


@NAMES
@KINDS
def test_a_random_program_does_the_same(name: str, kind: str) -> None:
    agreed = sum(program_agrees(seed, name, kind, Demand(), STAGE) for seed in range(ROUNDS))
    assert agreed == ROUNDS if kind == "defined" else agreed >= ROUNDS // 4


@NAMES
@KINDS
def test_so_it_does_whatever_else_is_asked_for(name: str, kind: str) -> None:
    agreed = sum(program_agrees(seed, name, kind, native_demand(seed), STAGE) for seed in range(FEWER))
    assert agreed == FEWER if kind == "defined" else agreed >= FEWER // 4


@NAMES
@KINDS
def test_so_it_does_at_the_ends_of_all_limits(name: str, kind: str) -> None:
    agreed = sum(program_agrees(seed, name, kind, native_demand(seed), STAGE, is_extreme=True) for seed in range(FEWER))
    assert agreed == FEWER if kind == "defined" else agreed >= FEWER // 4


@NAMES
def test_random_bytes_do_the_same(name: str) -> None:
    assert sum(bytes_agree(seed, name, STAGE) for seed in range(FEWER)) >= FEWER // 4


def test_what_would_write_to_this_process_is_not_run() -> None:
    here = ctypes.create_string_buffer(b"unharmed", 16384)
    target = architecture("x86_64")
    text = f"name = x\noffset = 0\npush {ctypes.addressof(here)}\npush 7\npop mem, u64\nexit\n"
    image = encode(parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions()), target)
    with pytest.raises(MappedHereError):
        compared(image, target, [(image.handlers[0], Point())], FakeContext, Demand(), STAGE)
    assert here.value == b"unharmed"
