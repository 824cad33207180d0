"""
Several processes that run in the same memory (CLONE_VM): all are attached to, for breakpoints are in the way of all.

Only the one that is probed is hit.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux import ptrace_calls
from integration.support import TIMEOUT, await_line, await_true, code_is_original, is_traced, running

if TYPE_CHECKING:
    from integration.support import Builder, Runner

HUNDRED = "name = sharing\noffset = tick\nmaxhits = 100\npush pid\nlog 1\nexit\n"
WALL = 0x40000000  # __WALL
SHARED = "note: a probepoint used a breakpoint instead of a jump: several processes share the memory"


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_process_in_the_memory_of_the_probed_one_lives_and_is_not_hit(
    build: Builder, run: Runner, engine: str
) -> None:
    program = build("sharing.c")
    with running(program) as target:
        other = int(await_line(target))
        client, output = run.start(HUNDRED, ["-p", str(target.pid)], ["--engine", engine])
        await_true(lambda: output.exists() and output.read_text().count("\n") >= 100, "a hundred records")
        result = run.end(client, output)
        assert {word for (word,) in result.words()} == {target.pid}
        assert result.counts[0].hits == 100
        assert (SHARED in result.stderr) == (engine == "inline"), result.stderr
        assert not is_traced(other)
        assert code_is_original(other, program)
        target.send_signal(signal.SIGUSR1)
        assert target.wait(TIMEOUT) == 0


def test_without_that_process_there_is_no_probe(build: Builder, run: Runner) -> None:
    program = build("sharing.c")
    with running(program) as target:
        other = int(await_line(target))
        ptrace_calls.seize(other, follow=False)
        result = run(HUNDRED, ["-p", str(target.pid)])
        assert result.status == 1
        assert (
            f"error: process {target.pid} shares its memory with process {other}, which would hit its breakpoints: "
            f"process {other} (sharing) is traced by process"
        ) in result.stderr
        assert code_is_original(target.pid, program)
        ptrace_calls.interrupt(other)
        os.waitpid(other, WALL)
        ptrace_calls.detach(other)
        target.send_signal(signal.SIGUSR1)
        assert target.wait(TIMEOUT) == 0
