"""The ends of several programs in one tracer: by ``exit``, and when the client or the tracer is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Counts, Finished, Notice
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import on_demand
from integration.several import BOTH, Group, grouped
from integration.support import (
    TIMEOUT,
    await_line,
    await_true,
    code_is_original,
    is_traced,
    kernel_state,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Builder


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


@pytest.fixture
def group() -> Iterator[Group]:
    with grouped() as made:
        yield made


@pytest.fixture
def writing() -> Iterator[Group]:
    with grouped(allow_write=True) as made:
        yield made


# Handing over


def test_exit_3_of_one_program_is_one_hit_of_the_other(path: Path, tmp_path: Path) -> None:
    with on_demand(path) as target, grouped(allow_write=True, core_directory=str(tmp_path)) as group:
        pid = target.process.pid
        before = group.insert(path, BOTH, pid)
        dumping = group.insert(path, "offset = stepped\nminor = 9\nexit 3\noffset = emulated\nminor = 9\nexit 3\n", pid)
        after = group.insert(path, BOTH, pid)
        target.say("call 5")
        await_true(lambda: before.hits == after.hits == [5, 5], "the hits of the others")
        assert dumping.hits == [1, 1]
        dumping.await_state(ProbeState.REMOVED, 0, 1)
        for each in (before, after):
            assert each.session.local_variables() == [10]
            assert [event for event in each.events if isinstance(event, Notice)] == []
        await_true(lambda: sum(isinstance(event, Notice) for event in dumping.events) == 2, "the word of the cores")
        assert sorted(core.name for core in tmp_path.iterdir()) == [f"core.dprobes.{pid}", f"core.dprobes.{pid}.1"]
        assert target.end() == 0


def test_exit_1_takes_the_probes_of_all_programs_away_from_the_process(path: Path, writing: Group) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        first = writing.insert(path, BOTH, pid)
        handing = writing.insert(path, "offset = emulated\nexit 1\n", pid)
        assert target.process.stdin is not None
        target.process.stdin.write("call 2\n")
        target.process.stdin.flush()
        await_true(lambda: kernel_state(pid) == "T", "the process being stopped")
        await_true(lambda: any(isinstance(event, Notice) for event in handing.events), "the word of it")
        (notice,) = (event.message for event in handing.events if isinstance(event, Notice))
        assert re.fullmatch(
            rf"process {pid} \(ondemand\) is stopped at 0x[0-9a-f]+, before the probed instruction", notice
        )
        assert [event for event in first.events if isinstance(event, Notice)] == []
        await_true(lambda: first.finished is not None and handing.finished is not None, "the end of both")
        assert (first.hits, handing.hits) == ([1, 1], [1])
        assert code_is_original(pid, path)
        os.kill(pid, signal.SIGCONT)
        assert await_line(target.process, TIMEOUT) == "2\n"
        assert target.end() == 0


def test_two_exits_at_once_the_first_one_decides(path: Path, tmp_path: Path) -> None:
    with on_demand(path) as target, grouped(allow_write=True, core_directory=str(tmp_path)) as group:
        pid = target.process.pid
        dumping = group.insert(path, "offset = stepped\nexit 3\n", pid)
        handing = group.insert(path, "offset = stepped\nexit 1\n", pid)
        target.say("call 3")
        await_true(lambda: len(list(tmp_path.iterdir())) == 1, "the core")
        assert (dumping.hits, handing.hits) == ([1], [1])
        await_true(lambda: any(isinstance(event, Notice) for event in handing.events), "the word of the other exit")
        assert [event.message for event in handing.events if isinstance(event, Notice)] == [
            f"'exit 1' was not carried out in process {pid}: another handler ended with 'exit 3' at the same moment"
        ]
        assert target.end() == 0


# The worst


TWO = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from dprobes.engines.engine_interface import Scope
from integration.ebpf.insessions import job_for
from integration.several import Group

path, pid = Path(sys.argv[2]), int(sys.argv[3])
group = Group()
group.insert(path, "offset = stepped\\nexit\\noffset = emulated\\nexit\\n", pid)
while True:
    other = group.insert(path, "offset = emulated\\nexit\\noffset = both\\nexit\\n", pid)
    print("there", flush=True)
    other.end()
    group.programs.remove(other)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_client_with_two_programs_that_is_killed_leaves_nothing_behind(path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with on_demand(path, 3) as target:
        target.say("start")
        pid = target.process.pid
        with running(sys.executable, "-c", TWO, Path(__file__).parents[1], path, pid) as client:
            for _ in range(dice.randrange(1, 6)):
                assert await_line(client, TIMEOUT) == "there\n"
            time.sleep(dice.random() / 50)
            client.kill()
        await_true(lambda: not is_traced(pid), "the end of the tracer")
        assert code_is_original(pid, path)
        assert target.say("stop") > 0
        assert target.end() == 0


def test_a_tracer_with_two_programs_that_is_killed_leaves_nothing_behind(path: Path) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        group = Group()
        programs = [group.insert(path, text, pid) for text in (BOTH, "offset = emulated\nexit\noffset = both\nexit\n")]
        target.say("call 4")
        await_true(lambda: [len(each.records) for each in programs] == [8, 8], "the records")
        os.kill(tracer_of(pid), signal.SIGKILL)
        for program in programs:
            program.thread.join(TIMEOUT)
            counts = Counts(hits=4, records=4)
            assert program.finished == Finished((counts, counts), cut_short=True)
            # Those of three functions, and one of the engine's own in the dynamic linker.
            assert [event.message for event in program.events if isinstance(event, Notice)] == [
                "the tracer was killed by signal 9; 4 breakpoints (the engine's own included) were removed from outside"
            ]
        assert code_is_original(pid, path)
        target.say("call 4")
        again = group.insert(path, BOTH, pid)
        target.say("call 1")
        await_true(lambda: again.hits == [1, 1], "the hits of a program that came later")
        group.close()
        assert target.end() == 0
