"""Random programs do what the interpreter does also on real uprobes, with the registers of a real hit."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.arch.x86_processors import ACCESSED
from dprobes.bpf.lower import Placement
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import prepare
from integration.ebpf.kernel import descriptors, require_bpf, require_initial_namespace
from integration.ebpf.puppet import Puppet
from support.differential_runs import Demand, compared, program_agrees, random_demand
from support.random_programs import random_context
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.testing import FakeContext
    from integration.support import Builder

ROUNDS = rounds(5_000)
NAMES = pytest.mark.parametrize("name", ["i386", "x86_64"])


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def demand_of(seed: int) -> Demand:
    """Return a random demand; one in two is what a breakpoint wants by default."""
    if seed % 2:
        return Demand()
    random = Random(seed)
    demand = random_demand(random)
    if demand.request.placement in (Placement.BREAKPOINT, Placement.RET_SITE):
        return demand
    # The others are no matter of registers: a trampoline and a perf event would have to be hit.
    placement = random.choice((Placement.BREAKPOINT, Placement.RET_SITE))
    return replace(demand, request=replace(demand.request, placement=placement))


@contextmanager
def puppet_of(build: Builder, name: str) -> Iterator[Puppet]:
    """Have a puppet for a processor; nothing of what was attached may be left."""
    is_i386 = name == "i386"
    program = build("puppet.c", *(["-no-pie"] if is_i386 else []), i386=is_i386)
    before = descriptors()
    with Puppet(program) as puppet:
        yield puppet
    assert descriptors() == before


@NAMES
@pytest.mark.parametrize("kind", ["defined", "wild"])
def test_a_random_program_does_the_same_on_a_uprobe(build: Builder, name: str, kind: str) -> None:
    with puppet_of(build, name) as puppet:
        sites = cycle(puppet.sites)
        agreed = sum(program_agrees(seed, name, kind, demand_of(seed), next(sites)) for seed in range(ROUNDS))
    assert agreed == ROUNDS if kind == "defined" else agreed >= ROUNDS // 4


@NAMES
def test_every_register_is_there_at_every_site(build: Builder, name: str) -> None:
    target = architecture(name)
    registers = [name for name in REGISTER_OFFSETS if target.register(name) is not None and name != ACCESSED]
    source = "name = puppet\noffset = 0\n" + "".join(f"push r, {register}\n" for register in registers)
    source += f"log {len(registers)}\nexit\n"
    program = parse_source(SourceFile("registers.rpn", source), Diagnostics(), CompileOptions())
    image = encode(program, target)
    with puppet_of(build, name) as puppet:
        for seed, site in enumerate(puppet.sites):

            def world(seed: int = seed) -> FakeContext:
                return random_context(Random(seed), target)

            hits = [(image.handlers[0], prepare(program, 0, world()))]
            assert compared(image, target, hits, world, demand_of(seed), site)
