"""
``kill -9`` of the tracer: what the kernel lets the threads do that it leaves behind.

A thread that runs into a breakpoint at that very moment gets a SIGTRAP. But nobody computes anything wrong.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.procfs import SPARED, copy_score, set_score
from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_traced,
    await_true,
    processor_time,
    read_result,
    running,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

SITES = ("sum_double", "product_single", "root_double", "shuffled", "load_double", "sum_packed", "sum_x87")
HOT = "name = hotfloats\n" + "".join(
    f"offset = {site}\nminor = {minor}\npush 1\nlog 1\nexit\n" for minor, site in enumerate(SITES, 1)
)

# The handler of the first one takes some tenths of a second.
SLOW = HOT.replace("name = hotfloats\n", "name = hotfloats\njmpmax = 65535\n").replace(
    "minor = 1\npush 1\nlog 1\n", "minor = 1\npush 60000\nagain:\n" + "push 0\nadd\n" * 40 + "loop again\n"
)


def test_threads_whose_hits_wait_go_on_with_the_instruction_and_meet_no_breakpoint(build: Builder, run: Runner) -> None:
    program = build("hotfloats.c")
    with running(program, 6, "once", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as target:
        await_line(target)
        process, output = run.start(SLOW, ["-p", str(target.pid)])
        tracer = await_traced(target.pid)
        await_breakpoint(target.pid, program, "sum_double")
        assert target.stdin is not None
        target.stdin.write("x")
        target.stdin.flush()
        await_line(target)
        # The first hit is over. In the handler of the second one the tracer knows of all others.
        before = processor_time(tracer)
        await_true(lambda: processor_time(tracer) > before + 5, "the second handler")
        os.kill(tracer, signal.SIGKILL)
        result = read_result(process, output)
        assert result.status == 1
        assert "the tracer was killed by signal 9" in result.stderr
        stderr = target.communicate(timeout=TIMEOUT)[1]
        assert stderr == ""
        assert target.returncode == 0


def has_records(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 1000


def survive_kills(build: Builder, run: Runner, rounds: int, threads: int, pause: int, seed: int) -> dict[str, int]:
    """Kill tracers of hot targets; return how the targets ended, none of which computed anything wrong."""
    program = build("hotfloats.c")
    dice = random.Random(seed)
    ends = {"alive": 0, "SIGTRAP": 0}
    for _ in range(rounds):
        with running(program, threads, pause, stderr=subprocess.PIPE) as target:
            await_line(target)
            process, output = run.start(HOT, ["-p", str(target.pid)])
            tracer = await_traced(target.pid)
            await_true(functools.partial(has_records, output), "records")
            time.sleep(dice.uniform(0, 0.05))
            os.kill(tracer, signal.SIGKILL)
            assert read_result(process, output).status == 1
            target.send_signal(signal.SIGUSR2)
            assert target.communicate(timeout=TIMEOUT)[1] == ""
            assert target.returncode in (0, -signal.SIGTRAP)
            ends["SIGTRAP" if target.returncode else "alive"] += 1
    return ends


def test_hot_threads_compute_nothing_wrong_when_the_tracer_is_killed(build: Builder, run: Runner) -> None:
    survive_kills(build, run, 4, 5, 0, seed=1)


@pytest.mark.torture
@pytest.mark.parametrize("pause", [0, 30000])
@pytest.mark.parametrize("threads", [1, 5])
def test_hot_threads_survive_many_kills_of_the_tracer_or_end(
    build: Builder, run: Runner, threads: int, pause: int
) -> None:
    ends = survive_kills(build, run, 40, threads, pause, seed=threads + pause)
    print(f"{threads} threads, pause {pause}: {ends}")


def test_the_out_of_memory_killer_is_to_spare_the_tracer_where_that_is_allowed(build: Builder, run: Runner) -> None:
    with running("sleep", "600") as sleeper:
        mine = Path("/proc/self/oom_score_adj").read_text()
        try:
            set_score(sleeper.pid, SPARED)
            expected = f"{SPARED}\n"
        except PermissionError:
            expected = mine
        copy_score(os.getpid(), sleeper.pid)
        assert Path(f"/proc/{sleeper.pid}/oom_score_adj").read_text() == mine
    with running(build("hotfloats.c"), 1, "once", stdin=subprocess.PIPE) as target:
        await_line(target)
        process, output = run.start(HOT, ["-p", str(target.pid)])
        tracer = await_traced(target.pid)
        assert Path(f"/proc/{tracer}/oom_score_adj").read_text() == expected
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == mine
        run.end(process, output)
