"""Where the C library has the id of a thread is where this process has its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.inline.handler_code import tid_place_in, tid_place_of
from dprobes.platform.linux.call_proxy import map_code
from dprobes.target.process_maps import parse_maps, read_maps

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("movq %fs:0, %rax; movl 0x30(%rax), %eax; ret", 0x30),
        ("endbr64; movq %fs:0, %rax; movl 0x38(%rax), %eax; ret", 0x38),
        ("movq %fs:0, %rax; movl 0x148(%rax), %eax; ret", 0x148),
        ("movq %fs:0, %rax; movl 0x30(%rax), %ecx; ret", None),
        ("movl $186, %eax; syscall; ret", None),
    ],
)
def test_musl_has_it_where_its_function_takes_it_from(tmp_path: Path, body: str, place: int | None) -> None:
    source, library = tmp_path / "a.s", tmp_path / "libc.so"
    source.write_text(f".globl gettid\n.type gettid, @function\ngettid: {body}\n.fill 32, 1, 0x90\n")
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    assert tid_place_of(library) == place
