"""Where glibc has the id of a thread is where this process has its own."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from dprobes.engines.inline.threadids import tid_place_in
from dprobes.engines.linux.machinecode import map_code
from dprobes.target.processmaps import parse_maps, read_maps

RETURN_THREAD_POINTER = bytes.fromhex("64488b04251000 0000c3".replace(" ", ""))  # mov rax, fs:[0x10]; ret


def test_each_thread_has_its_id_there() -> None:
    place = tid_place_in(os.getpid(), parse_maps(read_maps(os.getpid())))
    if place is None:
        pytest.skip("the C library of this process does not say where it has the id of a thread")
    pointer = ctypes.CFUNCTYPE(ctypes.c_uint64)(map_code(RETURN_THREAD_POINTER))
    found = []

    def look() -> None:
        at = pointer() + place
        found.append((ctypes.c_uint32.from_address(at).value, threading.get_native_id()))

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert all(ours == theirs for ours, theirs in found)


def test_nobody_knows_it_without_a_c_library() -> None:
    assert tid_place_in(os.getpid(), []) is None
