"""Firmware behind QEMU's stub, in real mode: what QEMU says to have executed is what was hit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Runner

TICK = 0xFFEA5
"""Where the PC's firmware has the handler of its timer, by its segment f000 (the entry point that all have)."""
TICKS = 0x46C
"""What that counts: a word in the BIOS data area."""
HITS = 12


@contextmanager
def machine(tmp_path: Path, *options: str) -> Iterator[Path]:
    """Start a machine that stands at its reset, and has nothing to boot; QEMU logs what it executes at ``TICK``."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86_64 is not installed")
    socket = tmp_path / "stub"
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=single", "-cpu", "qemu64", "-m", "32", "-nodefaults"]
    command += ["-no-user-config", "-display", "none", "-S", "-gdb", f"unix:{socket},server=on,wait=off"]
    command += ["-boot", "menu=on,splash-time=65535", *options]
    command += ["-d", "exec,nochain", "-dfilter", f"{TICK:#x}+1", "-D", str(tmp_path / "executed")]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT
    while not socket.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watcher = threading.Thread(target=_end_when_asked, args=(process, tmp_path / "end"), daemon=True)
    watcher.start()
    try:
        yield tmp_path
    finally:
        process.kill()
        process.wait(TIMEOUT)
        watcher.join(TIMEOUT)


@pytest.fixture
def firmware(tmp_path: Path) -> Iterator[Path]:
    with machine(tmp_path) as directory:
        yield directory


def _end_when_asked(process: subprocess.Popen[bytes], path: Path) -> None:
    while process.poll() is None:
        if path.exists():
            process.kill()
        time.sleep(0.05)


def program(handler: str, *keywords: str) -> str:
    lines = "".join(f"{each}\n" for each in keywords)
    return f"name = machine\nmodtype = kernel\nvars = 1\naddress = {TICK:#x}\nminor = 1\n{lines}{handler}"


def test_each_tick_in_real_mode_is_a_hit(firmware: Path, run: Runner) -> None:
    """The last hit leaves the machine standing: its instruction is not executed."""
    log = f"push {TICKS:#x}; push mem, u32; push r, cs; push r, rip; push r, cr0; log 4"
    handler = f"{log}\ninc lv, 0; push lv, 0; push {HITS}; eq; jz more\nexit 1\nmore: exit\n"
    result = run(program(handler), [], ["--engine", f"gdb={firmware / 'stub'}", "--allow-write"])
    assert result.status == 0, result.stderr
    assert f"the machine is stopped at {TICK:#x} ({TICK:#x})" in result.stderr
    assert f"hint: gdb -ex 'target remote {firmware / 'stub'}'" in result.stderr
    found = result.words()
    assert [words[:3] for words in found] == [[0x10, TICK & 0xFFFF, 0xF000]] * HITS
    assert [words[3] - found[0][3] for words in found] == list(range(HITS))
    executed = (firmware / "executed").read_text().splitlines()
    assert len([line for line in executed if f"/{TICK:016x}/" in line]) == HITS - 1


def test_without_paging_addresses_are_physical_ones(firmware: Path, run: Runner) -> None:
    """Where no memory is, QEMU reads zeros, as it writes nowhere."""
    handler = f"""
        push {TICKS:#x}; lin2phys; log 1
        push {TICKS:#x}; push phys, u32; push {TICKS:#x}; push mem, u32; sub; log 1
        push 0x7000000000; push 5; pop phys, u64; push 0x7000000000; push phys, u64; log 1
        exit 1
    """
    result = run(program(handler), [], ["--engine", f"gdb={firmware / 'stub'}", "--allow-write"])
    assert result.status == 0, result.stderr
    assert result.words() == [[TICKS, 0, 0]]


WATCHED = [(TICKS, 4, "w"), (0x41A, 2, "rw"), (0x41C, 2, "rw"), (0x413, 1, "w"), (0x470, 1, "w"), (0x474, 4, "w")]
"""The counter, both ends of the queue of keys, which is waited for, and what nobody writes meanwhile."""


def test_more_watchpoints_than_a_processor_has(firmware: Path, run: Runner) -> None:
    definitions = "".join(
        f"address = {address:#x}:{address + size - 1:#x}\nwatchpoint = {access}\nminor = {minor}\n"
        f"push {TICKS:#x}; push mem, u32; log 1; exit\n"
        for minor, (address, size, access) in enumerate(WATCHED, 1)
    )
    text = f"name = machine\nmodtype = kernel\n{definitions}"
    client, output = run.start(text, [], ["--engine", f"gdb={firmware / 'stub'}"])
    deadline = time.monotonic() + TIMEOUT
    most = {1: 2 * HITS, 2: 0, 3: 0}  # the firmware sets the counter before it counts, some times more than once
    while not (output.exists() and all(output.read_text().count(f'"minor": {n},') > most[n] for n in most)):
        assert client.poll() is None, client.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    result = run.end(client, output)
    assert result.status == 0, result.stderr
    counted = result.words(1)
    ticks = [words[0] for words in counted if words[0] > counted[0][0]]
    assert len(ticks) >= HITS
    assert ticks == list(range(ticks[0], ticks[0] + len(ticks)))
    hits = [result.counts[minor].hits for minor in range(1, 7)]
    assert hits[0] > HITS
    assert hits[1] > 0
    assert hits[2] > 0
    assert hits[5] < HITS


def test_what_a_machine_without_a_kernel_has_not(firmware: Path, run: Runner) -> None:
    options = ["--engine", f"gdb={firmware / 'stub'}"]
    result = run("name = vmlinux\nmodtype = kernel\noffset = schedule\nminor = 1\nexit\n", [], options)
    assert result.status == 1
    assert result.stderr.splitlines()[-2:] == [
        f"dprobes: error: no kernel of Linux is in the memory behind the stub {firmware / 'stub'}",
        "hint: wait until it has booted; a machine without one has addresses only: write 'name = machine'",
    ]
    result = run("name = machine\nmodtype = kernel\noffset = schedule\nminor = 1\nexit\n", [], options)
    assert "error: a machine as such has no symbol 'schedule'" in result.stderr
    assert "hint: write 'address =' and a number, or 'name = vmlinux' if a kernel of Linux runs there" in result.stderr


def test_the_run_ends_with_the_machine(firmware: Path, run: Runner) -> None:
    client, output = run.start(program("exit\n"), [], ["--engine", f"gdb={firmware / 'stub'}"])
    deadline = time.monotonic() + TIMEOUT
    while not (output.exists() and output.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (firmware / "end").touch()
    _, error = client.communicate(timeout=TIMEOUT)
    assert client.returncode == 0, error
    stub = firmware / "stub"
    closed = f"the stub {stub} has closed the connection: the run ends"
    reset = f"the connection to the stub {stub} has failed: connection reset by peer: the run ends"
    assert closed in error or reset in error.replace("Connection", "connection"), error


def test_a_machine_goes_on_after_ctrl_c(firmware: Path, run: Runner) -> None:
    client, output = run.start(program("exit\n"), [], ["--engine", f"gdb={firmware / 'stub'}"])
    deadline = time.monotonic() + TIMEOUT
    while not (output.exists() and output.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.send_signal(signal.SIGINT)
    _, error = client.communicate(timeout=TIMEOUT)
    assert client.returncode == 0, error
    log = firmware / "executed"
    before = log.stat().st_size
    while log.stat().st_size <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("after", [0.0, 0.05, 0.3])
def test_a_machine_goes_on_after_we_are_killed(firmware: Path, run: Runner, after: float) -> None:
    client, output = run.start(program("exit\n"), [], ["--engine", f"gdb={firmware / 'stub'}"])
    deadline = time.monotonic() + TIMEOUT
    while not (output.exists() and output.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(after)
    client.kill()
    client.communicate(timeout=TIMEOUT)
    log = firmware / "executed"
    before = log.stat().st_size
    while log.stat().st_size <= before + 1000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
