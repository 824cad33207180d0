"""A stub that looks at nothing while its target runs is asked for the registers of the next stop before that."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Self

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.remote_protocol import Exited, MessageKind, PacketReader, Stopped, ThreadId, packet
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.engines.gdb.stub_transports import adopted_transport
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

THREAD = ThreadId(1, 1)
STOP = b"T05thread:p01.1;"
WORDS = 34


class Emulator:
    """
    Stop and go on as gdb_handlesig in QEMU's gdbstub/user.c does: with 256 bytes at a time, of which none is left over.

    ``stops`` are sent one after another. ``heard`` is what was taken, by stops; registers are those numbers of words.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        ours, self._connection = socket.socketpair()
        self.transport = adopted_transport(ours.detach())
        self.transport.name, self.transport.peer = "fake", "qemu-aarch64"
        self._stops = stops
        self.heard: list[list[bytes]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.transport.close()
        self._thread.join(20.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with self._connection:
            for number, stop in enumerate(self._stops):
                if stop:
                    self._put(stop)
                if stop.startswith(b"W") or not self._stand(number):
                    return

    def _put(self, payload: bytes) -> None:
        while True:
            self._connection.sendall(packet(payload))
            sign = self._connection.recv(1)
            if sign in (b"+", b""):
                return

    def _stand(self, number: int) -> bool:
        """Answer until the target is let go; return False at the end of the connection."""
        self.heard.append([])
        reader, is_running = PacketReader(), False
        while not is_running:
            data = self._connection.recv(256)
            if not data:
                return False
            for message in reader.feed(data):
                if message.kind is MessageKind.PACKET:
                    self._connection.sendall(b"+")
                    self.heard[-1].append(message.payload)
                    is_running |= self._serve(message.payload, number)
        return True

    def _serve(self, payload: bytes, number: int) -> bool:
        match payload[:1]:
            case b"c":
                return True
            case b"g":
                self._put(number.to_bytes(8, "little").hex().encode() * WORDS)
            case b"P" | b"G" | b"z" | b"H":
                self._put(b"OK")
            case b"q" if payload == b"qqemu.sstepbits":
                self._put(b"ENABLE=1")
            case _:
                self._put(b"")
        return False


def started(emulator: Emulator) -> Stub:
    stub = Stub(emulator.transport, 5.0)
    stub.start()
    return stub


def numbers_of(registers: bytes) -> set[int]:
    return {int.from_bytes(registers[at : at + 8], "little") for at in range(0, len(registers), 8)}


def test_the_registers_of_each_stop_are_there_with_it() -> None:
    with Emulator([b"", *[STOP] * 5, b"W00"]) as emulator:
        stub = started(emulator)
        assert stub.set_register(THREAD, 2, bytes(8))
        for stop in range(1, 6):
            for register in range(stop - 1):  # none at first, then more and more are set
                assert stub.set_register(THREAD, register, bytes(8))
            assert stub.resume_asking_ahead(0x1000 + stop)
            assert stub.wait(TIMEOUT) == Stopped(5, THREAD, {})
            assert numbers_of(stub.read_registers(THREAD)) == {stop}
        assert stub.resume_asking_ahead(None)
        assert stub.wait(TIMEOUT) == Exited(0, None)
    asked = [[each[:1] for each in heard] for heard in emulator.heard[1:]]
    assert asked == [[b"g", *[b"P"] * n, b"c"] for n in (1, 2, 3, 4)] + [[b"g", b"c"]]
    assert emulator.heard[1][-1] == b"c1002"


def test_other_questions_come_behind_it() -> None:
    with Emulator([b"", STOP, STOP]) as emulator:
        stub = started(emulator)
        assert stub.resume_asking_ahead(None)
        assert stub.wait(TIMEOUT) == Stopped(5, THREAD, {})
        assert stub.ask("z0,1000,4") == b"OK"
        assert numbers_of(stub.read_registers(THREAD)) == {1}
        assert numbers_of(stub.read_registers(THREAD)) == {1}
        assert stub.resume_asking_ahead(None)
        assert stub.wait(TIMEOUT) == Stopped(5, THREAD, {})
    assert emulator.heard[1] == [b"g", b"z0,1000,4", b"g", b"c"]


def test_registers_that_were_changed_are_asked_for_anew() -> None:
    with Emulator([b"", STOP]) as emulator:
        stub = started(emulator)
        assert stub.resume_asking_ahead(None)
        stub.wait(TIMEOUT)
        assert stub.set_register(THREAD, 2, bytes(8))
        stub.read_registers(THREAD)
        stub.read_registers(ThreadId(1, 2))
    assert emulator.heard[1] == [b"g", b"P2=0000000000000000", b"g", b"Hgp1.2", b"g"]


def test_an_interrupt_that_comes_too_late_is_not_taken_for_an_answer() -> None:
    with Emulator([b"", STOP, STOP]) as emulator:
        stub = started(emulator)
        for stop in (1, 2):
            assert stub.resume_asking_ahead(None)
            stub.interrupt()
            assert stub.wait(TIMEOUT) == Stopped(5, THREAD, {})
            assert numbers_of(stub.read_registers(THREAD)) == {stop}
        assert stub.ask("z0,1000,4") == b"OK"


def test_what_is_too_long_is_sent_as_always() -> None:
    with Emulator([b"", STOP]) as emulator:
        stub = started(emulator)
        processor = processor_of(architecture("aarch64"))
        assert processor is not None
        target = StubTarget(stub, "little", processor.default_description(), processor.breakpoint)
        registers = target.registers(THREAD)
        for name in ("x0", "x1", "x2", "x3", "pc"):
            registers[name] = 1
        target.resume_with(THREAD, registers, "pc")
        assert target.await_stop(5.0) == Stopped(5, THREAD, {})
        assert numbers_of(stub.read_registers(THREAD)) == {1}
    assert [each[:1] for each in emulator.heard[0][-2:]] == [b"G", b"c"]
    assert emulator.heard[1] == [b"g"]


@pytest.mark.parametrize(("peer", "asked"), [("gdbserver", False), ("", False), ("qemu-s390x", True)])
def test_only_an_emulator_at_the_other_end_is_asked_ahead(peer: str, *, asked: bool) -> None:
    with Emulator([b""]) as emulator:
        emulator.transport.peer = peer
        assert started(emulator).can_be_asked_ahead is asked
