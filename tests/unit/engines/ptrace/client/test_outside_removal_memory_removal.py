"""Memory is unmapped only where it is what was mapped for handlers; ``test_inline_kills`` does it to processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.client import outside_removal
from dprobes.engines.ptrace.client.outside_removal import unmap_left_memory
from dprobes.engines.ptrace.restorer_messages import FilesShared
from dprobes.engines.ptrace.site_patches import NativeMemory, Patches
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.call_injection import MUNMAP
from dprobes.engines.ptrace.tracer.native.thread_places import names_address, unmap_program
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.register_images import frame_32
from dprobes.target.process_maps import parse_maps, read_maps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 2 * mmap.PAGESIZE
START_32 = 0x0803_8000
"""Address of a page for code in a 32-bit process."""
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


def mapper(protection: int = mmap.PROT_READ) -> Callable[..., int]:
    """Return a function that maps memory here."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)

    def map_memory(size: int, flags: int, file: int) -> int:
        found: int = libc.mmap(None, size, protection, flags, file, 0)
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


def test_memory_of_a_32_bit_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of four bytes in the frame of a signal is not found, so a thread may return into the memory."""
    registers = [0x23] * len(Register)
    registers[Register.RIP], registers[Register.RSP] = START_32, 0xFFFF_0000
    frame = frame_32(registers, 0, bytes(576), bytes(512), 0)
    assert START_32.to_bytes(4, "little") in frame.data
    assert not names_address(frame.data, START_32, START_32 + mmap.PAGESIZE)
    page = mapper(mmap.PROT_READ | mmap.PROT_EXEC)(mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    code = {0: [(page, page + mmap.PAGESIZE)]}
    pid = child()
    try:
        monkeypatch.setattr(outside_removal, "_unmap_if_left", lambda *_: True)
        assert unmap_left_memory(pid, Patches(code=code))  # one of 64 bits would lose it
        monkeypatch.setattr(outside_removal, "word_size_of", lambda _: 4)
        assert not unmap_left_memory(pid, Patches(code=code))
        assert mapped(pid, page)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_memory_of_a_process_that_allows_no_injection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_removal, "may_inject", lambda _: False)
    descriptor = os.memfd_create("dprobes")
    os.ftruncate(descriptor, SIZE)
    region = mapper()(SIZE, mmap.MAP_SHARED, descriptor)
    pid = child()
    try:
        assert not unmap_left_memory(pid, Patches({0: NativeMemory(0, 0, region, SIZE)}), until=math.inf)
        assert mapped(pid, region)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)


class KilledError(Exception):
    """Say that the tracer is no more."""


GIVING_BACK = """
import ctypes, json, mmap, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
size, files = 2 * mmap.PAGESIZE, [os.memfd_create(name) for name in ("dprobes", "dprobes_gv", "dprobes-left")]
for file in files:
    os.ftruncate(file, size)
places = [libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0) for file in files]
places.append(libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
# Not at the beginning of a mapping, and where nothing ever was: else memory could hold an address in it.
start = libc.mmap(CODE, 3 * size, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
print(json.dumps([*places, start + size]), flush=True)
for place, length in json.loads(sys.stdin.readline()):
    libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(length))
for place in json.loads(sys.stdin.readline()):
    libc.mmap(place, size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0)
print("done", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def giving_back() -> Iterator[subprocess.Popen[str]]:
    """
    Run a process that has memory for handlers, and unmaps and maps what it is told.

    It has little memory besides: what is larger than can be looked through keeps its code.
    """
    source = f"CODE, MAP_FIXED = {0x3A5C_7E91_B000}, {MAP_FIXED}\n{GIVING_BACK}"
    command = [sys.executable, "-I", "-c", source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], *lines: object) -> str:
    """Tell the process something, and return its next line."""
    assert process.stdin is not None
    assert process.stdout is not None
    for line in lines:
        process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("done", range(5))
def test_what_a_killed_tracer_was_giving_back_is_given_back_to_the_end(done: int) -> None:
    with giving_back() as process:
        region, other, manifest, page, code = json.loads(told(process))
        memory = NativeMemory(page, mmap.PAGESIZE, region, SIZE, None, ((other, SIZE),), (manifest, SIZE))
        places = [code, region, page, other, manifest]
        space = AddressSpace.closed(8)
        space.patches = Patches({0: memory}, code={0: [(code, code + SIZE)]})
        unmapped: list[tuple[int, ...]] = []

        def call(number: int, *arguments: int) -> int:
            assert number == MUNMAP[8]
            if len(unmapped) == done:
                raise KilledError
            unmapped.append(arguments)
            return 0

        with contextlib.suppress(KilledError):
            unmap_program(space, call, 0)
        assert [start for start, _ in unmapped] == places[:done]
        foreign = places[:1] if done else []
        assert told(process, unmapped, foreign) == "done\n"
        assert unmap_left_memory(process.pid, Patches({0: memory}, code={0: [(code, code + SIZE)]}))
        left = [place for place in places if place not in foreign and mapped(process.pid, place)]
        # What is only a page of zeros cannot be told from what the process itself has there.
        assert left == ([page] if done == 2 else [])
        assert all(mapped(process.pid, place) for place in foreign)


@pytest.mark.parametrize("needed", [3, 40])
def test_a_thread_in_it_is_let_leave_it_and_not_for_ever(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(outside_removal, "_unmap", lambda *_: len(pauses) == needed)
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
