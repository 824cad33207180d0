"""
Handlers as machine code of AArch64 do what the interpreter does.

Every case runs so too (``conftest.COMPILED``); here are random programs and random bytes, with random demands.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from dprobes.bpf.lower import Placement
from support.a64_backend import A64Stage
from support.differential_runs import Demand, bytes_agree, program_agrees, random_demand
from support.rounds import rounds

ROUNDS = rounds(10_000)
FEWER = rounds(2_000, 15)
NAMES = pytest.mark.parametrize("name", ["i386", "x86_64"])
KINDS = pytest.mark.parametrize("kind", ["defined", "wild"])
STAGE = A64Stage()


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
