"""Handlers find the threads of a nested namespace in their page: those that are there, and no others."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.site_patches import NativeMemory
from dprobes.engines.ptrace.tracer import address_spaces
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.handler_memory import (
    NO_ROOM,
    begin_ids,
    enter_thread,
    lacks_ids,
    leave_thread,
    own_pages,
)
from dprobes.errors import reason_of_number
from dprobes.native.process_page import (
    PROCESS_IS_NESTED,
    PROCESS_PID,
    PROCESS_SIZE,
    THREAD,
    THREAD_SLOTS,
    THREAD_WINDOW,
    thread_window,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PID = 700
PAGES = (PROCESS_SIZE, 3 * PROCESS_SIZE)


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, ...]]:
    """What NSpid says of threads."""
    found: dict[int, tuple[int, ...]] = {
        PID: (PID, 40, 1),
        PID + 1: (PID + 1, 41, 2),
        PID + 2: (PID + 2, 42, 2 + THREAD_SLOTS),
    }
    monkeypatch.setattr(address_spaces, "ids_of", lambda tid: found.get(tid, ()))
    return found


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, 4 * PROCESS_SIZE)
    space = AddressSpace(descriptor, 8, has_shadow_stack=False, pids={PID})
    for number, page in enumerate(PAGES):
        space.patches.memories[number] = NativeMemory(page, PROCESS_SIZE, 0, 0)
    yield space
    space.close()


def looked_up(space: AddressSpace, local: int, page: int = PAGES[0]) -> int | None:
    """Return what a handler finds."""
    if not word_at(space, page + PROCESS_IS_NESTED):
        return local
    for place in thread_window(local):
        found, tid = THREAD.unpack(os.pread(space.memory, THREAD.size, page + place))
        if found == local:
            return int(tid)
    return None


def word_at(space: AddressSpace, address: int) -> int:
    return int.from_bytes(os.pread(space.memory, 4, address), "little")


def crowd(space: AddressSpace, local: int, page: int = PAGES[0]) -> None:
    for place in thread_window(local):
        os.pwrite(space.memory, THREAD.pack(1 << 30, 1), page + place)


def test_all_that_are_there_are_known_and_those_that_come(space: AddressSpace, ids: dict[int, tuple[int, ...]]) -> None:
    for page in PAGES:
        assert begin_ids(space, page, PID, [PID, PID + 1, PID + 9]) is None
    assert enter_thread(space, PID, PID + 2)
    for page in PAGES:
        assert word_at(space, page + PROCESS_PID) == PID
        assert [looked_up(space, found[-1], page) for found in ids.values()] == list(ids)
        assert looked_up(space, 3, page) is None
    assert not lacks_ids(space)


def test_one_that_has_ended_is_not_known_and_the_others_are(
    space: AddressSpace, ids: dict[int, tuple[int, ...]]
) -> None:
    for page in PAGES:
        assert begin_ids(space, page, PID, ids) is None
    leave_thread(space, PID + 1)
    leave_thread(space, PID + 1)
    for page in PAGES:
        assert [looked_up(space, found[-1], page) for found in ids.values()] == [PID, None, PID + 2]
    assert os.pread(space.memory, THREAD.size, PAGES[0] + thread_window(2).start) == bytes(THREAD.size)


def test_ids_that_are_used_again_are_those_of_the_new_thread(
    space: AddressSpace, ids: dict[int, tuple[int, ...]]
) -> None:
    assert begin_ids(space, PAGES[0], PID, ids) is None
    ids[PID + 5] = (PID + 5, 45, 2)
    assert enter_thread(space, PID, PID + 5)
    assert looked_up(space, 2) == PID + 5
    leave_thread(space, PID + 1)
    assert looked_up(space, 2) == PID + 5, "the one that had it before says nothing about the new one"
    ids[PID] = (PID, 40, 9)
    assert enter_thread(space, PID, PID)
    assert looked_up(space, 9) == PID


def test_of_a_process_in_no_nested_namespace_nothing_is_written(
    space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ids_of(tid: int) -> tuple[int, ...]:
        asked.append(tid)
        return (tid,)

    monkeypatch.setattr(address_spaces, "ids_of", ids_of)
    assert begin_ids(space, PAGES[0], PID, [PID, PID + 1]) is None
    assert enter_thread(space, PID, PID + 2)
    leave_thread(space, PID + 1)
    assert os.pread(space.memory, 4 * PROCESS_SIZE, 0) == bytes(4 * PROCESS_SIZE)
    assert asked == [PID]


def test_a_copy_knows_whose_it_is_and_its_own_thread_alone(
    space: AddressSpace, ids: dict[int, tuple[int, ...]]
) -> None:
    ids[900] = (900, 60, 30)
    own_pages(space, 900)
    assert enter_thread(space, 900, 900)
    for page in PAGES:
        assert (word_at(space, page + PROCESS_PID), looked_up(space, 30, page)) == (900, 900)
        assert looked_up(space, 1, page) is None
    own_pages(space, 5)
    assert (word_at(space, PAGES[0] + PROCESS_PID), word_at(space, PAGES[0] + PROCESS_IS_NESTED)) == (5, 0)
    assert space.local_ids is None


def test_a_process_that_runs_in_the_memory_of_another_one_is_not_taken_for_it(
    space: AddressSpace, ids: dict[int, tuple[int, ...]]
) -> None:
    assert begin_ids(space, PAGES[0], PID, ids) is None
    space.pids.add(900)
    ids[900] = (900, 60, 2)
    assert enter_thread(space, 900, 900)
    assert looked_up(space, 2) == PID + 1
    assert begin_ids(space, PAGES[1], 900, [900]) == "another process runs in its memory"
    space.pids.remove(PID)
    assert begin_ids(space, PAGES[1], 900, [900]) is None
    assert looked_up(space, 2, PAGES[1]) == 900


def test_where_one_finds_no_room_handlers_may_not_run(space: AddressSpace, ids: dict[int, tuple[int, ...]]) -> None:
    assert begin_ids(space, PAGES[0], PID, [PID]) is None
    for number in range(THREAD_WINDOW):
        ids[1000 + number] = (1000 + number, 50 + THREAD_SLOTS * number)
        assert enter_thread(space, PID, 1000 + number)
    crowd(space, 2, PAGES[1])
    assert not enter_thread(space, PID, PID + 1)
    assert lacks_ids(space)
    assert begin_ids(space, PAGES[0], PID, [PID]) == NO_ROOM
    ids[2000] = (2000, 50 + THREAD_SLOTS * THREAD_WINDOW)
    assert begin_ids(space, PAGES[0], PID, [2000]) == NO_ROOM
    assert [looked_up(space, ids[tid][-1]) for tid in range(1000, 1000 + THREAD_WINDOW)] == [
        *range(1000, 1000 + THREAD_WINDOW)
    ]


def test_a_child_begins_anew(space: AddressSpace, ids: dict[int, tuple[int, ...]]) -> None:
    crowd(space, 1)
    assert begin_ids(space, PAGES[0], PID, [PID]) == NO_ROOM
    ids[900] = (900, 60, 30)
    own_pages(space, 900)
    assert not lacks_ids(space)


def test_memory_that_is_gone_is_no_place_for_ids(ids: dict[int, tuple[int, ...]]) -> None:
    space = AddressSpace.closed(8)
    space.pids.add(PID)
    assert begin_ids(space, 0, PID, ids) == reason_of_number(errno.EBADF)
    space.patches.memories[0] = NativeMemory(0, 0, 0, 0)
    assert enter_thread(space, PID, PID)
    leave_thread(space, PID)
