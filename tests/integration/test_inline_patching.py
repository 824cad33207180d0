"""
A hundred thousand jumps are taken out and written again while 8 threads run through them, and no hit is missed.

All instructions of a program have jumps whose threads fork, take signals, and load and unload a library. Programs come
and go beside: for each of these changes all jumps are taken out and written again, with all threads stopped. Another
program counts calls all the time, which must be those that the probed program has counted itself.

The long form on two overloaded CPUs: 839 jumps, 120 changes, 100 680 jumps written; all of 74 299 calls counted, and
3.8 million hits of all instructions.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.engine_interface import Begun, Notice
from dprobes.engines.inline.inline_engine import InlineEngine, InlineHandlers
from dprobes.engines.ptrace.ptrace_engine import PtraceSession
from dprobes.target.probed_module import Module
from integration.several import grouped
from integration.support import TIMEOUT, await_line, await_true, running
from integration.test_inline_changes import programs_in
from integration.test_stress import SITES, report_of, stress
from support.instruction_places import places_in, source_of

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.engines.ptrace.tracer_messages import PatchSites
    from integration.ebpf.insessions import Followed
    from integration.support import Builder
    from integration.test_stress import Stress

__all__ = ["stress"]  # a fixture

THREADS = 8
PATCHES = 100_000


def counting(path: str) -> str:
    return f'name = "{path}"\nlogonfault = yes\n' + "".join(
        f"offset = stress_{site}\nminor = {minor}\nabort\n" for minor, site in enumerate(SITES)
    )


def everything_in(path: Path) -> str:
    functions = {(symbol.address, symbol.size) for symbol in Module.load(path).symbols.functions() if symbol.size}
    return source_of(path, places_in(path, sorted(functions)), "logonfault = yes;")


def jumps_of(program: Followed) -> int:
    session = program.session
    assert isinstance(session, PtraceSession)
    assert isinstance(session.native, InlineHandlers)
    return len(session.native.jumps)


@pytest.mark.parametrize("times", [1, 9])
def test_a_process_that_maps_something_where_jumps_were_planned_gets_others(
    monkeypatch: pytest.MonkeyPatch, build: Builder, times: int
) -> None:
    program, taken = build("crowded.c", "-O1", "-pthread"), list[int]()
    plan = InlineHandlers._plan
    with running(program, stdin=subprocess.PIPE) as target, grouped(engine=InlineEngine) as group:
        assert await_line(target) == "ready\n"

        def plan_late(self: InlineHandlers, *arguments: Any) -> PatchSites | None:
            request = plan(self, *arguments)
            if request is not None and len(taken) < times:
                taken.append(request.pages[0][0])
                assert target.stdin is not None
                target.stdin.write(f"{taken[-1]:x}\n")
                target.stdin.flush()
                assert await_line(target) == "mapped\n"
            return request

        monkeypatch.setattr(InlineHandlers, "_plan", plan_late)
        counts = group.insert(program, "offset = busy\nminor = 1\nabort\n", target.pid)
        await_true(lambda: sum(counts.hits) >= 100, "hits", TIMEOUT)
        counts.end()
    assert counts.finished is not None
    (count,) = counts.finished.counts
    if times == 1:
        assert jumps_of(counts) == 1
        assert all(way.startswith("inline") for way in count.executed)
    else:  # it is not tried for ever
        assert jumps_of(counts) == 0
        assert len(taken) == 4
        why = f"something else is mapped at {taken[-1]:#x}"
        assert Notice(f"a probepoint used a breakpoint instead of a jump: {why}", is_warning=False) in counts.events


@pytest.mark.parametrize("patches", [2_000, pytest.param(PATCHES, marks=pytest.mark.torture)])
def test_no_hit_is_lost_as_jumps_are_taken_out_and_written_again(stress: Stress, patches: int) -> None:
    first, _, *rest = stress.command(5, 0)
    starting = ["sh", "-c", 'read line; exec "$@"', "sh", first, "5", str(THREADS), *rest[1:]]
    with running(*starting, stdin=subprocess.PIPE) as target, programs_in(stress.program, target.pid) as programs:
        counts = programs.insert(counting(stress.linked.name))
        await_true(lambda: Begun() in counts.events, "that the shell is attached to", TIMEOUT)
        assert target.stdin is not None
        target.stdin.write("\n")
        target.stdin.close()
        target.stdin = None
        assert await_line(target) == "ready\n"
        everything = programs.insert(everything_in(stress.program))
        await_true(lambda: jumps_of(everything) > 700, "most of the jumps", TIMEOUT)
        jumps, written, changes = jumps_of(everything), 0, 0
        while written < patches:
            passing = programs.insert(f'name = "{stress.linked}"\noffset = stress_push + 1\nminor = 1\nabort\n')
            await_true(lambda each=passing: any(each.hits), "a hit", TIMEOUT)  # type: ignore[misc]
            programs.end(passing)
            changes += 2
            written += 2 * jumps
            assert target.poll() is None
        target.send_signal(signal.SIGUSR2)
        said = target.communicate(timeout=TIMEOUT)[0]
        assert target.returncode == 0
        await_true(lambda: counts.finished is not None, "the end", TIMEOUT)
    report = report_of(stress, said)
    for probe, count in zip(counts.session.probes, counts.session.counts(), strict=True):
        site = SITES.index(probe.where.removeprefix("stress_"))
        assert count.hits == report.calls[site, str(probe.path)], probe.where
    assert sum(everything.hits) > 0
    print(
        f"{jumps} jumps, {changes} changes, {written} patches; {sum(counts.hits)} hits, {sum(everything.hits)} of all"
    )
