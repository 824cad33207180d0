"""Compiled programs bring what the kernel of a guest does not show: where its functions and its data are."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from guests.guest import Guest

LINKED = 0xFFFFFFFF81000000
"""The address that Debian's kernels are linked for."""

PROGRAM = """
name = vmlinux
modtype = kernel
offset = __x64_sys_getppid
minor = 1
    push 13
    push linux_banner
    log str
    exit
offset = __x64_sys_getppid + 9
minor = 2
    exit
"""
CALLS = "import os\nfor _ in range(100): os.getppid()\n"


def build(source: str, directory: Path, *options: str) -> bytes:
    """Compile a program on this machine."""
    (directory / "program.rpn").write_text(source)
    command = [*DPROBES, "build", "program.rpn", "-o", "program.ppdf", *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    return (directory / "program.ppdf").read_bytes()


def system_map(guest: Guest, *names: str) -> str:
    """Return what the kernel's build listed of these symbols: the addresses before it was moved."""
    lines = guest.run(f"grep -E ' ({'|'.join(('_text', *names))})$' /proc/kallsyms").stdout.splitlines()
    slide = next(int(line.split()[0], 16) for line in lines if line.endswith(" _text")) - LINKED
    moved = sorted(
        f"{int(address, 16) - slide:016x} {rest}\n" for address, rest in (line.split(" ", 1) for line in lines)
    )
    return "".join(moved)


@pytest.mark.machine(kaslr=True)
@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_kernel_that_hides_its_addresses(guest: Guest, tmp_path: Path) -> None:
    symbols = tmp_path / "System.map"
    symbols.write_text(system_map(guest, "_end", "linux_banner", "__x64_sys_getppid"))
    image = guest.machine.image.vmlinuz
    guest.put("/tmp/program.ppdf", build(PROGRAM, tmp_path, "--for", str(image), "--sym", str(symbols)))
    guest.put("/tmp/program.rpn", PROGRAM)
    guest.put("/tmp/calls.py", CALLS)
    guest.run("echo 2 > /proc/sys/kernel/kptr_restrict")
    calls = ("--", str(PYTHON), "/tmp/calls.py")
    refused = guest.dprobes("run", "/tmp/program.rpn", *calls, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("dprobes: error: the kernel hides its addresses: ")
    done = guest.dprobes("run", "/tmp/program.ppdf", "--format", "hex", *calls)
    assert "note" not in done.stderr.replace("note: engine", "")
    assert done.stdout.count(b"Linux version".hex(" ")) == 100
    assert done.stdout.count("DProbes(0,2)") == 100
    guest.run("mount --bind /dev/null /proc/kcore")
    refused = guest.dprobes("run", "/tmp/program.ppdf", *calls, check=False)
    assert refused.returncode == 1
    assert refused.stderr == (
        "dprobes: error: the address of the kernel is unknown: the kernel hides its addresses: "
        "/proc/kallsyms shows 0 for all of them; /proc/kcore is not a core file\n"
        "hint: run dprobes as root; /proc/kallsyms (kernel.kptr_restrict 0 or 1) or /proc/kcore must be readable\n"
    )


def test_a_module_is_recognised_by_its_own_build(guest: Guest, tmp_path: Path) -> None:
    (path,) = guest.machine.image.directory.rglob("dummy.ko*")
    source = "name = dummy\nmodtype = kmod\nmajor = 8\noffset = dummy_xmit\nminor = 2\nexit\n"
    guest.put("/tmp/program.ppdf", build(source, tmp_path, "--for", str(path)))
    guest.load_module("dummy", "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 up")
    guest.put("/tmp/calls.py", "import socket\nsocket.socket(2, 2).sendto(b'x', ('10.9.9.2', 9))\n")
    options = ("--format", "csv", "--log", "procname", "--", str(PYTHON), "/tmp/calls.py")
    done = guest.dprobes("run", "/tmp/program.ppdf", *options)
    assert "found by their names" not in done.stderr
    assert len(done.stdout.splitlines()) >= 2, done.stderr
