"""The overload guard of compiled handlers: which hits run none, and what is counted of those."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import Filter, Request
from dprobes.bpf.lower.hits.hit_limits import MEASURED_EVERY
from dprobes.bpf.map_layouts import ENTRY_HEAD, LIMIT, LOAD_WINDOW, CpuLoad, Entry, ProbeField, ProbeLoad
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from support.ebpf_backend import EbpfRunner, obstacle

if TYPE_CHECKING:
    from dprobes.vm import Point

COST = 700
BY_TABLE = pytest.mark.parametrize("by_table", [False, True])
NOTES = pytest.mark.parametrize("note", [None, 0])  # with and without tickets that come back
PID = 4711


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


def runner_of(request: Request, handler: str = "exit") -> tuple[EbpfRunner, tuple[int, Point]]:
    program = parse_source(SourceFile("x.rpn", f"name = x\noffset = 0\n{handler}"), Diagnostics(), CompileOptions())
    target, context = architecture("x86_64"), FakeContext("x86_64", pid=PID)
    image = encode(program, target)
    return EbpfRunner(image, target, context, request=request), (image.handlers[0], prepare(program, 0, context))


def request_of(*, by_table: bool, note: int | None = None, passcount: int = 0, maxhits: int = 0) -> Request:
    probe = None if by_table else 2
    return Request(probe=probe, note=note, passcount=passcount, maxhits=maxhits, load_limit=LOAD_WINDOW)


@BY_TABLE
def test_a_thinned_handler_runs_at_one_hit_of_so_many_and_the_others_are_skipped(by_table: bool) -> None:
    runner, hit = runner_of(request_of(by_table=by_table))
    with runner:
        runner.set_thinning(3)
        ran = [runner.hit(*hit) is not None for _ in range(9)]
        counted = runner.count(ProbeField.HITS), runner.count(ProbeField.RECORDS), runner.load(ProbeLoad.SKIPPED)
        runner.set_thinning(1)
        assert runner.hit(*hit) is not None
    assert ran == [True, False, False] * 3
    assert counted == (9, 3, 6)


@BY_TABLE
@NOTES
def test_skipped_hits_count_for_passcount_and_maxhits(by_table: bool, note: int | None) -> None:
    runner, hit = runner_of(request_of(by_table=by_table, note=note, passcount=2, maxhits=4))
    with runner:
        runner.set_thinning(2)
        ran = [runner.hit(*hit) is not None for _ in range(5)]
        entries = runner.miss(*hit)  # whether a state is free or not
        assert runner.hit(*hit) is None
        skipped, disabled = runner.load(ProbeLoad.SKIPPED), runner.count(ProbeField.DISABLED)
    assert ran == [False, False, True, False, True]
    assert [(kind, body) for kind, _, body in entries] == [(Entry.ENDED, ENTRY_HEAD.pack(LIMIT, PID))]
    assert (skipped, disabled) == (2, note is None)


def test_each_hit_costs_its_trap_and_one_run_of_some_is_measured() -> None:
    runner, hit = runner_of(request_of(by_table=False))
    with runner:
        runner.set_thinning(0, COST)
        for _ in range(2 * MEASURED_EVERY):
            assert runner.hit(*hit) is not None
        measured = runner.load(ProbeLoad.TIME)
        fields = CpuLoad.TRAPS, CpuLoad.HANDLERS, CpuLoad.RUNS
        traps, handlers, runs = (sum(runner.cpu_loads(each)) for each in fields)
    assert runs == 2 * MEASURED_EVERY
    assert measured > 0
    assert measured % MEASURED_EVERY == 0
    assert (traps, handlers) == (2 * MEASURED_EVERY * COST, measured)


def test_no_handler_runs_on_a_cpu_that_is_braked() -> None:
    runner, hit = runner_of(request_of(by_table=False))
    with runner:
        runner.brake(time.monotonic_ns() + 3600 * 10**9)
        assert [runner.hit(*hit) for _ in range(3)] == [None] * 3
        assert runner.load(ProbeLoad.SKIPPED) == 3
        runner.brake(time.monotonic_ns())
        assert runner.hit(*hit) is not None
        assert 0 in runner.cpu_loads(CpuLoad.BRAKED)


def test_the_brake_works_when_handlers_have_taken_the_limit() -> None:
    request = Request(probe=2, load_limit=0)
    runner, hit = runner_of(request)
    with runner:
        ran = [runner.hit(*hit) is not None for _ in range(200)]
        braked = [until for until in runner.cpu_loads(CpuLoad.BRAKED) if until]
        skipped = runner.load(ProbeLoad.SKIPPED)
    # The first run on each CPU is measured, and anything is more than nothing.
    assert ran[0]
    assert 0 < sum(ran) < 200
    assert skipped == 200 - sum(ran)
    assert braked


@BY_TABLE
def test_hits_of_others_cost_their_trap_and_nothing_else(by_table: bool) -> None:
    request = Request(probe=None if by_table else 2, filter=Filter(excluded=PID), load_limit=LOAD_WINDOW)
    runner, hit = runner_of(request)
    with runner:
        runner.set_thinning(0, COST)
        assert runner.hit(*hit) is None
        assert runner.hit(*hit) is None
        assert (runner.count(ProbeField.HITS), runner.load(ProbeLoad.SKIPPED)) == (0, 0)
        assert runner.load(ProbeLoad.FOREIGN) == 2
        assert sum(runner.cpu_loads(CpuLoad.TRAPS)) == 2 * COST
