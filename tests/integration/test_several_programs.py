"""Several programs in one tracer: each has its own counts, records, variables and limits, and notices no other."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Counts, Finished, Notice, ProbeRemoval, Scope, Stop, VariableReset
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import OnDemand, compiled, job_for, on_demand
from integration.several import BOTH, Group, go, grouped
from integration.support import (
    TIMEOUT,
    await_line,
    await_true,
    children_of,
    code_is_original,
    is_traced,
    load_bias,
    memory_at,
    running,
    symbols_of,
    tracer_of,
)
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def test_each_program_has_its_own_counts_records_and_variables(path: Path, group: Group) -> None:
    with on_demand(path) as target:
        pid, children = target.process.pid, set(children_of(os.getpid()))  # those of earlier tests may be among them
        first = group.insert(path, BOTH, pid)
        target.say("call 2")
        second = group.insert(path, BOTH, pid)
        assert set(children_of(os.getpid())) - children == {tracer_of(pid)}
        second.await_begun()
        target.say("call 3")
        target.say("fork 4")
        await_true(lambda: first.hits == [9, 9] and second.hits == [7, 7], "the hits of both")
        assert first.session.local_variables() == [18]
        assert second.session.local_variables() == [14]
        first.session.change([VariableReset()])
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
        with attached(engine, job_for(path, BOTH, scope)) as one:
            with attached(engine, job_for(path, BOTH, scope)._replace(beside=(one,))) as two:
                target.say("call 3")
                two.change([Stop()])
                assert list(two.poll())[-1] == Finished(two.counts())
            target.say("call 4")
            one.change([Stop()])
            assert list(one.poll())[-1] == Finished(one.counts())
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
        await_true(lambda: [len(each.logs) for each in (programs[0], new, programs[2])] == [3, 1, 3], "three records")
        assert (programs[0].words()[-1], new.words(), programs[2].words()[-1]) == ((6,), [(7,)], (8,))
        assert len(programs[1].logs) == 2
        assert target.end() == 0


def test_programs_that_share_variables_share_all_or_none(path: Path, group: Group) -> None:
    with on_demand(path) as target, GlobalVariables(1) as variables:
        scope = Scope(pid=target.process.pid)
        first = group.insert(path, BOTH, target.process.pid)
        with pytest.raises(EngineError) as caught:
            group.enter(job_for(path, BOTH, scope, variables))
        assert caught.value.message == "a program shares its global variables with those that are inserted with it"
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
            each.await_state(ProbeState.DISABLED, 0)
            each.await_state(ProbeState.REMOVED, 1)
        plain.session.change([ProbeRemoval([0])])
        plain.await_state(ProbeState.REMOVED, 0)
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
        await_true(lambda: any(isinstance(event, Notice) for event in wrong.events), "the word of it")
        notices = [event.text for event in wrong.events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert "was ended by" in notices[0]
        assert [event for event in right.events if isinstance(event, Notice)] == []
        assert target.end() == 0


# Scopes


def test_a_program_is_about_its_own_processes(build: Builder, group: Group) -> None:
    loop = build("hotloop.c")
    text = f'name = "{loop}"\noffset = tick\nexit\n'
    script = "echo ready; while read count; do $0 $count; done"
    with running("sh", "-c", script, loop, stdin=subprocess.PIPE) as shell:
        assert await_line(shell) == "ready\n"

        def call(count: int) -> None:
            assert shell.stdin is not None
            shell.stdin.write(f"{count}\n")
            shell.stdin.flush()
            assert int(await_line(shell)) == count * (count - 1) // 2

        following = group.enter(job_of(compiled(text), Scope(pid=shell.pid)))
        only_shell = group.enter(job_of(compiled(text), Scope(pid=shell.pid, follow=False)))
        only_shell.await_begun()
        call(5)
        await_true(lambda: following.hits == [5], "the hits in the child")
        assert only_shell.hits == []
        # The other way round: when only that one is left, children are not traced any more.
        following.end()
        call(6)
        assert is_traced(shell.pid)
        again = group.enter(job_of(compiled(text), Scope(pid=shell.pid)))
        again.await_begun()
        call(7)
        await_true(lambda: again.hits == [7], "the hits in a later child")
        assert only_shell.hits == []
        only_shell.end()
        call(8)
        await_true(lambda: again.hits == [15], "the hits in the last child")


def test_a_process_that_a_probed_one_has_started_may_have_a_program_of_its_own(path: Path, group: Group) -> None:
    script = '"$0" 2; exit $?'
    with running("sh", "-c", f"read line; {script}", path, stdin=subprocess.PIPE) as shell:
        parent = group.enter(job_of(compiled(f'name = "{path}"\n{BOTH}'), Scope(pid=shell.pid)))
        parent.await_begun()
        target = OnDemand(shell)
        go(shell)
        assert await_line(shell) == "ready\n"
        (pid,) = children_of(shell.pid)
        child = group.insert(path, BOTH, pid)
        target.say("call 3")
        target.say("fork 4")
        await_true(lambda: child.hits == parent.hits == [7, 7], "the hits")
        # The shell is in the scope of nobody then: it is let go, and the rest stays.
        parent.end()
        await_true(lambda: not is_traced(shell.pid), "the shell being let go")
        assert is_traced(pid)
        target.say("call 2")
        target.say("fork 2")
        await_true(lambda: child.hits == [11, 11], "the hits of the other one")
        child.end()
        assert code_is_original(pid, path)
        assert target.end() == 0


def test_a_program_ends_with_its_processes_while_others_go_on(path: Path, group: Group) -> None:
    script = 'read line; "$0" 2; read line; "$0" 2; exit $?'
    with running("sh", "-c", script, path, stdin=subprocess.PIPE) as shell:
        parent = group.enter(job_of(compiled(f'name = "{path}"\n{BOTH}'), Scope(pid=shell.pid)))
        parent.await_begun()
        go(shell)
        assert await_line(shell) == "ready\n"
        (pid,) = children_of(shell.pid)
        child = group.insert(path, BOTH, pid)
        OnDemand(shell).say("call 3")
        os.kill(pid, signal.SIGTERM)
        child.thread.join(TIMEOUT)
        assert child.finished == Finished(child.session.counts())
        assert child.hits == [3, 3]
        assert [event for event in child.events if isinstance(event, Notice)] == []
        go(shell)
        assert await_line(shell) == "ready\n"
        OnDemand(shell).say("call 2")
        await_true(lambda: parent.hits == [5, 5], "the hits in the next child")
        assert OnDemand(shell).end() == 0


# What cannot be


def test_a_program_that_cannot_be_inserted_leaves_the_others(path: Path, group: Group) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        first = group.insert(path, BOTH, pid)
        place = load_bias(pid, path) + symbols_of(path)["both"]
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR)
        os.pwrite(descriptor, b"\xcc", place)
        other = group.enter(job_for(path, "offset = both\nexit\noffset = stepped\nexit\n", Scope(pid=pid)))
        other.await_active(1)
        assert other.probes_in(ProbeState.CONFLICT) == [0]
        os.pwrite(descriptor, b"\x55", place)
        os.close(descriptor)
        missing = job_of(compiled(f'name = "{path}"\noffset = missing\nexit\n'), Scope(pid=pid))
        wrong = group.enter(missing)
        wrong.await_begun()
        notices = [event.text for event in wrong.events if isinstance(event, Notice)]
        assert [f"'{path}' has no symbol 'missing'" in notice for notice in notices] == [True]
        wrong.end()
        target.say("call 3")
        await_true(lambda: first.hits == [3, 3], "the hits of the first one")
        assert other.hits == [0, 3]
        assert target.end() == 0


def test_a_process_that_has_been_let_go_gets_a_tracer_anew(path: Path, group: Group) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        first = group.insert(path, BOTH, pid)
        tracer = tracer_of(pid)
        first.end()
        second = group.insert(path, BOTH, pid)
        assert tracer_of(pid) not in (0, tracer)
        target.say("call 2")
        await_true(lambda: second.hits == [2, 2], "the hits")
        assert first.hits == [0, 0]
        assert target.end() == 0
