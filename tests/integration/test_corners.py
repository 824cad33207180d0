"""Rare situations: leaders that end, programs killed while they fork, mappings in pieces, faults that others answer."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    PATIENCE,
    TIMEOUT,
    await_line,
    await_traced,
    await_true,
    code_is_original,
    read_result,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

CORNERS = (
    "name = corners\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"
    "offset = load\nminor = 2\npush 2\nlog 1\nexit\n"
)


@pytest.mark.parametrize(
    "case",
    ["leader-ends", "many", "cut-mapping", "trap-ignored", "trap-blocked", "not-dumpable", "deep"],
)
def test_every_call_is_counted(build: Builder, run: Runner, case: str) -> None:
    result = run.command(CORNERS, build("corners.c"), case)
    assert result.counts[1].hits == len(result.records) == int(result.stdout)
    assert result.counts[1].hits > 0


def test_a_program_executed_among_hits_of_other_threads_is_probed(build: Builder, run: Runner) -> None:
    result = run.command(CORNERS, build("corners.c"), "exec-among-hits")
    assert [words[0] for words in result.words() if words[0] > 1].count(299) == 3
    assert len({r["pid"] for r in result.records}) == 1


def test_processes_killed_while_they_fork_leave_no_child_stuck(build: Builder, run: Runner) -> None:
    result = run.command(CORNERS, build("corners.c"), "killed-while-forking")
    assert [words[0] for words in result.words()].count(299) == 1


def test_a_fault_that_another_thread_answers_holds_up_nobody(build: Builder, run: Runner) -> None:
    result = run(CORNERS, ["--exit-status", "--", str(build("corners.c")), "userfault"])
    if result.status == 77:
        pytest.skip("userfaultfd is not allowed here")
    assert result.status == 0, result.stderr
    assert result.counts[2].hits == 1


@pytest.mark.parametrize("case", ["userfault-hit", "userfault-child"])
def test_a_step_in_which_a_thread_sleeps_ends_whatever_comes_between(build: Builder, run: Runner, case: str) -> None:
    # Limits, so that it is a step. The last hit of "tick" stops the thread, that of a child is one of other memory.
    name = "load" if case == "userfault-hit" else "through"
    text = f"name = corners\noffset = tick\nmaxhits = 2\nexit\noffset = {name}\nminor = 2\nmaxhits = 9\nexit\n"
    result = run(text, ["--exit-status", "--", str(build("corners.c")), case])
    if result.status == 77:
        pytest.skip("userfaultfd is not allowed here")
    assert result.status == 0, result.stderr
    assert result.counts[2].hits == 1


def test_a_busy_process_does_not_hold_up_a_calm_one(build: Builder, run: Runner) -> None:
    result = run.command(CORNERS, build("corners.c"), "busy-and-calm")
    by_process = [r["pid"] for r in result.records if bytes.fromhex(r["data"])[0] != 1]
    assert len(by_process) > 290


def test_a_mapping_that_cannot_be_written_is_reported(build: Builder, run: Runner) -> None:
    result = run.command(CORNERS, build("corners.c"), "shared-mapping")
    assert result.counts[1].hits == 300
    assert "CONFLICT" in result.stderr
    assert "cannot be written (input/output error)" in result.stderr


def test_a_process_whose_leader_has_ended_can_be_attached_to(build: Builder, run: Runner) -> None:
    program = build("leaderless.c")
    source = "name = leaderless\noffset = tick\nminor = 1\npush 1\nlog 1\nexit\n"
    with running(program, 3) as target:
        await_line(target)
        process, output = run.start(source, ["-p", str(target.pid)])
        await_true(lambda: output.exists() and output.stat().st_size > 2000, "records")
        process.send_signal(signal.SIGINT)
        result = read_result(process, output)
        assert result.status == 0, result.stderr
        assert target.wait(TIMEOUT) == 0
    assert result.counts[1].hits == len(result.records)


def test_a_process_in_vfork_can_be_attached_to_and_its_child_is_probed(build: Builder, run: Runner) -> None:
    program = build("leaderless.c")
    source = "name = leaderless\noffset = tick\nminor = 1\npush pid\nlog 1\nexit\n"
    with running(program, 6 * PATIENCE, "vfork") as target:
        child = int(await_line(target))
        process, output = run.start(source, ["-p", str(target.pid)])
        await_traced(child)
        await_true(lambda: output.exists() and output.stat().st_size > 2000, "records")
        assert target.wait(TIMEOUT) == 0
        result = read_result(process, output)
    assert result.status == 0, result.stderr
    assert {words[0] for words in result.words()} == {child, target.pid}


def has_records(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def kill_the_tracer(build: Builder, run: Runner, rounds: int) -> None:
    # A thread at a breakpoint when the tracer dies gets its SIGTRAP; so it dies between two hits, 200 ms apart.
    program = build("leaderless.c")
    source = "name = leaderless\noffset = tick\nminor = 1\npush 1\nlog 1\nexit\n"
    with running(program, rounds * 10, "slow") as target:
        await_line(target)
        for number in range(rounds):
            process, output = run.start(source, ["-p", str(target.pid)])
            tracer = await_traced(target.pid)
            await_true(functools.partial(has_records, output), "the record of a hit")
            time.sleep(0.02 * (number % 5))
            with contextlib.suppress(ProcessLookupError):
                os.kill(tracer, signal.SIGKILL)
            result = read_result(process, output, TIMEOUT)
            assert "Traceback" not in result.stderr
            assert not tracer_of(target.pid)
            assert code_is_original(target.pid, program)
        assert target.poll() is None


def test_a_calm_target_survives_the_death_of_the_tracer(build: Builder, run: Runner) -> None:
    kill_the_tracer(build, run, 5)


@pytest.mark.torture
def test_a_calm_target_survives_many_deaths_of_the_tracer(build: Builder, run: Runner) -> None:
    kill_the_tracer(build, run, 60)
