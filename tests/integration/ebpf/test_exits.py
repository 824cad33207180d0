"""``exit 1`` and ``exit 3`` in the kernel: a stopped process goes to a real debugger, or gets its core written."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import (
    TIMEOUT,
    await_line,
    await_true,
    children_of,
    code_is_original,
    is_traced,
    kernel_state,
    read_result,
    running,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

TURN = "name = handover\noffset = turn\nminor = 1\npush r, pc\nlog 1\nexit {}\n"
TICK = "offset = tick\nminor = 2\npush tid\nlog 1\nexit\n"
OPTIONS = ["--engine", "ebpf", "--allow-write"]
# turn() begins with 'mov $1234567, %eax', which takes five bytes.
LENGTH = 5


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_gdb_gets_the_process_right_behind_the_instruction(build: Builder, run: Runner, i386: bool) -> None:
    program = build("handover.c", i386=i386)
    debugger = (
        "gdb -p %p -nx -batch -ex 'set pagination off' -ex 'printf \"pc=%%#lx eax=%%d\\n\", (unsigned long)$pc, $eax' "
        "-ex 'x/5xb turn' -ex bt"
    )
    result = run(
        TURN.format(1) + TICK,
        ["--exit-status", "--", str(program), "3", "3000"],
        [*OPTIONS, "--debugger", debugger],
    )
    assert result.status == 0, result.stdout + result.stderr
    _, turn, *_ = next(line for line in result.stdout.splitlines() if line.count(" 0x") == 4).split()
    assert f"pc={int(turn, 16) + LENGTH:#x} eax=1234567" in result.stdout
    assert "<turn>:\t0xb8	0x87	0xd6	0x12	0x00" in result.stdout  # the breakpoint is gone
    assert re.search(r"#0 .* in turn \(\)\n#1 .* in outer .*\n(#[234] .*\n)+#5 .* in main ", result.stdout)
    assert "\n9000 0\n" in result.stdout  # no call was lost
    (record,) = [r for r in result.records if r["minor"] == 1]
    assert int(turn, 16) == record["ip"]
    assert result.counts[1].hits == result.counts[1].records == 1
    assert "after the probed instruction: starting gdb" in result.stderr


def test_without_a_debugger_the_process_is_left_stopped_and_the_run_ends(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    source = "name = torture\noffset = stepped\nminor = 1\nexit 1\n"
    with running(program, 600, 2) as target:
        await_line(target)
        # Its children call the function, too: one of them could be the process that stops.
        result = run(source, ["-p", str(target.pid), "--no-follow"], OPTIONS)
        assert result.status == 0, result.stderr
        where = re.escape(f"dprobes: warning: process {target.pid} (torture) is stopped at 0x")
        assert re.search(where + "[0-9a-f]+, after the probed instruction\n", result.stderr)
        await_true(lambda: kernel_state(target.pid) == "T", "the stop")
        await_true(lambda: code_is_original(target.pid, program), "the original code")
        target.send_signal(signal.SIGCONT)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
    assert result.counts[1].hits >= 1


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_gdb_reads_the_core_and_the_program_goes_on(build: Builder, run: Runner, tmp_path: Path, i386: bool) -> None:
    program = build("handover.c", i386=i386)
    result = run(TURN.format(3) + TICK, ["--exit-status", "--", str(program), "3", "4000"], OPTIONS, cwd=tmp_path)
    assert result.status == 0, result.stdout + result.stderr
    printed, sums = result.stdout.splitlines()
    assert sums == "12000 0"
    pid, turn, text, answer, _ = printed.split()
    core = tmp_path / f"core.dprobes.{pid}"
    size = core.stat().st_size
    assert f"note: the core of process {pid} (handover) is in './core.dprobes.{pid}' ({size} bytes)" in result.stderr
    assert core.stat().st_mode & 0o777 == 0o600
    commands = ("print/x $pc", "x/5xb turn", "x/4xb tick", "bt", f"x/s {text}", f"print *(unsigned long *){answer}")
    shown = gdb(program, core, *commands)
    assert f"$1 = {int(turn, 16) + LENGTH:#x}\n" in shown
    assert "<turn>:\t0xb8	0x87	0xd6	0x12	0x00" in shown
    # The breakpoint at tick() was there, and does not show.
    assert gdb(program, None, "x/4xb tick").split(":")[1].strip() == re.findall(r"<tick.*>:\t(.*)", shown)[0]
    assert "in turn ()" in shown
    assert "$2 = 42" in shown


def gdb(program: Path, core: Path | None, *commands: str) -> str:
    arguments = [part for command in commands for part in ("-ex", command)]
    files = [str(program)] if core is None else [str(program), str(core)]
    return subprocess.run(
        ["gdb", "-nx", "-batch", "-ex", "set pagination off", *arguments, *files],
        check=True, capture_output=True, text=True, timeout=TIMEOUT,
    ).stdout  # fmt: skip


def test_a_core_that_cannot_be_written_is_said_and_the_program_goes_on(build: Builder, run: Runner) -> None:
    program = build("handover.c")
    target = ["--exit-status", "--", str(program), "1", "100"]
    result = run(TURN.format(3), target, [*OPTIONS, "--core-dir", "/proc"])
    assert result.status == 0, result.stderr
    assert re.search(
        r"warning: no core of process \d+ \(handover\) in '/proc/core.dprobes.\d+': no such file or directory; "
        "the process continues\n",
        result.stderr,
    )


def test_several_threads_that_want_a_debugger_are_let_go(build: Builder, run: Runner) -> None:
    """The second one comes before the first one's wish was seen; each has sent a SIGSTOP to the process."""
    program = build("torture.c")
    source = "name = torture\noffset = stepped\nminor = 1\nexit 1\n"
    with running(program, 600, 8) as target:
        await_line(target)
        client, output = run.start(source, ["-p", str(target.pid), "--no-follow"], [*OPTIONS, "--debugger", "true %p"])
        result = read_result(client, output)
        assert result.status == 0, result.stderr
        await_true(lambda: kernel_state(target.pid) != "T", "the process going on")
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def is_writer(pid: int) -> bool:
    """Return whether a process is one that writes a core: nobody else lets the stopped process go on."""
    try:
        return b"core_dumper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_process_goes_on_even_if_dprobes_is_killed_meanwhile(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("torture.c")
    source = "name = torture\noffset = stepped\nminor = 1\nexit 3\n"
    with running(program, 600, 2) as target:
        await_line(target)
        options = [*OPTIONS, "--core-dir", str(tmp_path)]
        client, _ = run.start(source, ["-p", str(target.pid), "--no-follow"], options)
        await_true(lambda: any(map(is_writer, children_of(client.pid))), "the writer")
        (writer,) = filter(is_writer, children_of(client.pid))
        client.kill()
        await_true(lambda: kernel_state(target.pid) != "T" and not is_traced(target.pid), "the process going on")
        await_true(lambda: code_is_original(target.pid, program), "the original code")
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
    await_true(lambda: not is_writer(writer), "the end of the writer")
    # The writer has got to know what to write, or it has not, and then there is no file.
    assert all(core.stat().st_size > 0 for core in tmp_path.glob("core.*"))
