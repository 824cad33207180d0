"""What becomes of hits of which it shows later whether they were some."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Placement, Role, Site
from dprobes.engines.ptrace.tracer import hit_counter
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.hit_counter import HitCounter
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Slot
from dprobes.engines.ptrace.tracer.tracer_programs import Handled
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.vm import Point
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer.tracer_programs import Probe

BREAKPOINT, SLOT = 0x1000, 0x5000

UNUSED: Any = None


@pytest.fixture
def probe() -> Probe:
    return probe_of(inserted_program())


@pytest.fixture
def counter() -> HitCounter:
    return HitCounter(UNUSED, UNUSED)


@pytest.fixture
def thread(counter: HitCounter, probe: Probe) -> Thread:
    """Return a thread, this one, with a pending hit."""
    space = AddressSpace(-1, 8, has_shadow_stack=False)
    thread = Thread(os.getpid(), os.getpid(), space, ThreadState.RUNNING)
    thread.hit.breakpoint = Breakpoint(BREAKPOINT, 0x55, Site(0, 0, 0, b"\x55", (0, 1), point=Point(), role=Role.PROBE))
    space.slots.by_site[BREAKPOINT, b"\x55"] = Slot(SLOT, BREAKPOINT, SLOT + 1, Placement.PAGE)
    thread.hit.state = HitState.HANDLED
    counter.pend(thread, (Handled(probe),))
    return thread


@pytest.fixture
def stands_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets the thread stand at an address."""

    def stand_at(address: int) -> None:
        def get_registers(tid: int, registers: Any) -> None:
            registers[ptrace_calls.Register.RIP] = address

        monkeypatch.setattr(ptrace_calls, "get_registers", get_registers)

    return stand_at


@pytest.mark.parametrize(("address", "hits"), [(SLOT, 0), (SLOT + 1, 1)])
def test_at_a_detachment_what_was_executed_is_counted(
    counter: HitCounter, thread: Thread, probe: Probe, stands_at: Callable[[int], None], address: int, hits: int
) -> None:
    stands_at(address)
    counter.before_detachment(thread)
    assert probe.counts.hits == hits
    assert thread.hit.state is HitState.NONE
    assert counter.look_after() is None


@pytest.mark.parametrize(
    ("system_call", "is_interrupted", "hits"),
    [(None, True, 0), (-1, False, 0), (7, False, 1)],
    ids=["running", "asleep in a page fault", "asleep in a call"],
)
def test_a_thread_that_does_not_stop_is_looked_at(
    counter: HitCounter,
    thread: Thread,
    probe: Probe,
    monkeypatch: pytest.MonkeyPatch,
    system_call: int | None,
    is_interrupted: bool,
    hits: int,
) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(ptrace_calls, "interrupt", stopped.append)
    monkeypatch.setattr(hit_counter, "system_call_of", lambda _: system_call)
    thread.hit.looked_at = time.monotonic() + 100
    assert counter.look_after() is not None
    assert (stopped, probe.counts.hits) == ([], 0)
    thread.hit.looked_at = 0.0
    assert (counter.look_after() is None) == (hits > 0)
    assert (stopped, probe.counts.hits) == ([thread.tid] * is_interrupted, hits)
