"""Which processes are in scope: children with and without --follow, and dprobes itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT, await_line, await_traced, await_true, environment, is_traced, running

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

FAMILY = "name = family\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"
FIRST_OF_EACH_WAY = {"fork": [9], "vfork": [3], "spawn": [3], "system": [3], "clone-vm": [9]}


@pytest.mark.parametrize("way", FIRST_OF_EACH_WAY)
def test_no_follow_leaves_children_alone(build: Builder, run: Runner, way: str) -> None:
    depth = FIRST_OF_EACH_WAY[way][0]
    result = run(FAMILY, ["--no-follow", "--exit-status", "--", str(build("family.c")), way, str(depth)])
    assert result.status == 0, result.stderr
    assert [words[0] for words in result.words()] == FIRST_OF_EACH_WAY[way]
    assert result.counts[1].hits == 1


def test_no_follow_goes_along_with_an_exec_of_the_process_itself(build: Builder, run: Runner) -> None:
    result = run(FAMILY, ["--no-follow", "--exit-status", "--", str(build("family.c")), "exec", "3"])
    assert result.status == 0
    assert [words[0] for words in result.words()] == [3, 2, 1, 0]


def test_a_child_that_is_not_followed_is_free_while_its_parent_is_traced(build: Builder, run: Runner) -> None:
    client, output = run.start(FAMILY, ["--no-follow", "--", "bash", "-c", "sleep 100 & echo $!; wait"])
    child = int(await_line(client))
    await_true(lambda: not is_traced(child), "the end of tracing of the child")
    # Others may trace it.
    gdb = subprocess.run(
        ["gdb", "-p", str(child), "-batch", "-ex", "kill"], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert "Inferior 1" in gdb.stdout
    client.send_signal(signal.SIGTERM)
    client.wait(TIMEOUT)
    assert output.exists()


def test_another_dprobes_is_excluded_unless_allowed(build: Builder, run: Runner, tmp_path: Path) -> None:
    with running(build("torture.c"), 30, 1) as target:
        await_line(target)
        # The command line of a process that is forked and not executed is that of the server (``forked_starts``).
        first, _ = run.start("name = torture\noffset = main\nexit\n", ["-p", str(target.pid)], umask=0o022)
        tracer = await_traced(target.pid)
        source = tmp_path / "python.rpn"
        source.write_text('name = "libc.so.6"\noffset = read\nminor = 1\nexit\n')
        for process, name in ((first.pid, ""), (tracer, "dprobes-tracer")):
            done = subprocess.run(
                [*DPROBES, "run", "--engine", "ptrace", source, "-p", str(process)],
                capture_output=True, text=True, env=environment(), timeout=TIMEOUT, check=False,
            )  # fmt: skip
            assert done.returncode == 1
            assert f"error: EXCLUDED: process {process} ({name}" in done.stderr
            assert "hint: --allow-self lets one dprobes probe another one\n" in done.stderr
        # The client of the first run waits for records in read(2).
        second, output = run.start(source.read_text(), ["--allow-self", "-p", str(first.pid)])
        await_traced(first.pid)
        first.send_signal(signal.SIGINT)
        assert first.wait(TIMEOUT) in (0, 1)
        assert second.wait(TIMEOUT) == 0
        assert target.poll() is None
        assert len(output.read_text().splitlines()) > 0


def test_the_process_that_runs_dprobes_may_be_probed(run: Runner) -> None:
    # Only processes of dprobes are excluded, not those that happen to have it as a child or in an argument.
    with running(sys.executable, "-c", "input()", "dprobes", stdin=subprocess.PIPE) as target:
        client, output = run.start('name = "libc.so.6"\noffset = write\nexit\n', ["-p", str(target.pid)])
        await_traced(target.pid)
        run.end(client, output)
        assert target.poll() is None
