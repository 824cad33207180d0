"""Memory of a program that has ended goes when nobody can come back into it, and not before."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.restorer_messages import MemoryUnmapped
from dprobes.engines.ptrace.site_patches import NativeMemory, SitePatch
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.call_injection import InjectionError
from dprobes.engines.ptrace.tracer.native import handler_ends
from dprobes.engines.ptrace.tracer.native.handler_ends import Reclaimer
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
from dprobes.engines.ptrace.tracer.tracer_programs import Programs
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadGoneError, ThreadState, ThreadTable
from dprobes.platform.linux.ptrace_calls import Event
from dprobes.platform.x86.instruction_relocation import CodeCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram
    from dprobes.engines.ptrace.tracer.tracer_state import TracerState

ENDED, STAYING = 1, 2
CODE = {ENDED: [(0x10000, 0x11000)], STAYING: [(0x20000, 0x21000)]}
MEMORIES = {number: NativeMemory(number << 20, 4096, number << 24, 8192) for number in CODE}
MAPPED = {0x10000: 4096, 1 << 20: 4096, 1 << 24: 8192}
KILLED = signal.SIGKILL


class Tracer:
    """A tracer with a process that has memory of a program that has ended, and of one that has not."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[object] = []
        self.unmapped: dict[int, int] = {}
        self.error: Exception | None = None
        self.is_left = True
        self.deferred: dict[int, int] = {}
        self.threads = ThreadTable()
        self.space = AddressSpace(os.memfd_create("memory"), 8, has_shadow_stack=False, pids={7})
        self.space.patches.memories.update(MEMORIES)
        self.space.patches.code.update({number: list(ranges) for number, ranges in CODE.items()})
        self.thread = self.threads[7] = Thread(7, 7, self.space, ThreadState.STOPPED)
        self.programs = Programs([cast("InsertedProgram", SimpleNamespace(number=n)) for n in (ENDED, STAYING)])
        connection = SimpleNamespace(tell_restorer=self.told.append)
        state = SimpleNamespace(connection=connection, programs=self.programs, threads=self.threads)
        self.stopper = Stopper(self.threads, lambda _: None, lambda _: None)
        vars(self.stopper).update(deferred=self.deferred, defer=self.deferred.__setitem__)
        self.reclaimer = Reclaimer(cast("TracerState", state), self.stopper)
        self.held = [self.thread]

    def end(self) -> None:
        del self.programs[0]
        self.reclaimer.begin()

    def call(self, _: int, address: int, size: int) -> int:
        self.unmapped[address] = size
        return 0

    @contextlib.contextmanager
    def injecting(self, _: Thread) -> Iterator[Callable[..., int]]:
        if self.error is not None:
            raise self.error
        yield self.call


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    made = Tracer()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(made.stopper, "process_held", lambda _: contextlib.nullcontext(made.held))
    monkeypatch.setattr(handler_ends, "may_inject", lambda _: True)
    monkeypatch.setattr(handler_ends, "injecting", made.injecting)
    monkeypatch.setattr(handler_ends, "is_left", lambda *_: made.is_left)
    yield made
    made.space.close()


def jump(program: int, at: int, copy: int) -> SitePatch:
    copies = (CodeCopy(copy, at, exact=True),)
    return SitePatch(
        ((program, 0, at),), at, b"UHBC1", (0, b""), ((at, b"\xe9abcd"),), (b"UHBC1",), (), copies, copy + 9
    )


def test_nothing_is_looked_for_before_a_program_has_ended(tracer: Tracer) -> None:
    del tracer.programs[0]
    assert tracer.reclaimer.look_after() is None
    assert tracer.unmapped == {}


def test_what_a_program_had_goes_and_the_restorer_is_told(tracer: Tracer) -> None:
    tracer.end()
    assert tracer.reclaimer.look_after() is None
    assert tracer.unmapped == MAPPED
    assert tracer.told == [MemoryUnmapped(7, 1 << 24)]
    assert tracer.space.patches.memories == {STAYING: MEMORIES[STAYING]}
    assert tracer.space.patches.code == {STAYING: CODE[STAYING]}


def not_left(tracer: Tracer) -> None:
    tracer.is_left = False


def forking(tracer: Tracer) -> None:
    tracer.deferred[7] = signal.SIGTRAP << 8 | Event.FORK << 16 | 0x7F


def executing(tracer: Tracer) -> None:
    tracer.deferred[7] = signal.SIGTRAP << 8 | Event.EXEC << 16 | 0x7F


def nobody(tracer: Tracer) -> None:
    tracer.held.clear()


def refused(tracer: Tracer) -> None:
    tracer.error = InjectionError("no")


def jump_stays(tracer: Tracer) -> None:
    """Let memory show a jump that was not to be had out of it."""
    patch = jump(ENDED, 0x100, 0x10000)
    os.pwrite(tracer.space.memory, b"UHBC1", 0x100)
    tracer.space.patches.write(tracer.space.memory, patch)
    tracer.space.patches.forget(0, 0x200)


@pytest.mark.parametrize("obstacle", [not_left, forking, executing, nobody, refused, jump_stays])
def test_it_stays_as_long_as_it_may_be_used_and_is_looked_at_ever_more_rarely(
    tracer: Tracer, obstacle: Callable[[Tracer], None]
) -> None:
    obstacle(tracer)
    tracer.end()
    pauses = []
    for _ in range(15):
        pause = tracer.reclaimer.look_after()
        assert pause is not None
        assert tracer.reclaimer.look_after() == pytest.approx(pause)
        pauses.append(pause)
        tracer.now += pause
    assert pauses[:3] == pytest.approx([0.01, 0.02, 0.04])
    assert max(pauses) == pytest.approx(60.0)
    assert tracer.unmapped == {}
    assert tracer.space.patches.memories == MEMORIES
    assert tracer.told == []
    tracer.is_left, tracer.error = True, None
    tracer.deferred.clear()
    tracer.held[:] = [tracer.thread]
    os.pwrite(tracer.space.memory, b"UHBC1", 0x100)
    assert tracer.reclaimer.look_after() is None
    assert tracer.unmapped == MAPPED


def test_the_end_of_the_thread_that_was_to_do_it_is_handled_later(tracer: Tracer) -> None:
    tracer.error = ThreadGoneError(KILLED)
    tracer.end()
    assert tracer.reclaimer.look_after() == pytest.approx(0.01)
    assert tracer.deferred == {7: KILLED}


def test_nothing_is_remembered_of_addresses_that_others_may_get(tracer: Tracer) -> None:
    patches = tracer.space.patches
    for program, at, copy in ((ENDED, 0x100, 0x10000), (STAYING, 0x200, 0x20000)):
        os.pwrite(tracer.space.memory, b"UHBC1", at)
        patches.write(tracer.space.memory, jump(program, at, copy))
    patches.fixups.update({0x10010: 0x10020, 0x20010: 0x20020})
    patches.restore(tracer.space.memory, [0x100])
    tracer.end()
    assert tracer.reclaimer.look_after() is None
    assert patches.original_of(0x10000) is None
    assert patches.original_of(0x20000) is not None
    assert (patches.fixups, patches.starts) == ({0x20010: 0x20020}, [0x20000])
