"""
Programs that may make few system calls: no handler is put into them, their hits are those of breakpoints, none dies.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT, await_line, await_message, code_is_original, running

if TYPE_CHECKING:
    from integration.support import Builder, Runner

COUNT = "name = filtered\noffset = stepped\nminor = 1\nabort\n"
REASON = "a probepoint used a breakpoint instead of a jump: system calls cannot be made in the process"


@pytest.mark.parametrize("how", ["kill", "error", "strict"])
def test_a_program_under_seccomp_is_probed_by_breakpoints_and_told_why(build: Builder, run: Runner, how: str) -> None:
    program = build("filtered.c")
    with running(program, how, stdin=subprocess.PIPE) as target:
        assert target.stdin is not None
        assert await_line(target) == "ready\n"
        client, output = run.start(COUNT, ["-p", str(target.pid)], ["--engine", "inline"])
        await_message(client, "1 probepoint is active")
        target.stdin.write("x")
        target.stdin.flush()
        assert await_line(target) == "done\n"
        result = run.end(client, output)
        assert result.counts[1].hits == 1000
        assert "inline" not in result.counts[1].executed
        assert REASON in result.stderr
        assert code_is_original(target.pid, program)
        target.stdin.write("x")
        target.stdin.flush()
        assert await_line(target) == "done\n"
        target.stdin.close()
        assert target.wait(TIMEOUT) == 0
