"""Where threads stand when code changes: what is in the way, who is moved, and what stacks say."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.site_patches import SitePatch
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native import thread_places
from dprobes.engines.ptrace.tracer.native.thread_places import ThreadPlaces, stack_words
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Slot
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_relocation import CodeCopy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.breakpoint_sites import Site

SITE, MIDDLE, COPY = 0x5000, 0x5003, 0x9000
PATCH = SitePatch(
    ((0, 0, SITE),),
    SITE,
    bytes(7),
    (0, b""),
    ((SITE, bytes(5)),),
    (bytes(5),),
    ((MIDDLE, COPY + 3),),
    (CodeCopy(COPY, SITE, exact=True), CodeCopy(COPY + 3, MIDDLE, exact=True)),
    COPY + 12,
)
PLAIN = SitePatch(((0, 0, SITE),), SITE, bytes(5), (0, b""), ((SITE, bytes(5)),), (bytes(5),))


class Machine:
    """Threads whose registers are here; one without stands for one that cannot be stopped."""

    def __init__(self) -> None:
        self.space = AddressSpace.closed(8)
        self.registers: dict[int, int] = {}
        self.threads: list[Thread] = []
        self.stack_words: frozenset[int] | None = frozenset()

    def thread(self, pc: int | None, state: ThreadState = ThreadState.STOPPED) -> Thread:
        thread = Thread(len(self.threads) + 1, 1, self.space, state)
        self.threads.append(thread)
        if pc is not None:
            self.registers[thread.tid] = pc
        return thread

    def places(self, patch: SitePatch = PATCH) -> ThreadPlaces:
        return ThreadPlaces(self.space, self.threads, [patch])

    def get(self, tid: int, registers: ctypes.Array[ctypes.c_ulong]) -> None:
        if tid not in self.registers:
            raise ProcessLookupError
        registers[Register.RIP] = self.registers[tid]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(ptrace_calls, "get_registers", found.get)
    monkeypatch.setattr(ptrace_calls, "set_instruction_pointer", found.registers.__setitem__)
    monkeypatch.setattr(thread_places, "stack_words", lambda *_: found.stack_words)
    return found


def test_a_thread_in_what_is_displaced_is_moved_into_the_copy(machine: Machine) -> None:
    machine.thread(MIDDLE), machine.thread(SITE), machine.thread(SITE + 7)
    places = machine.places()
    assert places.obstacle(PATCH) is None
    places.move(PATCH)
    assert machine.registers == {1: COPY + 3, 2: SITE, 3: SITE + 7}


def test_a_thread_that_has_run_into_the_breakpoint_goes_to_the_jump(machine: Machine) -> None:
    machine.space.slots.by_address[0x7000] = Slot(0x7000, SITE, 0x7003, Placement.PAGE)
    machine.thread(0x7000).trapped = SITE
    places = machine.places()
    assert places.obstacle(PATCH) is None
    places.move(PATCH)
    assert machine.registers == {1: SITE}


@pytest.mark.parametrize(("pc", "to"), [(0x7000, COPY), (0x7003, COPY + 3)])
def test_a_thread_in_the_slot_of_the_instruction_goes_on_in_the_copy(machine: Machine, pc: int, to: int) -> None:
    machine.space.slots.by_address[0x7000] = Slot(0x7000, SITE, 0x7003, Placement.PAGE, is_free=True)
    machine.thread(pc)
    places = machine.places()
    assert places.obstacle(PATCH) is None
    places.move(PATCH)
    assert machine.registers == {1: to}


def test_a_hit_whose_instruction_is_under_way_has_to_end_first(machine: Machine) -> None:
    machine.space.slots.by_address[0x7000] = Slot(0x7000, SITE, 0x7003, Placement.PAGE, leads_on=True)
    machine.thread(0x7000).hit.state = HitState.PENDING
    assert machine.places().obstacle(PATCH) == "a thread is just executing the instruction"


def test_what_becomes_of_a_pending_hit_shows_in_its_slot(machine: Machine) -> None:
    machine.space.slots.by_address[0x7000] = Slot(0x7000, SITE, 0x7003, Placement.PAGE, leads_on=True)
    machine.thread(0x7000).hit.state = HitState.PENDING
    places = machine.places(PLAIN)
    assert places.obstacle(PLAIN) is None
    places.move(replace(PLAIN, copies=PATCH.copies))
    assert machine.registers == {1: 0x7000}


@pytest.mark.parametrize(("pending", "obstacle"), [(0x10, "a thread is just executing the instruction"), (0x20, None)])
def test_a_thread_whose_trap_is_still_to_come_is_not_at_the_next_instruction(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pending: int, obstacle: str | None
) -> None:
    """The kernel has reported our interrupt first: the thread stands behind the byte of the breakpoint."""
    monkeypatch.setattr(thread_places, "process_field", lambda _, name: f"{pending:016x}" if name == "SigPnd" else "")
    machine.space.breakpoints[SITE] = Breakpoint(SITE, 0x55, cast("Site", None))
    patch = replace(PATCH, moves=((SITE + 1, COPY + 1), (MIDDLE, COPY + 3)))
    machine.thread(SITE + 1)
    assert machine.places(patch).obstacle(patch) == obstacle


def test_nor_is_one_whose_breakpoint_was_taken_away_meanwhile(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_places, "process_field", lambda *_: f"{0x10:016x}")
    machine.space.former[MIDDLE - 1] = 0x55
    machine.thread(MIDDLE)
    assert machine.places().obstacle(PATCH) == "a thread is just executing the instruction"


@pytest.mark.parametrize("patch", [PATCH, PLAIN])
def test_a_thread_that_sleeps_in_the_instruction_is_in_the_way(machine: Machine, patch: SitePatch) -> None:
    thread = machine.thread(SITE)
    thread.hit.state, thread.hit.breakpoint = HitState.UNFINISHED, Breakpoint(SITE, 0, cast("Site", None))
    assert machine.places(patch).obstacle(patch) == "a thread sleeps in the instruction"


def test_a_system_call_that_is_made_once_more_is_in_the_way(machine: Machine) -> None:
    machine.thread(SITE + 2).restarting = SITE
    assert machine.places(PLAIN).obstacle(PLAIN) == "a thread sleeps in the instruction"


def test_a_thread_that_cannot_stop_may_be_anywhere(machine: Machine) -> None:
    machine.thread(None)
    assert machine.places().obstacle(PATCH) == "a thread cannot be stopped"
    assert machine.places(PLAIN).obstacle(PLAIN) is None


@pytest.mark.parametrize("state", [ThreadState.ENDED, ThreadState.NEWBORN])
def test_a_thread_that_does_not_run_its_code_is_nowhere(machine: Machine, state: ThreadState) -> None:
    machine.thread(SITE)
    machine.thread(None, state)
    assert machine.places().obstacle(PATCH) is None


def test_nobody_may_return_into_what_is_displaced(machine: Machine) -> None:
    machine.thread(0x6000)
    machine.stack_words = frozenset({MIDDLE})
    assert machine.places().obstacle(PATCH) == "a signal handler returns into code that would be displaced"
    machine.stack_words = None
    assert machine.places().obstacle(PATCH) == "a thread cannot be stopped"


@pytest.fixture
def own_space() -> Iterator[AddressSpace]:
    space = AddressSpace.closed(8)
    space.memory = os.open("/proc/self/mem", os.O_RDWR)
    yield space
    os.close(space.memory)


def mapped(size: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def frame(sp: int, ip: int) -> bytes:
    """Return what a signal frame has from the stack pointer on: sp, ip, flags, and the selectors."""
    return struct.pack("<QQQHHHH", sp, ip, 0x246, 0x33, 0, 0, 0x2B)


def test_words_are_found_above_the_stack_pointer(own_space: AddressSpace) -> None:
    memory, start = mapped(1 << 20)
    memory[64:72], memory[4096:4104] = struct.pack("<Q", SITE), struct.pack("<Q", MIDDLE)
    assert stack_words(own_space, os.getpid(), [start + 3], SITE, MIDDLE) == frozenset({SITE, MIDDLE})
    assert stack_words(own_space, os.getpid(), [start + 72], SITE, MIDDLE) == frozenset({MIDDLE})
    assert stack_words(own_space, os.getpid(), [start + 72, start], SITE, MIDDLE) == frozenset({SITE, MIDDLE})
    assert stack_words(own_space, os.getpid(), [start], MIDDLE + 1, COPY) == frozenset()


def test_the_stack_that_a_signal_has_interrupted_is_looked_at(own_space: AddressSpace) -> None:
    first, start = mapped(1 << 20)
    second, other = mapped(1 << 20)
    first[800:832] = frame(other + 256, 0x1234)
    second[256:264] = struct.pack("<Q", MIDDLE)
    assert stack_words(own_space, os.getpid(), [start], SITE, MIDDLE) == frozenset({MIDDLE})


def test_a_stack_that_is_none_says_nothing(own_space: AddressSpace) -> None:
    assert stack_words(own_space, os.getpid(), [64], SITE, MIDDLE) is None


def test_no_thread_may_be_in_code_that_leads_into_what_would_be_displaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with a punned jump, which displaces one instruction, that a window takes the place of."""
    former = replace(PLAIN, code=bytes(MIDDLE - SITE), copies=(CodeCopy(0xA010, SITE, exact=True),), begin=0xA000)
    former = replace(former, end=0xA020)
    machine.space.patches.displaced[0xA010] = former
    asked: list[list[tuple[int, int]]] = []

    def is_outside(_: AddressSpace, thread: Thread, ranges: list[tuple[int, int]]) -> bool:
        asked.append(ranges)
        return not any(start <= machine.registers[thread.tid] < end for start, end in ranges)

    monkeypatch.setattr(thread_places, "is_outside", is_outside)
    thread = machine.thread(0xA004)
    why = "a thread is in the code of another jump, which leads to code that would be displaced"
    assert machine.places().obstacle(PATCH) == why
    machine.registers[thread.tid] = 0x7000
    assert machine.places().obstacle(PATCH) is None
    assert asked == [[(0xA000, 0xA020)]] * 2
    # One that leads behind all of it is in nobody's way.
    machine.space.patches.displaced[0xA010] = replace(former, code=bytes(7))
    machine.registers[thread.tid] = 0xA004
    assert machine.places().obstacle(PATCH) is None
