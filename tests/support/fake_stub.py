"""A scripted stub of GDB's remote serial protocol on a socket, for cases that real stubs rarely produce."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Self

from dprobes.engines.gdb.remote_protocol import MessageKind, PacketReader, packet
from dprobes.engines.gdb.stub_transports import adopted_transport

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FakeStub"]

_TIMEOUT = 20.0


class FakeStub:
    r"""
    A thread that answers packets while the context manager is entered.

    ``answer`` returns the payload of the reply, None for no reply, or bytes with a leading ``$`` that are sent
    unchanged. ``asked`` are the received payloads, with ``b"\x03"`` for interrupts.
    """

    def __init__(self, answer: Callable[[bytes], bytes | None], *, acknowledges: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self.transport = adopted_transport(ours.detach())
        self.transport.name = "fake"
        self._connection = theirs
        self._answer = answer
        self._acknowledges = acknowledges
        self.asked: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.transport.close()
        self._thread.join(_TIMEOUT)
        self._connection.close()

    def send(self, data: bytes) -> None:
        """Send bytes that are no reply to a packet."""
        self._connection.sendall(data)

    def _serve(self) -> None:
        reader = PacketReader()
        try:
            while data := self._connection.recv(1 << 16):
                self.asked += [b"\x03"] * data.count(b"\x03")
                for message in reader.feed(data):
                    if message.kind is MessageKind.PACKET:
                        self._serve_packet(message.payload)
        except OSError:
            return

    def _serve_packet(self, payload: bytes) -> None:
        self.asked.append(payload)
        if self._acknowledges:
            self._connection.sendall(b"+")
        answer = self._answer(payload)
        if answer is not None:
            self._connection.sendall(answer if answer.startswith(b"$") else packet(answer))
