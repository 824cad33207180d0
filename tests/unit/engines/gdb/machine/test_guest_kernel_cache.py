"""Kernels are known again by their banner, and nothing else counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guest_kernel import KnownKernel, keep_kernel, known_kernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

START = 0xFFFFFFFF81000000
PLACE = START + 0x4000
KERNEL = KnownKernel(b"ffffffff81000000 T _text\n", b"types")


def memory(banner: bytes, start: int = START) -> Callable[[int, int], bytes]:
    def read(address: int, size: int) -> bytes:
        content = bytes(0x4000) + banner + b"\0" + bytes(600)
        return content[address - start :][:size] if address >= start else b""

    return read


def test_a_kernel_is_known_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = memory(b"Linux version 6.1.0 (builder) #1")
    assert known_kernel(read, START) is None
    keep_kernel(read, START, PLACE, KERNEL)
    assert known_kernel(read, START) == KERNEL
    assert known_kernel(memory(b"Linux version 6.1.0 (builder) #2"), START) is None
    assert known_kernel(memory(b"Linux version 6.1.0 (builder) #1", START + (1 << 21)), START + (1 << 21)) is None


def test_what_is_no_banner_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_kernel(memory(b"something"), START, PLACE, KERNEL)
    assert not list(tmp_path.rglob("guestkernel*"))


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(8):
        keep_kernel(memory(b"Linux version %d" % number), START, PLACE, KERNEL)
    assert len(list(tmp_path.rglob("guestkernel*"))) == 4
    assert known_kernel(memory(b"Linux version 7"), START) == KERNEL


def test_a_damaged_file_is_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = memory(b"Linux version 6.1.0")
    keep_kernel(read, START, PLACE, KERNEL)
    (file,) = tmp_path.rglob("guestkernel*")
    file.write_bytes(b"")
    assert known_kernel(read, START) is None
    file.rename(file.with_name("guestkernel-ffffffff81000000-x"))
    assert known_kernel(read, START) is None
