"""The page of a process has room for its threads, and for nothing beyond its end."""

from __future__ import annotations

from dprobes.native.process_page import (
    PROCESS_IS_NESTED,
    PROCESS_PID,
    PROCESS_SIZE,
    PROCESS_THREADS,
    THREAD,
    THREAD_SLOTS,
    THREAD_WINDOW,
    thread_window,
)
from dprobes.target.process_maps import PAGE_SIZE


def test_each_window_is_in_the_page() -> None:
    for local in (1, THREAD_SLOTS - 1, THREAD_SLOTS, (1 << 22) - 1):
        window = thread_window(local)
        assert len(window) == THREAD_WINDOW
        assert window.step == THREAD.size
        assert window.start >= PROCESS_THREADS
        assert window.stop <= PROCESS_SIZE
    assert PROCESS_SIZE % PAGE_SIZE == 0


def test_threads_are_behind_what_the_page_begins_with() -> None:
    assert len({PROCESS_PID, PROCESS_IS_NESTED}) == 2
    assert max(PROCESS_PID, PROCESS_IS_NESTED) + 4 <= PROCESS_THREADS


def test_ids_that_follow_each_other_are_beside_each_other() -> None:
    assert thread_window(6).start - thread_window(5).start == THREAD.size
    assert thread_window(5 + THREAD_SLOTS) == thread_window(5)
