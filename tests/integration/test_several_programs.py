"""Several programs in one tracer: each has its own counts, records, variables and limits, and notices no other."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.base import Begun, Counts, Finished, Job, Notice, ProbeState, Scope, StateEvent
from dprobes.engines.globals import GlobalVariables
from dprobes.engines.ptrace.engine import PtraceEngine
from dprobes.errors import EngineError
from integration.ebpf.insessions import compiled, job_for, on_demand
from integration.several import Group, Program, before_exec, go, grouped
from integration.support import (
    TIMEOUT,
    await_true,
    children_of,
    code_is_original,
    is_traced,
    memory_at,
)
from integration.test_returns import FUNCTIONS, KINDS, own_counts, program_of

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


BOTH = "vars = 1\noffset = stepped\nminor = 1\ninc lv, 0\nexit\noffset = emulated\nminor = 2\ninc lv, 0\nexit\n"


def test_each_program_has_its_own_counts_records_and_variables(path: Path, group: Group) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        first = group.insert(path, BOTH, pid)
        target.say("call 2")
        second = group.insert(path, BOTH, pid)
        assert len(children_of(os.getpid())) == 2  # the target, and one tracer
        assert second.events.count(Begun()) == 1
        target.say("call 3")
        target.say("fork 4")
        await_true(lambda: first.hits == [9, 9] and second.hits == [7, 7], "the hits of both")
        assert first.session.local_variables() == [18]
        assert second.session.local_variables() == [14]
        first.session.reset_variables()
        assert first.session.local_variables() == [0]
        assert second.session.local_variables() == [14]
        second.end()
        assert second.finished == Finished(second.session.counts())
        assert [second.records.count(n) for n in range(2)] == [7, 7]
        assert second.session.counts()[0] == Counts(hits=7, records=7, executed=("in a page",))
        assert is_traced(pid)
        target.say("call 5")
        await_true(lambda: first.hits == [14, 14], "the hits of the first one")
        assert second.hits == [7, 7]
        first.end()
        assert not is_traced(pid)
        assert code_is_original(pid, path)
        assert [first.records.count(n) for n in range(2)] == [14, 14]
        assert target.end() == 0


def test_the_first_program_may_end_before_the_others(path: Path, group: Group) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        first = group.insert(path, BOTH, pid)
        second = group.insert(path, "offset = both\nexit\noffset = emulated\nexit\n", pid)
        first.end()
        assert memory_at(pid, path, "stepped", 1) != b"\xcc"
        assert memory_at(pid, path, "emulated", 1) == b"\xcc"
        target.say("call 3")
        third = group.insert(path, BOTH, pid)
        target.say("call 2")
        await_true(lambda: (second.hits, third.hits) == ([5, 5], [2, 2]), "the hits")
        assert first.hits == [0, 0]
        second.end()
        target.say("call 1")
        await_true(lambda: third.hits == [3, 3], "the last hits")
        third.end()
        assert code_is_original(pid, path)
        assert target.end() == 0


def test_one_thread_may_hold_both(path: Path) -> None:
    engine = PtraceEngine()
    with on_demand(path) as target:
        scope = Scope(pid=target.process.pid)
        with engine.run(job_for(path, BOTH, scope)) as one:
            with engine.run(replace(job_for(path, BOTH, scope), beside=(one,))) as two:
                target.say("call 3")
                two.stop()
                assert list(two.events())[-1] == Finished(two.counts())
            target.say("call 4")
            one.stop()
            assert list(one.events())[-1] == Finished(one.counts())
        assert [counts.hits for counts in (*one.counts(), *two.counts())] == [7, 7, 3, 3]
        assert target.end() == 0


def test_ends_are_asked_for_at_the_same_moment(path: Path) -> None:
    with on_demand(path) as target:
        for _ in range(10):
            group = Group()
            programs = [group.insert(path, BOTH, target.process.pid) for _ in range(3)]
            enders = [threading.Thread(target=program.end) for program in programs]
            for ender in enders:
                ender.start()
            for ender in enders:
                ender.join(TIMEOUT)
            group.close()
            assert not is_traced(target.process.pid)
            assert [event for each in programs for event in each.events if isinstance(event, Notice)] == []
        assert code_is_original(target.process.pid, path)
        assert target.end() == 0


def test_handlers_run_in_the_order_of_insertion_whoever_is_replaced(path: Path, group: Group) -> None:
    """Each handler takes a number from a variable that all share."""
    text = "gvars = 1\noffset = stepped\npush gv, 0\nlog 1\ninc gv, 0\nexit\n"
    with on_demand(path) as target, GlobalVariables(1) as variables:
        scope = Scope(pid=target.process.pid)
        programs = []
        for _ in range(3):
            programs.append(group.enter(job_for(path, text, scope, variables)))
            programs[-1].await_active()
        target.say("call 2")
        await_true(lambda: [len(each.logs) for each in programs] == [2, 2, 2], "the records")
        assert [each.words() for each in programs] == [[(0,), (3,)], [(1,), (4,)], [(2,), (5,)]]
        new = group.enter(job_for(path, text, scope, variables, replaces=programs[1].session))
        new.await_active()
        target.say("call 1")
        await_true(lambda: len(new.logs) == 1 and len(programs[2].logs) == 3, "the records of the new one")
        assert (programs[0].words()[-1], new.words(), programs[2].words()[-1]) == ((6,), [(7,)], (8,))
        assert len(programs[1].logs) == 2
        assert target.end() == 0


def test_programs_that_share_variables_share_all_or_none(path: Path, group: Group) -> None:
    with on_demand(path) as target, GlobalVariables(1) as variables:
        scope = Scope(pid=target.process.pid)
        first = group.insert(path, BOTH, target.process.pid)
        with pytest.raises(EngineError) as caught:
            group.enter(job_for(path, BOTH, scope, variables))
        assert caught.value.message == "a program shares its global variables with those that are inserted beside it"
        target.say("call 1")
        await_true(lambda: first.hits == [1, 1], "the hits")
        assert target.end() == 0


# What handlers do to the state


def test_each_handler_sees_the_registers_of_the_hit_and_the_last_change_counts(path: Path, writing: Group) -> None:
    adding = "offset = {0}\npush r, rdi\nlog 1\npush r, rdi\npush {1}\nadd\npop r, rdi\npush r, rdi\nlog 1\nexit\n"
    looking = "offset = stepped\npush r, rdi\nlog 1\nexit\noffset = both\npush r, rdi\nlog 1\nexit\n"
    with on_demand(path) as target:
        pid = target.process.pid
        one = writing.insert(path, adding.format("stepped", 1000), pid)
        watcher = writing.insert(path, looking, pid)
        two = writing.insert(path, adding.format("stepped", 0), pid)
        # The last one puts back what the first one has changed: the program finds what it expects.
        target.say("call 3")
        await_true(lambda: len(two.logs) == len(one.logs) == 3 and len(watcher.logs) == 6, "the records")
        assert one.words() == [(n, n + 1000) for n in range(3)]
        assert two.words() == [(n, n) for n in range(3)]
        assert watcher.words() == [(n,) for n in range(3) for _ in range(2)]
        two.end()
        other = writing.insert(path, adding.format("stepped", 0).replace("rdi", "rbx"), pid)
        target.say("call 1")
        await_true(lambda: len(other.logs) == 1, "the last record")
        assert target.end() == 1  # now the change of the first one counts, though another one changes something, too


def test_memory_is_as_it_is(path: Path, writing: Group) -> None:
    adding = (
        "offset = stepped\npush bias\npush mem, u64\nlog 1\npush bias\npush bias\npush mem, u64\npush {0}\nadd\n"
        "pop mem, u64\nexit\n"
    )
    with on_demand(path) as target:
        pid = target.process.pid
        first = writing.insert(path, adding.format(1), pid)
        second = writing.insert(path, adding.format("-1"), pid)
        target.say("call 2")
        await_true(lambda: len(second.logs) == len(first.logs) == 2, "the records")
        assert (first.words(), second.words()) == ([(7,), (7,)], [(8,), (8,)])
        assert target.end() == 0


# Limits, and what handlers end


def test_limits_and_removals_concern_one_program(path: Path, group: Group) -> None:
    limits = "offset = stepped\npasscount = 2\nmaxhits = 3\nexit\noffset = emulated\nremove\n"
    with on_demand(path) as target:
        pid = target.process.pid
        plain = group.insert(path, BOTH, pid)
        limited = group.insert(path, limits, pid)
        again = group.insert(path, limits, pid)
        target.say("call 4")
        assert limited.hits == [4, 1]
        target.say("call 6")
        await_true(lambda: plain.hits == [10, 10], "all hits")
        for each in (limited, again):
            assert each.session.counts()[0] == Counts(hits=5, records=3, passed=2, executed=("in a page",))
            assert each.session.counts()[1] == Counts(hits=1, records=1, executed=("emulated",))
            assert each.probes_in(ProbeState.DISABLED) == [0]
            assert each.probes_in(ProbeState.REMOVED) == [1]
        plain.session.remove([0])
        await_true(lambda: plain.probes_in(ProbeState.REMOVED) == [0], "the end of a probepoint")
        assert memory_at(pid, path, "stepped", 1) != b"\xcc"
        assert memory_at(pid, path, "emulated", 1) == b"\xcc"
        target.say("call 1")
        assert plain.hits == [10, 11]
        assert target.end() == 0


def test_an_exception_ends_only_the_handler_that_raises_it(path: Path, group: Group) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        wrong = group.insert(path, "offset = stepped\npush 0\npush mem, u8\nlog 1\nexit\n", pid)
        right = group.insert(path, "offset = stepped\npush r, rdi\nlog 1\nexit\n", pid)
        target.say("call 2")
        await_true(lambda: right.words() == [(0,), (1,)], "the records of the other one")
        assert wrong.hits == [2]
        notices = [event.message for event in wrong.events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert "was ended by" in notices[0]
        assert [event for event in right.events if isinstance(event, Notice)] == []
        assert target.end() == 0


# Under load


def await_hits(program: Program, goal: int) -> None:
    await_true(lambda: sum(program.hits) >= goal, f"{goal} hits", TIMEOUT)


def assert_complete(program: Program) -> None:
    """See that each hit that ran the handler has left its record."""
    run = [counts.hits - counts.passed for counts in program.session.counts()]
    assert [program.records.count(n) for n in range(len(run))] == run
    assert program.finished is not None
    assert program.finished.counts == program.session.counts()


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
        job = Job(compiled(text), Scope(pid=target.pid), globals=variables)
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
            group.enter(Job(compiled(f'name = "{path}"\n{text.format(extra)}'), scope))
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
        first = group.enter(Job(compiled(header + watch("cell:cell+7") + watch("cell:cell+7", "rw")), scope))
        second = group.enter(Job(compiled(header + watch("cell:cell+7") + watch("bytes") + watch("bytes+1")), scope))
        second.await_begun()
        go(target)
        assert target.wait(TIMEOUT) == 0
    group.end()
    # Two of the second program find a register; which is the order of its definitions.
    assert second.probes_in(ProbeState.DEBUGREG_UNAVAIL) == [2]
    (refusal,) = (e for e in second.events if isinstance(e, StateEvent) and e.state is ProbeState.DEBUGREG_UNAVAIL)
    assert refusal.detail == "the programs for this process watch with all four debug registers already"
    assert first.hits == [150, 300]
    assert second.hits == [150, 0, 0]
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
