"""Memory is unmapped only where it is what was mapped for handlers; ``test_inline_kills`` does it to processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.client import memoryremoval
from dprobes.engines.ptrace.client.memoryremoval import unmap_left_memory
from dprobes.engines.ptrace.restorerwire import FilesShared
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.injection import MUNMAP
from dprobes.engines.ptrace.tracer.native.nativeremoval import unmap_program
from dprobes.engines.ptrace.tracer.native.patches import NativeMemory, Patches
from dprobes.target.processmaps import parse_maps, read_maps

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 2 * mmap.PAGESIZE
MAP_FIXED = 0x10
WIPE_ON_FORK = 18


def mapped(pid: int, address: int) -> bool:
    """Return whether anything is mapped there: the kernel joins what is alike and lies side by side."""
    return any(mapping.start <= address < mapping.end for mapping in parse_maps(read_maps(pid)))


def child() -> int:
    """Start a process that has all our memory, and sleeps."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def mapper() -> Callable[..., int]:
    """Return a function that maps memory here."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)

    def map_memory(size: int, flags: int, file: int, access: int = mmap.PROT_READ, place: int | None = None) -> int:
        found: int = libc.mmap(place, size, access, flags, file, 0)
        return found

    return map_memory


def test_memory_that_is_shared_with_a_process_goes() -> None:
    descriptor = os.memfd_create("dprobes")
    map_memory = mapper()
    os.ftruncate(descriptor, SIZE)
    region = map_memory(SIZE, mmap.MAP_SHARED, descriptor)
    other = map_memory(SIZE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1)
    page = map_memory(mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    pid = child()
    try:
        foreign = Patches({0: NativeMemory(page, mmap.PAGESIZE, other, SIZE)})
        assert unmap_left_memory(pid, foreign)
        assert mapped(pid, other)
        assert mapped(pid, region)
        assert unmap_left_memory(pid, Patches({0: NativeMemory(page, mmap.PAGESIZE, region, SIZE)}))
        assert not mapped(pid, region)
        assert mapped(os.getpid(), region)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)


class KilledError(Exception):
    """Say that the tracer is no more."""


@pytest.mark.parametrize("done", range(5))
def test_what_a_killed_tracer_was_giving_back_is_given_back_to_the_end(done: int) -> None:
    map_memory, files = mapper(), [os.memfd_create(name) for name in ("dprobes", "dprobes_gv", "dprobes-left")]
    for file in files:
        os.ftruncate(file, SIZE)
    region, other, manifest = (map_memory(SIZE, mmap.MAP_SHARED, file) for file in files)
    page = map_memory(mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    code = map_memory(SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, mmap.PROT_READ | mmap.PROT_EXEC)
    memory = NativeMemory(page, mmap.PAGESIZE, region, SIZE, None, ((other, SIZE),), (manifest, SIZE))
    places = [code, region, page, other, manifest]
    space = AddressSpace.closed(8)
    space.patches = Patches({0: memory}, code={0: [(code, code + SIZE)]})
    unmapped: list[int] = []

    def call(number: int, *arguments: int) -> int:
        assert number == MUNMAP[8]
        start, size = arguments
        if len(unmapped) == done:
            raise KilledError
        ctypes.CDLL(None).munmap(ctypes.c_void_p(start), size)
        unmapped.append(start)
        return 0

    with contextlib.suppress(KilledError):
        unmap_program(space, call, 0)
    assert unmapped == places[:done]
    foreign = map_memory(SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, place=places[0]) if done else 0
    pid = child()
    try:
        assert unmap_left_memory(pid, Patches({0: memory}, code={0: [(code, code + SIZE)]}))
        left = [place for place in places if place != foreign and mapped(pid, place)]
        # What is only a page of zeros cannot be told from what the process itself has there.
        assert left == ([page] if done == 2 else [])
        assert not foreign or mapped(pid, foreign)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for file in files:
            os.close(file)


@pytest.mark.parametrize("needed", [3, 40])
def test_a_thread_in_it_is_let_leave_it_and_not_for_ever(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(memoryremoval, "_unmap", lambda *_: len(pauses) == needed)
    monkeypatch.setattr(time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert unmap_left_memory(7, Patches()) is (needed == 3)
    assert pauses[:3] == [0.02, 0.04, 0.08]
    assert max(pauses) <= 0.2
    assert 2.0 < sum(pauses) < 2.3 or needed == 3


def test_files_of_which_nobody_has_said_where_they_are_go_as_well() -> None:
    map_memory, files = mapper(), [os.memfd_create("dprobes") for _ in range(2)]
    for file in files:
        os.ftruncate(file, SIZE)
    ours, others = (map_memory(SIZE, mmap.MAP_SHARED, file) for file in files)
    status = os.fstat(files[0])
    pid = child()
    try:
        assert unmap_left_memory(pid, Patches(), begun=FilesShared(pid, ((status.st_dev, status.st_ino),)))
        assert not mapped(pid, ours)
        assert mapped(pid, others)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for file in files:
            os.close(file)


def test_a_page_that_was_mapped_first_goes_unless_it_is_another_by_now() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    begun = FilesShared(0, (), (address, mmap.PAGESIZE))
    for is_ours in (False, True):
        if is_ours:
            page.madvise(WIPE_ON_FORK)
        pid = child()
        try:
            assert unmap_left_memory(pid, Patches(), begun=begun)
            assert mapped(pid, address) is not is_ours
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_process_that_has_ended_needs_nothing() -> None:
    pid = child()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert unmap_left_memory(pid, Patches({0: NativeMemory(0x1000, mmap.PAGESIZE, 0x2000, SIZE)}))
