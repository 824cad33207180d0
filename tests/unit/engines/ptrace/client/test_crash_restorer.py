"""Restoring a process's code from outside."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dprobes.engines.ptrace.client.crash_restorer import CrashRestorer
from dprobes.engines.ptrace.tracer_messages import (
    Lowered,
    MemoryCopied,
    PagesMapped,
    PagesUnmapped,
    Placed,
    Raised,
    Removed,
)
from dprobes.platform.linux import ptrace_calls


@pytest.fixture
def code() -> ctypes.Array[ctypes.c_char]:
    """Return bytes of this very process that stand for code: a breakpoint, original bytes, another breakpoint."""
    return ctypes.create_string_buffer(b"\xcc\x90\xcc", 3)


def test_only_bytes_that_are_still_breakpoints_are_restored(code: ctypes.Array[ctypes.c_char]) -> None:
    start = ctypes.addressof(code)
    restorer = CrashRestorer()
    restorer.placed(os.getpid(), ((start, 0x55), (start + 1, 0x53)))
    assert restorer.restore() == 1
    assert code.raw == b"\x55\x90\xcc"


def test_what_the_tracer_took_away_is_left_alone(code: ctypes.Array[ctypes.c_char]) -> None:
    start = ctypes.addressof(code)
    restorer = CrashRestorer()
    restorer.placed(os.getpid(), ((start, 0x55), (start + 2, 0x53)))
    restorer.removed(os.getpid(), (start,))
    assert restorer.restore() == 1
    assert code.raw == b"\xcc\x90\x53"


def test_a_process_that_no_longer_has_breakpoints_is_left_alone(code: ctypes.Array[ctypes.c_char]) -> None:
    restorer = CrashRestorer()
    restorer.placed(os.getpid(), ((ctypes.addressof(code), 0x55),))
    restorer.removed(os.getpid(), ())
    assert restorer.restore() == 0
    assert code.raw == b"\xcc\x90\xcc"


def test_processes_and_memory_that_are_gone_disturb_nobody(code: ctypes.Array[ctypes.c_char]) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    start = ctypes.addressof(code)
    restorer = CrashRestorer()
    restorer.placed(gone.pid, ((start, 0x55),))
    restorer.placed(os.getpid(), ((0x10, 0x55), (start, 0x55)))
    assert restorer.restore() == 1
    assert code.raw == b"\x55\x90\xcc"


def test_a_semaphore_is_lowered_once_if_one_of_its_breakpoints_is_still_there() -> None:
    memory = ctypes.create_string_buffer(b"\xcc\x90\xcc\0" + b"\x02\0" + b"\x05\0" + b"\0\0" + b"\xff\xff", 12)
    start = ctypes.addressof(memory)
    restorer = CrashRestorer()
    restorer.note(Placed(os.getpid(), ((start, 0x55), (start + 2, 0x55))))
    restorer.note(Raised(os.getpid(), ((start + 4, start), (start + 4, start + 2), (start + 6, start + 1))))
    restorer.note(Raised(os.getpid(), ((start + 8, start), (start + 10, start))))
    restorer.note(Lowered(os.getpid(), (start + 10,)))
    assert restorer.restore() == 2
    # Raised twice and lowered once; no breakpoint is there; killed before it was raised; lowered already.
    assert memory.raw == b"\x55\x90\x55\0" + b"\x01\0" + b"\x05\0" + b"\0\0" + b"\xff\xff"


def test_a_process_that_is_gone_takes_its_semaphores_along() -> None:
    memory = ctypes.create_string_buffer(b"\xcc\0\x01\0", 4)
    start = ctypes.addressof(memory)
    restorer = CrashRestorer()
    restorer.note(Raised(os.getpid(), ((start + 2, start),)))
    restorer.note(Removed(os.getpid()))
    restorer.note(Placed(os.getpid(), ((start, 0x55),)))
    assert restorer.restore() == 1
    assert memory.raw == b"\x55\0\x01\0"


def test_a_child_of_which_the_tracer_has_not_told_is_restored_as_its_parent(code: ctypes.Array[ctypes.c_char]) -> None:
    start, me = ctypes.addressof(code), os.getpid()
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    adopted: list[tuple[int, int]] = []

    def adopt(child: int, parent: int) -> None:
        adopted.append((child, parent))

    try:
        ptrace_calls.seize(child)
        restorer = CrashRestorer()
        restorer.placed(me, ((start, 0x55), (start + 1, 0x53)))
        assert restorer.restore(tracer=me, adopt=adopt) == 2
        assert adopted == [(child, me)]
        assert code.raw == b"\x55\x90\xcc"
        with Path(f"/proc/{child}/mem").open("rb") as memory:
            memory.seek(start)
            assert memory.read(3) == b"\x55\x90\xcc"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, ptrace_calls.WALL)


def test_pages_are_unmapped_in_all_processes_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped: dict[int, dict[int, list[tuple[int, int]]]] = {}
    name = "dprobes.engines.ptrace.client.outside_removal.unmap_left_memory"
    monkeypatch.setattr(name, lambda pid, patches, until: unmapped.update({pid: patches.code}))
    restorer = CrashRestorer()
    restorer.note(PagesMapped(7, ((0x1000, 0x2000),)))
    restorer.note(MemoryCopied(8, 7))
    restorer.note(MemoryCopied(9, 7))
    restorer.note(PagesMapped(7, ((0x5000, 0x6000),)))
    restorer.note(Removed(9))
    restorer.note(PagesMapped(7, ((0x9000, 0xA000),)))
    restorer.note(PagesUnmapped(7, ((0x9000, 0xA000),)))
    restorer.unmap()
    assert unmapped == {7: {0: [(0x1000, 0x2000), (0x5000, 0x6000)]}, 8: {0: [(0x1000, 0x2000)]}}
    unmapped.clear()
    restorer.unmap()
    assert not unmapped
