"""
One side of a conversation in packets: what is to be sent for what has come, and which of it is an answer.

::

    ask(payload) ─► bytes to send            receive(bytes) ─► answers and notifications, and bytes to send

Each packet is acknowledged until both sides agree that the connection loses nothing (``QStartNoAckMode``). What was
refused is sent again; a damaged packet is refused. Where a connection is reliable, several packets may be under way:
their answers come in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.protocol.packets import MessageKind, PacketReader, packet
from dprobes.errors import EngineError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.engines.gdb.protocol.packets import Message

__all__ = ["Conversation", "Received"]

_ATTEMPTS = 5
"""How often a packet is sent, or refused, before the connection counts as bad."""


class Received(NamedTuple):
    """What came of some bytes: ``answers`` and ``notifications`` are payloads, ``reply`` is to be sent."""

    answers: tuple[bytes, ...]
    notifications: tuple[bytes, ...]
    reply: bytes


class Conversation:
    """Keep what is known of a conversation; ``has_acknowledgements`` says whether packets are acknowledged."""

    def __init__(self) -> None:
        self.has_acknowledgements = True
        self._reader = PacketReader()
        self._asked = b""
        self._outstanding = 0
        """How many packets have had no answer."""
        self._is_acknowledged = True
        self._attempts = 0
        self._refusals = 0
        self._ahead = 0
        """How many packets that are still to come have been acknowledged."""

    @property
    def is_acknowledged(self) -> bool:
        """Whether the other side has got what was asked, as far as that shows."""
        return self._is_acknowledged or not self.has_acknowledgements

    @property
    def is_ahead(self) -> bool:
        """Whether packets that were acknowledged have not come yet."""
        return self._ahead > 0

    def ask(self, payload: bytes) -> bytes:
        """Return what is to be sent for a payload."""
        self._asked = packet(payload)
        self._is_acknowledged, self._attempts, self._refusals = False, 1, 0
        self._outstanding += 1
        return self._asked

    def acknowledge_ahead(self, count: int) -> bytes:
        """Return what acknowledges the next packets before they come, on a connection that damages none."""
        if not self.has_acknowledgements:
            return b""
        self._ahead += count
        return b"+" * count

    def ask_again(self) -> bytes:
        """Return the same once more; raise ``EngineError`` if that has been done too often."""
        self._attempts += 1
        if self._outstanding > 1:
            raise EngineError("the stub has refused one of several packets, on a connection that damages none")
        if self._attempts > _ATTEMPTS:
            raise EngineError(f"the stub has refused the packet {self._asked[:40]!r} {_ATTEMPTS} times")
        return self._asked

    def receive(self, data: bytes) -> Received:
        """Take what has come; raise ``EngineError`` if the other side does not speak the protocol."""
        answers: list[bytes] = []
        notifications: list[bytes] = []
        reply = bytearray()
        for message in self._reader.feed(data):
            match message.kind:
                case MessageKind.PACKET:
                    self._is_acknowledged = True
                    self._outstanding = max(0, self._outstanding - 1)
                    answers.append(message.payload)
                    reply += self._acknowledgement()
                case MessageKind.NOTIFICATION:
                    notifications.append(message.payload)
                case MessageKind.ACKNOWLEDGEMENT:
                    self._is_acknowledged = True
                case MessageKind.REFUSAL:
                    if not self.is_acknowledged:
                        reply += self.ask_again()
                case MessageKind.DAMAGED | MessageKind.ENDLESS:
                    reply += self._refusal_of(message)
        return Received(tuple(answers), tuple(notifications), bytes(reply))

    def _acknowledgement(self) -> bytes:
        if self._ahead:
            self._ahead -= 1
            return b""
        return b"+" if self.has_acknowledgements else b""

    def _refusal_of(self, message: Message) -> bytes:
        self._refusals += 1
        what = message.kind.value + (f": {message.payload.decode()}" if message.payload else "")
        is_hopeless = message.kind is MessageKind.ENDLESS or not self.has_acknowledgements
        if is_hopeless or self._refusals >= _ATTEMPTS:
            raise EngineError(f"the stub sent {what}")
        return b"-"
