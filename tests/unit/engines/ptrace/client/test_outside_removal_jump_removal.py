"""Jumps that a killed tracer has left: taken out wherever they are, also what was written of one in part."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.client.outside_removal import remove_jumps
from dprobes.engines.ptrace.site_patches import SitePatch

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
CODE = bytes(range(64))


class Child:
    """A process that does nothing, and has two pages in common with us: at ``start``, ``code`` in their middle."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 2 * PAGE)
        self.code = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + PAGE - 8
        self.write(0, CODE)
        self.pid = os.fork()
        if not self.pid:
            while True:
                signal.pause()

    def write(self, offset: int, data: bytes) -> None:
        self.memory[PAGE - 8 + offset : PAGE - 8 + offset + len(data)] = data

    @property
    def shown(self) -> bytes:
        return self.memory[PAGE - 8 : PAGE + 56]

    def patch(self, *writes: tuple[int, bytes]) -> SitePatch:
        there = tuple((self.code + offset, data) for offset, data in writes)
        originals = tuple(CODE[offset : offset + len(data)] for offset, data in writes)
        return SitePatch(((0, 0, there[-1][0]),), there[-1][0], b"", (0, b""), there, originals)


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    os.kill(made.pid, signal.SIGKILL)
    os.waitpid(made.pid, 0)


def test_a_jump_goes(child: Child) -> None:
    patch = child.patch((20, b"\xe9abcd"))
    child.write(20, b"\xe9abcd")
    assert remove_jumps(child.pid, [patch]) == 1
    assert child.shown == CODE
    assert remove_jumps(child.pid, [patch]) == 0


def test_of_a_jump_in_two_pages_the_part_goes_that_was_written(child: Child) -> None:
    patch = child.patch((8, b"bcd"), (6, b"\xe9a"))
    child.write(8, b"bcd")
    assert remove_jumps(child.pid, [patch]) == 1
    assert child.shown == CODE


def test_of_two_that_were_planned_at_one_place_that_goes_which_is_there(child: Child) -> None:
    first, second = child.patch((20, b"\xe9abcd")), child.patch((20, b"\xe9efgh"))
    for data in (b"\xe9abcd", b"\xe9efgh"):
        child.write(20, data)
        assert remove_jumps(child.pid, [first, second]) == 1
        assert child.shown == CODE


def test_what_somebody_else_has_written_stays(child: Child) -> None:
    child.write(20, b"\xe9ab!d")
    assert remove_jumps(child.pid, [child.patch((20, b"\xe9abcd"))]) == 0
    assert child.shown[20:25] == b"\xe9ab!d"


@pytest.mark.parametrize("first", [b"\xcc", CODE[20:21]], ids=["is", "was"])
def test_a_jump_goes_in_which_a_uprobe_is_or_was(child: Child, first: bytes) -> None:
    child.write(20, first + b"abcd")
    assert remove_jumps(child.pid, [child.patch((20, b"\xe9abcd"))]) == 1
    assert child.shown == CODE[:20] + first + CODE[21:]


def test_a_process_that_has_ended_has_none() -> None:
    made = Child()
    os.kill(made.pid, signal.SIGKILL)
    os.waitpid(made.pid, 0)
    assert remove_jumps(made.pid, [made.patch((20, b"\xe9abcd"))]) == 0
