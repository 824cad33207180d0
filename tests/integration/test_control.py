"""What other threads may do with a session of the ptrace engine while one iterates over its events."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Counts, Finished, ProbeRemoval, Scope, StateEvent, Stop, VariableReset
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import THREE, compiled, followed, job_for, on_demand
from integration.support import TIMEOUT, await_traced, await_true, code_is_original, memory_at
from integration.test_stress import LIBRARY, SITES, Stress, report_of, source
from support.attachments import attached, job_of

if TYPE_CHECKING:
    from pathlib import Path

    from integration.ebpf.insessions import Followed
    from integration.support import Builder


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


@pytest.fixture(scope="module")
def stress(build: Builder) -> Stress:
    linked = build("stress_sites.c", "-shared", "-fPIC", name=LIBRARY)
    copy = build("stress_sites.c", "-shared", "-fPIC", "-DCOPY", name=LIBRARY)
    return Stress(build("stress.c", str(linked), f"-Wl,-rpath,{linked.parent}", "-ldl"), linked, copy)


def await_more_hits(following: Followed, count: int = 500) -> None:
    goal = sum(following.hits) + count
    await_true(lambda: sum(following.hits) >= goal or following.finished is not None, f"{count} hits", TIMEOUT)


def await_state(following: Followed, probe: int, state: ProbeState) -> None:
    await_true(lambda: probe in following.probes_in(state), f"{state.value} of {probe}")


def test_counts_and_variables_can_be_read_at_any_time(path: Path) -> None:
    with on_demand(path) as target:
        assert PtraceEngine().session(job_for(path, THREE)).counts() == ()
        with followed(PtraceEngine(), job_for(path, THREE, Scope(pid=target.process.pid))) as following:
            session = following.session
            await_true(lambda: following.probes_in(ProbeState.ACTIVE) == [0, 1, 2], "the probepoints")
            target.say("call 5")
            await_true(lambda: session.counts()[2].hits == 1, "the last hit")
            assert [counts.hits for counts in session.counts()] == [5, 5, 1]
            assert session.local_variables() == [0, 5]
            cpus = session.cpu_variables()
            assert [sum(column) for column in zip(*cpus, strict=True)] == [0, 0, 5]
            session.change([VariableReset()])
            assert session.local_variables() == [0, 0]
            assert session.cpu_variables() == [[0, 0, 0]] * len(cpus)
            target.say("call 7")
            assert session.local_variables() == [0, 7]
            assert sum(map(sum, session.cpu_variables())) == 7
        # The end changes nothing of that.
        assert following.finished == Finished(session.counts())
        assert session.counts() == (
            Counts(hits=12, records=12, executed=("in a page",)),
            Counts(hits=12, records=12, executed=("emulated",)),
            Counts(hits=1, records=1, executed=("emulated",)),
        )
        assert session.local_variables() == [0, 7]
        session.change([VariableReset()])
        assert session.local_variables() == [0, 0]
        session.change([ProbeRemoval([0])])
        session.change([Stop()])
        assert target.end() == 0


def test_threads_read_and_reset_while_hits_come_and_the_session_ends(path: Path) -> None:
    with on_demand(path, 2) as target:
        failures: list[BaseException] = []
        over = threading.Event()

        def look() -> None:
            last = 0
            try:
                while not over.is_set():
                    counts = session.counts()
                    hits = counts[0].hits if counts else 0
                    assert hits >= last
                    last = hits
                    assert session.local_variables()[1] <= session.counts()[0].hits + 1 if counts else True
                    session.change([VariableReset()])
                    session.cpu_variables()
                    over.wait(0.001)
            except BaseException as error:
                failures.append(error)
                raise

        with followed(PtraceEngine(), job_for(path, THREE, Scope(pid=target.process.pid))) as following:
            session = following.session
            await_true(lambda: following.probes_in(ProbeState.ACTIVE) == [0, 1, 2], "the probepoints")
            lookers = [threading.Thread(target=look) for _ in range(2)]
            for looker in lookers:
                looker.start()
            target.say("start")
            await_true(lambda: following.hits[1] > 1000, "a thousand hits")
            calls = target.say("stop")
            session.change([VariableReset()])
            target.say("call 3")
        over.set()
        for looker in lookers:
            looker.join()
        assert failures == []
        assert session.local_variables()[1] <= 3
        assert following.hits == [calls + 3, calls + 3, 1]
        assert following.records.count(0) == calls + 3
        assert target.end() == 0


def test_probepoints_are_removed_and_the_others_stay(path: Path) -> None:
    with on_demand(path) as target:
        with followed(PtraceEngine(), job_for(path, THREE, Scope(pid=target.process.pid))) as following:
            pid = target.process.pid
            await_true(lambda: following.probes_in(ProbeState.ACTIVE) == [0, 1, 2], "the probepoints")
            target.say("call 2")
            target.say("fork 3")
            following.session.change([ProbeRemoval([1])])
            await_true(lambda: following.probes_in(ProbeState.REMOVED) == [2, 1], "the end of a probepoint")
            assert StateEvent((1,), 0, ProbeState.REMOVED) in following.events
            assert memory_at(pid, path, "emulated", 1) == b"\x55"
            assert memory_at(pid, path, "stepped", 1) == b"\xcc"
            target.say("call 4")
            target.say("fork 5")
            assert following.hits[:2] == [14, 5]
            # What has gone already is nothing to report again, not even together with what is there still.
            following.session.change([ProbeRemoval([1, 2])])
            following.session.change([ProbeRemoval([2, 0, 0])])
            await_true(lambda: following.probes_in(ProbeState.REMOVED) == [2, 1, 0], "the end of the other one")
            assert code_is_original(pid, path)
            target.say("call 8")
            target.say("fork 9")
            assert following.hits == [14, 5, 1]
            assert following.finished is None
        assert following.records.count(0) == 14
        assert following.records.count(1) == 5
        assert target.end() == 0


def test_probepoints_are_removed_from_hot_threads(path: Path) -> None:
    with on_demand(path, 4) as target:
        text = "offset = *ed\nminor = 4\nexit\noffset = both\nminor = 5\nexit\n"
        with followed(PtraceEngine(), job_for(path, text, Scope(pid=target.process.pid))) as following:
            await_true(lambda: len(following.probes_in(ProbeState.ACTIVE)) == 3, "the probepoints")
            names = [probe.where for probe in following.session.probes]
            target.say("start")
            for gone in (names.index("stepped"), names.index("emulated")):
                await_more_hits(following)
                following.session.change([ProbeRemoval([gone])])
                await_state(following, gone, ProbeState.REMOVED)
                reached = following.hits[gone]
                await_more_hits(following)
                # Each thread may have been about to execute the instruction of its last hit.
                assert following.hits[gone] <= reached + 4
            calls = target.say("stop")
        assert following.hits[2] == calls
        assert [following.records.count(number) for number in range(3)] == following.hits
        assert all(hits < calls for hits in following.hits[:2])
        assert code_is_original(target.process.pid, path)
        assert target.end() == 0


def test_what_was_removed_is_in_no_program_that_is_started_later(build: Builder) -> None:
    loop = build("hotloop.c")
    shell = subprocess.Popen(
        ["sh", "-c", f"echo ready; while read count; do {loop} $count; done"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdin is not None
    assert shell.stdout is not None

    def call(count: int) -> None:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f"{count}\n")
        shell.stdin.flush()
        assert int(shell.stdout.readline()) == count * (count - 1) // 2

    assert shell.stdout.readline() == "ready\n"
    text = "offset = tick\nminor = 1\nexit\noffset = main\nminor = 2\nexit\n"
    with followed(PtraceEngine(), job_for(loop, text, Scope(pid=shell.pid))) as following:
        await_traced(shell.pid)
        call(5)
        following.session.change([ProbeRemoval([0])])
        await_true(lambda: following.probes_in(ProbeState.REMOVED) == [0], "the end of the probepoint")
        call(6)
        call(7)
        await_true(lambda: following.hits == [5, 3], "the starts")
        shell.stdin.close()
        assert shell.wait(TIMEOUT) == 0
        shell.stdout.close()
        await_true(lambda: following.finished is not None, "the end")
    assert following.hits == [5, 3]


def test_a_watchpoint_is_removed(build: Builder, debug_registers: None) -> None:
    path = build("ondemand.c", "-pthread")
    with on_demand(path) as target:
        text = "address = bias\nwatchpoint = rw\nminor = 1\nexit\noffset = emulated\nexit\n"
        with followed(PtraceEngine(), job_for(path, text, Scope(pid=target.process.pid))) as following:
            await_true(lambda: sorted(following.probes_in(ProbeState.ACTIVE)) == [0, 1], "the probepoints")
            watched = [probe.where for probe in following.session.probes].index("bias")
            target.say("call 4")
            assert following.hits == [4, 4]
            following.session.change([ProbeRemoval([watched])])
            await_true(lambda: following.probes_in(ProbeState.REMOVED) == [watched], "the end of the watchpoint")
            target.say("call 6")
            target.say("fork 2")
            await_true(lambda: following.hits[1 - watched] == 12, "the other hits")
            assert following.hits[watched] == 4
        assert target.end() == 0


def test_a_number_that_no_probepoint_has_is_refused(path: Path) -> None:
    with on_demand(path) as target:
        with followed(PtraceEngine(), job_for(path, THREE, Scope(pid=target.process.pid))) as following:
            await_state(following, 0, ProbeState.ACTIVE)
            with pytest.raises(IndexError) as caught:
                following.session.change([ProbeRemoval([0, 3])])
            assert str(caught.value) == "there is no probepoint 3: they are 0 to 2"
            target.say("call 1")
            assert following.hits[0] == 1
        assert target.end() == 0


def test_a_process_that_a_stranger_follows_is_refused_with_what_to_do(path: Path) -> None:
    with on_demand(path) as target:
        pid = target.process.pid
        with followed(PtraceEngine(), job_for(path, THREE, Scope(pid=pid))) as following:
            await_state(following, 0, ProbeState.ACTIVE)
            for _ in range(2):
                with attached(PtraceEngine(), job_for(path, THREE, Scope(pid=pid))) as second:
                    with pytest.raises(EngineError) as caught:
                        list(second.poll())
                    assert caught.value.message == (
                        f"process {pid} (ondemand) is already traced by the dprobes of process {os.getpid()}, "
                        f"which began with a program for '{path}'"
                    )
                    assert caught.value.hint == (
                        "a process has one tracer: insert all programs with 'dprobes insert', which lets them share "
                        "it, or use --engine ebpf"
                    )
            target.say("call 3")
            assert following.hits[:2] == [3, 3]
        assert target.end() == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_removals_from_threads_processes_and_libraries_that_come_and_go(
    stress: Stress, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    command = stress.command(seed, rounds=60)
    unprobed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    dice = random.Random(seed)
    job = job_of(compiled(source()), Scope(command=tuple(command)))
    with followed(PtraceEngine(), job) as following:
        unwanted = dice.sample(range(len(SITES)), 4)
        for number in unwanted:
            goal = dice.randrange(200)
            await_more_hits(following, goal)
            found = [probe for probe, place in enumerate(following.session.probes) if place.number == number]
            following.session.change([ProbeRemoval(found)])
        await_true(lambda: following.finished is not None, "the end", TIMEOUT)
    assert following.finished is not None
    assert following.finished.exit_status == 0
    report = report_of(stress, capfd.readouterr().out)
    assert report.checksum == report_of(stress, unprobed.stdout).checksum
    for probe, place in enumerate(following.session.probes):
        hits, calls = following.hits[probe], report.calls[place.number, place.path]
        assert calls
        assert following.records.count(probe) == hits
        assert hits <= calls if place.number in unwanted else hits == calls
