"""Memory that is watched: whom an access concerns, and what a stub lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.placed_probes import WatchedPlaces
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.errors import EngineError
from dprobes.resolve.probepoints import ProbeState, WatchedMemory
from dprobes.rpn.rpn_program import Access
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Point

POINT = cast("Point", None)
FIRST, SECOND = cast("Any", SimpleNamespace()), cast("Any", SimpleNamespace())


def watched_places(fake: FakeStub, told: list[str]) -> WatchedPlaces:
    processor = processor_of(architecture("i386"))
    assert processor is not None
    stub = Stub(fake.transport, 5)
    stub.start()
    return WatchedPlaces(StubTarget(stub, "little", processor.default_description(), processor.breakpoint, told.append))


def memory(access: Access, address: int = 0x20, *, absolute: bool = False) -> WatchedMemory:
    return WatchedMemory(address, 4, absolute, access)


def test_accesses_concern_those_who_watch_them() -> None:
    told: list[str] = []
    with FakeStub(lambda payload: b"OK" if payload[:1] in b"Zz" else b"") as fake:
        places = watched_places(fake, told)
        assert not places
        assert places.place(FIRST, POINT, memory(Access.WRITE), 0x1000) is ProbeState.ACTIVE
        assert (
            places.place(SECOND, POINT, memory(Access.READ_WRITE, 0x1022, absolute=True), 0x1000) is ProbeState.ACTIVE
        )
        assert places
        assert [owner for owner, _ in places.concerned(0x1023, "watch")] == [FIRST, SECOND]
        assert [owner for owner, _ in places.concerned(0x1023, "awatch")] == [SECOND]
        assert [owner for owner, _ in places.concerned(0x1020, "watch")] == [FIRST]
        assert places.concerned(0x1026, "watch") == []
        places.drop(FIRST)
        assert [owner for owner, _ in places.concerned(0x1023, "watch")] == [SECOND]
        places.forget()
        assert not places
        assert [asked for asked in fake.asked if asked[:1] in b"Zz"] == [
            b"Z2,1020,4",
            b"Z4,1022,4",
            b"z2,1020,4",
            b"z4,1022,4",
        ]
    assert told == ["watch 4128 4 2", "watch 4130 4 4", "unwatch 4128 4 2", "unwatch 4130 4 4"]


def test_two_may_watch_the_same() -> None:
    with FakeStub(lambda payload: b"OK" if payload[:1] in b"Zz" else b"") as fake:
        places = watched_places(fake, [])
        for owner in (FIRST, SECOND):
            places.place(owner, POINT, memory(Access.WRITE), 0)
        places.drop(FIRST)
        assert [owner for owner, _ in places.concerned(0x21, "watch")] == [SECOND]
        assert [asked for asked in fake.asked if asked[:1] in b"Zz"] == [b"Z2,20,4"]


def test_a_stub_that_has_no_more() -> None:
    told: list[str] = []
    with FakeStub(lambda payload: b"E01" if payload[:1] == b"Z" else b"") as fake:
        assert watched_places(fake, told).place(FIRST, POINT, memory(Access.WRITE), 0) is ProbeState.DEBUGREG_UNAVAIL
    assert told == ["watch 32 4 2", "unwatch 32 4 2"]


def test_a_stub_that_has_none() -> None:
    with FakeStub(lambda _: b"") as fake, pytest.raises(EngineError) as caught:
        watched_places(fake, []).place(FIRST, POINT, memory(Access.READ_WRITE), 0)
    assert caught.value.message == "the stub fake has no watchpoints for reads and writes"
    assert caught.value.hint == "QEMU's emulation of a process has none; gdbserver and emulated machines have"
