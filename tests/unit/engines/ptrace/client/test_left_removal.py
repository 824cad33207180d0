"""What killed runs have left in a process: here one that lists it itself, as a tracer would."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import LeftThings
from dprobes.engines.ptrace import restorer_messages
from dprobes.engines.ptrace.client import left_removal
from dprobes.engines.ptrace.client.left_removal import left_notice, remove_all_left, remove_left

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = (1 << 22) - 1

LISTING = """
import ctypes, mmap, os, sys
from dprobes.engines.ptrace import restorer_messages as m
from dprobes.engines.ptrace.site_patches import SitePatch
from dprobes.engines.ptrace.site_patches import NativeMemory
from dprobes.native.process_page import HAS_ENDED

def mapped(name, size, data, flags):
    file = os.memfd_create(name)
    os.ftruncate(file, size)
    os.pwrite(file, data, 0)
    made = mmap.mmap(file, size, flags=flags)
    os.close(file)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))

is_over = sys.argv[1] == "ended"
region, start = mapped("dprobes", 4096, (HAS_ENDED if is_over else os.getpid()).to_bytes(4, "little"), mmap.MAP_SHARED)
if sys.argv[1] == "unmapped":
    ctypes.CDLL(None).munmap(ctypes.c_void_p(start), 4096)
code = ctypes.create_string_buffer(bytes.fromhex("e9010203ff"), 8)
other = ctypes.create_string_buffer(bytes.fromhex("90"), 8)
own, page = mapped("page", 4096, b"", mmap.MAP_PRIVATE)
spare, at = mapped("spare", 4096, b"", mmap.MAP_PRIVATE)
memory = NativeMemory(page, 4096, start, 4096, None, (), (at, 4096))
jump = SitePatch((), 0, b"", (0, b""), ((ctypes.addressof(code), code.raw[:5]),), (b"UH12 ",))
entry = m.entry_of(memory, (), [jump, jump], [(ctypes.addressof(other), 0x55)])
listed, _ = mapped(
    m.MANIFEST_FILE_NAME, m.MANIFEST_SIZE, m.MANIFEST_MAGIC + len(entry).to_bytes(8, "little") + entry,
    mmap.MAP_PRIVATE)
print("ready", flush=True)
sys.stdin.readline()
print(code.raw[:5], other.raw[:1], flush=True)
os._exit(0)
"""


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTING, request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def memory_of(process: subprocess.Popen[str]) -> str:
    return process.communicate("\n")[0]


@pytest.mark.parametrize("target", ["ended", "unmapped"], indirect=True)
def test_what_is_there_is_restored_and_nothing_else_is_written(target: subprocess.Popen[str]) -> None:
    assert remove_left(target.pid) == LeftThings(target.pid, 1, is_unmapped=True)
    assert memory_of(target) == "b'UH12 ' b'\\x90'\n"


def test_a_process_full_of_lists_does_not_keep_us(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create(restorer_messages.MANIFEST_FILE_NAME)
    os.ftruncate(file, 2 * mmap.PAGESIZE)
    os.pwrite(file, restorer_messages.MANIFEST_MAGIC + mmap.PAGESIZE.to_bytes(8, "little"), 0)
    # Of every second one only the first page, so that the kernel joins none with the next.
    lists = [mmap.mmap(file, mmap.PAGESIZE * (1 + n % 2), mmap.MAP_PRIVATE, mmap.PROT_READ) for n in range(500)]
    read: list[bytes] = []

    def entries_in(data: bytes) -> list[object]:
        read.append(data)
        return []

    monkeypatch.setattr(left_removal, "entries_in", entries_in)
    assert remove_left(os.getpid()) is None
    assert len(read) == 64
    for each in lists:
        each.close()
    os.close(file)


@pytest.mark.parametrize("target", ["living"], indirect=True)
def test_what_a_living_run_uses_is_left_alone(target: subprocess.Popen[str]) -> None:
    assert remove_left(target.pid) is None
    assert memory_of(target) == "b'\\xe9\\x01\\x02\\x03\\xff' b'\\x90'\n"


@pytest.mark.parametrize("target", ["ended"], indirect=True)
def test_all_processes_are_looked_at(target: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ["self", "1", str(NOBODY), str(target.pid)]
    monkeypatch.setattr("os.listdir", lambda path: seen if path == "/proc" else [str(target.pid)])
    assert [left.pid for left in remove_all_left()] == [target.pid]


def test_of_a_process_that_has_nothing_or_is_gone_nothing_is_said() -> None:
    assert remove_left(NOBODY) is None
    assert remove_left(1) is None


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (LeftThings(7, 1, is_unmapped=True),
         "1 place in its code was restored, and the memory of handlers was given back"),
        (LeftThings(7, 2, is_unmapped=False),
         "2 places in its code were restored, the memory of handlers is in use, and stays"),
    ],
)  # fmt: skip
def test_what_was_done_is_said(left: LeftThings, said: str) -> None:
    notice = left_notice(left)
    assert notice.message == f"killed runs left something in process 7: {said}"
    assert not notice.is_warning
