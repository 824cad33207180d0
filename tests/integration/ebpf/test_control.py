"""What other threads may do with a session while one iterates over its events."""

from __future__ import annotations

import contextlib
import itertools
import resource
import shutil
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.ebpf.read.ebpf_session import EbpfSession
from dprobes.engines.engine_interface import Counts, Finished, ProbeRemoval, Scope, StateEvent, Stop
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError
from dprobes.formatters.table_addresses import names_for
from dprobes.keyed.table_layout import row_parts
from dprobes.record.record_origin import RecordSource
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.process_images import ProcessImages
from integration.ebpf.insessions import THREE, followed, job_for, on_demand
from integration.ebpf.kernel import descriptors, require_bpf, require_initial_namespace
from integration.support import await_true, memory_at
from support.attachments import attach, attached

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


def test_counts_and_variables_can_be_read_at_any_time(path: Path) -> None:
    with on_demand(path) as target:
        job = job_for(path, THREE, Scope(pid=target.process.pid))
        session = EbpfSession(EbpfEngine()._settings, job)
        assert session.counts() == ()
        assert (session.local_variables(), session.cpu_variables()) == ([], [])
        session.begin()
        with contextlib.closing(session):
            # Nobody polls yet.
            target.say("call 5")
            assert [counts.hits for counts in session.counts()] == [5, 5, 1]
            assert [counts.records for counts in session.counts()] == [5, 5, 1]
            assert session.local_variables() == [0, 5]
            cpus = session.cpu_variables()
            assert [sum(column) for column in zip(*cpus, strict=True)] == [0, 0, 5]
            session.reset_variables()
            assert session.local_variables() == [0, 0]
            assert session.cpu_variables() == [[0, 0, 0]] * len(cpus)
            target.say("call 7")
        assert [counts.hits for counts in session.counts()] == [12, 12, 1]
        assert session.local_variables() == [0, 7]
        assert sum(map(sum, session.cpu_variables())) == 7
        session.reset_variables(0, 0)
        assert session.local_variables() == [0, 7]
        assert sum(map(sum, session.cpu_variables())) == 7
        session.reset_variables()
        assert session.local_variables() == [0, 0]
        assert session.cpu_variables() == [[0, 0, 0]] * len(cpus)
        session.remove([0])
        session.stop()
        assert target.end() == 0


def test_tables_are_read_with_what_has_the_addresses_in_them(path: Path) -> None:
    """Else an address would be that of the program which the process executed before."""
    images = ProcessImages()
    source = "table = where, count, address\noffset = both\npush r, rip\ntally where\nexit\n"
    with attached(EbpfEngine(), job_for(path, source)._replace(images=images)) as session, on_demand(path) as target:
        # Nobody iterates over the events.
        target.say("call 1")
        (table,) = session.tables()
        ((address, *_),) = [row_parts(table.table, row.key, row.cells) for row in table.rows]
        assert isinstance(address, int)
        assert target.process.pid in [pid for pid, _ in images.code_at(address)]
        assert target.end() == 0


def test_no_other_process_names_the_addresses_in_tables(build: Builder, tmp_path: Path) -> None:
    """Programs that are not relocated have their code at the same addresses."""
    path, other = build("ondemand.c", "-pthread", "-no-pie"), tmp_path / "other"
    shutil.copy(path, other)
    images = ProcessImages()
    source = "table = where, count, address\noffset = both\npush r, rip\ntally where\nexit\n"
    with on_demand(path) as target:
        job = job_for(path, source, Scope(pid=target.process.pid))._replace(images=images)
        with attached(EbpfEngine(), job) as session, on_demand(other) as outsider:
            target.say("call 1")
            (table,) = session.tables()
            names = names_for(RecordSource(1, "both", images=images), [table.table])
            ((address, *_),) = [row_parts(table.table, row.key, row.cells) for row in table.rows]
            assert isinstance(address, int)
            assert names.name_of(address, None) == f"both [{path.name}]"
            assert outsider.end() == 0
        assert target.end() == 0


@pytest.mark.parametrize(
    ("ending", "state"), [("maxhits = 2\nexit", ProbeState.DISABLED), ("remove", ProbeState.REMOVED)]
)
def test_what_ended_a_probepoint_just_before_the_end_is_said(path: Path, ending: str, state: ProbeState) -> None:
    with on_demand(path) as target:
        job = job_for(path, f"offset = both\nminor = 1\n{ending}\n", Scope(pid=target.process.pid))
        with attached(EbpfEngine(), job) as session:
            target.say("call 5")
            session.change([Stop()])  # before an event has reported the end of the probepoint
            events = list(session.poll())
        said = [event for event in events if isinstance(event, StateEvent)]
        assert said[-1] == StateEvent((0,), target.process.pid, state)
        assert target.end() == 0


def test_the_counts_at_the_end_stay(path: Path) -> None:
    with on_demand(path) as target, followed(EbpfEngine(), job_for(path, THREE)) as following:
        target.say("call 3")
        following.session.change([Stop()])
        await_true(lambda: following.finished is not None, "the end")
        assert following.finished == Finished(following.session.counts())
        assert following.session.counts() == (
            Counts(hits=3, records=3, executed=("single-stepped",)),
            Counts(hits=3, records=3, executed=("emulated",)),
            Counts(hits=1, records=1, executed=("emulated",)),
        )


def test_threads_read_while_hits_come_and_the_session_ends(path: Path) -> None:
    with on_demand(path, 2) as target:
        failures: list[BaseException] = []
        over = threading.Event()

        def read() -> None:
            last = 0
            try:
                while not over.is_set():
                    hits = session.counts()[1].hits
                    assert hits >= last
                    last = hits
                    assert len(session.local_variables()) == 2
                    session.cpu_variables()
            except BaseException as error:
                failures.append(error)
                raise

        with followed(EbpfEngine(), job_for(path, THREE, Scope(pid=target.process.pid))) as following:
            session = following.session
            readers = [threading.Thread(target=read) for _ in range(2)]
            for reader in readers:
                reader.start()
            target.say("start")
            await_true(lambda: following.hits[1] > 1000, "a thousand hits")
            calls = target.say("stop")
        over.set()
        for reader in readers:
            reader.join()
        assert failures == []
        assert following.hits == [calls, calls, 1]
        assert following.records.count(0) == calls
        assert target.end() == 0


@pytest.mark.parametrize("is_old", [False, True], ids=["uprobe_multi", "perf events"])
def test_probepoints_are_removed_and_the_others_stay(path: Path, is_old: bool) -> None:
    overrides = {Feature.UPROBE_MULTI: False, Feature.UPROBE_MULTI_PROCESS: False} if is_old else {}
    engine = EbpfEngine(features=Features(overrides=overrides))
    with on_demand(path) as target, followed(engine, job_for(path, THREE)) as following:
        pid = target.process.pid
        target.say("call 2")
        following.session.change([ProbeRemoval([1])])
        await_true(lambda: sorted(following.probes_in(ProbeState.REMOVED)) == [1, 2], "the end of a probepoint")
        assert StateEvent((1,), 0, ProbeState.REMOVED) in following.events
        await_true(lambda: memory_at(pid, path, "emulated", 1) == b"\x55", "the original instruction")
        assert memory_at(pid, path, "stepped", 1) == b"\xcc"
        target.say("call 4")
        assert following.hits == [6, 2, 1]
        # What has gone already is nothing to report again, not even together with what is there still.
        following.session.change([ProbeRemoval([1, 2])])
        following.session.change([ProbeRemoval([2, 0, 0])])
        await_true(lambda: sorted(following.probes_in(ProbeState.REMOVED)) == [0, 1, 2], "the end of the other one")
        await_true(lambda: memory_at(pid, path, "stepped", 1) != b"\xcc", "the original instruction")
        target.say("call 8")
        assert following.hits == [6, 2, 1]
        assert following.finished is None
        assert target.end() == 0


def test_a_probepoint_can_be_removed_from_a_pattern_under_load(path: Path) -> None:
    threads = 2
    with on_demand(path, threads) as target:
        text = "offset = *ed\nminor = 4\nexit\noffset = both\nminor = 5\nexit\n"
        with followed(EbpfEngine(), job_for(path, text, Scope(pid=target.process.pid))) as following:
            target.say("start")
            await_true(lambda: min(following.hits) > 1000, "a thousand hits")
            names = [probe.where for probe in following.session.probes]
            gone = 0
            following.session.change([ProbeRemoval([gone])])
            await_true(lambda: following.probes_in(ProbeState.REMOVED) == [gone], "the end of a probepoint")
            reached = following.hits
            await_true(lambda: following.hits[1] > reached[1] + 1000, "more hits")
            calls = target.say("stop")
        assert following.hits[gone] < calls
        others = [hits for number, hits in enumerate(following.hits) if number != gone]
        assert len(others) == len(names) - 1
        # Threads may have been between the old link and the new one.
        assert all(calls - threads <= hits <= calls for hits in others)
        assert target.end() == 0


def test_a_number_that_no_probepoint_has_is_refused(path: Path) -> None:
    with attached(EbpfEngine(), job_for(path, THREE)) as session:
        with pytest.raises(IndexError) as caught:
            session.change([ProbeRemoval([0, 3])])
        assert str(caught.value) == "there is no probepoint 3: they are 0 to 2"


NEIGHBOUR = """gvars = 1
vars = 1
offset = {name}
push gv, 0
pop lv, 0
inc gv, 0
exit
"""


@pytest.mark.parametrize("name", ["stepped", "emulated"])
def test_two_sessions_at_one_place_both_have_every_hit(path: Path, name: str) -> None:
    engine = EbpfEngine()
    with GlobalVariables(1) as variables, on_demand(path, 2) as target:
        job = job_for(path, NEIGHBOUR.format(name=name), variables=variables)
        with followed(engine, job) as first:
            target.say("call 3")
            with followed(engine, job) as second:
                target.say("call 4")
                # The newer one comes first: what the older one sees is odd.
                assert (first.session.local_variables(), second.session.local_variables()) == ([10], [9])
                target.say("start")
                await_true(lambda: min(second.hits) > 1000, "a thousand hits")
                calls = target.say("stop")
            assert (first.hits, second.hits) == ([calls], [calls - 3])
            target.say("call 5")
            assert (first.hits, second.hits) == ([calls + 5], [calls - 3])
        assert (len(first.records), len(second.records)) == (calls + 5, calls - 3)
        assert target.end() == 0


def test_sessions_in_many_threads_share_an_engine(path: Path) -> None:
    """The scope asks for types of the kernel, which whoever ends first closes."""
    engine = EbpfEngine()
    failures: list[BaseException] = []
    totals = [0] * 6

    def insert_again_and_again(number: int) -> None:
        try:
            with on_demand(path) as target:
                for turn in range(1, 6):
                    with followed(engine, job_for(path, THREE, Scope(pid=target.process.pid))) as following:
                        target.say(f"call {turn}")
                    totals[number] += following.hits[0]
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=insert_again_and_again, args=(number,)) for number in range(len(totals))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert totals == [15] * len(totals)


@pytest.mark.parametrize("room", [4, 16, 17])
def test_too_many_descriptors_are_an_error_that_leaves_nothing(build: Builder, room: int) -> None:
    """The limit is met by a map, or by a program or a link that some of a hundred probe definitions share."""
    many = build("many.c")
    text = "".join(f"offset = many_{n}\nminor = {n + 1}\nexit\n" for n in range(100))
    engine, job = EbpfEngine(), job_for(many, text)
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(each.split()[0]) for each in before}
    free = (number for number in range(hard) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, room, None)), hard))
    try:
        with pytest.raises(EngineError) as caught:
            attach(engine, job)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.message.endswith(": too many open files")
    assert (
        caught.value.hint
        == "maps, handlers and links take a descriptor each: raise the limit of open files (ulimit -n)"
    )
    assert descriptors() == before


def test_the_watch_on_faults_ends_with_the_session(build: Builder) -> None:
    engine, job = EbpfEngine(), job_for(build("jumps.c"), "offset = at_load\nminor = 1\nexit\n")
    for _ in range(2):  # the first time the engine keeps what it learns
        before = descriptors()
        with attached(engine, job) as session:
            assert session.probes
    assert descriptors() == before
