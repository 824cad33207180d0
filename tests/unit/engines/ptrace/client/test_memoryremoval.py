"""Memory is unmapped only where it is what was mapped for handlers; ``test_inline_kills`` does it to processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from pathlib import Path

from dprobes.engines.ptrace.client.memoryremoval import unmap_left_memory
from dprobes.engines.ptrace.tracer.native.patches import NativeMemory, Patches

SIZE = 2 * mmap.PAGESIZE


def mapped(pid: int, start: int) -> bool:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any(int(line.split("-")[0], 16) == start for line in lines)


def child() -> int:
    """Start a process that has all our memory, and sleeps."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def test_memory_that_is_shared_with_a_process_goes() -> None:
    descriptor = os.memfd_create("dprobes")
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    os.ftruncate(descriptor, SIZE)
    region = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    other = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0)
    page = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    pid = child()
    try:
        foreign = Patches({0: NativeMemory(page, mmap.PAGESIZE, other, SIZE)})
        assert unmap_left_memory(pid, foreign)
        assert mapped(pid, other)
        assert mapped(pid, region)
        assert unmap_left_memory(pid, Patches({0: NativeMemory(page, mmap.PAGESIZE, region, SIZE)}))
        assert not mapped(pid, region)
        assert mapped(os.getpid(), region)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)


def test_a_process_that_has_ended_needs_nothing() -> None:
    pid = child()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert unmap_left_memory(pid, Patches({0: NativeMemory(0x1000, mmap.PAGESIZE, 0x2000, SIZE)}))
