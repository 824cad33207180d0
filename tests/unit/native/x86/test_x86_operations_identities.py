"""Who hits, and when, is what the kernel says: also in other threads, after a fork, and while the page changes."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.native import runtime_routines
from dprobes.native.generated_code import Surroundings
from dprobes.native.process_page import (
    CLOCK_READING,
    CLOCK_READINGS,
    CLOCK_SIZE,
    PROCESS_IS_NESTED,
    PROCESS_PID,
    PROCESS_SIZE,
    THREAD,
    thread_window,
)
from dprobes.native.x86.x86_operations import X86Operations
from support.machine_code import Pages, function_at, libc, place, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MADV_WIPEONFORK = 18


def routine(write: Callable[[X86Operations], object], arguments: int = 0) -> Callable[..., int]:
    address = reserve(mmap.PAGESIZE)
    asm = X86Operations(address)
    write(asm)
    place(address, asm.assemble(), mmap.PAGESIZE)
    return function_at(address, arguments)


@pytest.fixture
def page() -> Iterator[Pages]:
    made = Pages(PROCESS_SIZE // mmap.PAGESIZE)
    assert not libc().madvise(made.start, PROCESS_SIZE, MADV_WIPEONFORK)
    yield made
    made.close()


def tid_place() -> int | None:
    """Return where the C library has the thread id, found by a search in the thread's structure."""
    asm_address = reserve(mmap.PAGESIZE)
    place(asm_address, bytes.fromhex("64488b042510000000c3"), mmap.PAGESIZE)  # mov rax, fs:0x10; ret
    start = function_at(asm_address, 0)()
    tid = threading.get_native_id()
    words = struct.unpack("=512I", ctypes.string_at(start, 2048))
    return next((4 * n for n, word in enumerate(words) if word == tid), None)


def in_child(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        os._exit(0 if check() else 1)
    return os.waitpid(child, 0)[1] == 0


def here() -> int:
    return os.getpid() << 32 | threading.get_native_id()


def test_the_ids_are_those_of_the_process_and_the_thread(page: Pages) -> None:
    where = tid_place()
    assert where is not None
    ids = routine(lambda asm: runtime_routines.write_ids(asm, page.start, where))
    page.write(page.start + PROCESS_PID, os.getpid().to_bytes(4, "little"))
    assert ids() == here()
    found: list[tuple[int, int]] = []
    threads = [threading.Thread(target=lambda: found.append((ids(), here()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(one == other for one, other in found)
    assert len({one for one, _ in found} | {here()}) >= 2
    # The page of a new process is empty until somebody writes its id.
    assert in_child(lambda: ids() == threading.get_native_id())
    assert ids() == here()


def test_in_a_nested_namespace_the_thread_has_the_id_that_the_page_has_for_it(page: Pages) -> None:
    where, tid = tid_place(), threading.get_native_id()
    assert where is not None
    ids = routine(lambda asm: runtime_routines.write_ids(asm, page.start, where))
    window = thread_window(tid)
    page.write(page.start + PROCESS_PID, (4711).to_bytes(4, "little"))
    page.write(page.start + PROCESS_IS_NESTED, (1).to_bytes(4, "little"))
    assert ids() == 4711 << 32, "one that is not there has no id"
    for mine in (window[0], window[-1]):
        for other in window:
            page.write(page.start + other, THREAD.pack(tid + window.step, 5))
        assert ids() == 4711 << 32
        page.write(page.start + mine, THREAD.pack(tid, (1 << 32) - 1))
        assert ids() == 4711 << 32 | (1 << 32) - 1
    page.write(page.start + window[-1], THREAD.pack(tid + 1, 5))
    page.write(page.start + window[-1] + window.step, THREAD.pack(tid, 6))
    assert ids() == 4711 << 32, "behind its window nothing is looked for"
    page.write(page.start + PROCESS_IS_NESTED, bytes(4))
    assert ids() == 4711 << 32 | tid


@pytest.mark.parametrize(("first_stack", "limit"), [(None, 1 << 64), (5 << 40, 5 << 40)])
def test_the_end_of_a_stack_is_the_nearest_of_what_is_above(first_stack: int | None, limit: int) -> None:
    end = routine(lambda asm: runtime_routines.write_stack_end(asm, first_stack), 1)
    own = routine(lambda asm: asm.raw(bytes.fromhex("64488b042500000000c3")))()  # mov rax, fs:0; ret
    above = [place for place in (own, first_stack) if place is not None]
    for address in (0, 4096, own - 1, own, own + 1, limit - 1, limit + 1 & (1 << 64) - 1, (1 << 64) - 1):
        assert end(address) == min((place for place in above if place >= address), default=0)
    ends: list[int] = []
    thread = threading.Thread(target=lambda: ends.append(end(own - 4096 if first_stack is None else 0)))
    thread.start()
    thread.join()
    assert len(ends) == 1


def test_where_nobody_has_a_thread_pointer_the_end_is_that_of_the_first_stack() -> None:
    """The load faults there: the way behind it is gone from the place that the fault is fixed up at."""
    asm = X86Operations(reserve(mmap.PAGESIZE))
    (fixup,) = runtime_routines.write_stack_end(asm, 0x7000)
    place(asm.address, asm.assemble(), mmap.PAGESIZE)
    assert function_at(fixup.target, 1)(0x6000) == 0x7000
    assert function_at(fixup.target, 1)(0x8000) == 0


def test_without_a_place_of_thread_ids_there_is_the_process_id_alone(page: Pages) -> None:
    ids = routine(lambda asm: runtime_routines.write_ids(asm, page.start, None))
    page.write(page.start + PROCESS_PID, (4711).to_bytes(4, "little"))
    assert ids() == 4711 << 32


def test_a_signal_goes_to_this_thread() -> None:
    send = routine(runtime_routines.write_signal, 1)

    def stops() -> bool:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        assert send(signal.SIGUSR1) == 0
        return signal.sigwait([signal.SIGUSR1]) == signal.SIGUSR1

    assert in_child(stops)
    child = os.fork()
    if not child:
        send(signal.SIGSTOP)
        os._exit(3)
    assert os.WSTOPSIG(os.waitpid(child, os.WUNTRACED)[1]) == signal.SIGSTOP
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize("has_rdpid", [True, False])
def test_the_cpu(*, has_rdpid: bool) -> None:
    if has_rdpid and " rdpid" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("processor: it has no RDPID")

    def write(asm: X86Operations) -> None:
        asm.read_cpu(Surroundings({}, {}, {}, has_rdpid))
        asm.ret()

    cpu = routine(write)
    allowed = os.sched_getaffinity(0)
    try:
        for each in allowed:
            os.sched_setaffinity(0, [each])
            assert cpu() == each
    finally:
        os.sched_setaffinity(0, allowed)


@functools.cache
def _rdtsc() -> Callable[[], int]:
    address = reserve(mmap.PAGESIZE)
    place(address, bytes.fromhex("0f3148c1e2204809d0c3"), mmap.PAGESIZE)  # rdtsc; shl rdx, 32; or rax, rdx; ret
    return function_at(address, 0)


def rdtsc() -> int:
    return _rdtsc()()


def both_clocks() -> tuple[int, int]:
    """Return counter and time of one moment: of many pairs the one with the least time between its parts."""
    pairs = []
    for _ in range(200):
        before, counter, after = time.monotonic_ns(), rdtsc(), time.monotonic_ns()
        pairs.append((after - before, counter, before + (after - before) // 2))
    return min(pairs)[1:]


def calibration() -> tuple[int, int, int]:
    """Return the counter, the time when it stood there, and nanoseconds for a count, times 2**32."""
    counter, begin = both_clocks()
    time.sleep(0.05)
    later, end = both_clocks()
    return later, end, ((end - begin) << 32) // (later - counter)


def clock_page(version: int, *readings: tuple[int, int, int]) -> bytes:
    """Return a page with two readings, of which the version says which is valid."""
    packed = b"".join(CLOCK_READING.pack(*reading) for reading in readings)
    return (version.to_bytes(8, "little") + packed).ljust(CLOCK_SIZE, b"\0")


@pytest.mark.parametrize("version", [2, 3])
def test_the_clock_is_clock_monotonic(page: Pages, version: int) -> None:
    readings = [(0, 0, 0), (0, 0, 0)]
    readings[version & 1] = calibration()
    page.write(page.start, clock_page(version, *readings))
    clock = routine(lambda asm: runtime_routines.write_clock(asm, page.start))
    differences = []
    for _ in range(1000):
        before = time.monotonic_ns()
        found = clock()
        after = time.monotonic_ns()
        differences.append(max(before - found, found - after, 0))
    assert sorted(differences)[500] < 1_000_000, "it drifts by a part of the time since it was set"


def test_a_counter_that_is_behind_gives_an_earlier_time(page: Pages) -> None:
    counter, now, rate = rdtsc(), 1 << 40, 1 << 32
    ahead = 1 << 40
    page.write(page.start, clock_page(0, (counter + ahead, now + ahead, rate)))
    clock = routine(lambda asm: runtime_routines.write_clock(asm, page.start))
    passed = rdtsc() - counter
    assert now + passed <= clock() <= now + (rdtsc() - counter)


def test_no_time_is_made_of_two_readings(page: Pages) -> None:
    """Somebody changes the page all the time between two clocks, of which each alone says the same."""
    clock = routine(lambda asm: runtime_routines.write_clock(asm, page.start))
    counter = rdtsc()
    readings = ((counter, 1 << 50, 1 << 32), (counter + (1 << 30), (1 << 50) + (1 << 30), 1 << 32))
    words = (ctypes.c_uint64 * (CLOCK_SIZE // 8)).from_address(page.start)
    page.write(page.start, clock_page(0, *readings))
    goes_on = True

    def change() -> None:
        version = 0
        while goes_on:
            version += 1
            place = (CLOCK_READINGS + CLOCK_READING.size * (version & 1)) // 8
            words[place], words[place + 1], words[place + 2] = readings[version // 2 & 1]
            words[0] = version

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(20_000):
            before = rdtsc()
            found = clock()
            assert (1 << 50) + before - counter <= found <= (1 << 50) + rdtsc() - counter
    finally:
        goes_on = False
        changer.join()
