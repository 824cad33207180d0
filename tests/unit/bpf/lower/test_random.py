"""
Handlers compiled to eBPF do what the interpreter does, and the verifier takes every one of them.

Every case runs as eBPF too (``conftest.COMPILED``); here are random programs and random bytes, with random demands.
"""

from __future__ import annotations

from random import Random

import pytest

from dprobes.bpf.lower import LoopForm
from support.differential_runs import Demand, bytes_agree, program_agrees, random_demand
from support.ebpf_abilities import loop_forms
from support.ebpf_backend import obstacle
from support.rounds import rounds

ROUNDS = rounds(10_000)
FEWER = rounds(2_000)
NAMES = pytest.mark.parametrize("name", ["i386", "x86_64"])
KINDS = pytest.mark.parametrize("kind", ["defined", "wild"])


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


@NAMES
@KINDS
def test_a_random_program_does_the_same(name: str, kind: str) -> None:
    agreed = sum(program_agrees(seed, name, kind, Demand()) for seed in range(ROUNDS))
    assert agreed == ROUNDS if kind == "defined" else agreed >= ROUNDS // 4


@NAMES
@KINDS
def test_so_it_does_whatever_else_is_asked_for(name: str, kind: str) -> None:
    agreed = sum(program_agrees(seed, name, kind, random_demand(Random(seed))) for seed in range(FEWER))
    assert agreed == FEWER if kind == "defined" else agreed >= FEWER // 4


@NAMES
@KINDS
@pytest.mark.parametrize("loops", [LoopForm.ITERATOR, LoopForm.CALLBACK])
def test_so_it_does_with_the_loops_of_older_kernels(name: str, kind: str, loops: LoopForm) -> None:
    if loops not in loop_forms():
        pytest.skip(f"this kernel has no loops of the form {loops.name}")
    assert sum(program_agrees(seed, name, kind, Demand(loops)) for seed in range(FEWER)) >= FEWER // 4


@NAMES
@KINDS
def test_so_it_does_where_programs_may_not_sleep(name: str, kind: str) -> None:
    assert sum(program_agrees(seed, name, kind, Demand(sleepable=False)) for seed in range(FEWER)) >= FEWER // 4


@NAMES
@KINDS
def test_so_it_does_at_the_ends_of_all_limits(name: str, kind: str) -> None:
    demand = random_demand
    agreed = sum(program_agrees(seed, name, kind, demand(Random(seed)), is_extreme=True) for seed in range(FEWER))
    assert agreed == FEWER if kind == "defined" else agreed >= FEWER // 4


@NAMES
def test_random_bytes_do_the_same(name: str) -> None:
    assert sum(bytes_agree(seed, name) for seed in range(FEWER)) >= FEWER // 4
