"""
Packets of the GDB remote serial protocol: bytes in, messages out, without a connection.

A packet and a notification are (GDB manual, appendix E.1, "Overview")::

    $ payload # checksum         % payload # checksum
                 two hexadecimal digits: the sum of the payload's bytes, as they are sent, modulo 256

In a payload, ``}`` escapes the byte after it, whose bit 5 is inverted; ``$``, ``#``, ``}`` and ``*`` occur only
escaped. ``*`` and a character with the code n + 29 encode n further copies of the previous character (run-length
encoding). Between packets, ``+`` acknowledges and ``-`` refuses a packet; other bytes are ignored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import adler32

from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "INTERRUPT",
    "SIGBUS",
    "SIGFPE",
    "SIGILL",
    "SIGINT",
    "SIGSEGV",
    "SIGTRAP",
    "Console",
    "Conversation",
    "Exited",
    "Message",
    "MessageKind",
    "NoThreads",
    "PacketReader",
    "Received",
    "StopReply",
    "Stopped",
    "ThreadId",
    "packet",
    "parse_stop_reply",
]

INTERRUPT: Final = b"\x03"
"""Byte that interrupts a running target. It is not a packet."""
SIGINT, SIGILL, SIGTRAP, SIGFPE, SIGBUS, SIGSEGV = 2, 4, 5, 8, 10, 11
"""Signal numbers of GDB (include/gdb/signals.def)."""

_START, _NOTIFICATION, _END, _ESCAPE, _RUN = b"$%#}*"
_ACKNOWLEDGED = b"+"[0]
_ESCAPED_BIT = 0x20
_RUN_BASE = 29
_SPECIAL = bytes((_START, _END, _ESCAPE, _RUN))
_CHECKSUM_DIGITS = 2
_ADLER_MAX = 256
"""Maximum number of bytes whose sum is below 65521, the modulus of Adler-32 (RFC 1950, section 8.2)."""
_PAYLOAD_MAX = 4 << 20
"""Maximum size of a payload in bytes, encoded and decoded; a larger one is an error."""


class MessageKind(enum.Enum):
    """Kinds of received messages; the value completes "the stub sent ..."."""

    PACKET = "a packet"
    NOTIFICATION = "a notification"
    ACKNOWLEDGEMENT = "an acknowledgement"
    REFUSAL = "a refusal"
    DAMAGED = "a packet that is damaged"
    ENDLESS = "a packet without an end"


class Message(NamedTuple):
    """
    Message from the stub.

    ``payload`` is the payload of a packet or a notification. For a damaged packet, it describes the damage.
    """

    kind: MessageKind
    payload: bytes = b""


_ACKNOWLEDGEMENT = Message(MessageKind.ACKNOWLEDGEMENT)


def packet(payload: bytes) -> bytes:
    """Return the packet with a payload, ``$PAYLOAD#CHECKSUM``, in which special bytes are escaped."""
    sent = payload if len(payload.translate(None, _SPECIAL)) == len(payload) else _escaped(payload)
    return b"$%b#%02x" % (sent, _checksum(sent))


def _checksum(sent: bytes) -> int:
    """Return the sum of the bytes modulo 256, from Adler-32, whose lower half is the sum plus one."""
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
    """Incremental parser of messages; the input may be split anywhere."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._looked_at = 0
        """Length in bytes of the part of an incomplete packet that was already searched for its end."""

    @property
    def is_within(self) -> bool:
        """True if the start of a packet has arrived, but not its end."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes from the stub; return the packets and acknowledgements that are complete with them."""
        messages: list[Message] = []
        taken = 0 if self._pending else self._take_whole(data, messages)
        self._pending += data[taken:]
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    @staticmethod
    def _take_whole(data: bytes, messages: list[Message]) -> int:
        """
        Parse complete messages that need no unescaping; return the number of their bytes.

        This is the fast path, which every hit uses. ``_next`` parses all other messages byte by byte.
        """
        place = 0
        while (start := data.find(b"$", place)) >= 0:
            end = data.find(b"#", start)
            after = end + 1 + _CHECKSUM_DIGITS
            if end < 0 or after > len(data) or data[place:start].strip(b"+"):
                break
            sent = data[start + 1 : end]
            is_simple = len(sent.translate(None, _SPECIAL)) == len(sent) <= _PAYLOAD_MAX
            if not is_simple or data[end + 1 : after] != b"%02x" % _checksum(sent):
                break
            messages += [_ACKNOWLEDGEMENT] * (start - place)
            messages.append(Message(MessageKind.PACKET, sent))
            place = after
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
        if begun_again >= 0:  # the end of the first packet was lost; it is or was sent again
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
    """Return the decoded payload as bytes, or a description of the error as a string."""
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


# Each packet is acknowledged until both sides agree that the connection loses nothing (``QStartNoAckMode``). A refused
# packet is sent again; a damaged packet is refused. On a reliable connection, several packets may be sent before the
# first reply; replies arrive in the same order.


_ATTEMPTS = 5
"""Maximum number of times that a packet is sent or refused; then an error is raised."""


class Received(NamedTuple):
    """Result of received bytes: payloads of answers and notifications, and the bytes to send as ``reply``."""

    answers: tuple[bytes, ...]
    notifications: tuple[bytes, ...]
    reply: bytes


class Conversation:
    """The client's side of the protocol; ``has_acknowledgements`` is True while packets are acknowledged."""

    def __init__(self) -> None:
        self.has_acknowledgements = True
        self._reader = PacketReader()
        self._asked = b""
        self._outstanding = 0
        """Number of packets without an answer so far."""
        self._is_acknowledged = True
        self._attempts = 0
        self._refusals = 0
        self._ahead = 0
        """Number of packets that were acknowledged before they arrive."""

    @property
    def is_acknowledged(self) -> bool:
        """True if the other side is known to have received the last packet."""
        return self._is_acknowledged or not self.has_acknowledgements

    @property
    def is_ahead(self) -> bool:
        """True if packets that were acknowledged have not arrived yet."""
        return self._ahead > 0

    def ask(self, payload: bytes) -> bytes:
        """Return the packet to send for a question with this payload, whose answer ``receive`` then returns."""
        self._asked = packet(payload)
        self._is_acknowledged, self._attempts, self._refusals = False, 1, 0
        self._outstanding += 1
        return self._asked

    def acknowledge_ahead(self, count: int) -> bytes:
        """Return the bytes that acknowledge the next packets before they arrive, on a connection that damages none."""
        if not self.has_acknowledgements:
            return b""
        self._ahead += count
        return b"+" * count

    def ask_again(self) -> bytes:
        """Return the last packet for another attempt; raise ``EngineError`` after too many attempts."""
        self._attempts += 1
        if self._outstanding > 1:
            raise EngineError("the stub has refused one of several packets, on a connection that damages none")
        if self._attempts > _ATTEMPTS:
            raise EngineError(f"the stub has refused the packet {self._asked[:40]!r} {_ATTEMPTS} times")
        return self._asked

    def receive(self, data: bytes) -> Received:
        """Process received bytes; raise ``EngineError`` if they violate the protocol."""
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


# Stop reply packets (GDB manual, appendix E.3).
#
# ::
#
#     S AA               T AA n:r;n:r;...          W AA [;process:pid]     X AA [;process:pid]     N     O text
#       a signal           and registers, or keys    has exited              was ended by a signal   no threads left


_SIGNAL_DIGITS = 2


@dataclass(frozen=True, slots=True)
class ThreadId:
    """Id of a thread in the protocol; ``process`` is 0 if the stub does not name processes."""

    process: int
    thread: int

    def __str__(self) -> str:
        return f"p{self.process:x}.{self.thread:x}" if self.process else f"{self.thread:x}"

    @classmethod
    def parse(cls, text: str) -> ThreadId:
        """Parse ``p PID . TID`` or ``TID``, in hexadecimal; raise ``EngineError`` for anything else."""
        process, _, thread = text[1:].partition(".") if text.startswith("p") else ("0", "", text)
        try:
            return cls(int(process, 16), int(thread or "0", 16))
        except ValueError:
            raise EngineError(f"the stub named a thread '{text}'") from None


@dataclass(frozen=True, slots=True)
class Stopped:
    """
    Stop of the target for a signal, in GDB's numbering.

    ``registers`` has the registers that the stub sent with it, by number. ``reason`` is a further reason: ``watch``,
    ``rwatch`` or ``awatch`` with the address in ``data``, ``swbreak``, ``hwbreak``, ``fork``, ``library`` and others.
    """

    signal: int
    thread: ThreadId | None
    registers: Mapping[int, bytes]
    reason: str = ""
    data: str = ""

    @property
    def address(self) -> int | None:
        """Address of the access that triggered a watchpoint, None for other stops."""
        return int(self.data, 16) if self.reason in _WATCHED else None


@dataclass(frozen=True, slots=True)
class Exited:
    """The end of a process, with a ``status`` or by a ``signal``."""

    status: int | None
    signal: int | None
    process: int | None = None


@dataclass(frozen=True, slots=True)
class NoThreads:
    """Stop reply (``N``): the target has no resumed threads left."""


@dataclass(frozen=True, slots=True)
class Console:
    """Stop reply (``O``): output of the target, which continues to run."""

    text: bytes


StopReply = Stopped | Exited | NoThreads | Console

_WATCHED = ("watch", "rwatch", "awatch")


def parse_stop_reply(payload: bytes) -> StopReply:
    """Parse a stop reply; raise ``EngineError`` for another payload."""
    try:
        kind, rest = payload[:1].decode("ascii"), payload[1:].decode("ascii")
        match kind:
            case "S":
                return Stopped(int(rest[:_SIGNAL_DIGITS], 16), None, {})
            case "T":
                return _stopped(rest)
            case "W" | "X":
                code, _, keys = rest.partition(";")
                process = int(keys.removeprefix("process:"), 16) if keys.startswith("process:") else None
                number = int(code, 16)
                return Exited(number, None, process) if kind == "W" else Exited(None, number, process)
            case "N":
                return NoThreads()
            case "O" if rest != "K":
                return Console(bytes.fromhex(rest))
    except ValueError:
        pass
    raise EngineError(f"the stub's answer is not a reason for a stop: {payload[:60]!r}")


def _stopped(text: str) -> Stopped:
    registers: dict[int, bytes] = {}
    thread: ThreadId | None = None
    reason = data = ""
    for pair in text[_SIGNAL_DIGITS:].split(";"):
        if not pair:
            continue
        key, colon, value = pair.partition(":")
        if not colon:
            raise ValueError(pair)
        if key == "thread":
            thread = ThreadId.parse(value)
        elif _is_number(key):
            registers[int(key, 16)] = bytes.fromhex(value)
        elif key in _WATCHED:
            reason, data = key, f"{int(value, 16):x}"
        elif key not in ("core", "threads", "thread-pcs") and not reason:
            reason, data = key, value
    return Stopped(int(text[:_SIGNAL_DIGITS], 16), thread, registers, reason, data)


def _is_number(key: str) -> bool:
    return bool(key) and all(character in "0123456789abcdefABCDEF" for character in key)
