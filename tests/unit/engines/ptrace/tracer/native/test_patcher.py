"""What is asked at a moment when nobody can do it is tried again, ever more rarely, and not for ever."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.engines.ptrace.leftmanifest import ENTRIES, LENGTH, MAGIC, entries_in, entry_of
from dprobes.engines.ptrace.reports import MemoryShared, Warned
from dprobes.engines.ptrace.requests import PatchSites, ShareMemory
from dprobes.engines.ptrace.sitepatch import SitePatch
from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.native import patcher
from dprobes.engines.ptrace.tracer.native.patcher import Patcher
from dprobes.engines.ptrace.tracer.native.patches import NativeMemory, Patches
from dprobes.engines.ptrace.tracer.programs import Programs
from dprobes.engines.ptrace.tracer.state import Thread, ThreadGoneError, ThreadState, ThreadTable

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram
    from dprobes.engines.ptrace.tracer.state import TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper

BUSY = "no thread of the process can make a system call for it now"
REQUEST = ShareMemory(0, 7, 3, 4096)


class Tracer:
    """A tracer whose only thread never stops for us; ``now`` is the time."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.threads = ThreadTable()
        self.threads[7] = Thread(7, 7, AddressSpace.closed(8), ThreadState.RUNNING)
        self.connection = connection = SimpleNamespace(send=self.sent.append)
        self.deferred: dict[int, int] = {}
        stopper = SimpleNamespace(stop=lambda _: [], deferred=self.deferred, defer=self.deferred.__setitem__)
        state = SimpleNamespace(
            connection=connection,
            programs=Programs([cast("InsertedProgram", SimpleNamespace(number=0))]),
            threads=self.threads,
        )
        self.patcher = Patcher(cast("TracerState", state), cast("Stopper", stopper), lambda _: None)
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
    assert tracer.sent == [MemoryShared(0, 7, problem="the process is not traced any more")]
    assert tracer.patcher.look_after() is None


def test_a_process_that_is_killed_in_a_call_for_us_has_gone_and_its_end_is_handled_later(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = tracer.threads[7]
    thread.space.memory, thread.state = 1 << 20, ThreadState.STOPPED

    def share_memory(*_: object) -> NativeMemory:
        raise ThreadGoneError(9)

    monkeypatch.setattr(patcher, "process_held", lambda *_: contextlib.nullcontext([thread]))
    monkeypatch.setattr(patcher, "may_inject", lambda _: True)
    monkeypatch.setattr(patcher, "share_memory", share_memory)
    tracer.connection.tell_restorer = lambda _: None
    tracer.connection.open = lambda _: os.open(os.devnull, os.O_RDONLY)
    tracer.patcher.share(REQUEST)
    assert tracer.sent == [MemoryShared(0, 7, problem="the process is not traced any more")]
    assert tracer.deferred == {7: 9}


def test_what_is_asked_for_a_program_that_has_ended_is_not_done(tracer: Tracer) -> None:
    tracer.patcher.share(replace(REQUEST, program=1))
    tracer.patcher.patch(PatchSites(1, 7, ((1, 0),), (), (), (), ()))
    assert tracer.sent == []
    assert tracer.patcher.look_after() is None


JUMP = SitePatch(((0, 1, 0x401000),), 0x401000, b"\x55\x48\x89\xe5\x90", (0x401005, b""),
                 ((0x401000, b"\xe9\1\2\3\4"),), (b"\x55\x48\x89\xe5\x90",), end=7)  # fmt: skip
OTHER = SitePatch(((0, 2, 0x402000),), 0x402000, b"\x55\x48\x89\xe5\x90", (0x402005, b""),
                  ((0x402000, b"\xe9\1\2\3\4"),), (b"\x55\x48\x89\xe5\x90",), end=7)  # fmt: skip


class ListingSpace:
    """A space of which nothing but the manifest is there, so many bytes of it, and one breakpoint."""

    def __init__(self, size: int) -> None:
        self.memory = NativeMemory(0x1000, 4096, 0x10000, 1 << 20, manifest=(0, size))
        self.data = bytearray(MAGIC.ljust(size, b"\0"))
        self.pids = {7}
        self.patches = Patches({0: self.memory})
        self.breakpoints = {0x403000: SimpleNamespace(address=0x403000, original=0x90)}

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.data[address : address + size])

    def write(self, address: int, data: bytes) -> None:
        self.data[address : address + len(data)] = data

    def written(self) -> list[tuple[tuple[int, bytes], ...]]:
        """Return what is listed."""
        end = ENTRIES + int.from_bytes(self.data[LENGTH : LENGTH + 8], "little")
        return [patch.writes for entry in entries_in(bytes(self.data[ENTRIES:end])) for patch in entry.writes]


def announce(tracer: Tracer, space: ListingSpace, *patches: SitePatch) -> str | None:
    tracer.connection.tell_restorer = lambda _: None
    return tracer.patcher._announce(cast("AddressSpace", space), 0, (), patches)


def test_what_is_written_is_listed_once(tracer: Tracer) -> None:
    space = ListingSpace(4096)
    assert announce(tracer, space) is None
    assert announce(tracer, space, JUMP) is None
    assert announce(tracer, space, JUMP, OTHER) is None
    before = bytes(space.data)
    assert announce(tracer, space, OTHER) is None
    assert space.data == before
    assert space.written() == [((0x403000, b"\xcc"),), JUMP.writes, OTHER.writes]
    assert tracer.sent == []


def test_jumps_that_find_no_room_are_refused_and_others_are_not(tracer: Tracer) -> None:
    probe = ListingSpace(4096)
    space = ListingSpace(ENTRIES + len(entry_of(probe.memory, (), (JUMP,), ())) + 5)
    space.breakpoints.clear()
    assert announce(tracer, space, JUMP, OTHER) == (
        f"the list of what is written into the process is full ({len(space.data)} bytes)"
    )
    assert space.written() == []
    assert announce(tracer, space, JUMP) is None
    assert space.written() == [JUMP.writes]


def test_breakpoints_that_find_no_room_are_reported_once(tracer: Tracer) -> None:
    probe = ListingSpace(4096)
    space = ListingSpace(ENTRIES + len(entry_of(probe.memory, (), (JUMP,), ())) + 5)
    assert announce(tracer, space, JUMP) is None
    assert announce(tracer, space, JUMP) is None
    assert space.written() == [JUMP.writes]
    full = f"the list of what is written into the process is full ({len(space.data)} bytes)"
    hint = "they stay there if all processes of dprobes are killed at once, and 'dprobes stop --left' misses them"
    assert tracer.sent == [Warned(f"1 breakpoint is not listed in process 7: {full}", hint, 0)]


def test_a_list_that_is_gone_takes_nothing(tracer: Tracer) -> None:
    space = ListingSpace(4096)
    space.data[:8] = bytes(8)
    assert announce(tracer, space, JUMP) == "the list of what is written into the process is not there any more"


def test_another_memory_at_the_same_place_has_a_list_of_its_own(tracer: Tracer) -> None:
    space = ListingSpace(4096)
    assert announce(tracer, space, JUMP) is None
    space.data = bytearray(MAGIC.ljust(4096, b"\0"))
    space.patches.begin_list(space.memory)
    assert announce(tracer, space, JUMP) is None
    assert JUMP.writes in space.written()
