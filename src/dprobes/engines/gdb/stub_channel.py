"""
Questions to a stub and their answers, and what is told in between without waiting.

Which packets a stub knows is found by asking: one that it does not know it answers with an empty one (GDB manual,
appendix E.1), and nothing is asked twice that it does not.
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
"""Seconds to wait for what a stub says of itself when somebody connects."""
_FRAME = 4
"""Bytes of a packet around its payload."""
_AT_ONCE_MAX = 200
"""
Bytes of packets that are sent together while they are acknowledged.

QEMU (user mode) takes 256 bytes from the connection, and waits for the acknowledgement of its answer before it looks at
what of them is left. What comes after it would be taken for a refusal.
"""
_READ_AT_ONCE = 256
"""
Bytes that QEMU (user mode) takes from the connection while the target stands still (gdb_handlesig in gdbstub/user.c).

It looks at all of them before it lets the target go, and at nothing in the connection until that stops.
"""
_OURS = (
    "multiprocess+;swbreak+;hwbreak+;fork-events+;vfork-events+;exec-events+;vContSupported+;no-resumed+;"
    "xmlRegisters=i386,arm,mips,powerpc,s390"
)
"""What we can, and the processors whose descriptions of registers we understand."""
_STOPS = (b"S", b"T", b"W", b"X", b"N")
"""How packets begin that say why a target stands still."""
_OBJECT_MAX = 64 << 20
_CHUNK = 0x800
REASON: Final = b"?"
"""What asks why the target stands still."""


def _is_stop(answer: bytes) -> bool:
    """Return whether an answer to another question says that the target has stopped."""
    return answer[:1] in (b"S", b"T") and answer[1:3].isalnum() and answer[1:3].lower() == answer[1:3]


class StubChannel:
    """The way to a stub at the other end of ``transport``, which answers within ``patience`` seconds."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience = patience
        self._conversation = Conversation()
        self._answers: deque[bytes] = deque()
        self._told: list[bytes] = []
        """What is to be sent before the next question, and answered by OK."""
        self._owed: deque[bytes] = deque()
        """What of that has been sent, in its order, and is still to be answered."""
        self._may_stop_late = True
        """Whether a stop may still come that nobody waits for: QEMU stops a machine when somebody connects."""
        self._unknown: set[str] = set()
        self._due = b""
        """Acknowledgements that go out with what is sent next."""
        self._is_followed = False
        """Whether something will be sent as soon as what is awaited has come, so that its acknowledgement can wait."""
        self.features: dict[str, str] = {}
        """What it says of itself: "+", "-", or a value, by the name."""

    @property
    def name(self) -> str:
        """How a user named it."""
        return self._transport.name

    def start(self) -> None:
        """Agree with it on how to speak; raise ``EngineError`` if it does not speak the protocol."""
        self._take_all(_DRAIN)  # a stop that nobody asked for
        self._answers.clear()
        self._transmit(b"+")
        for entry in self.ask(f"qSupported:{_OURS}").decode("ascii", "replace").split(";"):
            name, equals, value = entry.partition("=")
            self.features[name if equals else entry[:-1]] = value if equals else entry[-1:]
        if self.features.get("QStartNoAckMode") == "+" and self.ask("QStartNoAckMode") == b"OK":
            self._conversation.has_acknowledgements = False
        self.ask("Hgp0.0" if self.knows("multiprocess") else "Hg0")  # before it gdbserver has no target to describe

    @property
    def has_acknowledgements(self) -> bool:
        """Whether packets are acknowledged."""
        return self._conversation.has_acknowledgements

    def relay(self) -> DebuggerRelay:
        """Return what lets a debugger have the connection, while the target stands still."""
        from dprobes.engines.gdb.stub_transports import DebuggerRelay

        self.flush()
        return DebuggerRelay(self._transport, acknowledges=self.has_acknowledgements)

    def take_over(self, *, has_acknowledgements: bool, patience: float) -> StopReply | None:
        """
        Go on with a conversation that somebody else has begun; return the stop that comes within so many seconds.

        The other one may have left answers that were not acknowledged, or not read.
        """
        self._conversation.has_acknowledgements = has_acknowledgements
        if has_acknowledgements:
            self._transmit(b"+")
        self._take_all(patience)
        stops = [answer for answer in self._answers if answer[:1] in _STOPS]
        self._answers.clear()
        return parse_stop_reply(stops[-1]) if stops else None

    def knows(self, feature: str) -> bool:
        """Return whether it said that it has a feature."""
        return self.features.get(feature) == "+"

    def ask(self, payload: str | bytes, patience: float | None = None) -> bytes:
        """Return the answer to a packet; raise ``EngineError`` if there is none in time."""
        data = payload.encode("latin-1") if isinstance(payload, str) else payload
        self._send(data)
        answer = self._answer(data, self._patience if patience is None else patience)
        while self._may_stop_late and data != REASON and _is_stop(answer):
            answer = self._answer(data, self._patience)
        return answer

    def ask_if_known(self, payload: str) -> bytes | None:
        """Return the answer to a packet, None if the stub does not know such."""
        return self.ask_if_known_kind(payload.partition(":")[0].partition(",")[0], payload)

    def ask_if_known_kind(self, kind: str, payload: str) -> bytes | None:
        """Return the answer to a packet of a kind, None if the stub does not know that."""
        if kind in self._unknown:
            return None
        answer = self.ask(payload)
        if not answer:
            self._unknown.add(kind)
            return None
        return answer

    def command(self, line: str, patience: float | None = None) -> str | None:
        """Return what the monitor behind the stub says to a command (``qRcmd``), None if there is no monitor."""
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
        Ask for what has no answer but OK, with the next question, and do not wait for it.

        Whatever waits for an answer then raises ``EngineError`` if another one comes.
        """
        self._told.append(payload.encode("latin-1") if isinstance(payload, str) else payload)

    def flush(self) -> None:
        """
        Send what was told, and wait for the answers.

        QEMU (system mode) stops a machine for whatever comes while that goes on, an acknowledgement included.
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
        """Send what was told, and a packet after it."""
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
        Send what was told, a packet that lets the target go, and a question that QEMU (user mode) takes at its stop.

        ::

            padding, what was told, the packet │ + for each answer to what was told, and for the stop │ question
            └──────── _READ_AT_ONCE ──────────┘

        So it waits for nothing until it has answered that. Return False, with nothing sent, where there is no room.
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
        """Return the next answer to what was asked, None if there is none in time."""
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
                return None  # what comes is no answer, however much of it

    def _take_all(self, silence: float) -> None:
        """Take what comes until nothing does for so many seconds; ``EngineError`` if there is no end of it."""
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
        """Return what a stub has under a name (``qXfer``), None if it has none of that kind."""
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
                raise EngineError(f"the stub {self.name} does not come to the end of '{kind}'")

    def drain(self) -> None:
        """
        Take what comes without having been asked for, while the target stands still, and forget it.

        QEMU (user mode) takes what interrupts it for a refusal if it has stopped just then, and says so once more. What
        comes later still is no answer to a question.
        """
        self._may_stop_late = True
        self._transmit(b"")
        self._take_all(_DRAIN)
        self._answers.clear()
        self._owed.clear()

    def fileno(self) -> int:
        """Return the descriptor that is readable when something has come."""
        return self._transport.fileno()

    def close(self) -> None:
        """End the connection."""
        self._transport.close()

    def _unexpected(self, asked: str | bytes, answer: bytes) -> EngineError:
        shown = asked if isinstance(asked, str) else asked[:40].decode("latin-1")
        return EngineError(f"the stub {self.name} answers '{shown}' with {answer[:40]!r}")
