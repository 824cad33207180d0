"""GDB speaks as it would to the stub, whether packets are acknowledged there or not."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb.remote_protocol import packet
from dprobes.engines.gdb.stub_transports import DebuggerRelay, adopted_transport

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sides:
    """A relay with a stub and a debugger that the test is."""

    def __init__(self, *, acknowledges: bool) -> None:
        self.stub, ours = socket.socketpair()
        self._transport = adopted_transport(ours.detach())
        self.relay = DebuggerRelay(self._transport, acknowledges=acknowledges)
        self.debugger = socket.socket(socket.AF_UNIX)
        for each in (self.stub, self.debugger):
            each.settimeout(5)
        self.connect()

    def connect(self) -> None:
        self.debugger.connect(str(self.relay.path))
        self.serve()

    def serve(self) -> bool:
        return all(self.relay.serve(0.01) for _ in range(3))

    def close(self) -> None:
        self.relay.close()
        self._transport.close()
        self.stub.close()
        self.debugger.close()


@pytest.fixture
def silent() -> Iterator[Sides]:
    """A stub that does not acknowledge packets."""
    sides = Sides(acknowledges=False)
    yield sides
    sides.close()


@pytest.fixture
def acknowledging() -> Iterator[Sides]:
    sides = Sides(acknowledges=True)
    yield sides
    sides.close()


def test_what_is_acknowledged_passes_as_it_is(acknowledging: Sides) -> None:
    sent = b"+" + packet(b"qSupported") + b"\x03"
    acknowledging.debugger.sendall(sent)
    acknowledging.serve()
    assert acknowledging.stub.recv(100) == sent
    acknowledging.stub.sendall(b"+" + packet(b"PacketSize=100"))
    acknowledging.serve()
    assert acknowledging.debugger.recv(100) == b"+" + packet(b"PacketSize=100")


def test_acknowledgements_are_given_until_they_are_switched_off(silent: Sides) -> None:
    start = packet(b"QStartNoAckMode")
    silent.debugger.sendall(b"+" + start[:5])
    silent.serve()
    silent.debugger.sendall(start[5:])
    silent.serve()
    assert silent.debugger.recv(100) == b"+"
    assert silent.stub.recv(100) == start
    silent.stub.sendall(packet(b"OK"))
    silent.serve()
    assert silent.debugger.recv(100) == packet(b"OK")
    silent.debugger.sendall(b"+" + packet(b"?"))
    silent.serve()
    assert silent.stub.recv(100) == b"+" + packet(b"?")


def test_an_interrupt_passes(silent: Sides) -> None:
    silent.debugger.sendall(b"\x03")
    silent.serve()
    assert silent.stub.recv(100) == b"\x03"


def test_the_end_of_the_debugger_is_told(silent: Sides) -> None:
    assert silent.relay.is_serving
    silent.debugger.close()
    assert not silent.serve()
    silent.relay.close()
    assert not silent.relay.is_serving
    assert silent.relay.has_served


def test_the_end_of_the_stub_is_told(silent: Sides) -> None:
    silent.stub.close()
    assert not silent.serve()
    silent.relay.close()
    assert not silent.relay.path.parent.exists()


def test_what_a_stub_has_said_last_arrives_though_it_hears_no_acknowledgement(acknowledging: Sides) -> None:
    acknowledging.stub.sendall(packet(b"W00"))
    acknowledging.stub.close()
    acknowledging.debugger.sendall(b"+")
    assert not acknowledging.relay.serve(1)
    assert acknowledging.debugger.recv(100) == packet(b"W00")
