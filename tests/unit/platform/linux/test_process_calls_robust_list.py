"""The kernel notes the end of a thread in memory that others share with it, however it ends."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from pathlib import Path

import pytest

from dprobes.platform.linux.process_calls import ROBUST_LIST_SIZE, note_end_of_thread

DIED = 1 << 30  # FUTEX_OWNER_DIED


def prepared(shared: mmap.mmap) -> int:
    """Have the kernel note the end of this thread; return what the word is until then."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    with memoryview(shared) as memory:
        note_end_of_thread(memory[:ROBUST_LIST_SIZE], address)
    return word_of(shared)


def word_of(shared: mmap.mmap) -> int:
    return int.from_bytes(shared[:4], "little")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_has_ended(number: int) -> None:
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    ready, child_ready = os.pipe()
    child = os.fork()
    if child == 0:
        prepared(shared)
        os.write(child_ready, b"x")
        signal.pause()
        os._exit(1)
    assert os.read(ready, 1) == b"x"
    assert word_of(shared) == child
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    assert word_of(shared) == DIED
    os.close(ready)
    os.close(child_ready)


def test_it_is_about_the_thread_that_calls() -> None:
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    found: list[int] = []
    over = threading.Event()

    def live() -> None:
        found.append(prepared(shared))
        found.append(threading.get_native_id())
        over.wait()

    thread = threading.Thread(target=live)
    thread.start()
    while len(found) < 2:
        pass
    assert found[0] == found[1] == word_of(shared)
    over.set()
    thread.join()
    while Path(f"/proc/self/task/{found[1]}").exists():  # Python is done with it before the kernel is
        pass
    assert word_of(shared) == DIED
