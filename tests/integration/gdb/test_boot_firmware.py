"""OVMF, U-Boot and memtest86+ behind QEMU's stub, probed by addresses: each execution that QEMU logs is a hit."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Runner

FLASH = range(0xFF000000, 0x100000000)
"""Where a PC has its firmware, up to the last byte below 4 GiB."""
LOADED = range(0x100000, 0x200000)
"""Where systems are loaded."""


class System(NamedTuple):
    """A system, what it is to QEMU, and where its code is."""

    path: Path
    option: str
    code: range


SYSTEMS = {
    "ovmf": System(Path("/usr/share/ovmf/OVMF.fd"), "-bios", FLASH),
    "u-boot-qemu": System(Path("/usr/lib/u-boot/qemu-x86_64/u-boot.rom"), "-bios", FLASH),
    "memtest86+": System(Path("/boot/memtest86+x64.bin"), "-kernel", LOADED),
}
"""By the packages of Debian that have them."""
LOOKED_AT = 20000
HITS = 8


@contextmanager
def machine(system: System, log: Path, code: range, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a machine with a system; QEMU logs which code it executes there."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86_64 is not installed")
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=single", "-cpu", "qemu64", "-m", "128", "-nodefaults"]
    command += ["-no-user-config", "-display", "none", system.option, str(system.path), *options]
    command += ["-d", "exec,nochain", "-dfilter", f"{code.start:#x}+{len(code):#x}", "-D", str(log)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT)


def await_that(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def executed(log: Path) -> list[int]:
    """Return where blocks of code begin that were executed, in this order."""
    return [int(found, 16) for found in re.findall(r"/([0-9a-f]{16})/", log.read_text() if log.exists() else "")]


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> System:
    found = SYSTEMS[request.param]
    if not found.path.exists():
        pytest.skip(f"{request.param} is not installed")
    return found


def test_code_is_hit_as_often_as_it_is_executed(system: System, run: Runner, tmp_path: Path) -> None:
    """The first block that is executed often enough; the last hit leaves the machine before its instruction."""
    before, log, socket = tmp_path / "before", tmp_path / "executed", tmp_path / "stub"
    with machine(system, before, system.code) as process:
        await_that(lambda: len(executed(before)) > LOOKED_AT, process)
    place = next(address for address, count in Counter(executed(before)).items() if count >= HITS)
    handler = f"push r, rip; push r, cr0; log 2\ninc lv, 0; push lv, 0; push {HITS}; eq; jz more\nexit 1\nmore: exit\n"
    text = f"name = machine\nmodtype = kernel\nvars = 1\naddress = {place:#x}\nminor = 1\n{handler}"
    listens = ["-S", "-gdb", f"unix:{socket},server=on,wait=off"]
    with machine(system, log, range(place, place + 1), *listens) as process:
        await_that(socket.exists, process)
        result = run(text, [], ["--engine", f"gdb={socket}", "--allow-write"])
        assert result.status == 0, result.stderr
        assert f"the machine is stopped at {place:#x} ({place:#x})" in result.stderr
        assert [(rip, cr0 & 1) for cr0, rip in result.words()] == HITS * [(place, 1)]
        assert executed(log) == (HITS - 1) * [place]
