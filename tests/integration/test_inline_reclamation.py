"""
Memory of programs that have ended is given back while others go on: a process has no more of it than before they came.

``kill -9`` of the tool at any moment meanwhile changes nothing of that.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Scope
from dprobes.engines.inline.inline_engine import InlineEngine
from integration.ebpf.insessions import compiled, on_demand
from integration.several import Group, assert_complete, grouped
from integration.support import TIMEOUT, await_line, await_traced, await_true, environment
from integration.test_inline_kills import WAYS, await_clean
from integration.test_inline_several import EMULATED, STEPPED, await_jump
from support.attachments import job_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.several import Program
    from integration.support import Builder

ROUNDS = (20, pytest.param(200, marks=pytest.mark.torture))
RECORDS = 64
"""The kB that records and counts of the program that stays may take: those of a program take more than half of it."""
CHURN = "import sys; from integration.test_inline_reclamation import churn; churn(sys.argv[1], int(sys.argv[2]))"
QUIET = "logonfault = yes\noffset = {0}\nminor = 1\nabort\n"


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


@pytest.fixture
def group() -> Iterator[Group]:
    with grouped(engine=InlineEngine) as made:
        yield made


def mapped(pid: int) -> Counter[str]:
    """Return how many bytes are mapped in a process, by how and what of: neighbours may be shown as one mapping."""
    found = Counter[str]()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        found[f"{line.split()[1]} {line[73:]}"] += end - start
    return found


def resident(pid: int) -> int:
    """Return how many kB of a process's memory are there."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1])


def insert(group: Group, path: Path, text: str, pid: int, former: Program | None = None) -> Program:
    """Insert a program, in the place of another one that ends then if there is one."""
    job = job_of(compiled(f'name = "{path}"\n{text}'), Scope(pid=pid))
    if former is None:
        program = group.enter(job)
    else:
        program = group.enter(job._replace(replaces=former.session))
        finish(group, former)
    program.await_active()
    return program


def finish(group: Group, program: Program) -> None:
    group.programs.remove(program)
    program.end()


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("how", ["inserted", "replaced"])
def test_programs_that_come_and_go_beside_another_leave_nothing(
    path: Path, group: Group, how: str, rounds: int
) -> None:
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first = insert(group, path, STEPPED, pid)
        await_jump(pid, path, "stepped")
        second = None
        before, kilobytes, hits = Counter[str](), 0, 0
        for number in range(rounds):
            former, second = second, insert(group, path, EMULATED, pid, second if how == "replaced" else None)
            await_jump(pid, path, "stepped", "emulated")
            if number == 1:  # the second one may find that the process has something for good since the first one
                before = mapped(pid)
                kilobytes = resident(pid)
            target.say("call 1")
            if how == "inserted":
                finish(group, second)
                hits += sum(second.hits)
                assert_complete(second)
            elif former is not None:
                hits += sum(former.hits)
                assert_complete(former)
        if how == "replaced":
            assert second is not None
            await_true(lambda: mapped(pid) == before, "the end of the mappings of all but the last one", TIMEOUT)
            finish(group, second)
            hits += sum(second.hits)
        assert hits == rounds
        await_true(lambda: mapped(pid).total() < before.total(), "the end of the mappings of all", TIMEOUT)
        assert resident(pid) <= kilobytes + RECORDS
        finish(group, first)
        assert first.hits == [rounds]
        assert target.end() == 0


def churn(path: str, pid: int) -> None:
    """Insert and replace programs in a process beside one that stays, as long as that does, and say so."""
    with grouped(engine=InlineEngine) as group:
        first = insert(group, Path(path), QUIET.format("stepped"), pid)
        while first.finished is None and not first.failures:
            program = insert(group, Path(path), QUIET.format("emulated"), pid)
            print("inserted", flush=True)
            program = insert(group, Path(path), QUIET.format("both"), pid, program)
            print("replaced", flush=True)
            finish(group, program)


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.torture)])
def test_a_tool_that_is_killed_meanwhile_leaves_nothing(path: Path, kills: int) -> None:
    dice, ends = random.Random(kills), Counter[tuple[str, int]]()
    command = [sys.executable, "-c", CHURN, str(path)]
    for _ in range(kills):
        with on_demand(path, 2) as target:
            pid = target.process.pid
            target.say("start")
            with subprocess.Popen(
                [*command, str(pid)], stdout=subprocess.PIPE, text=True, env=environment_of_tests()
            ) as tool:
                assert await_line(tool, TIMEOUT) == "inserted\n"
                tracer = await_traced(pid)
                time.sleep(dice.uniform(0, 0.7))
                ways = dice.choice(WAYS)
                for who in ways:
                    os.kill(tool.pid if who == "client" else tracer, signal.SIGKILL)
                # A client that is left may find that its tracer is gone while it inserts something.
                tool.communicate(timeout=TIMEOUT)
            try:
                await_clean(pid, path)
                target.say("stop")
                target.end()
            except (AssertionError, OSError):
                if target.process.poll() is None:
                    raise
            ends["+".join(ways), target.process.returncode] += 1
            # Without a tracer, who runs into a breakpoint before that is taken out comes to an end.
            assert target.process.returncode in ((0, -signal.SIGTRAP) if "tracer" in ways else (0,)), ends
    print(ends)


def environment_of_tests() -> dict[str, str]:
    """Return an environment in which a process of Python finds the tests."""
    here = str(Path(__file__).resolve().parents[1])
    given = environment()
    return {**given, "PYTHONPATH": os.pathsep.join(filter(None, (here, given.get("PYTHONPATH", ""))))}
