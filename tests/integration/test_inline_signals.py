"""Signals that interrupt handlers in the process: their own hits count, and what they leave holds nothing up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Notice, Scope
from dprobes.engines.inline.inline_engine import InlineEngine
from integration.ebpf.insessions import job_for
from integration.several import grouped
from integration.support import TIMEOUT, await_true, running
from integration.test_inline import INLINE, ways
from integration.test_replacing import Chain, await_hits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Builder, Runner

RECORD = "name = alarms\nlogmax = 16\noffset = step\nminor = 1\npush r, rdi\nlog 1\nexit\n"
SLOW = "jmpmax = 60000\noffset = step\nminor = 1\npush 50000\nagain: loop again\npush r, rdi\nlog 1\nexit\n"
CALM = list(range(1_000_000_000, 1_000_001_000))


@pytest.fixture
def chain() -> Iterator[Chain]:
    chain = Chain(InlineEngine())
    yield chain
    chain.close()


@pytest.mark.parametrize("mode", ["plain", "stack"])
def test_hits_in_signal_handlers_count_as_well(build: Builder, run: Runner, mode: str) -> None:
    result = run.command(RECORD, build("alarms.c", "-O1"), mode, 400, options=INLINE)
    executed, alarms, _ = map(int, result.stdout.split())
    counts = result.counts[1]
    assert alarms > 0
    assert "inline" in ways(result)
    assert counts.hits == counts.records + counts.lost == executed
    assert [value for (value,) in result.words() if value >= CALM[0]] == CALM


def test_a_record_that_a_signal_handler_jumps_away_from_holds_up_no_others(build: Builder, run: Runner) -> None:
    result = run.command(RECORD, build("alarms.c", "-O1"), "jump", 400, options=INLINE)
    executed, _, jumps = map(int, result.stdout.split())
    counts = result.counts[1]
    assert jumps > 0
    assert "inline" in ways(result)
    assert executed <= counts.hits <= executed + jumps
    assert counts.hits - jumps <= counts.records + counts.lost <= counts.hits
    assert [value for (value,) in result.words() if value >= CALM[0]] == CALM


def test_states_that_a_signal_handler_jumps_away_from_are_had_again(build: Builder, run: Runner) -> None:
    source = (
        "name = alarms\nlogmax = 64\noffset = step\nreturn = yes\nminor = 1\n"
        "begin: push entry, rdi\njlt begin\nlog 1\nexit\n"  # a loop, so that it has a state
    )
    result = run.command(source, build("alarms.c", "-O1"), "jump", 400, options=INLINE)
    executed, _, jumps = map(int, result.stdout.split())
    counts = result.counts[1]
    assert executed - jumps <= counts.hits <= executed
    assert [value for (value,) in result.words() if value >= CALM[0]] == CALM


def test_a_handler_that_a_signal_has_interrupted_ends_before_its_program_does(build: Builder) -> None:
    path = build("alarms.c", "-O1")
    with running(path, "plain", 1_000_000) as target, grouped(engine=InlineEngine) as group:
        group.insert(path, "offset = apart\nminor = 2\nexit\n", target.pid)
        for _ in range(5):
            program = group.insert(path, SLOW, target.pid)
            await_true(lambda program=program: sum(program.hits) >= 20, "hits", TIMEOUT)  # type: ignore[misc]
            program.end()
            group.programs.remove(program)
            assert program.finished is not None
            assert len(program.records) == program.finished.counts[0].hits
            assert program.finished.counts == program.session.counts()
            assert Notice not in map(type, program.events)


def test_a_handler_that_a_signal_has_interrupted_ends_before_its_program_is_replaced(
    build: Builder, chain: Chain, capfd: pytest.CaptureFixture[str]
) -> None:
    # A thread is in the handler nearly always, and has stopped there for a signal when it is to be looked at.
    path = build("alarms.c", "-O1")
    scope = Scope(command=(str(path), "plain", "600"))  # so long that it ends after the last replacement
    last = chain.enter(job_for(path, SLOW, scope))
    for _ in range(5):
        await_hits(last, sum(last.hits) + 20)
        last = chain.enter(job_for(path, SLOW, scope, replaces=last.session))
    await_true(lambda: last.finished is not None, "the end", TIMEOUT)
    chain.finish()
    executed, *_ = capfd.readouterr().out.split()
    assert list(chain.hits.values()) == [int(executed)]
