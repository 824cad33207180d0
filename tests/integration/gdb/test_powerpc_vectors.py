"""Interrupt vectors of a PowerPC behind QEMU's stub, where addresses are not translated: what QEMU raises is hit."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from integration.support import PROGRAMS, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Runner

DECREMENTER = 0xFFF00900
COUNTER = 0x1000
IDLE = range(0xFFF00120, 0xFFF00128)
TRANSLATIONS, INTERRUPTS = 0x30, 0x8000
"""MSR: IR and DR, and EE."""
HITS = 20
TOOLS = "powerpc-linux-gnu-"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """Start a Macintosh that stands at its reset; QEMU logs the interrupts that it raises."""
    for tool in ("qemu-system-ppc", f"{TOOLS}gcc", f"{TOOLS}objcopy"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    source, compiled, rom = PROGRAMS / "vectors_ppc.S", tmp_path / "vectors.o", tmp_path / "rom"
    subprocess.run([f"{TOOLS}gcc", "-c", "-o", compiled, source], check=True)
    subprocess.run([f"{TOOLS}objcopy", "-O", "binary", "-j", ".text", compiled, rom], check=True)
    socket = tmp_path / "stub"
    command: list[object] = [
        "qemu-system-ppc",
        "-M",
        "g3beige",
        "-accel",
        "tcg,thread=single",
        "-m",
        "32",
        "-nodefaults",
    ]
    command += ["-display", "none", "-bios", rom, "-S", "-gdb", f"unix:{socket},server=on,wait=off"]
    command += ["-d", "int", "-D", tmp_path / "raised"]
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT
    while not socket.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield tmp_path
    process.kill()
    process.wait(TIMEOUT)


def program(handler: str, address: int = DECREMENTER) -> str:
    return f"name = machine\nmodtype = kernel\nvars = 1\naddress = {address:#x}\nminor = 1\n{handler}"


def test_each_interrupt_of_the_decrementer_is_a_hit(machine: Path, run: Runner) -> None:
    log = f"push {COUNTER:#x}; push mem, u32; push r, msr; push r, nip; push r, r1; log 4"
    handler = f"{log}\ninc lv, 0; push lv, 0; push {HITS}; eq; jz more\nexit 1\nmore: exit\n"
    result = run(program(handler), [], ["--engine", f"gdb={machine / 'stub'}", "--allow-write"])
    assert result.status == 0, result.stderr
    assert f"the machine is stopped at {DECREMENTER:#x} ({DECREMENTER:#x})" in result.stderr
    found = result.words(size=4, order="big")
    assert [words[0] for words in found] == [COUNTER] * HITS
    assert not any(words[2] & (TRANSLATIONS | INTERRUPTS) for words in found)
    assert {words[1] for words in found} == {DECREMENTER}
    assert [words[3] for words in found] == list(range(HITS))
    raised = (machine / "raised").read_text().splitlines()
    assert len([line for line in raised if "DECR" in line]) == HITS


def test_physical_memory_is_that_of_addresses(machine: Path, run: Runner) -> None:
    handler = f"push {COUNTER:#x}; push phys, u32; push {COUNTER:#x}; push mem, u32; sub; log 1; exit 1\n"
    result = run(program(handler), [], ["--engine", f"gdb={machine / 'stub'}", "--allow-write"])
    assert result.status == 0, result.stderr
    assert result.words(size=4, order="big") == [[0]]


def test_what_a_powerpc_has_not_is_refused(machine: Path, run: Runner) -> None:
    options = ["--engine", f"gdb={machine / 'stub'}", "--allow-write"]
    result = run(program("push 0x70; push io, u8; log 1; exit"), [], options)
    assert result.status == 2
    assert "error: 'push io, u8' is for x86 only, and the module is for ppc" in result.stderr
    result = run(program("push r, rip; log 1; exit"), [], options)
    assert result.status == 2
    assert "error: ppc has no register 'rip'" in result.stderr


def test_a_kernel_is_not_looked_for(machine: Path, run: Runner) -> None:
    text = "name = vmlinux\nmodtype = kernel\noffset = schedule\nexit\n"
    result = run(text, [], ["--engine", f"gdb={machine / 'stub'}"])
    assert result.status == 1
    assert "and kernels are probed on x86_64 only" in result.stderr
    assert "hint: write a program about its addresses: 'name = machine' and 'address = NUMBER'" in result.stderr
