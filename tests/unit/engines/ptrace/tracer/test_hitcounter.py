"""What becomes of hits of which it shows later whether they were some."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.hits.lifecycle import HitState
from dprobes.engines.linux import ptracecalls
from dprobes.engines.ptrace.sites import Role, Site
from dprobes.engines.ptrace.tracer import hitcounter
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
from dprobes.engines.ptrace.tracer.hitcounter import HitCounter
from dprobes.engines.ptrace.tracer.programs import Handled
from dprobes.engines.ptrace.tracer.state import Thread, ThreadState
from dprobes.engines.ptrace.tracer.steps.slots import Placement, Slot
from dprobes.vm import Point
from ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer.programs import Probe

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
            registers[ptracecalls.Register.RIP] = address

        monkeypatch.setattr(ptracecalls, "get_registers", get_registers)

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
    monkeypatch.setattr(ptracecalls, "interrupt", stopped.append)
    monkeypatch.setattr(hitcounter, "system_call_of", lambda _: system_call)
    thread.hit.looked_at = time.monotonic() + 100
    assert counter.look_after() is not None
    assert (stopped, probe.counts.hits) == ([], 0)
    thread.hit.looked_at = 0.0
    assert (counter.look_after() is None) == (hits > 0)
    assert (stopped, probe.counts.hits) == ([thread.tid] * is_interrupted, hits)
