"""Many places in a process's memory, read page by page; semaphores in it, and what forked children have of jumps."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.breakpoint_sites import Site
from dprobes.engines.ptrace.site_patches import SitePatch
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace, PageReader
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
from dprobes.rpn.rpn_program import Point
from dprobes.target.process_maps import PAGE_SIZE
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.engines.ptrace.tracer.tracer_programs import Probe

SIZE = 2 * PAGE_SIZE


@pytest.mark.parametrize(
    ("address", "size"),
    [(0, 8), (PAGE_SIZE - 8, 8), (PAGE_SIZE - 7, 8), (PAGE_SIZE - 1, 2), (SIZE - 8, 8), (0, SIZE), (1, PAGE_SIZE)],
)
def test_a_place_may_end_in_another_page_than_it_begins(tmp_path: Path, address: int, size: int) -> None:
    data = bytes(n % 251 for n in range(SIZE))
    (tmp_path / "memory").write_bytes(data)
    with (tmp_path / "memory").open("rb") as memory:
        assert PageReader(memory.fileno()).read(address, size) == data[address : address + size]


# Semaphores of USDT probes, in a file that stands for memory: breakpoints at 0 and 16, semaphores at 32 and 34.

FIRST, SECOND, SEMAPHORE, OTHER = 0, 16, 32, 34


@pytest.fixture
def space(tmp_path: Path) -> Iterator[AddressSpace]:
    (tmp_path / "memory").write_bytes(bytes([0x90]) * 32 + bytes(8))
    space = AddressSpace(os.open(tmp_path / "memory", os.O_RDWR), 8, has_shadow_stack=False)
    yield space
    space.close()


def placed(space: AddressSpace, address: int, semaphore: int, *probes: Probe) -> None:
    breakpoint_ = Breakpoint(address, 0x90, Site(0, 0, address, b"\x90", (0, 1)))
    for probe in probes:
        site = Site(0, 0, address, b"\x90", (0, 1), point=Point(), semaphore=semaphore - address if semaphore else 0)
        breakpoint_.add(probe.program, site, probe)
    space.place(breakpoint_)


def values(space: AddressSpace) -> tuple[int, int]:
    data = os.pread(space.memory, 4, SEMAPHORE)
    return int.from_bytes(data[:2], "little"), int.from_bytes(data[2:], "little")


def test_a_semaphore_is_raised_as_long_as_a_breakpoint_needs_it(space: AddressSpace) -> None:
    program = inserted_program()
    first, second, plain = probe_of(program, 1), probe_of(program, 2), probe_of(program, 3)
    placed(space, FIRST, SEMAPHORE, first)
    space.breakpoints[FIRST].add(program, Site(3, 0, FIRST, b"\x90", (0, 1), point=Point()), plain)
    placed(space, SECOND, SEMAPHORE, second)
    assert space.needed_semaphores() == {SEMAPHORE: [FIRST, SECOND]}
    space.raise_semaphore(SEMAPHORE, FIRST)
    assert values(space) == (1, 0)
    assert space.drop(first) == []  # the breakpoint stays for the other probe
    assert (values(space), space.take_lowered()) == ((1, 0), ())
    assert [breakpoint_.address for breakpoint_ in space.drop(second)] == [SECOND]
    assert (values(space), space.take_lowered(), space.take_lowered()) == ((0, 0), (SEMAPHORE,), ())
    space.drop(plain)
    assert values(space) == (0, 0)


def test_all_ways_to_withdraw_lower_what_was_raised(space: AddressSpace) -> None:
    ours, theirs = inserted_program(0), inserted_program(1)
    placed(space, FIRST, SEMAPHORE, probe_of(ours))
    placed(space, SECOND, OTHER, probe_of(theirs))
    space.raise_semaphore(SEMAPHORE, FIRST)
    space.raise_semaphore(OTHER, SECOND)
    space.drop_program(ours)
    assert values(space) == (0, 1)
    space.withdraw_all()
    assert values(space) == (0, 0)
    assert space.take_lowered() == (SEMAPHORE, OTHER)


def test_where_the_file_is_gone_nothing_is_lowered(space: AddressSpace) -> None:
    probe = probe_of(inserted_program())
    placed(space, FIRST, SEMAPHORE, probe)
    space.raise_semaphore(SEMAPHORE, FIRST)
    os.pwrite(space.memory, b"\x55", FIRST)  # something else is mapped there
    space.drop(probe)
    assert values(space) == (1, 0)
    placed(space, FIRST, SEMAPHORE, other := probe_of(inserted_program()))
    space.raise_semaphore(SEMAPHORE, FIRST)
    space.forget(space.breakpoints[FIRST])
    space.forget_semaphores()
    assert (values(space), space.semaphores) == ((2, 0), {})
    space.drop(other)
    assert values(space) == (2, 0)


def test_a_semaphore_that_somebody_has_lowered_to_nothing_is_left_alone(space: AddressSpace) -> None:
    probe = probe_of(inserted_program())
    placed(space, FIRST, SEMAPHORE, probe)
    space.raise_semaphore(SEMAPHORE, FIRST)
    os.pwrite(space.memory, bytes(2), SEMAPHORE)
    space.drop(probe)
    assert values(space) == (0, 0)


# Breakpoints that are not written, because jumps are about to take their place.


def test_a_breakpoint_may_wait_for_a_jump_and_is_written_if_none_comes(space: AddressSpace) -> None:
    space.place(Breakpoint(FIRST, 0x90, Site(0, 0, FIRST, b"\x90", (0, 1))), is_written=False)
    placed(space, SECOND, 0)
    space.renew()
    assert os.pread(space.memory, 2, FIRST) == b"\x90\x90"
    assert space.read(FIRST, 2) == b"\xcc\x90"
    assert space.read(SECOND, 1) == b"\xcc"
    space.write_unwritten()
    assert os.pread(space.memory, 2, FIRST) == b"\xcc\x90"
    assert not space.unwritten


def test_a_breakpoint_that_was_not_written_leaves_nothing(space: AddressSpace) -> None:
    breakpoint_ = Breakpoint(FIRST, 0x90, Site(0, 0, FIRST, b"\x90", (0, 1)))
    space.place(breakpoint_, is_written=False)
    space.withdraw(breakpoint_)
    space.write_unwritten()
    assert space.read(FIRST, 1) == b"\x90"
    assert not space.breakpoints


# A child that was forked while jumps came and went: what its memory has of them is known to nobody.

CODE = b"\x48\x89\xe5\x55\x53\x90\x90\x90"
GONE = SitePatch(((0, 0, 0x40),), 0x40, bytes(5), (0x45, b""), ((0x40, b"\xe9abcd"),), (bytes(5),))


@pytest.fixture
def forked() -> Iterator[tuple[AddressSpace, int, int]]:
    """Yield the space of this process, a child that sleeps, and where both have a page of code."""
    page = mmap.mmap(-1, PAGE_SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(CODE)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    space = AddressSpace.of_thread(os.getpid(), 8)
    yield space, child, ctypes.addressof(ctypes.c_char.from_buffer(page))
    space.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def adopted_child(parent: AddressSpace, child: int, address: int, code: bytes) -> bytes:
    """Return what a child whose memory holds ``code`` has there when it is adopted."""
    memory = os.open(f"/proc/{child}/mem", os.O_RDWR)
    os.pwrite(memory, code, address)
    os.close(memory)
    space = parent.copy_for_child(child)
    found = space.read(address, len(CODE))
    space.close()
    return found


@pytest.mark.parametrize(
    ("left", "adopted"),
    [
        (b"\xe9\x01\x02\x03\x04", b"\xcc" + CODE[1:]),  # a whole jump
        (b"\x48\x01\x02\x03\x04", b"\xcc" + CODE[1:]),  # one whose first byte was restored
        (b"\xcc\x01\x02\x03\x04", b"\xcc" + CODE[1:]),
        (b"\x48\x89\xe5\x55\x53", b"\xcc" + CODE[1:]),
        (b"\xe9\x01\x02\xcc\x04", b"\xcc" + CODE[1:3] + b"\xcc" + CODE[4:]),  # another breakpoint is in its midst
    ],
)
def test_a_child_gets_the_code_of_its_parent_where_it_has_the_rest_of_a_jump(
    forked: tuple[AddressSpace, int, int], left: bytes, adopted: bytes
) -> None:
    parent, child, address = forked
    parent.place(Breakpoint(address, CODE[0], Site(0, 0, address, CODE[:3], (0, 3))))
    if adopted[3] == 0xCC:
        parent.place(Breakpoint(address + 3, CODE[3], Site(0, 0, address + 3, CODE[3:4], (0, 1))))
    parent.patches.displaced[GONE.start] = GONE
    assert adopted_child(parent, child, address, left) == adopted


def test_a_child_keeps_what_it_has_where_no_jumps_have_been(forked: tuple[AddressSpace, int, int]) -> None:
    parent, child, address = forked
    parent.place(Breakpoint(address, CODE[0], Site(0, 0, address, CODE[:3], (0, 3))))
    assert adopted_child(parent, child, address, b"\x48\x31\xc0") == b"\xcc\x31\xc0" + CODE[3:]


def test_a_child_has_no_breakpoint_for_which_its_parent_awaits_a_jump(forked: tuple[AddressSpace, int, int]) -> None:
    parent, child, address = forked
    parent.place(Breakpoint(address, CODE[0], Site(0, 0, address, CODE[:3], (0, 3))), is_written=False)
    space = parent.copy_for_child(child)
    memory = os.open(f"/proc/{child}/mem", os.O_RDWR)
    assert os.pread(memory, 3, address) == CODE[:3]
    space.write_unwritten()
    assert os.pread(memory, 3, address) == b"\xcc" + CODE[1:3]
    os.close(memory)
    space.close()
