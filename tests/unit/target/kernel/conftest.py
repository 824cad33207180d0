"""A small kernel in the form of distributions' files: an image and a module, each with a build-id and alternatives."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from unit.target.conftest import Toolbox

# struct alt_instr of Linux 6.3 and later, and of 5.11 to 6.2
FLAGS = {14: ".long 0x10001", 12: ".word 1"}

SOURCE = """
        .text
        .globl _text, plain
_text:  endbr64
        call plain
        push %rbp
        nopl 0(%rax,%rax,1)
        ret
        .balign 16
plain:  push %rbx
        mov $7, %eax
1:      mov %rax, %rbx
        mov %rbx, %rcx
2:      pop %rbx
        ret
        .section .altinstr_replacement, "ax"
3:      lfence
4:
        .section .altinstructions, "a"
        .long 1b - .
        .long 3b - .
        FLAGS
        .byte 2b - 1b, 4b - 3b
"""


@pytest.fixture
def kernel_file(tools: Toolbox, tmp_path: Path) -> Callable[[str, int], Path]:
    """Return what makes the file of a kernel, or of a module with a name ending in .ko, with entries of some size."""

    def make(name: str, entry: int = 14) -> Path:
        source = tmp_path / f"{name}.s"
        source.write_text(SOURCE.replace("FLAGS", FLAGS[entry]))
        options = ["-r"] if name.endswith(".ko") else ["-no-pie", "-Wl,-Ttext=0xffffffff81000000", "-Wl,-e,_text"]
        tools.run("gcc", "-nostdlib", "-Wl,--build-id", *options, source, "-o", tmp_path / name)
        return tmp_path / name

    return make


def boot_image(payload: bytes, *, with_size: bool) -> bytes:
    """Return a bzImage with a payload; ``with_size`` appends how large the kernel is."""
    payload += b"\0\0\0\1" if with_size else b""
    code = bytes(64) + payload + bytes(32)
    setup = bytearray(3 * 512)
    setup[0x1F1] = 2
    setup[0x202:0x206] = b"HdrS"
    setup[0x248:0x250] = struct.pack("<II", 64, len(payload))
    return bytes(setup) + code
