"""What address spaces watch, and where an emulation must not reach: memory that debug registers watch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.placed_breakpoints import Watchpoint
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
from dprobes.engines.ptrace.tracer.thread_watchpoints import DebugRegisters, UnwatchedMemory, Watchpoints
from dprobes.engines.ptrace.tracer.tracer_state import ThreadTable
from dprobes.engines.ptrace.tracer_messages import ProbeStatus, Watched
from dprobes.platform.x86.debug_registers import Watch
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.rpn_program import Access
from dprobes.vm import Point
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.tracer_state import Thread


class Stack:
    """Remember what was written, and read it."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def read_word(self, address: int, size: int) -> int:
        assert size == 8
        return self.words.get(address, 0)

    def write_word(self, address: int, size: int, value: int) -> None:
        assert size == 8
        self.words[address] = value


def test_an_emulation_cannot_touch_what_is_watched() -> None:
    space = AddressSpace.closed(8)
    probe = probe_of(inserted_program())
    for watch in (Watch(0x1000, 8, Access.WRITE), Watch(0x2004, 4, Access.READ_WRITE)):
        space.watchpoints += (Watchpoint(watch, probe, Point(), (0, 0, "/x")),)
    stack = Stack()
    memory = UnwatchedMemory(stack, space)
    memory.write_word(0x1008, 8, 7)
    assert memory.read_word(0x1008, 8) == 7
    assert memory.read_word(0x1000, 8) == 0
    for address in (0xFF9, 0x1000, 0x1007, 0x2000):
        with pytest.raises(PermissionError):
            memory.write_word(address, 8, 1)
    with pytest.raises(PermissionError):
        memory.read_word(0x2000, 8)
    assert stack.words == {0x1008: 7}


class FakeStopper(Stopper):
    """Stop nothing: no thread runs in the space."""

    def __init__(self) -> None:
        super().__init__(ThreadTable(), lambda _: None, lambda _: None)

    def stop(self, threads: list[Thread]) -> list[Thread]:
        assert not threads
        return []


@pytest.fixture
def sent() -> list[object]:
    return []


@pytest.fixture
def watchpoints(sent: list[object]) -> Watchpoints:
    state: Any = SimpleNamespace(connection=SimpleNamespace(send=sent.append), threads=ThreadTable())
    return Watchpoints(state, FakeStopper(), DebugRegisters(sent.append))


WATCHES = [Watch(0x1000 * n, 8, Access.WRITE) for n in range(3)]
FILE = (0, 0, "/x")


def test_what_is_watched_is_announced_before_and_active_after(watchpoints: Watchpoints, sent: list[object]) -> None:
    space, program = AddressSpace.closed(8), inserted_program(3)
    wanted = [Watchpoint(watch, probe_of(program, n), Point(), FILE) for n, watch in enumerate(WATCHES[:2])]
    watchpoints.update(space, 17, program, FILE, wanted)
    assert space.watchpoints == tuple(wanted)
    assert sent == [Watched(17, tuple(WATCHES[:2])), ProbeStatus(3, (0, 1), 17, ProbeState.ACTIVE)]
    assert [watchpoint.probe.state for watchpoint in wanted] == [ProbeState.ACTIVE] * 2


def test_a_program_that_takes_the_place_of_another_keeps_what_both_watch(
    watchpoints: Watchpoints, sent: list[object]
) -> None:
    space, former, other, program = AddressSpace.closed(8), *map(inserted_program, (1, 2, 3))
    space.pids = {17}
    of_other = Watchpoint(WATCHES[0], probe_of(other), Point(), FILE)
    kept = Watchpoint(WATCHES[1], probe_of(former), Point(), FILE)
    space.watchpoints = (kept, Watchpoint(WATCHES[0], probe_of(former, 1), Point(), FILE), of_other)
    wanted = [Watchpoint(watch, probe_of(program, n), Point(), FILE) for n, watch in enumerate(WATCHES[1:])]
    assert watchpoints.pass_on(space, former, wanted) == {wanted[0].probe}
    assert space.watchpoints == (of_other, kept, wanted[1])
    assert kept.probe is wanted[0].probe
    assert sent[-1] == ProbeStatus(3, (1,), 17, ProbeState.ACTIVE)
