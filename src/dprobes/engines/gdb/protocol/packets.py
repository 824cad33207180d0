"""
Packets of the GDB remote serial protocol: bytes in, messages out, without a connection.

A packet and a notification are (GDB manual, appendix E.1, "Overview")::

    $ payload # checksum         % payload # checksum
                 two hexadecimal digits: the sum of the payload's bytes, as they are sent, modulo 256

In a payload ``}`` escapes the byte behind it, whose bit 5 is inverted; ``$``, ``#``, ``}`` and ``*`` do not occur else.
``*`` and a character with the code n + 29 stand for n more copies of the character before them (run-length encoding).
Between packets there are ``+`` and ``-``, which acknowledge and refuse a packet, and anything else is noise.
"""

from __future__ import annotations

import enum
from typing import Final
from zlib import adler32

from dprobes.lazynamedtuple import NamedTuple

__all__ = ["INTERRUPT", "Message", "MessageKind", "PacketReader", "packet"]

INTERRUPT: Final = b"\x03"
"""What stops the target while it runs; it is no packet."""

_START, _NOTIFICATION, _END, _ESCAPE, _RUN = b"$%#}*"
_ACKNOWLEDGED = b"+"[0]
_ESCAPED_BIT = 0x20
_RUN_BASE = 29
_SPECIAL = bytes((_START, _END, _ESCAPE, _RUN))
_CHECKSUM_DIGITS = 2
_ADLER_MAX = 256
"""Bytes whose sum is less than 65521, which Adler-32 reduces sums by (RFC 1950, section 8.2)."""
_PAYLOAD_MAX = 4 << 20
"""Bytes of a payload, as it is sent and as it is meant; a stub that sends more is not one."""


class MessageKind(enum.Enum):
    """Say what has come; the value completes "the stub sent ..."."""

    PACKET = "a packet"
    NOTIFICATION = "a notification"
    ACKNOWLEDGEMENT = "an acknowledgement"
    REFUSAL = "a refusal"
    DAMAGED = "a packet that is damaged"
    ENDLESS = "a packet without an end"


class Message(NamedTuple):
    """
    What has come from the other side.

    ``payload`` is that of a packet or a notification; of a damaged packet it is what is wrong, as text.
    """

    kind: MessageKind
    payload: bytes = b""


_ACKNOWLEDGEMENT = Message(MessageKind.ACKNOWLEDGEMENT)


def packet(payload: bytes) -> bytes:
    """Return the bytes to send for a payload."""
    sent = payload if len(payload.translate(None, _SPECIAL)) == len(payload) else _escaped(payload)
    return b"$%b#%02x" % (sent, _checksum(sent))


def _checksum(sent: bytes) -> int:
    """Return the sum of the bytes modulo 256, by another checksum whose lower half is one more than their sum."""
    if len(sent) <= _ADLER_MAX:
        return adler32(sent) - 1 & 0xFF
    return sum((adler32(sent[at : at + _ADLER_MAX]) & 0xFFFF) - 1 for at in range(0, len(sent), _ADLER_MAX)) & 0xFF


def _escaped(payload: bytes) -> bytes:
    sent = bytearray()
    for byte in payload:
        if byte in _SPECIAL:
            sent += bytes((_ESCAPE, byte ^ _ESCAPED_BIT))
        else:
            sent.append(byte)
    return bytes(sent)


class PacketReader:
    """Find the messages in what comes, in whatever pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._looked_at = 0
        """How much of a packet that has begun is known not to hold its end."""

    @property
    def is_within(self) -> bool:
        """Whether a packet has begun whose end has not come."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[Message]:
        """Take what has come; return the messages that are complete by that."""
        messages: list[Message] = []
        taken = 0 if self._pending else self._take_whole(data, messages)
        self._pending += data[taken:]
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    @staticmethod
    def _take_whole(data: bytes, messages: list[Message]) -> int:
        """
        Find the messages that are whole and as they nearly always are; return how many bytes those take.

        Each hit waits for it: what is said byte by byte below is looked at as a whole here.
        """
        place = 0
        while (start := data.find(b"$", place)) >= 0:
            end = data.find(b"#", start)
            behind = end + 1 + _CHECKSUM_DIGITS
            if end < 0 or behind > len(data) or data[place:start].strip(b"+"):
                break
            sent = data[start + 1 : end]
            is_simple = len(sent.translate(None, _SPECIAL)) == len(sent) <= _PAYLOAD_MAX
            if not is_simple or data[end + 1 : behind] != b"%02x" % _checksum(sent):
                break
            messages += [_ACKNOWLEDGEMENT] * (start - place)
            messages.append(Message(MessageKind.PACKET, sent))
            place = behind
        return place

    def _next(self) -> Message | None:
        pending = self._pending
        for place, byte in enumerate(pending):
            if byte in (_START, _NOTIFICATION):
                del pending[:place]
                return self._packet()
            if byte in b"+-":
                del pending[: place + 1]
                return _ACKNOWLEDGEMENT if byte == _ACKNOWLEDGED else Message(MessageKind.REFUSAL)
        pending.clear()
        return None

    def _packet(self) -> Message | None:
        pending = self._pending
        end = pending.find(_END, max(1, self._looked_at))
        length = end if end >= 0 else len(pending)
        if length > _PAYLOAD_MAX:
            self._forget(len(pending))
            return Message(MessageKind.ENDLESS)
        if end < 0 or len(pending) < end + 1 + _CHECKSUM_DIGITS:
            self._looked_at = length
            return None
        is_packet = pending[0] == _START
        sent, checksum = bytes(pending[1:end]), bytes(pending[end + 1 : end + 1 + _CHECKSUM_DIGITS])
        begun_again = sent.rfind(b"$")
        if begun_again >= 0:  # the end of the first one was lost, which is sent once more, or was
            self._forget(begun_again + 1)
            return self._packet()
        self._forget(end + 1 + _CHECKSUM_DIGITS)
        expected = b"%02x" % _checksum(sent)
        if checksum.lower() != expected:
            return Message(MessageKind.DAMAGED, b"its checksum is %r, not %r" % (checksum, expected))
        meant = _meaning_of(sent)
        if isinstance(meant, str):
            return Message(MessageKind.DAMAGED, meant.encode())
        return Message(MessageKind.PACKET if is_packet else MessageKind.NOTIFICATION, meant)

    def _forget(self, count: int) -> None:
        del self._pending[:count]
        self._looked_at = 0


def _meaning_of(sent: bytes) -> bytes | str:
    """Return what a payload means, or what is wrong with it."""
    if _ESCAPE not in sent and _RUN not in sent:
        return sent
    meant = bytearray()
    place = 0
    while place < len(sent):
        byte = sent[place]
        place += 1
        if byte not in (_ESCAPE, _RUN):
            meant.append(byte)
            continue
        if place == len(sent):
            return "it ends within an escape sequence" if byte == _ESCAPE else "it ends within a run"
        following = sent[place]
        place += 1
        if byte == _ESCAPE:
            meant.append(following ^ _ESCAPED_BIT)
        elif not meant:
            return "it begins with a run of nothing"
        elif following < _RUN_BASE:
            return "a run is of less than no characters"
        else:
            meant += meant[-1:] * (following - _RUN_BASE)
            if len(meant) > _PAYLOAD_MAX:
                return "it is longer than any packet"
    return bytes(meant)
