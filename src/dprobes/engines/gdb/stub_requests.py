"""
Requests to a stub about registers, memory, breakpoints and threads, by the packets that the stub supports.

Each method makes one kind of request. ``engines.gdb.stub_channel`` transmits requests and answers.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from dprobes.engines.gdb.remote_protocol import INTERRUPT, NoThreads, Stopped, StopReply, ThreadId, parse_stop_reply
from dprobes.engines.gdb.stub_channel import REASON, StubChannel
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.gdb.stub_transports import Transport

__all__ = ["BreakpointKind", "Stub"]

_PATIENCE = 5.0
"""Maximum number of seconds to wait for a stub's reply."""
_UNDER_WAY = 0.5
"""Seconds within which an interrupt reaches a running target."""
_DEFAULT_PACKET_SIZE = 400
_OVERHEAD = 32
"""Bytes of a packet that are not its payload."""
_PACKET_SIZE_MAX = 1 << 16
_EMULATORS = "qemu-"
"""Prefix of the names of QEMU's programs."""
_BATCH = 32
"""Number of memory reads that are sent together."""


class BreakpointKind(enum.IntEnum):
    """Kinds of breakpoints and watchpoints, as numbered in Z packets."""

    SOFTWARE = 0
    HARDWARE = 1
    WRITE = 2
    READ = 3
    ACCESS = 4


class Stub(StubChannel):
    """A stub at the other end of ``transport``, for use by one thread."""

    def __init__(self, transport: Transport, patience: float = _PATIENCE) -> None:
        super().__init__(transport, patience)
        self._is_interrupted = False
        self._tried: set[str] = set()
        self._selected: dict[str, str] = {}
        self._actions: list[str] | None = None
        """Actions that ``vCont`` supports, None until the stub was asked."""
        self._looks_ahead: bool | None = None
        """Cached value of ``can_be_asked_ahead``, None until it was determined."""
        self._last_stop: tuple[bytes, StopReply] = b"", NoThreads()
        self._has_asked_ahead = False
        self._told_ahead: bytes | None = None
        """Registers of the thread that stopped last, None once anything may have changed them."""

    @property
    def is_machine(self) -> bool:
        """True if the target is a machine: only QEMU's stub for machines knows the mode of physical memory."""
        return self.ask_if_known("qqemu.PhyMemMode") is not None

    @property
    def is_process(self) -> bool:
        """True if the target is a process: it has an auxiliary vector, which machines lack."""
        return self.knows("qXfer:auxv:read") and not self.is_machine

    # Threads

    def threads(self) -> list[ThreadId]:
        """Return the ids of all threads."""
        found: list[ThreadId] = []
        answer = self.ask("qfThreadInfo")
        while answer.startswith(b"m") and len(found) < 1 << 20:
            found += [ThreadId.parse(text) for text in answer[1:].decode("ascii", "replace").split(",") if text]
            answer = self.ask("qsThreadInfo")
        if not found and (current := self.current_thread()) is not None:
            found.append(current)
        return found

    def current_thread(self) -> ThreadId | None:
        """Return the thread that stopped last, None if the stub does not support threads."""
        answer = self.ask_if_known("qC")
        return ThreadId.parse(answer[2:].decode("ascii", "replace")) if answer and answer.startswith(b"QC") else None

    def _select(self, thread: ThreadId | None) -> None:
        if thread is not None and self._selected.get("g") != str(thread):
            if self.ask(f"Hg{thread}") not in (b"OK", b""):
                raise EngineError(f"the stub {self.name} has no thread {thread}")
            self._selected["g"] = str(thread)

    # Registers and memory

    def read_registers(self, thread: ThreadId | None) -> bytes:
        """Return all registers of a thread in the layout of the target's description; unavailable bytes are 0."""
        answer, self._told_ahead = self._told_ahead, None
        if answer is None or (thread is not None and self._selected.get("g") != str(thread)):
            self._select(thread)
            answer = self.ask("g")
        try:
            return bytes.fromhex(answer.decode("ascii").replace("x", "0"))
        except ValueError:
            raise self._unexpected("g", answer) from None

    def read_register(self, thread: ThreadId | None, number: int) -> bytes | None:
        """Return one register of a thread, None if the stub has no such number or cannot read single registers."""
        self._select(thread)
        answer = self.ask_if_known_kind("p", f"p{number:x}")
        try:
            return bytes.fromhex((answer or b"").decode("ascii")) or None
        except ValueError:
            return None  # an error, or a register that is unavailable now

    def set_registers(self, thread: ThreadId | None, data: bytes) -> None:
        """Set all registers of a thread without waiting for the answer."""
        self._select(thread)
        self._told_ahead = None
        self.tell(f"G{data.hex()}")

    def set_register(self, thread: ThreadId | None, number: int, value: bytes) -> bool:
        """Set one register of a thread; return whether the stub supports that."""
        self._select(thread)
        self._told_ahead = None
        if "P" in self._unknown:
            return False
        payload = f"P{number:x}={value.hex()}"
        if "P" in self._tried:
            self.tell(payload)
            return True
        self._tried.add("P")
        if (answer := self.ask(payload)) != b"OK":
            self._unknown.add("P")
        return answer == b"OK"

    @property
    def _room(self) -> int:
        """Number of bytes of memory that fit into one packet, encoded in hexadecimal."""
        try:
            size = int(self.features.get("PacketSize", f"{_DEFAULT_PACKET_SIZE:x}"), 16)
        except ValueError:
            size = _DEFAULT_PACKET_SIZE
        return max(8, (min(size, _PACKET_SIZE_MAX) - _OVERHEAD) // 2)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of memory; fewer than ``size`` if some cannot be read."""
        data = bytearray()
        while len(data) < size:
            count = min(size - len(data), self._room)
            piece = self._memory_in(self.ask(f"m{address + len(data):x},{count:x}"), count)
            data += piece
            if len(piece) < count:
                break
        return bytes(data)

    def read_in_batches(self, address: int, size: int) -> bytes:
        """
        Return as many bytes of memory as can be read, with several requests under way at a time.

        The stub must accept a packet before its previous answer was acknowledged, as QEMU (system mode) does. The round
        trip of a packet takes longer than the read.
        """
        data, room = bytearray(), self._room
        self.flush()
        while len(data) < size:
            wanted = min(size - len(data), _BATCH * room)
            at = address + len(data)
            pieces = [(at + done, min(room, wanted - done)) for done in range(0, wanted, room)]
            packets = [self._conversation.ask(b"m%x,%x" % piece) for piece in pieces]
            self._transmit(b"".join(packets))
            answers = [self._memory_in(self._answer(b"m", self._patience), count) for _, count in pieces]
            for answer, (_, count) in zip(answers, pieces, strict=True):
                data += answer
                if len(answer) < count:
                    return bytes(data)
        return bytes(data)

    def _memory_in(self, answer: bytes, size: int) -> bytes:
        if answer.startswith(b"E") or not answer:
            return b""
        try:
            data = bytes.fromhex(answer.decode("ascii"))
        except ValueError:
            raise self._unexpected("m", answer) from None
        if len(data) > size:
            raise self._unexpected("m", answer)
        return data

    def write(self, address: int, data: bytes) -> bool:
        """Write memory; return False if the stub reports an error."""
        for start in range(0, len(data), self._room):
            piece = data[start : start + self._room]
            if self.ask(f"M{address + start:x},{len(piece):x}:{piece.hex()}") != b"OK":
                return False
        return True

    # Breakpoints

    def insert(self, kind: BreakpointKind, address: int, size: int) -> bool | None:
        """Insert a breakpoint or watchpoint; return whether that succeeded, None if the stub lacks the kind."""
        answer = self.ask_if_known_kind(f"Z{kind:d}", f"Z{kind:d},{address:x},{size:x}")
        return None if answer is None else answer == b"OK"

    @property
    def knows_breakpoints(self) -> bool:
        """True unless the stub has answered that it does not support software breakpoints."""
        return f"Z{BreakpointKind.SOFTWARE:d}" not in self._unknown

    def insert_again(self, kind: BreakpointKind, address: int, size: int) -> None:
        """Insert again a breakpoint that the stub accepted before, without waiting for the answer."""
        self.tell(f"Z{kind:d},{address:x},{size:x}")

    def remove(self, kind: BreakpointKind, address: int, size: int) -> None:
        """Remove a breakpoint or watchpoint without waiting for the answer."""
        self.tell(f"z{kind:d},{address:x},{size:x}")

    # Resuming and stopping

    def reason(self) -> StopReply:
        """Return the stop reply for the state in which the target is stopped now (``?``)."""
        return parse_stop_reply(self.ask(REASON))

    def resume(self, actions: Iterable[tuple[str, ThreadId | None]]) -> None:
        """
        Resume threads, each with an action: ``c`` (continue) or ``s`` (step). The thread None means all others.

        ``wait`` returns the next stop.
        """
        self._forget_stop()
        listed = list(actions)
        if self._has_vcont():
            text = "".join(f";{action}" + (f":{thread}" if thread is not None else "") for action, thread in listed)
            payload = f"vCont{text}"
        else:
            action, thread = listed[0]
            if thread is not None:
                self.ask(f"Hc{thread if action == 's' else '-1'}")
            payload = action
        self._send(payload.encode())

    def resume_asking_ahead(self, pc: int | None) -> bool:
        """
        Resume the threads, the stopped one at ``pc``, and request the registers of the next stop in advance.

        Return False, with nothing done, if the stub cannot be asked ahead, or if the pending packets are too large.
        """
        payload = b"c" if pc is None else b"c%x" % pc
        if not self.can_be_asked_ahead or not self._send_with_question(payload, b"g"):
            return False
        self._forget_stop()
        self._has_asked_ahead = self._is_followed = True
        return True

    def resume_at(self, pc: int) -> None:
        """Resume the threads, the stopped one at ``pc``; only where ``can_be_asked_ahead``."""
        self._forget_stop()
        self._send(b"c%x" % pc)

    def _forget_stop(self) -> None:
        self._selected.clear()
        self._may_stop_late, self._told_ahead = False, None

    @property
    def can_be_asked_ahead(self) -> bool:
        """True if a request about the next stop may be sent before the target stops."""
        if self._looks_ahead is None:
            self._looks_ahead = self._can_look_ahead()
        return self._looks_ahead

    def _can_look_ahead(self) -> bool:
        """
        Return whether the stub is QEMU's user mode emulation, of a version that reads nothing while the target runs.

        Later versions, which support QCatchSyscalls, may look for an interrupt, which must be the first byte then.
        """
        is_direct = self._transport.peer.startswith(_EMULATORS) and self.has_acknowledgements
        if not is_direct or self.knows("QCatchSyscalls") or self.ask_if_known("qqemu.sstepbits") is None:
            return False
        return not self.is_machine

    def has_steps(self) -> bool:
        """Return whether the stub can single-step a thread; one without ``vCont`` is presumed to."""
        return not self._has_vcont() or self._actions is None or "s" in self._actions

    def _has_vcont(self) -> bool:
        if self._actions is None:
            answer = self.ask("vCont?").decode("ascii", "replace")
            self._actions = answer.removeprefix("vCont;").split(";") if answer.startswith("vCont") else []
        return "c" in self._actions

    def wait(self, timeout: float) -> StopReply | None:
        """
        Return the next stop.

        None if the target still runs after ``timeout`` seconds. Raise ``EngineError`` at the end.
        """
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next_answer(deadline - time.monotonic())
            if answer is None:
                return None
            if answer != b"OK" or not self._is_interrupted:
                break  # else QEMU (user mode) interpreted an interrupt as a refusal and repeated its answer
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        reply = self._stop_reply(answer)
        if isinstance(reply, Stopped) and reply.thread is not None:
            self._selected["g"] = str(reply.thread)  # GDB presumes this as well
        if self._has_asked_ahead and isinstance(reply, Stopped):
            self._has_asked_ahead = False
            self._told_ahead = self._answer(b"g", self._patience)
            self._is_followed = False
            if was_interrupted:
                self.drain()  # QEMU interprets an interrupt as a refusal of these answers and repeats them
        return reply

    def _stop_reply(self, answer: bytes) -> StopReply:
        if answer != self._last_stop[0]:  # consecutive stop replies are mostly equal
            self._last_stop = answer, parse_stop_reply(answer) if answer else NoThreads()
        return self._last_stop[1]

    def interrupt(self) -> None:
        """Request a stop of the running target by sending the byte 0x03; ``wait`` returns the stop."""
        self._is_interrupted = True
        self._transmit(INTERRUPT)

    def absorb_interrupt(self) -> None:
        """
        Resume a target that another stop reached first, so that it stops by the signal of the pending interrupt.

        No breakpoint may be inserted. Otherwise the signal would reach the target when it is released, and end it.
        """
        self.resume([("c", None)])
        if self.wait(_UNDER_WAY) is None:  # the interrupt was sent while the target stood still, and is lost
            self.interrupt()
            self.wait(self._patience)

    @property
    def raises_signals(self) -> bool:
        """True if the stub interrupts by a signal, which the target receives if it stops for another reason first."""
        return self.knows("QPassSignals")

    def leave_copy(self, thread: ThreadId, addresses: Iterable[int], size: int) -> None:
        """Remove breakpoints from the child of a fork, which ``thread`` belongs to, and detach from that process."""
        self._select(thread)
        for address in addresses:
            self.ask(f"z{BreakpointKind.SOFTWARE:d},{address:x},{size:x}")
        self.detach(thread.process)
        self._selected.clear()

    def detach(self, process: int) -> bool:
        """Detach from the target, which continues; return whether the stub accepted that."""
        self.flush()
        answer = self.ask(f"D;{process:x}" if process else "D")
        if answer != b"OK" and process:
            answer = self.ask("D")
        return answer == b"OK"
