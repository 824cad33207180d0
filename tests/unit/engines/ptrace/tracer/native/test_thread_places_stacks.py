"""What is on the stacks of a stopped thread, signal stacks included."""

from __future__ import annotations

import os

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.thread_places import stacks_from
from dprobes.target.process_maps import Mapping, parse_maps

SELECTORS = bytes.fromhex("3300000000002b00")
SIZE = 1 << 20
MAPS = parse_maps("".join(f"{n << 20:x}-{(n + 1) << 20:x} rw-p 00000000 00:00 0 \n" for n in range(1, 4)))


def space_with(data: bytes) -> AddressSpace:
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, 4 * SIZE)
    os.pwrite(descriptor, data, SIZE)
    return AddressSpace(descriptor, 8, has_shadow_stack=False)


def frame(sp: int) -> bytes:
    return sp.to_bytes(8, "little") + bytes(16) + SELECTORS


def stacks(data: bytes, maps: list[Mapping] = MAPS) -> list[int] | None:
    space = space_with(data)
    try:
        found = stacks_from(space, lambda at: next((m for m in maps if m.start <= at < m.end), None), [SIZE])
    finally:
        space.close()
    return None if found is None else [len(each) for each in found]


def test_a_signal_that_was_taken_on_another_stack_leads_to_the_first_one() -> None:
    assert stacks(frame(2 * SIZE + 64)) == [SIZE, SIZE - 64]
    assert stacks(frame(0)) == [SIZE]


def test_a_stack_full_of_what_looks_like_frames_counts_as_in_use() -> None:
    many = b"".join(frame(2 * SIZE + 8 * n) for n in range(SIZE // 32))
    assert stacks(many) is None
