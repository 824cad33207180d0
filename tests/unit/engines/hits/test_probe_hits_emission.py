"""Records come in the order of the hits, also when it is known only later that a hit was one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.hits.probe_hits import Emitter
from support.ptrace_programs import inserted_program, probe_of

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe


class FakeConnection:
    """Keep what is sent; take at most ``room`` records."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.sent: list[bytes] = []

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        if len(self.sent) == self.room:
            return False
        self.sent.append(record)
        return True


@pytest.fixture
def connection() -> FakeConnection:
    return FakeConnection()


@pytest.fixture
def emitter(connection: FakeConnection) -> Emitter:
    return Emitter(connection)


@pytest.fixture
def probe() -> Probe:
    return probe_of(inserted_program())


def test_a_record_that_nothing_precedes_is_sent_at_once(
    emitter: Emitter, connection: FakeConnection, probe: Probe
) -> None:
    emitter.emit([(probe, b"1")])
    emitter.emit([(probe, b"2"), (probe, b"3")])
    assert connection.sent == [b"1", b"2", b"3"]
    assert probe.counts.records == 3


def test_later_records_wait_for_queued_ones(emitter: Emitter, connection: FakeConnection, probe: Probe) -> None:
    first, second = emitter.queue(), emitter.queue()
    emitter.emit([(probe, b"3")])
    emitter.emit([(probe, b"2")], second)
    assert connection.sent == []
    emitter.emit([(probe, b"1")], first)
    assert connection.sent == [b"1", b"2", b"3"]


def test_a_hit_without_a_record_gives_way(emitter: Emitter, connection: FakeConnection, probe: Probe) -> None:
    queued = emitter.queue()
    emitter.emit([(probe, b"2")])
    emitter.emit([], queued)
    assert connection.sent == [b"2"]


def test_nobody_waits_for_a_hit_that_is_skipped(emitter: Emitter, connection: FakeConnection, probe: Probe) -> None:
    slow, other = emitter.queue(), emitter.queue()
    emitter.emit([(probe, b"3")])
    emitter.skip(slow)
    assert connection.sent == []
    emitter.emit([(probe, b"2")], other)
    emitter.emit([(probe, b"1")], slow)
    assert connection.sent == [b"2", b"3", b"1"]


def test_finishing_sends_what_is_known(emitter: Emitter, connection: FakeConnection, probe: Probe) -> None:
    emitter.queue()
    emitter.emit([(probe, b"2")])
    emitter.queue()
    emitter.emit([(probe, b"4")])
    emitter.finish()
    assert connection.sent == [b"2", b"4"]


def test_what_finds_no_room_is_counted_as_lost(probe: Probe) -> None:
    connection = FakeConnection(room=1)
    emitter = Emitter(connection)
    queued = emitter.queue()
    emitter.emit([(probe, b"2")])
    emitter.emit([(probe, b"1")], queued)
    assert connection.sent == [b"1"]
    assert (probe.counts.records, probe.counts.lost) == (1, 1)
