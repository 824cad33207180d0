"""Programs that take the place of others in a tracer: each hit is one of exactly one program."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Begun, Finished, Job, ProbeRemoval, Scope, Stop
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError, SourceError
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import Followed, compiled, job_for, on_demand
from integration.support import (
    TIMEOUT,
    await_line,
    await_true,
    code_is_original,
    is_traced,
    load_bias,
    memory_at,
    running,
    symbols_of,
)
from integration.test_returns import FUNCTIONS, KINDS, own_counts, program_of
from integration.test_stress import LIBRARY, SITES, Stress, report_of, source
from support.attachments import attach, attached, job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

REPLACEMENTS = int(os.environ.get("DPROBES_TORTURE_REPLACEMENTS", "1000"))


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


class Chain:
    """
    Enter sessions one after the other, each in the place of the one before, and follow each in a thread.

    ``hits`` are the sums of all programs' hits, by the files and written places of their probepoints.
    """

    def __init__(self, engine: PtraceEngine | None = None) -> None:
        self._engine = engine or PtraceEngine()
        self.last: Followed | None = None
        self._thread = threading.Thread()
        self.hits: Counter[tuple[str, str]] = Counter()

    def enter(self, job: Job) -> Followed:
        """Enter a session; its job says whose place it takes."""
        session = attach(self._engine, job)
        if self.last is not None:
            self._collect(self.last)
        following = self.last = Followed(session)
        self._thread = threading.Thread(target=following.follow)
        self._thread.start()
        return following

    def finish(self) -> None:
        """Stop the last session, and wait for its end."""
        assert self.last is not None
        self.last.session.change([Stop()])
        self._collect(self.last)
        self.close()

    def close(self) -> None:
        if self.last is not None:
            self.last.session.close()
            self.last = None

    def _collect(self, following: Followed) -> None:
        """Add up what a program that is over has counted; it must have said so, and given out all records."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        assert not following.failures
        assert following.finished is not None
        assert following.finished.counts == following.session.counts()
        assert [following.records.count(number) for number in range(len(following.hits))] == following.hits
        for probe, hits in zip(following.session.probes, following.hits, strict=True):
            self.hits[probe.path, probe.where] += hits


@pytest.fixture
def chain() -> Iterator[Chain]:
    chain = Chain()
    yield chain
    chain.close()


def await_active(following: Followed, *probes: int) -> None:
    await_true(lambda: set(probes) <= set(following.probes_in(ProbeState.ACTIVE)), f"the probepoints {probes}")


def both(number: int) -> str:
    return f"offset = stepped\nminor = {number}\nexit\noffset = emulated\nminor = {number}\nexit\n"


def test_the_new_program_goes_on_where_the_old_one_ends(path: Path, chain: Chain) -> None:
    with on_demand(path) as target, GlobalVariables(2) as variables:
        pid = target.process.pid
        scope = Scope(pid=pid)
        text = "vars = 1\ngvars = 2\noffset = stepped\nminor = {0}\ninc lv, 0\ninc gv, 1\nexit\noffset = {1}\nexit\n"
        old = chain.enter(job_for(path, text.format(1, "emulated"), scope, variables))
        await_active(old, 0, 1)
        target.say("call 5")
        new = chain.enter(job_for(path, text.format(2, "both"), scope, variables, replaces=old.session))
        await_true(lambda: old.finished is not None, "the end of the old program")
        await_active(new, 0, 1)
        await_true(lambda: new.events.count(Begun()) == 1, "the word that it has begun")
        assert old.finished == Finished(old.session.counts())
        assert old.hits == [5, 5]
        assert memory_at(pid, path, "emulated", 1) == b"\x55"
        assert memory_at(pid, path, "both", 1) == b"\xcc"
        # A hand that was too late, or does not know yet.
        old.session.change([ProbeRemoval([0])])
        old.session.change([Stop()])
        target.say("call 7")
        target.say("fork 2")
        await_true(lambda: new.hits == [9, 9], "the hits of the new program")
        assert new.session.local_variables() == [9]
        assert old.session.local_variables() == [5]
        assert list(variables.cells()) == [0, 14]
        new.session.change([ProbeRemoval([0])])
        await_true(lambda: new.probes_in(ProbeState.REMOVED) == [0], "the end of a probepoint")
        target.say("call 1")
        await_true(lambda: new.hits == [9, 10], "the last hit")
        chain.finish()
        assert old.hits == [5, 5]
        assert code_is_original(pid, path)
        assert target.end() == 0


def test_one_thread_may_do_all(path: Path) -> None:
    engine = PtraceEngine()
    with on_demand(path) as target:
        scope = Scope(pid=target.process.pid)
        with attached(engine, job_for(path, both(1), scope)) as old:
            events = old.poll()
            while not old.counts():
                next(events)
            with attached(engine, job_for(path, both(2), scope, replaces=old)) as new:
                assert isinstance(list(events)[-1], Finished)
                target.say("call 3")
                new.change([Stop()])
                assert list(new.poll())[-1] == Finished(new.counts())
                assert [counts.hits for counts in new.counts()] == [3, 3]
        assert [counts.hits for counts in old.counts()] == [0, 0]
        assert target.end() == 0


def test_a_program_that_cannot_be_inserted_leaves_the_old_one(path: Path, chain: Chain) -> None:
    with on_demand(path) as target, GlobalVariables(1) as variables:
        pid = target.process.pid
        scope = Scope(pid=pid)
        old = chain.enter(job_for(path, both(1), scope))
        await_active(old, 0, 1)
        target.say("call 2")

        def refused(job: Job) -> str:
            with pytest.raises((EngineError, SourceError)) as caught, attached(PtraceEngine(), job):
                pass
            return caught.value.message

        wrong = job_of(compiled(f'name = "{path}"\noffset = missing\nexit\n'), scope, replaces=old.session)
        assert f"'{path}' has no symbol 'missing'" in refused(wrong)
        shared = job_for(path, both(2), scope, variables, replaces=old.session)
        assert refused(shared) == "a program shares its global variables with the one whose place it takes"
        idle = PtraceEngine().session(job_for(path, both(2), scope))
        lonely = job_for(path, both(2), scope, replaces=idle)
        assert refused(lonely) == "the program that is to be replaced is not running"
        place = symbol_address(pid, path, "both")
        write(pid, place, b"\xcc")
        patched = job_for(path, "offset = both\nexit\n", scope, replaces=old.session)
        assert patched.resolved is not None
        where = f"offset {patched.resolved.in_code[0].offset:#x} of '{path}'"
        assert refused(patched) == (
            f"CONFLICT in process {pid}: a breakpoint of another tool is at {where}; the old program continues"
        )
        write(pid, place, b"\x55")
        target.say("call 3")
        await_true(lambda: old.hits == [5, 5], "the hits of the old program")
        assert old.finished is None
        # What was refused once is taken when there is nothing against it any more.
        new = chain.enter(job_for(path, "offset = both\nexit\n", scope, replaces=old.session))
        await_active(new, 0)
        target.say("call 4")
        await_true(lambda: new.hits == [4], "the hits of the new program")
        chain.finish()
        assert refused(job_for(path, both(3), scope, replaces=new.session)) == (
            "the program that is to be replaced has ended"
        )
        assert target.end() == 0


def test_a_program_of_which_nothing_can_be_inserted_leaves_the_old_one(path: Path, chain: Chain) -> None:
    mismatch = "offset = {}\nopcode = 0x0f\nminor = {}\nexit\n\n"
    with on_demand(path) as target:
        scope = Scope(pid=target.process.pid)
        old = chain.enter(job_for(path, both(1), scope))
        await_active(old, 0, 1)
        nothing = mismatch.format("both", 1) + mismatch.format("emulated", 2)
        with (
            pytest.raises(EngineError) as caught,
            attached(PtraceEngine(), job_for(path, nothing, scope, replaces=old.session)),
        ):
            pass
        assert caught.value.message == (
            "no probepoint of the new program can be inserted; the old program continues: MISMATCH at both"
        )
        target.say("call 3")
        await_true(lambda: old.hits == [3, 3], "the hits of the old program")
        assert old.finished is None
        partly = mismatch.format("emulated", 2) + "offset = both\nminor = 3\nexit\n"
        new = chain.enter(job_for(path, partly, scope, replaces=old.session))
        await_active(new, 1)
        target.say("call 4")
        await_true(lambda: new.hits == [0, 4], "the hits of the new program")
        chain.finish()
        assert target.end() == 0


def symbol_address(pid: int, path: Path, symbol: str) -> int:
    return load_bias(pid, path) + symbols_of(path)[symbol]


def write(pid: int, address: int, data: bytes) -> None:
    descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    os.pwrite(descriptor, data, address)
    os.close(descriptor)


@pytest.mark.parametrize("count", [30, pytest.param(REPLACEMENTS, marks=pytest.mark.torture)], ids=["some", "many"])
def test_no_hit_of_hot_threads_is_lost_or_counted_twice(path: Path, chain: Chain, count: int) -> None:
    dice = random.Random(count)
    with on_demand(path, 4) as target:
        scope = Scope(pid=target.process.pid)
        last = chain.enter(job_for(path, both(0), scope))
        await_active(last, 0, 1)
        target.say("start")
        for number in range(1, count + 1):
            goal = sum(last.hits) + dice.randrange(100)
            await_hits(last, goal)
            text = both(number) + ("offset = both\nexit\n" if number % 2 else "")
            last = chain.enter(job_for(path, text, scope, replaces=last.session))
        calls = target.say("stop")
        chain.finish()
        hits = {where: hits for (_, where), hits in chain.hits.items()}
        assert (hits["stepped"], hits["emulated"]) == (calls, calls)
        assert 0 < hits["both"] <= calls
        assert code_is_original(target.process.pid, path)
        assert target.end() == 0


def await_hits(following: Followed, goal: int) -> None:
    await_true(
        lambda: sum(following.hits) >= goal or following.finished is not None or bool(following.failures),
        f"{goal} hits",
        TIMEOUT,
    )


def test_returns_of_functions_that_were_entered_before_are_hits_of_the_new_program(
    build: Builder, chain: Chain
) -> None:
    path = build("ondemand.c", "-pthread")
    with on_demand(path, 3) as target:
        scope = Scope(pid=target.process.pid)
        text = "offset = stepped\nreturn = yes\nexit\noffset = both\nreturn = yes\nexit\n"
        last = chain.enter(job_for(path, text, scope))
        await_active(last, 0, 1)
        target.say("start")
        for _ in range(10):
            await_hits(last, sum(last.hits) + 50)
            last = chain.enter(job_for(path, text, scope, replaces=last.session))
        calls = target.say("stop")
        chain.finish()
        assert set(chain.hits.values()) == {calls}
        assert target.end() == 0


@pytest.mark.parametrize("kind", ["O1", "O2"])
def test_tail_called_functions_return_into_the_new_program(
    build: Builder, chain: Chain, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = build("returns.c", *KINDS[kind])
    scope = Scope(command=(str(path), "4", "800"))
    text = program_of(path.name, FUNCTIONS)
    last = chain.enter(job_of(compiled(text), scope))
    replacements = 0
    while last.finished is None:
        await_hits(last, sum(last.hits) + 100)
        with contextlib.suppress(EngineError):  # that it has ended meanwhile
            last = chain.enter(job_of(compiled(text), scope, replaces=last.session))
            replacements += 1
    chain.finish()
    assert replacements >= 3
    expected = {name: count for name, (count, _) in own_counts(capfd.readouterr().out).items()}
    expected["structure_tail"] = expected.pop("structure")
    assert {where: hits for (_, where), hits in chain.hits.items()} == expected


def test_watchpoints_are_passed_on(path: Path, chain: Chain, debug_registers: None) -> None:
    with on_demand(path, 2) as target:
        scope = Scope(pid=target.process.pid)
        text = "address = bias\nwatchpoint = rw\nminor = {0}\nexit\noffset = stepped\nexit\n"
        last = chain.enter(job_for(path, text.format(0), scope))
        await_active(last, 0, 1)
        target.say("start")
        for number in range(1, 11):
            await_hits(last, sum(last.hits) + 50)
            last = chain.enter(job_for(path, text.format(number), scope, replaces=last.session))
        await_active(last, 0, 1)
        calls = target.say("stop")
        only = chain.enter(job_for(path, "offset = emulated\nexit\n", scope, replaces=last.session))
        await_active(only, 0)
        more = target.say("call 3") - calls
        chain.finish()
        assert only.hits == [more]
        assert set(chain.hits.values()) == {calls, more}
        assert target.end() == 0


FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from dprobes.engines.engine_interface import Begun, Scope
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from support.attachments import attach
from integration.ebpf.insessions import job_for

path, scope = Path(sys.argv[2]), Scope(pid=int(sys.argv[3]))
session = None
for number in range(1000000):
    other = ("emulated", "both")[number % 2]
    text = f"offset = stepped\\nexit\\noffset = {other}\\nexit\\n"
    session = attach(PtraceEngine(), job_for(path, text, scope, replaces=session))
    for event in session.poll():
        if isinstance(event, Begun):
            break
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_client_that_is_killed_among_replacements_leaves_nothing_behind(path: Path, seed: int) -> None:
    dice = random.Random(seed)
    tests = Path(__file__).parents[1]
    with on_demand(path, 3) as target:
        target.say("start")
        pid = target.process.pid
        with running(sys.executable, "-c", FOR_EVER, tests, path, pid) as client:
            for number in range(dice.randrange(3, 10)):
                assert await_line(client, TIMEOUT) == f"{number}\n"
            time.sleep(dice.random() / 50)
            client.kill()
        await_true(lambda: not is_traced(pid), "the end of the tracer")
        assert code_is_original(pid, path)
        assert target.say("stop") > 0
        assert target.end() == 0


@pytest.fixture(scope="module")
def stress(build: Builder) -> Stress:
    linked = build("stress_sites.c", "-shared", "-fPIC", name=LIBRARY)
    copy = build("stress_sites.c", "-shared", "-fPIC", "-DCOPY", name=LIBRARY)
    return Stress(build("stress.c", str(linked), f"-Wl,-rpath,{linked.parent}", "-ldl"), linked, copy)


def check_replacements(stress: Stress, chain: Chain, seed: int, rounds: int, output: Callable[[], str]) -> None:
    """Replace a program at random moments while the stress program runs, and compare all hits with its own counts."""
    command = stress.command(seed, rounds)
    unprobed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    dice = random.Random(seed)
    last = chain.enter(job_of(compiled(source()), Scope(command=tuple(command))))
    replacements = 0
    while last.finished is None:
        await_hits(last, sum(last.hits) + dice.randrange(150))
        job = job_of(compiled(source()), Scope(command=tuple(command)), replaces=last.session)
        with contextlib.suppress(EngineError):  # that it has ended meanwhile
            last = chain.enter(job)
            replacements += 1
    await_true(lambda: last.finished is not None, "the end", TIMEOUT)
    chain.finish()
    assert replacements >= 3
    assert last.finished is not None
    assert last.finished.exit_status == 0
    report = report_of(stress, output())
    assert report.checksum == report_of(stress, unprobed.stdout).checksum
    for (file, where), hits in chain.hits.items():
        assert hits == report.calls[SITES.index(where.removeprefix("stress_")), file]


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 150), (2, 150), *(pytest.param(n, 3000, marks=pytest.mark.torture) for n in range(3, 9))]
)
def test_no_hit_is_lost_as_threads_processes_and_libraries_come_and_go(
    stress: Stress, chain: Chain, seed: int, rounds: int, capfd: pytest.CaptureFixture[str]
) -> None:
    check_replacements(stress, chain, seed, rounds, lambda: capfd.readouterr().out)
    assert len(chain.hits) == 2 * len(SITES)
