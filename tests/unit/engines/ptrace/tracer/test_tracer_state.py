"""A hit that ends before it was counted was none: what it has drawn is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.tracer_programs import Handled
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadHit, ThreadState
from support.ptrace_programs import inserted_program, probe_of


def hit_in(state: HitState, given_back: list[str]) -> ThreadHit:
    probe = probe_of(inserted_program())
    shared: Any = SimpleNamespace(is_limited=True, give_back=lambda: given_back.append("once"))
    probe.shared = shared
    return ThreadHit(state, handled=(Handled(probe),))


@pytest.mark.parametrize(
    ("state", "after", "given_back"),
    [
        (HitState.NONE, HitState.NONE, []),
        (HitState.HANDLED, HitState.NONE, ["once"]),
        (HitState.UNFINISHED, HitState.NONE, ["once"]),
        (HitState.COUNTED, HitState.NONE, []),
        (HitState.REPEATED, HitState.NONE, []),
        (HitState.PENDING, HitState.PENDING, []),
    ],
)
def test_a_hit_ends_with_its_thread(state: HitState, after: HitState, given_back: list[str]) -> None:
    found: list[str] = []
    hit = hit_in(state, found)
    hit.end()
    assert (hit.state, found) == (after, given_back)


def test_another_program_begins_without_a_hit() -> None:
    found: list[str] = []
    thread = Thread(7, 7, AddressSpace.closed(8), ThreadState.STOPPED, hit=hit_in(HitState.UNFINISHED, found))
    thread.begin_program(AddressSpace.closed(8))
    assert (thread.hit.state, found) == (HitState.NONE, ["once"])
