"""Several programs at one instruction share one jump, and come and go while threads run through it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Scope
from dprobes.engines.inline.inline_engine import InlineEngine
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import compiled, on_demand
from integration.several import Group, assert_complete, await_hits, grouped
from integration.support import TIMEOUT, await_line, await_traced, await_true, code_is_original
from integration.test_inline_kills import WAYS, await_clean
from integration.test_inline_reclamation import environment_of_tests
from integration.test_inline_several import await_jump, executed, is_jump_at
from support.attachments import job_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.several import Program
    from integration.support import Builder

EMULATED = "vars = 1\nlogonfault = yes\noffset = emulated\nminor = 1\ninc lv, 0\nexit\n"
TRIED = "vars = 1\noffset = stepped\nminor = 1\ninc lv, 0\nexit\n"
"""The first instruction of this function loads from memory: whether it will complete is tried first."""
QUIET = "offset = {0}\nlogonfault = yes\nminor = 1\nabort\n"
CHURN = "import sys; from integration.test_inline_shared_jumps import churn; churn(sys.argv[1], int(sys.argv[2]))"


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


@pytest.fixture
def group() -> Iterator[Group]:
    with grouped(engine=InlineEngine, allow_write=True) as made:
        yield made


def finish(group: Group, program: Program) -> None:
    group.programs.remove(program)
    program.end()


def ways(program: Program) -> set[str]:
    """Return how the hits of all probepoints were executed, but for by which jump."""
    return {way.split(" (")[0] for counts in program.session.counts() for way in counts.executed}


@pytest.mark.parametrize("text", [EMULATED, TRIED])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_may_go_first(path: Path, group: Group, order: tuple[int, ...], text: str) -> None:
    name = "emulated" if text is EMULATED else "stepped"
    with on_demand(path, 2) as target:
        pid = target.process.pid
        programs: list[Program] = []
        hits = [0, 0, 0]
        for number in range(3):
            programs.append(group.insert(path, text, pid))
            await_jump(pid, path, name)
            target.say("call 10")
            hits = [each + 10 * (place <= number) for place, each in enumerate(hits)]
        for number in order:
            finish(group, programs[number])
            assert programs[number].hits == [hits[number]]
            assert ways(programs[number]) == {"inline"}, executed(programs[number])
            assert_complete(programs[number])
            if group.programs:
                assert is_jump_at(pid, path, name)
            target.say("call 10")
            hits = [each + 10 * (programs[place] in group.programs) for place, each in enumerate(hits)]
        assert code_is_original(pid, path)
        assert target.end() == 0


LOOKING = "logonfault = yes\noffset = emulated\nminor = {0}\npush r, rdi\nlog 1\n{1}exit\n"
SETTING = "push {1}\npop r, {0}\n"


@pytest.mark.parametrize("engine", [PtraceEngine, InlineEngine])
@pytest.mark.parametrize("register", ["rdi", "r11"])
def test_each_handler_sees_the_registers_of_the_hit(path: Path, engine: type[PtraceEngine], register: str) -> None:
    """A jump is shared only where what one of them changes is not looked at by others."""
    with grouped(engine=engine, allow_write=True) as group, on_demand(path, 2) as target:
        pid = target.process.pid
        first, second = (
            group.insert(path, LOOKING.format(n, SETTING.format(register, 100 + n)), pid) for n in range(2)
        )
        job = job_of(compiled(f'name = "{path}"\n{LOOKING.format(2, "")}'), Scope(pid=pid))
        third = group.enter(job._replace(replaces=first.session))
        finish(group, first)
        third.await_active()
        last = group.insert(path, LOOKING.format(3, ""), pid)
        assert is_jump_at(pid, path, "emulated") == (engine is InlineEngine and register != "rdi")
        target.say("call 2")
        group.end()
        assert [each.words() for each in (second, third, last)] == [[(0,), (1,)]] * 3
        group.programs.clear()
        assert target.end() == (1 if register == "rdi" else 0)


def test_all_hits_are_there_of_each_while_others_come_and_go(path: Path, group: Group) -> None:
    dice = random.Random(7)
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first = group.insert(path, QUIET.format("emulated") + QUIET.format("stepped"), pid)
        await_jump(pid, path, "emulated", "stepped")
        target.say("start")
        others: list[Program] = []
        for _ in range(12):
            if others and dice.random() < 0.4:
                finish(group, gone := others.pop(dice.randrange(len(others))))
                assert "inline" in ways(gone)  # breakpoints as well while a thread was in another jump's code
            else:
                text = dice.choice(
                    (QUIET.format("emulated"), QUIET.format("stepped"), TRIED.replace("inc lv, 0\nexit", "abort"))
                )
                others.append(group.insert(path, text, pid))
                await_hits(others[-1], 100)
        made = target.say("stop")
        for each in (*others, first):
            finish(group, each)
        assert first.hits == [made, made]
        assert code_is_original(pid, path)
        assert target.end() == 0


def test_jumps_that_are_near_each_other_are_planned_together(path: Path, group: Group) -> None:
    """The two instructions at the beginning of this function have one byte each."""
    with on_demand(path, 2) as target:
        pid, text = target.process.pid, "vars = 1\nlogonfault = yes\noffset = both{}\nminor = 1\ninc lv, 0\nexit\n"
        first = group.insert(path, text.format(""), pid)
        await_jump(pid, path, "both")
        target.say("call 5")
        second = group.insert(path, text.format(" + 1"), pid)
        target.say("call 5")
        third = group.insert(path, text.format(""), pid)
        target.say("call 5")
        finish(group, first)
        target.say("call 5")
        finish(group, second)
        target.say("call 5")
        finish(group, third)
        assert [first.hits, second.hits, third.hits] == [[15], [15], [15]]
        assert ways(second) == {"inline"}
        assert code_is_original(pid, path)
        assert target.end() == 0


def test_returns_with_their_entries_are_shared(path: Path, group: Group) -> None:
    text = "vars = 1\noffset = emulated\nreturn = yes\nminor = 1\npush entry, rdi\npush r, rax\nlog 2\nexit\n"
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first = group.insert(path, text, pid)
        await_jump(pid, path, "emulated")
        target.say("call 2")
        second = group.insert(path, text, pid)
        target.say("call 2")
        finish(group, first)
        target.say("call 2")
        entry = group.insert(path, EMULATED, pid)
        target.say("call 2")
        finish(group, second)
        target.say("call 2")
        finish(group, entry)
        words = [(n + 1, n) for n in range(2)]  # the last one that was pushed comes first
        assert (first.words(), second.words(), entry.hits) == (words * 2, words * 3, [4])
        assert [ways(each) for each in (first, second)] == [{"inline"}] * 2
        assert target.end() == 0


def test_limits_of_one_program_are_none_of_others(path: Path, group: Group) -> None:
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first = group.insert(path, EMULATED, pid)
        second = group.insert(path, EMULATED.replace("inc lv", "maxhits = 3\npasscount = 2\ninc lv"), pid)
        third = group.insert(path, EMULATED, pid)
        await_jump(pid, path, "emulated")
        target.say("call 10")
        second.await_state(ProbeState.DISABLED, 0)
        target.say("call 10")
        group.end()
        (counts,) = second.session.counts()
        assert (counts.hits, counts.passed, counts.records) == (5, 2, 3)
        assert [first.hits, third.hits] == [[20], [20]]
        # Some hits may fall between two plans of the jump, and be emulated at the breakpoint that is there then.
        assert all("inline" in ways(each) for each in (first, second, third))
        group.programs.clear()
        assert target.end() == 0


def test_a_program_that_needs_a_breakpoint_takes_the_jump_away_as_long_as_it_is_there(path: Path, group: Group) -> None:
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first, second = group.insert(path, EMULATED, pid), group.insert(path, EMULATED, pid)
        await_jump(pid, path, "emulated")
        target.say("call 10")
        other = group.insert(path, EMULATED.replace("inc lv, 0", "push uid\nlog 1"), pid)
        assert not is_jump_at(pid, path, "emulated")
        target.say("call 10")
        finish(group, other)
        assert is_jump_at(pid, path, "emulated")
        target.say("call 10")
        group.end()
        assert [first.hits, second.hits, other.hits] == [[30], [30], [10]]
        assert other.words() == [(os.getuid(),)] * 10
        group.programs.clear()
        assert target.end() == 0


def test_handlers_that_may_end_otherwise_are_not_shared(path: Path, group: Group) -> None:
    ending = EMULATED.replace("inc lv, 0\nexit", "push r, rdi\npush 5\nsub\njz on\nexit\non:\npush 99\nskip")
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first = group.insert(path, ending, pid)
        await_jump(pid, path, "emulated")
        target.say("call 2")
        second = group.insert(path, EMULATED, pid)
        target.say("call 2")
        finish(group, second)
        assert is_jump_at(pid, path, "emulated")
        target.say("call 2")
        finish(group, first)
        assert [first.hits, second.hits] == [[6], [2]]
        assert target.end() == 0


def test_a_child_of_the_process_has_both_and_loses_one_with_it(path: Path, group: Group) -> None:
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first, second = group.insert(path, EMULATED, pid), group.insert(path, EMULATED, pid)
        await_jump(pid, path, "emulated")
        target.say("fork 10")
        finish(group, second)
        target.say("fork 10")
        finish(group, first)
        assert [first.hits, second.hits] == [[20], [10]]
        assert target.end() == 0


def memory(pid: int) -> tuple[int, int]:
    """Return of how many programs a process has memory, and how many bytes of code it has that are no file's."""
    rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    code = [row[0].split("-") for row in rows if "x" in row[1] and len(row) < 6]
    return sum("/memfd:dprobes-left" in row for row in rows), sum(int(end, 16) - int(start, 16) for start, end in code)


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.torture)])
def test_programs_that_come_and_go_at_the_same_place_leave_nothing(path: Path, group: Group, rounds: int) -> None:
    with on_demand(path, 2) as target:
        pid = target.process.pid
        last, before = group.insert(path, EMULATED, pid), (0, 0)
        for number in range(rounds):
            added = group.insert(path, EMULATED, pid)
            await_jump(pid, path, "emulated")
            target.say("call 1")
            finish(group, last)  # in turn the one that was there, and then the one that had joined it
            assert last.hits == [3 if number else 1]
            target.say("call 1")
            last = added
            await_true(lambda: memory(pid)[0] == 1, "the end of the other program's memory", TIMEOUT)
            if number > 1:
                await_true(lambda known=before: memory(pid) == known, "the end of its code", TIMEOUT)  # type: ignore[misc]
            before = memory(pid)
        finish(group, last)
        assert ways(last) == {"inline"}
        assert target.end() == 0


def churn(path: str, pid: int) -> None:
    """Insert, replace and end programs at the place where one stays, as long as that does, and say so."""
    with grouped(engine=InlineEngine) as group:
        first = group.insert(Path(path), TRIED, pid)
        while first.finished is None and not first.failures:
            program = group.insert(Path(path), TRIED, pid)
            print("inserted", flush=True)
            job = job_of(compiled(f'name = "{path}"\n{TRIED}'), Scope(pid=pid))
            replacing = group.enter(job._replace(replaces=program.session))
            finish(group, program)
            replacing.await_active()
            finish(group, replacing)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.torture)])
def test_a_tool_that_is_killed_meanwhile_leaves_nothing(path: Path, kills: int) -> None:
    dice = random.Random(kills)
    command = [sys.executable, "-c", CHURN, str(path)]
    for number in range(kills):
        with on_demand(path, 2) as target:
            pid = target.process.pid
            target.say("start")
            with subprocess.Popen(
                [*command, str(pid)], stdout=subprocess.PIPE, text=True, env=environment_of_tests()
            ) as tool:
                assert await_line(tool, TIMEOUT) == "inserted\n"
                tracer = await_traced(pid)
                time.sleep(dice.uniform(0, 0.5))
                ways_of_ends = WAYS[number % len(WAYS)]
                for who in ways_of_ends:
                    os.kill(tool.pid if who == "client" else tracer, signal.SIGKILL)
                tool.communicate(timeout=TIMEOUT)
            await_clean(pid, path)
            if target.process.poll() is None:
                target.say("stop")
                target.end()
            # Without a tracer, who runs into a breakpoint before that is taken out comes to an end.
            allowed = (0, -signal.SIGTRAP) if "tracer" in ways_of_ends else (0,)
            assert target.process.returncode in allowed
