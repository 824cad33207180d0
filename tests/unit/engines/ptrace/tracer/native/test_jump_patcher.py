"""What is asked at a moment when nobody can do it is tried again, ever more rarely, and not for ever."""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.engines.ptrace.site_patches import NativeMemory, Patches, SitePatch
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace, LocalIds
from dprobes.engines.ptrace.tracer.native import jump_patcher
from dprobes.engines.ptrace.tracer.native.handler_memory import NO_ROOM
from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
from dprobes.engines.ptrace.tracer.tracer_programs import Programs
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadGoneError, ThreadState, ThreadTable
from dprobes.engines.ptrace.tracer_messages import MemoryShared, PatchSites, ShareMemory, SitesPatched

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram
    from dprobes.engines.ptrace.tracer.tracer_state import TracerState

BUSY = "no thread of the process can make a system call for it now"
REQUEST = ShareMemory(0, 7, 3, 4096)
JUMP = SitePatch(((0, 1, 0x401000),), 0x401000, b"\x55\x48\x89\xe5\x90", (0x401005, b""),
                 ((0x401000, b"\xe9\1\2\3\4"),), (b"\x55\x48\x89\xe5\x90",), end=7)  # fmt: skip


class Tracer:
    """A tracer whose only thread never stops for us; ``now`` is the time."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.threads = ThreadTable()
        self.threads[7] = Thread(7, 7, AddressSpace.closed(8), ThreadState.RUNNING)
        self.connection = connection = SimpleNamespace(send=self.sent.append)
        self.deferred: dict[int, int] = {}
        self.stopper = Stopper(self.threads, lambda _: None, lambda _: None)
        vars(self.stopper).update(stop=lambda _: [], deferred=self.deferred, defer=self.deferred.__setitem__)
        state = SimpleNamespace(
            connection=connection,
            programs=Programs([cast("InsertedProgram", SimpleNamespace(number=0))]),
            threads=self.threads,
        )
        modules = SimpleNamespace(write_late=lambda *_: None)
        self.patcher = Patcher(
            cast("TracerState", state), self.stopper, cast("ModuleBreakpoints", modules), lambda _: None
        )
        self.now = 100.0


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    made = Tracer()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def test_nothing_waits_at_first(tracer: Tracer) -> None:
    assert tracer.patcher.look_after() is None


def test_pauses_become_longer_and_end(tracer: Tracer) -> None:
    tracer.patcher.share(REQUEST)
    assert tracer.sent == []
    pauses = []
    while (pause := tracer.patcher.look_after()) is not None:
        pauses.append(pause)
        tracer.now += pause
    assert pauses[:3] == pytest.approx([0.01, 0.02, 0.04])
    assert max(pauses) == pytest.approx(2.0)
    assert len(pauses) == 18
    assert tracer.sent == [MemoryShared(0, 7, problem=BUSY)]


def test_it_is_not_tried_before_its_time(tracer: Tracer) -> None:
    tracer.patcher.share(REQUEST)
    tracer.now += 0.004
    assert tracer.patcher.look_after() == pytest.approx(0.006)


def test_a_process_that_has_gone_is_not_waited_for(tracer: Tracer) -> None:
    tracer.threads.clear()
    tracer.patcher.share(REQUEST)
    assert tracer.sent == [MemoryShared(0, 7, problem="the process is no longer traced")]
    assert tracer.patcher.look_after() is None


def test_a_process_that_is_killed_in_a_call_for_us_has_gone_and_its_end_is_handled_later(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = tracer.threads[7]
    thread.space.memory, thread.state = 1 << 20, ThreadState.STOPPED

    def share_memory(*_: object) -> NativeMemory:
        raise ThreadGoneError(9)

    monkeypatch.setattr(tracer.stopper, "process_held", lambda _: contextlib.nullcontext([thread]))
    monkeypatch.setattr(jump_patcher, "may_inject", lambda _: True)
    monkeypatch.setattr(jump_patcher, "share_memory", share_memory)
    tracer.connection.tell_restorer = lambda _: None
    tracer.connection.open = lambda _: os.open(os.devnull, os.O_RDONLY)
    tracer.patcher.share(REQUEST)
    assert tracer.sent == [MemoryShared(0, 7, problem="the process is no longer traced")]
    assert tracer.deferred == {7: 9}


def test_where_handlers_would_not_know_all_threads_there_are_no_jumps(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = tracer.threads[7]
    thread.space.memory, thread.state = 1 << 20, ThreadState.STOPPED
    monkeypatch.setattr(tracer.stopper, "process_held", lambda _: contextlib.nullcontext([thread]))
    monkeypatch.setattr(jump_patcher, "may_inject", lambda _: True)
    thread.space.local_ids = LocalIds(7, is_full=True)
    tracer.patcher.share(REQUEST)
    thread.space.patches.memories[0] = NativeMemory(0x1000, 4096, 0x10000, 1 << 20)
    tracer.patcher.patch(PatchSites(0, 7, ((0, 0x1000),), (), (), (), (JUMP,)))
    assert tracer.sent == [
        MemoryShared(0, 7, problem=NO_ROOM),
        SitesPatched(0, 7, (), tuple((probe, NO_ROOM) for probe in JUMP.probes)),
    ]


def test_what_is_asked_for_a_program_that_has_ended_is_not_done(tracer: Tracer) -> None:
    tracer.patcher.share(REQUEST._replace(program=1))
    tracer.patcher.patch(PatchSites(1, 7, ((1, 0),), (), (), (), ()))
    assert tracer.sent == []
    assert tracer.patcher.look_after() is None


def test_jumps_are_looked_at_all_the_time_and_no_longer_than_a_fiftieth_of_it(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    tracer.connection.warn_once = lambda message, _: warned.append(message)
    patches = tracer.threads[7].space.patches
    assert tracer.patcher.look_after() is None
    patches.by_site[0x401000] = JUMP
    tracer.now += 0.2
    assert tracer.patcher.look_after() == pytest.approx(0.2)
    tracer.now += 0.15
    assert tracer.patcher.look_after() == pytest.approx(0.05)
    assert warned == []

    def mend(*_: object) -> bool:
        tracer.now += 0.1
        return True

    monkeypatch.setattr(Patches, "mend", mend)
    tracer.now += 0.05
    assert tracer.patcher.look_after() == pytest.approx(5)
    assert warned == [
        "process 7: another tool has inserted uprobes over jumps of this run, which have been written again"
    ]
    patches.by_site.clear()
    tracer.now += 5
    assert tracer.patcher.look_after() is None
