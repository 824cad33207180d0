"""Restoring a process's code from outside."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

from dprobes.engines.ptrace.client.crashrestorer import CrashRestorer


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
