from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.attach.untouched import is_untouched, maps_file
from dprobes.engines.linux.procfs import living_thread, thread_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CODE = bytes(range(200)) + b"\x55\x48\x89\xe5" + bytes(mmap.PAGESIZE)
PLACE = 200

SCRIPT = """
import ctypes, mmap, os, sys, threading
file = os.open(sys.argv[1], os.O_RDONLY)
code = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
def work():
    print("there", flush=True)
    for line in sys.stdin:
        code[int(line)] = 0xCC
        print("written", flush=True)
    os._exit(0)
if sys.argv[2:] == ["leaderless"]:
    threading.Thread(target=work).start()
    ctypes.CDLL(None).syscall(60, 0)  # exit(2): this thread alone
work()
"""


class Mapper:
    """A process that executes a file, and patches it when it is told to."""

    def __init__(self, path: Path, *more: str) -> None:
        path.write_bytes(CODE)
        self.path = str(path)
        status = path.stat()
        self.identity = status.st_dev, status.st_ino
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, path, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "there\n"

    def patch(self, place: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{place}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "written\n"

    @property
    def is_untouched(self) -> bool:
        return is_untouched(self.path, self.identity, [(PLACE, CODE[PLACE : PLACE + 4])])


@pytest.fixture(params=["with its first thread", "leaderless"])
def mapper(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mapper]:
    mapper = Mapper(tmp_path / "code", request.param)
    if request.param == "leaderless":
        while thread_state(mapper.process.pid) != "Z":
            time.sleep(0.001)
    yield mapper
    mapper.process.communicate("")


def test_code_is_untouched_until_somebody_changes_the_instruction(mapper: Mapper) -> None:
    assert mapper.is_untouched
    mapper.patch(PLACE - 1)  # in the same page
    assert mapper.is_untouched
    mapper.patch(PLACE + 3)
    assert not mapper.is_untouched


def test_who_executes_a_file_is_known(mapper: Mapper, tmp_path: Path) -> None:
    assert maps_file(living_thread(mapper.process.pid), mapper.path, mapper.identity)
    assert not maps_file(os.getpid(), mapper.path, mapper.identity)
    other = tmp_path / "other"
    other.mkdir()
    same_name = other / "code"
    same_name.write_bytes(CODE)
    status = same_name.stat()
    assert not maps_file(living_thread(mapper.process.pid), str(same_name), (status.st_dev, status.st_ino))


def test_a_file_that_is_read_only_as_data_is_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(CODE)
    status = path.stat()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        assert data[PLACE] == CODE[PLACE]
        assert not maps_file(os.getpid(), str(path), (status.st_dev, status.st_ino))
