"""The kernel's news of processes is what they do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dprobes.engines.ebpf.read.image_watch import Executed, ForkedProcess, MappedFile, ProcessNews

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not root")


def test_what_processes_map_execute_and_fork_is_told_in_order() -> None:
    news = ProcessNews()
    try:
        script = "import os, mmap\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint(os.getpid())"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        pid = int(done.stdout)
        found = [each for each in news.take() if pid in (each.pid, getattr(each, "parent", 0))]
        assert [each.time for each in found] == sorted(each.time for each in found)
        assert isinstance(found[0], ForkedProcess)
        assert found[0].parent == os.getpid()
        assert isinstance(found[1], Executed)
        mapped = [each.mapping for each in found if isinstance(each, MappedFile)]
        libc = next(each for each in mapped if "libc.so" in each.path)
        status = Path(libc.path).stat()
        assert (libc.device, libc.inode) == (status.st_dev, status.st_ino)
        assert libc.executable
        assert any(each.path == "[vdso]" for each in mapped)
        child = found[-1]
        assert isinstance(child, ForkedProcess)
        assert child.parent == pid
        assert all(each.pid != child.pid for each in news.take())
    finally:
        news.close()


def test_a_ring_goes_round() -> None:
    news = ProcessNews()
    try:
        count = 0
        for _ in range(40):  # each start of a program takes about a kilobyte
            for _ in range(30):
                subprocess.run(["/bin/true"], check=True)
            count += sum(isinstance(each, Executed) for each in news.take())
        assert count >= 40 * 30
    finally:
        news.close()
