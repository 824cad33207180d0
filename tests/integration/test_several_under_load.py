"""Several programs in one tracer while threads run hot: each hit counts once in each, whatever comes and goes."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Counts, Finished, RecordBatch, Scope, StateEvent
from dprobes.engines.ptrace.client import program_run
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import compiled, job_for, on_demand
from integration.several import BOTH, Group, Program, assert_complete, await_hits, before_exec, go, grouped
from integration.support import (
    TIMEOUT,
    await_true,
    code_is_original,
)
from integration.test_returns import FUNCTIONS, KINDS, own_counts, program_of
from integration.test_stress import LIBRARY, Stress, report_of, source
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder

INSERTIONS = int(os.environ.get("DPROBES_TORTURE_INSERTIONS", "1000"))


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


# Under load


@pytest.mark.parametrize("count", [40, pytest.param(INSERTIONS, marks=pytest.mark.torture)], ids=["some", "many"])
def test_programs_that_come_and_go_cost_the_first_one_no_hit(path: Path, group: Group, count: int) -> None:
    dice = random.Random(count)
    second = (
        "vars = 1\noffset = stepped\ninc lv, 0\nexit\noffset = both\nexit\n",
        "offset = emulated\npasscount = 5\nmaxhits = 20\nexit\n",
        "offset = stepped\nreturn = yes\nexit\noffset = stepped\nmaxhits = 3\nexit\n",
    )
    with on_demand(path, 4) as target:
        pid = target.process.pid
        first = group.insert(path, BOTH, pid)
        target.say("start")
        for number in range(count):
            other = group.insert(path, second[number % 3], pid)
            await_hits(first, sum(first.hits) + dice.randrange(60))
            other.end()
            assert_complete(other)
            group.programs.remove(other)
        calls = target.say("stop")
        first.end()
        assert first.hits == [calls, calls]
        assert_complete(first)
        # A handler ran once for each hit, whatever was done to the others.
        assert first.session.local_variables() == [2 * calls]
        assert code_is_original(pid, path)
        assert target.end() == 0


def test_two_programs_count_every_hit_of_hot_threads(path: Path, group: Group) -> None:
    with on_demand(path, 4) as target:
        pid = target.process.pid
        programs = [group.insert(path, BOTH, pid), group.insert(path, BOTH, pid)]
        target.say("start")
        await_hits(programs[1], 2000)
        calls = target.say("stop")
        target.say("call 10")
        group.end()
        for program in programs:
            assert program.hits == [calls + 10, calls + 10]
            assert_complete(program)
            assert program.session.local_variables() == [2 * (calls + 10)]
        assert target.end() == 0


@pytest.mark.parametrize("order", [0, 1], ids=["the first", "the second"])
def test_one_of_two_programs_is_replaced_under_load(path: Path, group: Group, order: int) -> None:
    dice = random.Random(order)
    with on_demand(path, 4) as target:
        pid = target.process.pid
        scope = Scope(pid=pid)
        programs = [group.insert(path, BOTH, pid), group.insert(path, BOTH, pid)]
        kept = programs[1 - order]
        chain = [programs[order]]
        target.say("start")
        for _ in range(30):
            await_hits(kept, sum(kept.hits) + dice.randrange(60))
            last = chain[-1]
            chain.append(group.enter(job_for(path, BOTH, scope, replaces=last.session)))
            last.thread.join(TIMEOUT)
            assert last.finished is not None
        calls = target.say("stop")
        group.end()
        assert kept.hits == [calls, calls]
        assert kept.session.local_variables() == [2 * calls]
        assert [sum(each.hits[n] for each in chain) for n in range(2)] == [calls, calls]
        for each in (kept, *chain):
            assert_complete(each)
        assert code_is_original(pid, path)
        assert target.end() == 0


@pytest.mark.parametrize("kind", ["O1", "O2"])
def test_returns_and_tail_calls_are_hits_of_both_in_the_order_of_insertion(
    build: Builder, group: Group, kind: str
) -> None:
    path = build("returns.c", *KINDS[kind])
    numbered = program_of(path.name, FUNCTIONS).replace("push r, retval", "push gv, 0\ninc gv, 0\npush r, retval")
    text = numbered.replace("log 1", "log 2").replace("\n", "\ngvars = 1\n", 1)
    with before_exec(path, "4", "200") as target, GlobalVariables(1) as variables:
        job = job_of(compiled(text), Scope(pid=target.pid), globals=variables)
        programs = [group.enter(job), group.enter(job)]
        for program in programs:
            program.await_begun()
        go(target)
        assert target.stdout is not None
        output = target.stdout.read()
        assert target.wait(TIMEOUT) == 0
    group.end()
    expected = {name: count for name, (count, _) in own_counts(output).items()}
    expected["structure_tail"] = expected.pop("structure")
    for program in programs:
        assert {p.where: n for p, n in zip(program.session.probes, program.hits, strict=True)} == expected
        assert_complete(program)
    # The numbers that handlers took, and what the function returned.
    first, second = (program.words() for program in programs)
    assert [number + 1 for _, number in first] == [number for _, number in second]
    assert [value for value, _ in first] == [value for value, _ in second]


def test_only_what_completes_is_logged_for_each_as_it_wants(build: Builder, group: Group) -> None:
    path = build("faults.c")
    text = "vars = 1\noffset = at_protected\n{}inc lv, 0\npush lv, 0\nlog 1\nexit\n"
    with before_exec(path, "protected", "20") as target:
        scope = Scope(pid=target.pid)
        patient, eager, limited = (
            group.enter(job_of(compiled(f'name = "{path}"\n{text.format(extra)}'), scope))
            for extra in ("", "logonfault = yes\n", "maxhits = 7\n")
        )
        limited.await_begun()
        go(target)
        assert target.stdout is not None
        faults = int(target.stdout.read())
        assert target.wait(TIMEOUT) == 0
    group.end()
    assert (patient.hits, eager.hits, limited.hits) == ([20], [20 + faults], [7])
    for each in (patient, eager, limited):
        assert_complete(each)
    assert patient.words()[-1] == eager.words()[-1] == (20 + faults,)


# Watchpoints


def watch(place: str, access: str = "w") -> str:
    return f"address = {place}\nwatchpoint = {access}\nexit\n"


@pytest.mark.usefixtures("debug_registers")
def test_watchpoints_share_the_debug_registers(build: Builder, group: Group) -> None:
    path = build("watched.c")
    header = f'name = "{path}"\n'
    with before_exec(path, "threads", "50", "3") as target:
        scope = Scope(pid=target.pid)
        first = group.enter(job_of(compiled(header + watch("cell:cell+7") + watch("cell:cell+7", "rw")), scope))
        places = ("cell:cell+7", "bytes", "bytes+1", "bytes+2")
        second = group.enter(job_of(compiled(header + "".join(watch(place, "rw") for place in places)), scope))
        second.await_begun()
        go(target)
        assert target.wait(TIMEOUT) == 0
    group.end()
    # Three of the second program find a register, by the order of its definitions: the writes that the first watches
    # need none, because pages can be protected.
    assert second.probes_in(ProbeState.DEBUGREG_UNAVAIL) == [3]
    (refusal,) = (e for e in second.events if isinstance(e, StateEvent) and e.state is ProbeState.DEBUGREG_UNAVAIL)
    assert refusal.detail == "the programs for this process watch with all four debug registers already"
    assert first.hits == [150, 300]
    assert second.hits == [300, 0, 0, 0]
    for each in (first, second):
        assert_complete(each)


@pytest.mark.usefixtures("debug_registers")
def test_watchpoints_of_one_program_come_and_go_beside_those_of_another(path: Path, group: Group) -> None:
    with on_demand(path, 3) as target:
        pid = target.process.pid
        first = group.insert(path, watch("bias", "rw") + "offset = emulated\nexit\n", pid)
        target.say("start")
        for _ in range(10):
            one, two = (group.insert(path, watch("bias", "rw"), pid) for _ in range(2))
            await_hits(two, 20)
            one.end()
            await_hits(two, sum(two.hits) + 20)
            two.end()
            for each in (one, two):
                assert_complete(each)
                group.programs.remove(each)
        calls = target.say("stop")
        first.end()
        assert first.hits == [calls, calls]
        assert target.end() == 0


@pytest.fixture(scope="module")
def stress(build: Builder) -> Stress:
    linked = build("stress_sites.c", "-shared", "-fPIC", name=LIBRARY)
    copy = build("stress_sites.c", "-shared", "-fPIC", "-DCOPY", name=LIBRARY)
    return Stress(build("stress.c", str(linked), f"-Wl,-rpath,{linked.parent}", "-ldl"), linked, copy)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_hit_is_lost_as_threads_processes_libraries_and_programs_come_and_go(
    stress: Stress, group: Group, seed: int
) -> None:
    command = stress.command(seed, rounds=100)
    unprobed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    dice = random.Random(seed)
    with before_exec(*command) as target:
        job = job_of(compiled(source()), Scope(pid=target.pid))
        first, second = group.enter(job), group.enter(job)
        second.await_begun()
        go(target)
        while first.finished is None:
            await_hits(first, sum(first.hits) + dice.randrange(200))
            with contextlib.suppress(EngineError):  # that it has ended meanwhile
                guest = group.enter(job)
                guest.end()
                group.programs.remove(guest)
        assert target.stdout is not None
        report = report_of(stress, target.stdout.read())
        assert target.wait(TIMEOUT) == 0
    group.end()
    assert report.checksum == report_of(stress, unprobed.stdout).checksum
    for each in (first, second):
        assert_complete(each)
        found = {(p.number, p.path): n for p, n in zip(each.session.probes, each.hits, strict=True)}
        assert found == report.calls


def test_a_program_that_nobody_follows_holds_up_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PtraceEngine()
    with on_demand(path) as target, contextlib.ExitStack() as stack:
        job = job_for(path, "offset = stepped\nexit\n", Scope(pid=target.process.pid))
        with monkeypatch.context() as patch:
            patch.setattr(program_run, "_BACKLOG", 12 * 1000)  # records of flags, major and minor
            ignored = engine.session(job)
        ignored.begin()
        stack.callback(ignored.close)
        with attached(engine, job._replace(beside=(ignored,))) as session:
            followed = Program(session)
            followed.await_active()
            target.say("call 3000")
            target.say("fork 2000")
            await_true(lambda: len(followed.records) == 5000, "all records of the one that is followed", TIMEOUT)
            ignored.stop()
            events = list(ignored.poll())
            followed.end()
        assert sum(len(event.records) for event in events if isinstance(event, RecordBatch)) == 1000
        counts = Counts(hits=5000, records=1000, lost=4000, executed=("in a page",))
        assert events[-1] == Finished((counts,))
        assert target.end() == 0
