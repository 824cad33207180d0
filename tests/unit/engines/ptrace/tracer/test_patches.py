"""Jumps in memory: written whole or not at all, taken out only where they still are, and hidden from readers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.tracer.patches import Patches
from dprobes.engines.ptrace.wire import SitePatch

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = bytes(range(64))
PATCH = SitePatch((0,), 8, ((8, b"\xe9abcd"), (40, b"XY")), (CODE[8:13], CODE[40:42]), CODE[8:13])


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("memory")
    os.write(descriptor, CODE)
    yield descriptor
    os.close(descriptor)


def shown(memory: int) -> bytes:
    return os.pread(memory, 64, 0)


def test_a_jump_is_written_and_taken_out(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    assert shown(memory) == CODE[:8] + b"\xe9abcd" + CODE[13:40] + b"XY" + CODE[42:]
    patches.restore(memory, [8])
    assert shown(memory) == CODE
    assert not patches.by_site


def test_what_somebody_else_has_written_there_stays(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    os.pwrite(memory, b"!", 9)
    patches.restore(memory, [8])
    assert shown(memory)[8:13] == b"\xe9!bcd"
    assert shown(memory)[40:42] == CODE[40:42]


def test_readers_see_the_file(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    for start, end in ((0, 64), (9, 11), (12, 41), (13, 40)):
        data = bytearray(shown(memory)[start:end])
        patches.hide(start, data)
        assert data == CODE[start:end]


def test_a_jump_can_be_put_aside(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    with patches.put_aside(memory, 8):
        assert shown(memory) == CODE
    assert shown(memory)[8:9] == b"\xe9"
    with patches.put_aside(memory, 20):
        assert shown(memory)[8:9] == b"\xe9"


def test_a_jump_that_cannot_be_written_changes_nothing() -> None:
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        patches = Patches()
        with pytest.raises(OSError, match="Bad file descriptor"):
            patches.write(descriptor, PATCH)
        assert not patches.by_site
    finally:
        os.close(descriptor)


def test_a_copy_is_its_own(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    copy = patches.copy()
    copy.forget(0, 64)
    assert not copy.by_site
    assert patches.by_site == {8: PATCH}


def test_jumps_of_one_group_belong_together() -> None:
    patches = Patches()
    for site, group in ((8, (0, 8)), (20, (0, 8)), (30, (1, 8)), (40, None), (50, None)):
        patches.by_site[site] = SitePatch((0,), site, ((site, b"\xe9abcd"),), (CODE[:5],), CODE[:5], group)
    assert sorted(patches.bound_to([8])) == [8, 20]
    assert patches.bound_to([40, 41]) == [40]
    assert sorted(patches.bound_to([30, 20])) == [8, 20, 30]


def test_a_jump_relies_on_its_own_bytes_and_on_those_that_it_shares() -> None:
    patches = Patches()
    patches.by_site[8] = SitePatch((0,), 8, ((8, b"\xe9a"), (40, b"XY")), (CODE[8:10], CODE[40:42]), CODE[8:13])
    relying = [address for address in range(64) if patches.relying_on(address)]
    assert relying == [8, 9, 10, 11, 12, 40, 41]
