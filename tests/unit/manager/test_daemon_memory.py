"""What a manager has read and freed is no part of its memory any more, whichever thread did so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from dprobes.manager.daemon import LARGE

SIZE = 16 * LARGE
PROGRAM = f"""
import re, threading
from pathlib import Path
from dprobes.manager.daemon import give_large_blocks_back

def memory():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"^Private_Dirty: +(\\d+) kB$", text, re.MULTILINE)[0]) << 10

def read():
    for _ in range(4):
        bytearray(b"x") * {SIZE}
    done.wait()

if {{fixed}}:
    give_large_blocks_back()
before = memory()
done = threading.Barrier(4 + 1)
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
done.wait()
for thread in threads:
    thread.join()
print(memory() - before)
"""


def grown(*, fixed: bool) -> int:
    """Return by how much a process grows whose threads have large blocks, and free them."""
    command = [sys.executable, "-c", PROGRAM.format(fixed=fixed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: has no mallopt(3)")
def test_large_blocks_that_were_freed_are_given_back() -> None:
    assert grown(fixed=False) > SIZE
    assert grown(fixed=True) < SIZE // 4
