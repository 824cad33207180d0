"""
What can be asked of a stub: its registers, memory, breakpoints and threads, whatever of the protocol it knows.

Each method is about one thing; how questions are sent and answered is ``engines.gdb.stub_channel``'s.
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
"""Seconds within which a stub has to answer."""
_UNDER_WAY = 0.5
"""Seconds within which an interrupt has reached a target that goes on."""
_DEFAULT_PACKET_SIZE = 400
_OVERHEAD = 32
"""Bytes of a packet that are not its contents."""
_PACKET_SIZE_MAX = 1 << 16
_EMULATORS = "qemu-"
"""How the names of QEMU's programs begin."""
_BATCH = 32
"""How many pieces of memory are asked for together."""


class BreakpointKind(enum.IntEnum):
    """The kinds of Z packets."""

    SOFTWARE = 0
    HARDWARE = 1
    WRITE = 2
    READ = 3
    ACCESS = 4


class Stub(StubChannel):
    """A stub at the other end of ``transport``, for one thread."""

    def __init__(self, transport: Transport, patience: float = _PATIENCE) -> None:
        super().__init__(transport, patience)
        self._is_interrupted = False
        self._tried: set[str] = set()
        self._selected: dict[str, str] = {}
        self._actions: list[str] | None = None
        """What ``vCont`` can have threads do, None as long as it was not asked."""
        self._looks_ahead: bool | None = None
        """What ``can_be_asked_ahead`` says, None as long as that was not looked at."""
        self._last_stop: tuple[bytes, StopReply] = b"", NoThreads()
        self._has_asked_ahead = False
        self._told_ahead: bytes | None = None
        """The registers of the thread that stopped last, as long as nothing has changed them."""

    @property
    def is_machine(self) -> bool:
        """Whether it stands for a machine, of whose physical memory QEMU's stub knows, and not for a process."""
        return self.ask_if_known("qqemu.PhyMemMode") is not None

    @property
    def is_process(self) -> bool:
        """Whether it stands for a process: it has an auxiliary vector, which machines have not."""
        return self.knows("qXfer:auxv:read") and not self.is_machine

    # Threads

    def threads(self) -> list[ThreadId]:
        """Return the threads there are."""
        found: list[ThreadId] = []
        answer = self.ask("qfThreadInfo")
        while answer.startswith(b"m") and len(found) < 1 << 20:
            found += [ThreadId.parse(text) for text in answer[1:].decode("ascii", "replace").split(",") if text]
            answer = self.ask("qsThreadInfo")
        if not found and (current := self.current_thread()) is not None:
            found.append(current)
        return found

    def current_thread(self) -> ThreadId | None:
        """Return the thread that stopped last, None if the stub does not know of threads."""
        answer = self.ask_if_known("qC")
        return ThreadId.parse(answer[2:].decode("ascii", "replace")) if answer and answer.startswith(b"QC") else None

    def _select(self, thread: ThreadId | None) -> None:
        if thread is not None and self._selected.get("g") != str(thread):
            if self.ask(f"Hg{thread}") not in (b"OK", b""):
                raise EngineError(f"the stub {self.name} has no thread {thread}")
            self._selected["g"] = str(thread)

    # Registers and memory

    def read_registers(self, thread: ThreadId | None) -> bytes:
        """Return all registers of a thread, as the target's description puts them; what is not known is zeros."""
        answer, self._told_ahead = self._told_ahead, None
        if answer is None or (thread is not None and self._selected.get("g") != str(thread)):
            self._select(thread)
            answer = self.ask("g")
        try:
            return bytes.fromhex(answer.decode("ascii").replace("x", "0"))
        except ValueError:
            raise self._unexpected("g", answer) from None

    def read_register(self, thread: ThreadId | None, number: int) -> bytes | None:
        """Return one register of a thread, None if the stub has none of that number, or reads none alone."""
        self._select(thread)
        answer = self.ask_if_known_kind("p", f"p{number:x}")
        try:
            return bytes.fromhex((answer or b"").decode("ascii")) or None
        except ValueError:
            return None  # an error, or one that is not available now

    def set_registers(self, thread: ThreadId | None, data: bytes) -> None:
        """Set all registers of a thread, and do not wait for that."""
        self._select(thread)
        self._told_ahead = None
        self.tell(f"G{data.hex()}")

    def set_register(self, thread: ThreadId | None, number: int, value: bytes) -> bool:
        """Set one register of a thread; return whether the stub does such a thing."""
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
        """How many bytes go into one packet."""
        try:
            size = int(self.features.get("PacketSize", f"{_DEFAULT_PACKET_SIZE:x}"), 16)
        except ValueError:
            size = _DEFAULT_PACKET_SIZE
        return max(8, (min(size, _PACKET_SIZE_MAX) - _OVERHEAD) // 2)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of memory; fewer if they cannot all be read."""
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
        Return as many bytes of memory as can be read, of a stub that takes a packet before its answer was acknowledged.

        QEMU (system mode) does. Pieces are asked for together, as a packet's way there and back takes longer than
        reading.
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
        """Change memory; return whether that could be done."""
        for start in range(0, len(data), self._room):
            piece = data[start : start + self._room]
            if self.ask(f"M{address + start:x},{len(piece):x}:{piece.hex()}") != b"OK":
                return False
        return True

    # Breakpoints

    def insert(self, kind: BreakpointKind, address: int, size: int) -> bool | None:
        """Insert a breakpoint or watchpoint; return whether that could be done, None if the stub knows none such."""
        answer = self.ask_if_known_kind(f"Z{kind:d}", f"Z{kind:d},{address:x},{size:x}")
        return None if answer is None else answer == b"OK"

    @property
    def knows_breakpoints(self) -> bool:
        """Whether it has not said that it knows no software breakpoints."""
        return f"Z{BreakpointKind.SOFTWARE:d}" not in self._unknown

    def insert_again(self, kind: BreakpointKind, address: int, size: int) -> None:
        """Insert what was there before, and do not wait for that."""
        self.tell(f"Z{kind:d},{address:x},{size:x}")

    def remove(self, kind: BreakpointKind, address: int, size: int) -> None:
        """Remove it, and do not wait for that."""
        self.tell(f"z{kind:d},{address:x},{size:x}")

    # Going on, and stopping

    def reason(self) -> StopReply:
        """Return why the target stands still now."""
        return parse_stop_reply(self.ask(REASON))

    def resume(self, actions: Iterable[tuple[str, ThreadId | None]]) -> None:
        """Let threads go on: ``c`` or ``s`` each, None being all others; ``wait`` says what becomes of it."""
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
        Let threads go on, the one that has stopped at ``pc``, and ask for the registers of the next stop.

        Return False, with nothing done, if the stub cannot be asked ahead, or is told too much at once.
        """
        payload = b"c" if pc is None else b"c%x" % pc
        if not self.can_be_asked_ahead or not self._send_with_question(payload, b"g"):
            return False
        self._forget_stop()
        self._has_asked_ahead = self._is_followed = True
        return True

    def resume_at(self, pc: int) -> None:
        """Let threads go on, the one that has stopped at ``pc``, where ``can_be_asked_ahead``."""
        self._forget_stop()
        self._send(b"c%x" % pc)

    def _forget_stop(self) -> None:
        self._selected.clear()
        self._may_stop_late, self._told_ahead = False, None

    @property
    def can_be_asked_ahead(self) -> bool:
        """Whether a question may be sent before the stop that it is about."""
        if self._looks_ahead is None:
            self._looks_ahead = self._can_look_ahead()
        return self._looks_ahead

    def _can_look_ahead(self) -> bool:
        """
        Return whether it is QEMU's emulation of processes, of a version that looks at nothing while the target runs.

        Later ones, which know of QCatchSyscalls, may look for an interrupt, which must be the first byte then.
        """
        is_direct = self._transport.peer.startswith(_EMULATORS) and self.has_acknowledgements
        if not is_direct or self.knows("QCatchSyscalls") or self.ask_if_known("qqemu.sstepbits") is None:
            return False
        return not self.is_machine

    def has_steps(self) -> bool:
        """Return whether it lets a thread execute one instruction; one without ``vCont`` does, as far as it says."""
        return not self._has_vcont() or self._actions is None or "s" in self._actions

    def _has_vcont(self) -> bool:
        if self._actions is None:
            answer = self.ask("vCont?").decode("ascii", "replace")
            self._actions = answer.removeprefix("vCont;").split(";") if answer.startswith("vCont") else []
        return "c" in self._actions

    def wait(self, timeout: float) -> StopReply | None:
        """Return why the target has stopped, None if it goes on; raise ``EngineError`` at the connection's end."""
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next_answer(deadline - time.monotonic())
            if answer is None:
                return None
            if answer != b"OK" or not self._is_interrupted:
                break  # else QEMU (user mode) took an interrupt for a refusal, and says it once more
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        reply = self._stop_reply(answer)
        if isinstance(reply, Stopped) and reply.thread is not None:
            self._selected["g"] = str(reply.thread)  # as GDB presumes, too
        if self._has_asked_ahead and isinstance(reply, Stopped):
            self._has_asked_ahead = False
            self._told_ahead = self._answer(b"g", self._patience)
            self._is_followed = False
            if was_interrupted:
                self.drain()  # it takes an interrupt for a refusal of these, and says them once more
        return reply

    def _stop_reply(self, answer: bytes) -> StopReply:
        if answer != self._last_stop[0]:  # else it is what is known, as it mostly is
            self._last_stop = answer, parse_stop_reply(answer) if answer else NoThreads()
        return self._last_stop[1]

    def interrupt(self) -> None:
        """Stop the target; ``wait`` says that it has."""
        self._is_interrupted = True
        self._transmit(INTERRUPT)

    def absorb_interrupt(self) -> None:
        """
        Let a target that another stop came first to run into the signal of an interrupt; no breakpoint may be in.

        Otherwise the signal would reach it when it is let go, and end it.
        """
        self.resume([("c", None)])
        if self.wait(_UNDER_WAY) is None:  # it came when the target stood still, and is lost
            self.interrupt()
            self.wait(self._patience)

    @property
    def raises_signals(self) -> bool:
        """Whether it interrupts with a signal, which the target gets that is not stopped by it."""
        return self.knows("QPassSignals")

    def leave_copy(self, thread: ThreadId, addresses: Iterable[int], size: int) -> None:
        """Take breakpoints out of the process of a thread that was made by a fork, and let that process go."""
        self._select(thread)
        for address in addresses:
            self.ask(f"z{BreakpointKind.SOFTWARE:d},{address:x},{size:x}")
        self.detach(thread.process)
        self._selected.clear()

    def detach(self, process: int) -> bool:
        """Let go of the target, which goes on; return whether the stub took it."""
        self.flush()
        answer = self.ask(f"D;{process:x}" if process else "D")
        if answer != b"OK" and process:
            answer = self.ask("D")
        return answer == b"OK"
