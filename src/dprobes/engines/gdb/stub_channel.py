"""
Requests to a stub and its replies, and requests that are sent without waiting for the reply.

A stub replies to an unsupported packet with an empty one (GDB manual, appendix E.1). Such a packet is not sent again.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from dprobes.engines.gdb.remote_protocol import Conversation, StopReply, parse_stop_reply
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.gdb.stub_transports import DebuggerRelay, Transport

__all__ = ["REASON", "StubChannel"]

_DRAIN = 0.05
"""Seconds to wait for unsolicited packets of a stub after connecting."""
_FRAME = 4
"""Bytes of a packet that are not its payload."""
_AT_ONCE_MAX = 200
"""
Maximum total size in bytes of packets that are sent together while they are acknowledged.

QEMU (user mode) reads 256 bytes from the connection, and waits for the acknowledgement of its answer before it
processes the rest of them. It would interpret the remaining bytes as a refusal.
"""
_READ_AT_ONCE = 256
"""
Bytes that QEMU (user mode) reads from the connection while the target is stopped (gdb_handlesig in gdbstub/user.c).

It processes all of them before it resumes the target, and reads nothing more until that stops.
"""
_OURS = (
    "multiprocess+;swbreak+;hwbreak+;fork-events+;vfork-events+;exec-events+;vContSupported+;no-resumed+;"
    "xmlRegisters=i386,arm,mips,powerpc,s390"
)
"""Features of this client, and the processors whose register descriptions it understands."""
_STOPS = (b"S", b"T", b"W", b"X", b"N")
"""First bytes of packets that give the reason of a stop."""
_OBJECT_MAX = 64 << 20
_CHUNK = 0x800
REASON: Final = b"?"
"""Packet that requests the reason of the current stop."""


def _is_stop(answer: bytes) -> bool:
    """Return whether the answer to a question that is not about stops is a stop reply (to another client)."""
    return answer[:1] in (b"S", b"T") and answer[1:3].isalnum() and answer[1:3].lower() == answer[1:3]


class StubChannel:
    """A channel to the stub at the other end of ``transport``, which must reply within ``patience`` seconds."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience = patience
        self._conversation = Conversation()
        self._answers: deque[bytes] = deque()
        self._told: list[bytes] = []
        """Payloads to send before the next question; the stub answers each with OK."""
        self._owed: deque[bytes] = deque()
        """Payloads of ``tell`` that were sent, in their order, and not answered yet."""
        self._may_stop_late = True
        """True if an unsolicited stop may still arrive: QEMU stops a machine when a client connects."""
        self._unknown: set[str] = set()
        self._due = b""
        """Acknowledgements that will be sent together with the next packet."""
        self._is_followed = False
        """
        True if something is sent as soon as the expected answer arrives, so that the answer's acknowledgement can wait.
        """
        self.features: dict[str, str] = {}
        """Features that the stub reports, by name: "+", "-", or a value."""

    @property
    def name(self) -> str:
        """Name of the stub as the user gave it."""
        return self._transport.name

    def start(self) -> None:
        """Negotiate the features; raise ``EngineError`` if the stub does not speak the protocol."""
        self._take_all(_DRAIN)  # an unsolicited stop
        self._answers.clear()
        self._transmit(b"+")
        for entry in self.ask(f"qSupported:{_OURS}").decode("ascii", "replace").split(";"):
            name, equals, value = entry.partition("=")
            self.features[name if equals else entry[:-1]] = value if equals else entry[-1:]
        if self.features.get("QStartNoAckMode") == "+" and self.ask("QStartNoAckMode") == b"OK":
            self._conversation.has_acknowledgements = False
        self.ask("Hgp0.0" if self.knows("multiprocess") else "Hg0")  # before this, gdbserver has no target to describe

    @property
    def has_acknowledgements(self) -> bool:
        """True if packets are acknowledged."""
        return self._conversation.has_acknowledgements

    def relay(self) -> DebuggerRelay:
        """Return a relay that gives a debugger the connection, while the target is stopped."""
        from dprobes.engines.gdb.stub_transports import DebuggerRelay

        self.flush()
        return DebuggerRelay(self._transport, acknowledges=self.has_acknowledgements)

    def take_over(self, *, has_acknowledgements: bool, patience: float) -> StopReply | None:
        """
        Continue a conversation that another client has begun; return the last stop that arrives.

        The other client may have left answers unread or unacknowledged. So read until nothing arrives for ``patience``
        seconds.
        """
        self._conversation.has_acknowledgements = has_acknowledgements
        if has_acknowledgements:
            self._transmit(b"+")
        self._take_all(patience)
        stops = [answer for answer in self._answers if answer[:1] in _STOPS]
        self._answers.clear()
        return parse_stop_reply(stops[-1]) if stops else None

    def knows(self, feature: str) -> bool:
        """Return whether the stub's answer to ``qSupported`` has ``feature`` as supported."""
        return self.features.get(feature) == "+"

    def ask(self, payload: str | bytes, patience: float | None = None) -> bytes:
        """
        Return the answer to a packet; raise ``EngineError`` if none arrives within ``patience`` seconds.

        Without ``patience``, the limit of the channel applies.
        """
        data = payload.encode("latin-1") if isinstance(payload, str) else payload
        self._send(data)
        answer = self._answer(data, self._patience if patience is None else patience)
        while self._may_stop_late and data != REASON and _is_stop(answer):
            answer = self._answer(data, self._patience)
        return answer

    def ask_if_known(self, payload: str) -> bytes | None:
        """Return the answer to a packet, None if the stub does not support its kind."""
        return self.ask_if_known_kind(payload.partition(":")[0].partition(",")[0], payload)

    def ask_if_known_kind(self, kind: str, payload: str) -> bytes | None:
        """Return the answer to a packet of a kind, None if the stub does not support that."""
        if kind in self._unknown:
            return None
        answer = self.ask(payload)
        if not answer:
            self._unknown.add(kind)
            return None
        return answer

    def command(self, line: str, patience: float | None = None) -> str | None:
        """
        Return the output of a command of the stub's monitor (``qRcmd``), or None if the stub has no monitor.

        Raise ``EngineError`` if no answer arrives within ``patience`` seconds, by default the limit of the channel.
        """
        patience = self._patience if patience is None else patience
        if "qRcmd" in self._unknown:
            return None
        said, answer = bytearray(), self.ask(f"qRcmd,{line.encode().hex()}", patience)
        while answer[:1] == b"O" and answer != b"OK":
            try:
                said += bytes.fromhex(answer[1:].decode("ascii"))
            except ValueError:
                raise self._unexpected("qRcmd", answer) from None
            answer = self._answer(b"qRcmd", patience)
        if not answer:
            self._unknown.add("qRcmd")
            return None
        return said.decode("utf-8", "replace")

    def tell(self, payload: str | bytes) -> None:
        """
        Queue a request whose only answer is OK, to be sent with the next question, without waiting for its answer.

        The method that waits for a later answer raises ``EngineError`` if the answer to the queued request is not OK.
        """
        self._told.append(payload.encode("latin-1") if isinstance(payload, str) else payload)

    def flush(self) -> None:
        """
        Send the queued requests and wait for their answers.

        QEMU (system mode) stops a machine for any byte that arrives while it runs, an acknowledgement included.
        """
        self._transmit(b"")
        if self._told:
            last = self._told.pop()
            self._send(last)
            if (answer := self._answer(last, self._patience)) != b"OK":
                raise self._unexpected(last, answer)

    def _transmit(self, data: bytes) -> None:
        due, self._due = self._due, b""
        if due or data:
            self._transport.send(due + data)

    def _send(self, payload: bytes) -> None:
        """Send the requests that ``tell`` has queued, then a packet with the payload."""
        told, self._told = self._told, []
        size = sum(len(each) for each in (*told, payload)) + _FRAME * (len(told) + 1)
        may_be_one = not self._conversation.has_acknowledgements or size <= _AT_ONCE_MAX
        if not (self._transport.is_reliable and may_be_one):
            for each in told:
                self._transmit(self._conversation.ask(each))
                if (answer := self._answer(each, self._patience)) != b"OK":
                    raise self._unexpected(each, answer)
            told = []
        self._owed.extend(told)
        self._transmit(b"".join(map(self._conversation.ask, (*told, payload))))

    def _send_with_question(self, payload: bytes, question: bytes) -> bool:
        """
        Send the queued requests, a packet that resumes the target, and a question for its next stop.

        QEMU (user mode) reads the question when the target stops::

            padding, what was told, the packet │ + for each answer to what was told, and for the stop │ question
            └──────── _READ_AT_ONCE ──────────┘

        So QEMU waits for nothing until it has answered the question. If the packets are larger than ``_READ_AT_ONCE``,
        send nothing and return False.
        """
        size = sum(len(each) + _FRAME for each in (*self._told, payload))
        if size > _READ_AT_ONCE:
            return False
        told, self._told = self._told, []
        self._owed.extend(told)
        packets = b"".join(map(self._conversation.ask, (*told, payload)))
        acknowledgements = self._conversation.acknowledge_ahead(len(told) + 1)
        after = acknowledgements + self._conversation.ask(question)
        self._transmit(packets.rjust(_READ_AT_ONCE, b"+") + after)
        return True

    def _answer(self, asked: bytes, patience: float) -> bytes:
        answer = self._next_answer(patience)
        if answer is None:
            raise EngineError(f"the stub {self.name} does not answer '{asked[:40].decode('latin-1')}'")
        return answer

    def _next_answer(self, patience: float) -> bytes | None:
        """Return the next answer to a packet, or None if none arrives within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            while self._answers:
                answer = self._answers.popleft()
                if not self._owed:
                    return answer
                told = self._owed.popleft()
                if answer != b"OK":
                    raise self._unexpected(told, answer)
            left = deadline - time.monotonic()
            data = self._transport.receive(left)
            if data is None:
                return None
            self._take(data)
            if left <= 0 and not self._answers:
                return None  # incomplete data is no answer, however much of it arrives

    def _take_all(self, silence: float) -> None:
        """Receive until nothing arrives for ``silence`` seconds; raise ``EngineError`` if data keeps arriving."""
        deadline = time.monotonic() + silence + self._patience
        while (data := self._transport.receive(silence)) is not None:
            self._take(data)
            if time.monotonic() > deadline:
                raise EngineError(f"the stub {self.name} does not stop to send")

    def _take(self, data: bytes) -> None:
        received = self._conversation.receive(data)
        if self._is_followed and not self._conversation.is_ahead:
            self._due += received.reply
        else:
            self._transmit(received.reply)
        self._answers.extend(received.answers)

    def read_object(self, kind: str, annex: str = "") -> bytes | None:
        """
        Return the contents of an object of the stub (``qXfer``), or None if it has none of that kind.

        Raise ``EngineError`` if the contents are incomplete or too large.
        """
        if not self.knows(f"qXfer:{kind}:read"):
            return None
        data = bytearray()
        while True:
            answer = self.ask(f"qXfer:{kind}:read:{annex}:{len(data):x},{_CHUNK:x}")
            if answer[:1] not in (b"m", b"l"):
                return None
            data += answer[1:]
            if answer[:1] == b"l":
                return bytes(data)
            if len(answer) == 1 or len(data) > _OBJECT_MAX:
                raise EngineError(f"the stub {self.name} does not finish '{kind}'")

    def drain(self) -> None:
        """
        Receive and discard unsolicited packets while the target is stopped.

        QEMU (user mode) interprets an interrupt as a refusal if it has just stopped, and repeats its last answer. A
        stop that arrives even later is not interpreted as the answer to a question.
        """
        self._may_stop_late = True
        self._transmit(b"")
        self._take_all(_DRAIN)
        self._answers.clear()
        self._owed.clear()

    def fileno(self) -> int:
        """Return the descriptor that is readable when data has arrived."""
        return self._transport.fileno()

    def close(self) -> None:
        """Close the connection to the stub. The state of the target does not change."""
        self._transport.close()

    def _unexpected(self, asked: str | bytes, answer: bytes) -> EngineError:
        shown = asked if isinstance(asked, str) else asked[:40].decode("latin-1")
        return EngineError(f"the stub {self.name} answers '{shown}' with {answer[:40]!r}")
