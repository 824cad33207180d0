"""Writes near our breakpoints: what memory gets, what the breakpoints stand in for, and which instructions change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.breakpoint_sites import Site
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.breakpoint_placement import write_memory
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    from dprobes.platform.linux import process_calls

LENGTH = 4
"""The length of the instructions under the breakpoints."""


class Memory:
    """Note what is written; addresses from 0x9000 on cannot be."""

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []

    def write(self, pid: int, address: int, data: bytes) -> bool:
        if address >= 0x9000:
            return False
        self.written.append((address, data))
        return True


def thread_with(places: list[int]) -> Thread:
    space = AddressSpace(-1, 8, has_shadow_stack=False)
    for place in places:
        site = Site(0, 0, place, bytes(LENGTH), (0, LENGTH))
        space.breakpoints[place] = Breakpoint(place, 0x55, site)
    return Thread(os.getpid(), os.getpid(), space, ThreadState.STOPPED)


def write(thread: Thread, address: int, data: bytes) -> tuple[list[tuple[int, bytes]], list[int]]:
    memory = Memory()
    rewritten = write_memory(cast("process_calls.RemoteMemory", memory), thread, address, data)
    return memory.written, [b.address for b in rewritten]


# Few breakpoints are looked at one by one; of many, those at the addresses in question.
@pytest.mark.parametrize("others", [0, 1000], ids=["few", "many"])
def test_a_breakpoint_stays_and_stands_in_for_what_was_written(others: int) -> None:
    thread = thread_with([0x1000, 0x1010, 0x1014, *range(0x4000, 0x4000 + others)])
    assert write(thread, 0x100E, b"abcdefgh") == ([(0x100E, b"ab\xccdef\xcch")], [0x1010, 0x1014])
    originals = [thread.space.breakpoints[place].original for place in (0x1000, 0x1010, 0x1014)]
    assert originals == [0x55, ord("c"), ord("g")]


@pytest.mark.parametrize("others", [0, 1000], ids=["few", "many"])
@pytest.mark.parametrize(
    ("address", "changed"),
    [(0x0FFF, []), (0x1001, [0x1000]), (0x1003, [0x1000]), (0x1004, [])],
    ids=["before", "second byte", "last byte", "behind"],
)
def test_a_write_behind_a_breakpoint_changes_its_instruction(others: int, address: int, changed: list[int]) -> None:
    thread = thread_with([0x1000, *range(0x4000, 0x4000 + others)])
    assert write(thread, address, b"x") == ([(address, b"x")], changed)
    assert thread.space.breakpoints[0x1000].original == 0x55


def test_a_write_that_fails_changes_no_breakpoint() -> None:
    thread = thread_with([0x9000])
    with pytest.raises(AddressFault) as caught:
        write(thread, 0x9000, b"x")
    assert caught.value.address == 0x9000
    assert thread.space.breakpoints[0x9000].original == 0x55
