"""Physical memory of a machine behind QEMU's stub, compared with what the machine and QEMU say of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON
from integration.conftest import run
from kernel.observed_machine import observed, words_of

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest
    from integration.support import Runner

__all__ = ["run"]

HPET = 0xFED00000
"""A device whose first register is a constant (IA-PC HPET Specification, 2.3.4)."""
OWN_PAGE = """
import ctypes, mmap
page = mmap.mmap(-1, 4096)
page[:16] = b"in its own page."
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
with open("/proc/self/pagemap", "rb", 0) as file:
    file.seek(address // 4096 * 8)
    frame = int.from_bytes(file.read(8), "little") & (1 << 55) - 1
ctypes.CDLL(None).syscall(110, ctypes.c_long(frame * 4096), ctypes.c_long(address))
print(frame * 4096, page[:16].hex())
"""
"""getppid(2) with two arguments that it does not take, and what is in the page then."""


def program(handler: str) -> str:
    return f"name = vmlinux\nmodtype = kernel\noffset = __x64_sys_getppid\nminor = 1\nmaxhits = 1\n{handler}\n"


def test_the_kernel_lies_where_it_says(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """Memory of the kernel and of a device is read; what is not mapped has no physical address."""
    handler = """
        push linux_banner; lin2phys; log 1
        push 13; push linux_banner; lin2phys; log mrp
        push 0xfed00000; push phys, u32; log 1
        sx nowhere; push 8; lin2phys; log 1; abort
        nowhere: log 2; exit
    """
    with observed(guest, run, program(handler), tmp_path) as seen:
        seen.await_record()
        result = seen.stop()
    data = bytes.fromhex(result.records[0]["data"])
    banner = int.from_bytes(data[:8], "little")
    (start, end) = re.findall("([0-9a-f]+)-([0-9a-f]+) : Kernel rodata", guest.get("/proc/iomem").decode())[0]
    assert int(start, 16) <= banner <= int(end, 16)
    assert data[8:24] == b"\0\x0d\0Linux version"
    (shown,) = re.findall(r": 0x([0-9a-f]+)", guest.monitor(f"xp /1wx {HPET:#x}"))
    assert data[24:] == b"".join(n.to_bytes(8, "little") for n in (int(shown, 16), 1, 8))
    assert int(shown, 16)


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_page_of_a_program_is_read_and_changed(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """The program knows from its kernel where its page is."""
    handler = """
        push u, rsi; jz other
        push u, rdi; log 1
        push u, rsi; lin2phys; log 1
        push u, rdi; push phys, u64; log 1
        push u, rsi; push mem, u64; log 1
        push u, rdi; push 0x2a; pop phys, u8
        push u, rsi; push mem, u8; log 1
        exit
        other: abort
    """
    with observed(guest, run, program(handler).replace("maxhits = 1\n", ""), tmp_path, "--allow-write") as seen:
        while not seen.lines:
            assert seen.client.poll() is None, seen.client.communicate()[1]
            frame, found = guest.run([str(PYTHON), "-c", OWN_PAGE]).stdout.split()
        result = seen.stop()
    assert result.status == 0, result.stderr
    text = int.from_bytes(b"in its o", "little")
    assert words_of(result.records[-1]) == [int(frame), int(frame), text, text, 0x2A]
    assert bytes.fromhex(found) == b"*n its own page."
