"""What watchpoints hold for: addresses in every process, one process alone, and registers that perf has taken."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import await_line, await_true, read_result, running, symbols_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

pytestmark = pytest.mark.usefixtures("debug_registers")

SYS_PERF_EVENT_OPEN = 298
PERF_TYPE_BREAKPOINT = 5
ATTRIBUTE_SIZE = 128


def fixed(build: Builder, *, i386: bool = False) -> tuple[Path, int]:
    """Return a program that lies where it was linked, and the address of its cell."""
    program = build("watched.c", "-no-pie", name="fixed", i386=i386)
    return program, symbols_of(program)["cell"]


def watch_number(address: int, minor: int = 1, header: str = "", body: str = "push u, eip\nlog 1\nexit\n") -> str:
    return f"address = {address:#x}:{address + 3:#x}\nwatchpoint = w\nminor = {minor}\n{header}{body}"


def in_kernel_mode(*definitions: str) -> str:
    return "name = vmlinux\nmodtype = kernel\n" + "".join(definitions)


# Programs for the kernel that watch addresses of user programs


def test_a_user_address_holds_in_every_process_of_the_tree(build: Builder, run: Runner) -> None:
    (program, cell), (program_32, cell_32) = fixed(build), fixed(build, i386=True)
    source = in_kernel_mode(watch_number(cell), watch_number(cell_32, 2))
    script = f"{program} put; {program_32} put; {program} fork 3; {program_32} exec 2"
    result = run.command(source, "/bin/sh", "-c", script)
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: 1 + 3, 2: 1 + 2}
    assert [len(record["data"]) for record in result.records if record["minor"] == 2] == [8] * 3


def test_it_is_one_probepoint_whatever_the_program_is(build: Builder, run: Runner) -> None:
    (program, cell), (program_32, _) = fixed(build), fixed(build, i386=True)
    script = f"{program_32} put; {program} put; {program} put; {program} put"
    result = run.command(in_kernel_mode(watch_number(cell, header="maxhits = 2\n")), "/bin/sh", "-c", script)
    assert result.counts[1].hits == 2
    assert result.stderr.count("0,1") == 1


def test_a_handler_that_is_none_for_i386_is_inserted_into_the_others(build: Builder, run: Runner) -> None:
    (program, cell), (program_32, _) = fixed(build), fixed(build, i386=True)
    source = in_kernel_mode(watch_number(cell, body="push r, r8\nlog 1\nexit\n"))
    result = run.command(source, "/bin/sh", "-c", f"{program_32} put; {program_32} put; {program} put")
    assert result.counts[1].hits == 1
    warnings = re.findall(r"warning: the program cannot be inserted into process \d+\n(.*)\n", result.stderr)
    assert len(warnings) == 1
    assert warnings[0].endswith(":6:9: error: i386 has no register 'r8'")


def access(target: subprocess.Popen[str]) -> bool:
    assert target.stdin is not None
    target.stdin.write("x")
    target.stdin.flush()
    return await_line(target) == "done\n"


def test_a_running_process(build: Builder, run: Runner) -> None:
    program, cell = fixed(build)
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        client, output = run.start(in_kernel_mode(watch_number(cell)), ["-p", str(target.pid)])
        await_true(lambda: access(target) and output.exists() and output.read_text() != "", "a record")
        client.send_signal(signal.SIGINT)
        result = read_result(client, output)
    assert result.counts[1].hits == len(result.records) > 0


@pytest.mark.parametrize(
    ("definitions", "what"),
    [
        ("address = jiffies\nwatchpoint = w\nexit\n", "watchpoints or samplers in the kernel"),
        ("address = 0xffffffff81000000\nwatchpoint = w\nexit\n", "watchpoints or samplers in the kernel"),
        ("address = 0x404030\nexit\n", "probes in the kernel or a kernel module"),
        ("address = 0x404030\nwatchpoint = w\npush jiffies\nlog 1\nexit\n", "watchpoints or samplers in the kernel"),
        (
            "address = 0x404030\nwatchpoint = w\nexit\noffset = schedule\nminor = 1\nexit\n",
            "probes in the kernel or a kernel module",
        ),
    ],
)
def test_what_names_something_in_the_kernel_is_refused(run: Runner, definitions: str, what: str) -> None:
    result = run(in_kernel_mode(definitions), ["--", "/bin/true"])
    assert result.status == 2
    assert f"'modtype = kernel' needs {what}, which the ptrace engine lacks" in result.stderr


# Scope, and registers that others have


@pytest.mark.parametrize("way", ["fork", "vfork", "spawn", "exec"])
def test_no_follow_watches_only_the_process_itself(build: Builder, run: Runner, way: str) -> None:
    program = build("watched.c")
    source = "name = watched\naddress = cell:cell+7\nwatchpoint = w\nminor = 1\nexit\n"
    result = run(source, ["--no-follow", "--exit-status", "--", str(program), way, "4"])
    assert (result.status, result.counts[1].hits) == (0, 0)
    result = run(source, ["--no-follow", "--exit-status", "--", str(program), "threads", "5", "2"])
    assert (result.status, result.counts[1].hits) == (0, 10)


def break_with_perf(pid: int, address: int) -> int:
    """Let perf_event_open(2) count the writes to an address by a thread."""
    attributes = bytearray(ATTRIBUTE_SIZE)
    # type, size, config, period, sample type, read format, flags (disabled, exclude kernel and hypervisor), wakeup,
    # bp_type (HW_BREAKPOINT_W), bp_addr, bp_len
    flags = 1 | 1 << 5 | 1 << 6
    fields = (PERF_TYPE_BREAKPOINT, ATTRIBUTE_SIZE, 0, 0, 0, 0, flags, 0, 2, address, 4)
    struct.pack_into("=IIQQQQQIIQQ", attributes, 0, *fields)
    buffer = (ctypes.c_char * ATTRIBUTE_SIZE).from_buffer(attributes)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(SYS_PERF_EVENT_OPEN, buffer, pid, -1, -1, 0)
    if descriptor < 0:
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            pytest.skip(f"perf_event_open: {os.strerror(number)}")
        raise OSError(number, os.strerror(number))
    return descriptor


def test_registers_that_perf_has_taken(build: Builder, run: Runner) -> None:
    program, cell = fixed(build)
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        descriptors = [break_with_perf(target.pid, cell + 64 + 8 * slot) for slot in range(4)]
        try:
            source = "name = fixed\naddress = cell\nwatchpoint = rw\nminor = 1\nexit\n"
            client, output = run.start(source, ["-p", str(target.pid)])
            assert client.stderr is not None
            line = client.stderr.readline()
            client.terminate()
            read_result(client, output)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        assert line == (
            f"dprobes: warning: DEBUGREG_UNAVAIL in process {target.pid}: perf has the debug registers in use; "
            "not inserted there\n"
        )
        assert target.poll() is None


# Handing over


def test_a_watchpoint_may_end_with_a_core(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("watched.c")
    source = "name = watched\naddress = cell:cell+7\nwatchpoint = w\nminor = 1\npasscount = 4\nexit 3\n"
    result = run(source, ["--exit-status", "--", str(program), "threads", "10", "1"], ["--core-dir", str(tmp_path)])
    assert (result.status, result.stdout) == (0, "10 10\n")
    assert (result.counts[1].hits, result.counts[1].records) == (5, 1)
    (core,) = tmp_path.glob("core.dprobes.*")
    commands = ("-ex", "print cell", "-ex", "print (long)$pc - (long)&put")
    text = subprocess.run(
        ["gdb", "-nx", "-batch", *commands, str(program), str(core)], check=True, capture_output=True, text=True
    ).stdout
    # The fifth write has just happened, and the thread stands behind it.
    assert "$1 = 4\n" in text
    assert int(re.search(r"\$2 = (\d+)", text)[1]) > 0  # type: ignore[index]
