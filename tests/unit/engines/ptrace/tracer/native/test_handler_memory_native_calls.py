"""The tracer takes what handlers have kept of a call, and keeps for them what it has seen itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import CALL_WINDOW, CallTable, call_key
from dprobes.engines.ptrace.site_patches import NativeMemory
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.handler_memory import add_calls, take_call
from dprobes.engines.ptrace.tracer.placed_breakpoints import Entry
from dprobes.native.process_page import PROCESS_SIZE
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = CallTable.of(2)
FRAME = 0x7FFC_1234_5678
KEPT = ((4, None), (5, None))
PAGE = 3 * PROCESS_SIZE
MEMORY = NativeMemory(PAGE, PROCESS_SIZE + TABLE.size, 0, 0, TABLE)


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, PAGE + PROCESS_SIZE + TABLE.size)
    space = AddressSpace(descriptor, 8, has_shadow_stack=False)
    space.patches.memories[inserted_program().number] = MEMORY
    yield space
    space.close()


def test_what_was_added_is_taken_once(space: AddressSpace) -> None:
    probe, other = (probe_of(inserted_program(), n) for n in (1, 2))
    calls = [(FRAME, Entry(10, {5: 50, 4: 40})), (FRAME - 64, Entry(20, {5: 51, 4: 41}))]
    add_calls(space, MEMORY, probe, calls)
    assert take_call(space, other, FRAME, KEPT) is None
    assert take_call(space, probe, FRAME, KEPT) == Entry(10, {4: 40, 5: 50})
    assert take_call(space, probe, FRAME, KEPT) is None
    assert take_call(space, probe, FRAME - 64, KEPT) == Entry(20, {4: 41, 5: 51})


def test_a_free_slot_has_no_time(space: AddressSpace) -> None:
    probe = probe_of(inserted_program(), 1)
    add_calls(space, MEMORY, probe, [(FRAME, Entry(10, {4: 40, 5: 50}))])
    start = PAGE + PROCESS_SIZE + TABLE.window(call_key(probe.number, FRAME)).start
    assert os.pread(space.memory, 8, start) == call_key(probe.number, FRAME).to_bytes(8, "little")
    take_call(space, probe, FRAME, KEPT)
    assert os.pread(space.memory, 16, start) == bytes(16)


def test_what_is_being_filled_is_no_entry(space: AddressSpace) -> None:
    probe = probe_of(inserted_program(), 1)
    add_calls(space, MEMORY, probe, [(FRAME, Entry(0, {}))])
    assert take_call(space, probe, FRAME, KEPT) is None


def test_of_too_many_the_oldest_is_forgotten(space: AddressSpace) -> None:
    probe = probe_of(inserted_program(), 1)
    frames: list[int] = []
    wanted, frame = TABLE.window(call_key(1, FRAME)), FRAME
    while len(frames) <= CALL_WINDOW:
        if TABLE.window(call_key(1, frame)) == wanted:
            frames.append(frame)
        frame -= 8
    add_calls(space, MEMORY, probe, [(each, Entry(1000 - n, {})) for n, each in enumerate(frames)])
    found = [take_call(space, probe, each, ()) for each in frames]
    assert [None if entry is None else entry.time for entry in found] == [
        *(1000 - n for n in range(CALL_WINDOW - 1)), None, 1000 - CALL_WINDOW
    ]  # fmt: skip


def test_a_process_without_a_table_has_no_calls(space: AddressSpace) -> None:
    probe = probe_of(inserted_program(), 1)
    space.patches.memories[probe.program.number] = NativeMemory(PAGE, PROCESS_SIZE, 0, 0)
    assert take_call(space, probe, FRAME, KEPT) is None
    space.patches.memories.clear()
    assert take_call(space, probe, FRAME, KEPT) is None


def test_memory_that_is_gone_has_no_calls() -> None:
    probe = probe_of(inserted_program(), 1)
    space = AddressSpace.closed(8)
    space.patches.memories[probe.program.number] = MEMORY
    add_calls(space, MEMORY, probe, [(FRAME, Entry(1, {}))])
    assert take_call(space, probe, FRAME, KEPT) is None


@pytest.mark.parametrize("left", [0, 3, 17])
def test_memory_that_ends_in_the_middle_of_a_slot_has_no_calls(space: AddressSpace, left: int) -> None:
    probe = probe_of(inserted_program(), 1)
    add_calls(space, MEMORY, probe, [(FRAME, Entry(10, {4: 40, 5: 50}))])
    start = PAGE + PROCESS_SIZE + TABLE.window(call_key(probe.number, FRAME)).start
    os.ftruncate(space.memory, start + left)  # as where a process has unmapped what follows
    add_calls(space, MEMORY, probe, [(FRAME, Entry(1, {}))])
    assert take_call(space, probe, FRAME, KEPT) is None
