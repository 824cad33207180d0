"""Whose hits count: processes of a cgroup, numbers of a PID namespace, and files that only a container has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import is_attached
from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_message,
    await_true,
    code_is_original,
    read_result,
    running,
    status_field,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

LATECOMER = f"latecomer{os.getpid()}"
"""The name of a program's files, which other test runs on this machine do not have."""
HOT = ("--engine", "ebpf", "--overhead", "off")
"""Options for probepoints that are hit millions of times a second: else they would be disabled after some seconds."""
TICK = 'name = "{}"\noffset = tick\nminor = 1\npush pid\npush tid\nlog 2\nexit\n'


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def await_attached(client: subprocess.Popen[str]) -> None:
    def attached() -> bool:
        assert client.poll() is None, client.communicate()
        return is_attached(client.pid)

    await_true(attached, "the run")


def await_progress(pid: int) -> None:
    """Wait until a process has run for some milliseconds, which takes its time on a busy machine."""

    def run_time() -> int:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])

    until = run_time() + 20_000_000
    await_true(lambda: run_time() > until, f"progress of process {pid}")


def run_in(cgroup: Path | None, *command: object) -> None:
    """Run a command in a cgroup."""
    enter = f"echo $$ > {cgroup}/cgroup.procs; " if cgroup is not None else ""
    script = enter + 'exec "$@"'
    subprocess.run(
        ["sh", "-c", script, "sh", *map(str, command)], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT
    )


def test_only_processes_of_the_cgroup_and_those_below_are_hit(build: Builder, run: Runner, cgroup: Path) -> None:
    program = build("hotloop.c")
    client, output = run.start(TICK.format(program), [], ["--engine", "ebpf", "--cgroup", str(cgroup)])
    await_attached(client)
    run_in(None, program, 10)
    run_in(cgroup, program, 20)
    run_in(cgroup / "below", program, 40)
    result = run.end(client, output)
    assert result.counts[1].hits == len(result.records) == 60
    below, below_output = run.start(TICK.format(program), [], ["--engine", "ebpf", "--cgroup", str(cgroup / "below")])
    await_attached(below)
    run_in(cgroup, program, 20)
    run_in(cgroup / "below", program, 40)
    assert run.end(below, below_output).counts[1].hits == 40


def test_numbers_are_those_of_the_processes_own_namespace(build: Builder, run: Runner) -> None:
    """The first process of a new PID namespace is number 1 there."""
    program = build("hotloop.c")
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made")
    script = f"echo ready; read line; exec {program} 5"
    with running(*unshare, "sh", "-c", script, stdin=subprocess.PIPE) as shell:
        await_line(shell)
        (pid,) = (int(n) for n in Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split())
        assert status_field(pid, "NSpid").split()[-1] == "1"
        options = ["--engine", "ebpf", "--pid-namespace"]
        client, output = run.start(TICK.format(program), ["-p", str(pid)], options)
        await_attached(client)
        assert shell.stdin is not None
        shell.stdin.write("go\n")
        shell.stdin.close()
        shell.wait(TIMEOUT)
        client.wait(TIMEOUT)
        result = run.end(client, output)
    assert result.words() == [[1, 1]] * 5
    assert {(r["pid"], r["tid"]) for r in result.records} == {(1, 1)}


def test_a_program_that_only_a_container_has_is_probed_there(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("torture.c", "-static")
    place = tmp_path / "place"
    place.mkdir()
    inside = place / "containerized"
    script = f"mount -t tmpfs none {place} && cp {program} {inside} && exec {inside} 600 1"
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made")
    with running("unshare", "--mount", "sh", "-c", script) as target:
        await_line(target)
        assert not inside.exists()
        source = "name = containerized\noffset = emulated\nminor = 1\npasscount = 1000000000\nexit\n"
        client, output = run.start(source, [], HOT)
        await_attached(client)
        await_progress(target.pid)
        result = run.end(client, output)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
    assert result.counts[1].passed > 0


def test_a_file_that_comes_later_is_probed_as_well(build: Builder, run: Runner, tmp_path: Path) -> None:
    """As that of a container which starts when the run has begun: another file of the same name."""
    first = build("torture.c", name=LATECOMER)
    second = tmp_path / LATECOMER
    source = f"name = {LATECOMER}\noffset = emulated\nminor = 1\npasscount = 1000000000\nexit\n"
    with running(first, 600, 1) as early:
        await_line(early)
        client, output = run.start(source, [], HOT)
        await_message(client, "1 probepoint is active")
        await_breakpoint(early.pid, first, "emulated")
        shutil.copy(first, second)
        with running(second, 600, 1) as late:
            await_line(late)
            await_breakpoint(late.pid, second, "emulated")
            await_progress(early.pid)
            await_progress(late.pid)
            result = run.end(client, output)
            await_true(lambda: code_is_original(late.pid, second), "the original code")
    assert f"dprobes: note: {second} appeared after the run began: it is probed from now on\n" in result.stderr
    passed = re.findall(r"^0,1 +emulated in (\S+) +\d+ +0 +0 +(\d+) ", result.stderr, re.MULTILINE)
    assert [path for path, _ in passed] == [str(first), str(second)]
    assert all(int(count) > 0 for _, count in passed)


def test_a_program_that_a_tree_executes_later_is_probed_in_each_place(
    build: Builder, run: Runner, tmp_path: Path
) -> None:
    first = build("torture.c", name=LATECOMER)
    second = tmp_path / LATECOMER
    shutil.copy(first, second)
    source = f"name = {LATECOMER}\noffset = emulated\nminor = 1\nmaxhits = 1\npush 1\nlog 1\nexit\n"
    script = f"{second} 600 1 & read line; kill -USR2 $!; wait $!"
    with running("sh", "-c", script, stdin=subprocess.PIPE) as shell, running(first, 600, 1) as other:
        await_line(shell)
        await_line(other)
        client, output = run.start(source, ["-p", str(shell.pid)], ["--engine", "ebpf"])
        await_true(lambda: output.exists() and bool(output.read_text()), "a record")
        assert shell.stdin is not None
        shell.stdin.write("end\n")
        shell.stdin.close()
        shell.wait(TIMEOUT)
        result = read_result(client, output)
    assert len(result.records) == 1
