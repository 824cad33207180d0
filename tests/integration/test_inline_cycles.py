"""Sessions of handlers in processes leave no thread, descriptor or mapping here, however they end."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Finished, Scope, StateEvent
from dprobes.engines.inline.inline_engine import InlineEngine, InlineHandlers
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import followed, job_for, on_demand
from integration.ebpf.kernel import descriptors
from integration.support import await_true, code_is_original, memory_at
from support.attachments import attached

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.ebpf.insessions import OnDemand
    from integration.support import Builder

SOURCE = (
    "vars = 1\ngvars = 1\nlogonfault = yes\n"
    "offset = stepped\nminor = 1\ninc lv, 0\ninc gv, 0\npush lv, 0\nlog 1\nexit\n"
)
STACKS = "table = t, count, ustack\noffset = emulated\nminor = 2\ntally t\nexit\n"
CYCLES = 12


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


def mappings() -> Counter[str]:
    """Return what this process maps of files in memory, and how often."""
    gc.collect()
    rows = Path("/proc/self/maps").read_text().splitlines()
    return Counter(name for row in rows if (name := row[73:]).startswith("/memfd:"))


def await_jump(path: Path, pid: int) -> None:
    await_true(lambda: memory_at(pid, path, "stepped", 1) in (b"\xe9", b"\x2e", b"\xeb"), "a jump")


def one(path: Path, target: OnDemand) -> None:
    with followed(InlineEngine(), job_for(path, SOURCE, Scope(pid=target.process.pid))) as run:
        await_jump(path, target.process.pid)
        target.say("call 10")
    assert run.hits == [10]
    assert len(run.records) == 10
    assert run.session.local_variables() == [10]


def one_that_nobody_follows(path: Path, target: OnDemand) -> None:
    with attached(InlineEngine(), job_for(path, SOURCE, Scope(pid=target.process.pid))):
        pass
    assert code_is_original(target.process.pid, path)


def one_that_is_not_begun(path: Path, target: OnDemand) -> None:
    InlineEngine().session(job_for(path, SOURCE, Scope(pid=target.process.pid)))


def one_without_a_process(path: Path, target: OnDemand) -> None:
    del target
    job = job_for(path, SOURCE, Scope(pid=1 << 22))
    with pytest.raises(EngineError), attached(InlineEngine(), job) as session:
        list(session.poll())


def one_that_is_replaced(path: Path, target: OnDemand) -> None:
    scope, engine = Scope(pid=target.process.pid), InlineEngine()
    with GlobalVariables(1) as variables, followed(engine, job_for(path, SOURCE, scope, variables)) as first:
        await_jump(path, target.process.pid)
        target.say("call 5")
        with followed(engine, job_for(path, SOURCE, scope, variables, first.session)) as second:
            target.say("call 6")
        assert (first.hits, second.hits) == ([5], [6])
        with contextlib.closing(variables.cells()) as cells:
            assert cells[0] == 11


def one_that_cannot_replace(path: Path, target: OnDemand) -> None:
    scope, engine = Scope(pid=target.process.pid), InlineEngine()
    with followed(engine, job_for(path, SOURCE, scope)) as first:
        await_jump(path, target.process.pid)
        wrong = job_for(path, "offset = stepped\nopcode = 0xf4\nminor = 1\nexit\n", scope, None, first.session)
        with pytest.raises(EngineError), attached(engine, wrong):
            pass
        target.say("call 7")
    assert first.hits == [7]


def one_whose_events_are_left(path: Path, target: OnDemand) -> None:
    with attached(InlineEngine(), job_for(path, SOURCE, Scope(pid=target.process.pid))) as session:
        for event in session.poll():
            if isinstance(event, StateEvent) and event.state is ProbeState.ACTIVE:
                break
    assert code_is_original(target.process.pid, path)


def one_with_stacks(path: Path, target: OnDemand) -> None:
    with followed(InlineEngine(), job_for(path, STACKS, Scope(pid=target.process.pid))) as run:
        native = run.session.native  # type: ignore[attr-defined]
        assert isinstance(native, InlineHandlers)
        await_true(lambda: bool(native.jumps or native.refused), "a jump")
        target.say("call 3")
    assert run.hits == [3]


def one_of_a_command(path: Path, target: OnDemand) -> None:
    del target
    job = job_for(path, SOURCE, Scope(command=("/bin/sh", "-c", f"echo call 4 | {path} 1")))
    with attached(InlineEngine(), job) as session:
        (end,) = [event for event in session.poll() if isinstance(event, Finished)]
    assert [counts.hits for counts in end.counts] == [4]


ENDS = (
    one, one_that_nobody_follows, one_that_is_not_begun, one_without_a_process, one_that_is_replaced,
    one_that_cannot_replace, one_whose_events_are_left, one_with_stacks, one_of_a_command,
)  # fmt: skip


@pytest.mark.parametrize("run", ENDS, ids=lambda run: run.__name__)
def test_sessions_leave_nothing(path: Path, run: Callable[[Path, OnDemand], None]) -> None:
    threads = set(threading.enumerate())  # some may be of tests before this one
    with on_demand(path, 2) as target:
        for _ in range(2):
            run(path, target)
        before, mapped = descriptors(), mappings()
        for _ in range(CYCLES):
            run(path, target)
            assert threads.issuperset(threading.enumerate())
        assert descriptors() == before
        assert mappings() == mapped
        assert target.end() == 0
    assert not [thread for thread in {*threading.enumerate()} - threads if thread.name == "dprobes-life"]
