"""A program takes the place of another one under load: each hit is one of exactly one of them."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.ebpf.read import session_switchover
from dprobes.engines.ebpf.read.ebpf_session import EbpfSession
from dprobes.engines.ebpf.read.session_switchover import runs_newest_first
from dprobes.engines.engine_interface import Finished, Notice, Scope, Stop
from dprobes.engines.overload_guard import UNLIMITED
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.errors import EngineError, NotSupportedError
from dprobes.resolve.probepoints import ProbeState
from integration.ebpf.insessions import Followed, followed, job_for, on_demand
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_true, code_is_original, running
from support.attachments import attach

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Attachment
    from integration.ebpf.insessions import OnDemand
    from integration.support import Builder


COUNTING = """inc gv, 0
push r, {register}
push 0x3f
and
jnz silent
inc gv, 1
exit
silent:
abort
"""
"""One hit in 64 emits a record: no reader could take as many as there are hits."""

NAMES = ("stepped", "emulated", "both")
THREE = "gvars = 2\n" + "".join(
    f"offset = {name}\nminor = {n}\n{COUNTING.format(register='edi')}" for n, name in enumerate(NAMES)
)
PATTERN = "gvars = 2\n" + "".join(
    f"offset = {place}\n{COUNTING.format(register='edi')}" for place in ("*ed", "both\nminor = 2")
)
RETURNS = "gvars = 2\n" + "".join(
    f"offset = {name}\nreturn = yes\nminor = {n}\n{COUNTING.format(register='eax')}" for n, name in enumerate(NAMES)
)


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


def engine_with(features: Features | None = None) -> EbpfEngine:
    # All hits count that a program can make in a loop.
    return EbpfEngine(replaceable=True, features=features, overhead=UNLIMITED)


OLD = {Feature.UPROBE_MULTI: False, Feature.UPROBE_MULTI_PROCESS: False}


def hits_by_name(following: Followed) -> dict[str, int]:
    counts = zip(following.session.probes, following.hits, strict=True)
    return {probe.where.partition("+")[0]: hits for probe, hits in counts}


class Generations:
    """Programs that take each other's place; each is followed by a thread of its own until its end."""

    def __init__(self, engine: EbpfEngine, path: Path, variables: GlobalVariables) -> None:
        self._engine = engine
        self._path = path
        self._variables = variables
        self._stack = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []
        self.all: list[Followed] = []

    def insert(self, text: str) -> Followed:
        old = self.all[-1].session if self.all else None
        session = attach(self._engine, job_for(self._path, text, variables=self._variables, replaces=old))
        following = Followed(session)
        thread = threading.Thread(target=following.follow)
        thread.start()
        self.all.append(following)
        self._threads.append(thread)
        if old is not None:
            self._threads[-2].join(TIMEOUT)
            assert self.all[-2].finished == Finished(old.counts())
            old.close()
        return following

    def close(self) -> None:
        for following, thread in zip(self.all, self._threads, strict=True):
            following.session.change([Stop()])
            thread.join(TIMEOUT)
            assert not thread.is_alive()
            assert following.failures == []
        if self.all:
            self.all[-1].session.close()


def replaced(
    engine: EbpfEngine, path: Path, target: OnDemand, strings: Sequence[str], count: int
) -> tuple[int, list[Followed], list[int]]:
    """Replace programs while threads call functions; return the calls, the programs, and the global variables."""
    with GlobalVariables(2) as variables, contextlib.closing(Generations(engine, path, variables)) as generations:
        generations.insert(strings[0])
        before = target.say("call 0")
        target.say("start")
        for number in range(1, count + 1):
            generations.insert(strings[number % len(strings)])
        calls = target.say("stop") - before
        last = generations.all[-1]
        cells = variables.cells()
        counted = list(cells)
        cells.close()
        before_last = sum(len(each.records) for each in generations.all[:-1])
        await_true(lambda: before_last + len(last.records) >= counted[1], "the last records")
    return calls, generations.all, counted


def check_counts(calls: int, generations: Sequence[Followed], counted: Sequence[int]) -> None:
    """Check that each call is a hit of exactly one program, and each hit one record and one change of a variable."""
    for name in NAMES:
        assert sum(hits_by_name(each)[name] for each in generations) == calls, name
    assert counted[0] == 3 * calls
    assert sum(len(each.records) for each in generations) == counted[1] > 0
    for each in generations:
        for number, counts in enumerate(each.session.counts()):
            assert counts.records == each.records.count(number)
            assert counts.lost == counts.missed == 0


@pytest.mark.parametrize("kind", ["written out", "patterns", "returns", "perf events"])
def test_each_hit_is_one_of_exactly_one_program(path: Path, kind: str) -> None:
    features = Features(overrides=OLD) if kind == "perf events" else None
    strings = {"patterns": [THREE, PATTERN], "returns": [RETURNS]}.get(kind, [THREE])
    count = 4 if features is not None else 17
    with on_demand(path, 2) as target:
        calls, generations, counted = replaced(engine_with(features), path, target, strings, count)
        assert calls > 0
        check_counts(calls, generations, counted)
        assert target.end() == 0


@pytest.mark.torture
def test_each_hit_is_one_of_exactly_one_of_a_thousand_programs(path: Path) -> None:
    engine = engine_with()
    for text in ([THREE, PATTERN], [RETURNS]):
        with on_demand(path, 4) as target:
            calls, generations, counted = replaced(engine, path, target, text, 500)
            check_counts(calls, generations, counted)
            assert target.end() == 0


def test_a_hit_that_is_under_way_when_the_programs_change_places_is_not_lost(path: Path) -> None:
    """Between the two programs a third one takes its time at each hit: it is newer than the old one."""
    slow = "jmpmax = 65535\nvars = 1\noffset = emulated\nagain:\n" + "inc lv, 0\n" * 120 + "jmp again\n"
    text = "offset = emulated\nabort\n"
    engine = engine_with()
    with on_demand(path, 2) as target:
        hits = calls = 0
        for _ in range(3):
            with followed(engine, job_for(path, text)) as old, followed(engine, job_for(path, slow)) as between:
                target.say("start")
                await_true(lambda: min(old.hits[0], between.hits[0]) > 0, "hits")
                with followed(engine, job_for(path, text, replaces=old.session)) as new:
                    await_true(lambda: new.hits[0] > 0, "hits")
                    calls = target.say("stop")
                hits += old.hits[0] + new.hits[0]
        assert hits == calls


def test_threads_that_live_for_one_hit_are_not_lost(build: Builder) -> None:
    """Thread ids come again within one replacement or the next one."""
    program = build("threads.c", "-pthread")
    text = "gvars = 1\noffset = tick\ninc gv, 0\nexit\n"
    with (
        GlobalVariables(1) as variables,
        contextlib.closing(Generations(engine_with(), program, variables)) as generations,
        contextlib.ExitStack() as stack,
    ):
        generations.insert(text)
        target = stack.enter_context(running(program, "2", "4000", "short"))
        while target.poll() is None:
            generations.insert(text)
        assert target.stdout is not None
        calls = int(target.stdout.read())
        assert target.returncode == 0
        assert calls == 8000
        assert sum(each.hits[0] for each in generations.all) == calls
        cells = variables.cells()
        assert cells[0] == calls
        cells.close()


def test_a_session_in_whose_scope_a_process_is_not_leaves_it_alone(path: Path) -> None:
    """From when hits are the new program's, its scope counts."""
    with on_demand(path) as one, on_demand(path) as other:
        scopes = [Scope(pid=target.process.pid) for target in (one, other)]
        with followed(engine_with(), job_for(path, THREE, scopes[0])) as old:
            one.say("call 2")
            other.say("call 3")
            with followed(engine_with(), job_for(path, THREE, scopes[1], replaces=old.session)) as new:
                one.say("call 4")
                other.say("call 5")
                assert (old.hits, new.hits) == ([2] * 3, [5] * 3)


def test_watchpoints_wait_until_the_debug_registers_are_free(path: Path, debug_registers: None) -> None:
    text = "".join(
        f"address = {name}\nwatchpoint = rw\nminor = {n}\nexit\n" for n, name in enumerate(("bias", "wrong", "over"))
    )
    with on_demand(path) as target:
        scope = Scope(pid=target.process.pid)
        with followed(engine_with(), job_for(path, text, scope)) as old:
            target.say("call 20")
            with followed(engine_with(), job_for(path, text, scope, replaces=old.session)) as new:
                await_true(lambda: old.finished is not None, "the end of the old program")
                target.say("call 30")
                assert (old.hits, new.hits) == ([20, 0, 0], [30, 0, 0])
                assert new.probes_in(ProbeState.ACTIVE) == [0, 1, 2]
                assert new.probes_in(ProbeState.DEBUGREG_UNAVAIL) == []
                (notice,) = [event for event in new.events if isinstance(event, Notice)]
                assert notice.message == (
                    "memory is watched from now on: accesses ran no handler since the old program released its "
                    "debug registers"
                )


def test_a_sampler_takes_the_place_of_another_one(path: Path) -> None:
    text = "sampler = 500hz\nexit\n"
    with on_demand(path, 2) as target, followed(engine_with(), job_for(path, text)) as old:
        target.say("start")
        await_true(lambda: old.hits[0] > 5, "samples")
        with followed(engine_with(), job_for(path, text, replaces=old.session)) as new:
            await_true(lambda: old.finished is not None, "the end of the old program")
            ended = old.hits
            await_true(lambda: new.hits[0] > 5, "samples")
            assert old.hits == ended
        target.say("stop")


def test_probepoints_of_one_program_only_come_and_go(path: Path) -> None:
    first, second = (f"offset = {name}\nminor = 1\nexit\noffset = both\nminor = 2\nexit\n" for name in NAMES[:2])
    with on_demand(path) as target, followed(engine_with(), job_for(path, first)) as old:
        target.say("call 3")
        with followed(engine_with(), job_for(path, second, replaces=old.session)) as new:
            await_true(lambda: old.finished is not None, "the end of the old program")
            error = refusal(engine_with(), path, old.session)
            assert error.message == "the inserted program has just been replaced by another one"
            assert error.hint == "query the inserted programs, and replace the present one"
            target.say("call 5")
            assert hits_by_name(old) == {"stepped": 3, "both": 3}
            assert hits_by_name(new) == {"emulated": 5, "both": 5}
            assert new.probes_in(ProbeState.ACTIVE) == [0, 1]
        assert code_is_original(target.process.pid, path)


def test_variables_and_limits_start_anew_but_for_global_variables(path: Path) -> None:
    text = "vars = 1\ngvars = 2\noffset = emulated\npasscount = 2\nmaxhits = 3\ninc lv, 0\ninc gv, 1\nexit\n"
    with GlobalVariables(2) as variables, on_demand(path) as target:
        cells = variables.cells()
        with followed(engine_with(), job_for(path, text, variables=variables)) as old:
            target.say("call 9")
            assert old.session.local_variables() == [3]
            await_true(lambda: old.probes_in(ProbeState.DISABLED) == [0], "the last hit")
            # What is disabled in the old program is anew in the new one.
            with followed(engine_with(), job_for(path, text, variables=variables, replaces=old.session)) as new:
                assert new.session.local_variables() == [0]
                target.say("call 4")
                assert (old.hits, new.hits) == ([5], [4])
                assert (old.session.local_variables(), new.session.local_variables()) == ([3], [2])
        assert list(cells) == [0, 5]
        cells.close()


def test_a_program_that_cannot_be_inserted_leaves_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_demand(path, 2) as target, followed(engine_with(), job_for(path, THREE)) as old:
        target.say("start")
        await_true(lambda: min(old.hits) > 100, "a hundred hits")

        def refuse(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        engine = engine_with()
        assert engine.features.remembered(runs_newest_first)
        for place in ("kernel.bpf_links.link_uprobes", "attach.map_objects.SharedMaps.set_successor"):
            with monkeypatch.context() as patch:
                patch.setattr(f"dprobes.engines.ebpf.{place}", refuse)
                with pytest.raises(EngineError) as caught:
                    attach(engine, job_for(path, THREE, replaces=old.session))
                assert os.strerror(28).lower() in caught.value.message.lower()
        calls = target.say("stop")
        assert old.finished is None
        await_true(lambda: old.hits == [calls] * 3, "all hits")
        # It can be replaced still.
        with followed(engine_with(), job_for(path, THREE, replaces=old.session)) as new:
            target.say("call 7")
            assert (old.hits, new.hits) == ([calls] * 3, [7] * 3)
        assert target.end() == 0


MISMATCHES = "offset = emulated\nopcode = 0x0f\nexit\n\noffset = stepped\nopcode = 0x0f\nminor = 1\nexit\n"
PARTLY = MISMATCHES + "\noffset = both\nminor = 2\nexit\n"


def test_a_program_of_which_nothing_can_be_inserted_leaves_the_old_one(path: Path) -> None:
    engine = engine_with()
    with on_demand(path) as target, followed(engine, job_for(path, THREE)) as old:
        with pytest.raises(EngineError) as caught:
            attach(engine, job_for(path, MISMATCHES, replaces=old.session))
        assert caught.value.message == (
            "no probepoint of the new program can be inserted; the old program continues: MISMATCH at emulated"
        )
        target.say("call 3")
        await_true(lambda: old.hits == [3, 3, 3], "the hits of the old program")
        assert old.finished is None
        with followed(engine, job_for(path, PARTLY, replaces=old.session)) as new:
            target.say("call 4")
            assert (old.hits, new.hits) == ([3, 3, 3], [0, 0, 4])
        assert target.end() == 0


def test_a_program_takes_the_place_of_one_that_has_ended(path: Path) -> None:
    with on_demand(path) as target, followed(engine_with(), job_for(path, THREE)) as old:
        old.session.change([Stop()])
        await_true(lambda: old.finished is not None, "the end of the old program")
        with followed(engine_with(), job_for(path, THREE, replaces=old.session)) as new:
            target.say("call 6")
            assert (old.hits, new.hits) == ([0] * 3, [6] * 3)


def test_a_breakpoint_stays_where_the_old_program_has_it(path: Path) -> None:
    # Between a breakpoint and the cheaper one behind it, a thread would be hit by both programs.
    engines = EbpfEngine(replaceable=True, exact=True), engine_with()
    with on_demand(path) as target, contextlib.ExitStack() as stack:
        old = stack.enter_context(followed(engines[0], job_for(path, THREE)))
        new = stack.enter_context(followed(engines[1], job_for(path, THREE, replaces=old.session)))
        descriptor = os.open(path, os.O_PATH)
        stack.callback(os.close, descriptor)
        places = []
        for each in (old, new):
            assert isinstance(each.session, EbpfSession)
            places.append(each.session.breakpoints_in(descriptor))
        assert places[0] == places[1]
        assert len(places[0]) == 3
        target.say("call 2")
        assert new.hits == [2, 2, 2]


def refusal(
    engine: EbpfEngine, path: Path, old: Attachment, scope: Scope | None = None
) -> EngineError | NotSupportedError:
    with pytest.raises((EngineError, NotSupportedError)) as caught:
        attach(engine, job_for(path, THREE, scope, replaces=old))
    return caught.value


def test_what_cannot_be_replaced_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_demand(path) as target, followed(EbpfEngine(), job_for(path, THREE)) as old:
        error = refusal(engine_with(), path, old.session)
        assert error.message == "the inserted program was not inserted as a replaceable one"
        assert error.hint == "remove it, and insert the new one"
        target.say("call 2")
        assert old.hits == [2, 2, 2]
    with on_demand(path) as target, followed(engine_with(), job_for(path, THREE)) as old:
        error = refusal(engine_with(), path, old.session, scope=Scope(command=("true",)))
        assert error.message == "a program that starts a command cannot replace another one"
        with monkeypatch.context() as patch:
            patch.setattr(session_switchover, "runs_newest_first", lambda _: False)
            error = refusal(engine_with(), path, old.session)
        assert error.message == (
            "programs cannot be replaced on this kernel: it does not run the handlers of a place from the newest to "
            "the oldest"
        )
        assert error.hint == "remove the inserted program, then insert the new one"
        target.say("call 2")
        assert old.hits == [2, 2, 2]
        traced = PtraceEngine().session(job_for(path, THREE, scope=Scope(pid=target.process.pid)))
        error = refusal(engine_with(), path, traced)
        assert error.message == "the ebpf engine replaces only programs of the ebpf engine"


@pytest.mark.parametrize("overrides", [{}, OLD], ids=["uprobe_multi", "perf events"])
def test_the_kernel_runs_the_newest_program_first(overrides: dict[Feature, bool]) -> None:
    assert runs_newest_first(Features(overrides=overrides))
