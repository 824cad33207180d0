"""
Target of a stub: its threads, its memory while it is stopped, and its breakpoints.

Memory is cached in blocks until the target resumes, because handlers and the engine read the same words.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

from dprobes.engines.gdb.remote_protocol import SIGINT, SIGTRAP, Console, Exited, NoThreads, Stopped
from dprobes.engines.gdb.stub_registers import Registers, parse_description
from dprobes.engines.gdb.stub_requests import BreakpointKind
from dprobes.engines.gdb.stub_transports import ConnectionLostError
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.engines.gdb.remote_protocol import StopReply, ThreadId
    from dprobes.engines.gdb.stub_registers import TargetDescription
    from dprobes.engines.gdb.stub_requests import Stub

__all__ = ["BLOCK", "StubTarget"]

BLOCK: Final = 64
"""Bytes of memory that are read at once."""
_STEP_PATIENCE = 5.0
"""Maximum number of seconds for one instruction to complete."""
_STOP_PATIENCE = 5.0
"""Maximum number of seconds for an interrupted target to stop."""
_INTERRUPTS = (0, SIGINT)
"""Signals by which stubs report an interrupt. 0 is no signal."""
_STEP_ATTEMPTS = 3
_SINGLE_MAX = 3
"""Maximum number of registers that are set one by one."""


def _is_for_interrupt(reply: StopReply) -> bool:
    return isinstance(reply, Stopped) and reply.signal in _INTERRUPTS


class StubTarget:
    """
    The target of a ``stub``.

    ``breakpoint_`` is the breakpoint instruction of its processor, ``default`` applies if the stub describes no
    registers. ``tell`` receives lines about changes of the target, for ``stub_restorer``.
    """

    def __init__(
        self,
        stub: Stub,
        byte_order: Literal["little", "big"],
        default: TargetDescription,
        breakpoint_: bytes,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.stub = stub
        self.tell: Callable[[str], None] = (lambda _: None) if tell is None else tell
        self.byte_order = byte_order
        described = parse_description(lambda name: stub.read_object("features", name))
        self.description = default if described is None or not described.registers else described
        self._blocks: dict[int, bytes] = {}
        self._originals: dict[int, bytes] = {}
        """
        Original bytes under breakpoints that are written into memory because the stub does not support breakpoints.
        """
        self._breakpoint = breakpoint_
        self.inserted: set[int] = set()
        self._watched: Counter[tuple[int, int, BreakpointKind]] = Counter()
        """Watched memory ranges, with the number of probepoints that watch each."""
        self.processors = 1
        """Number of processors of a machine; 1 for a process."""
        self._taken_out: set[int] = set()
        """Addresses of breakpoints that were removed while a child shares the memory (vfork)."""
        self._accesses_as_program: bool | None = None
        self.process = 0
        """Process id in the stub's numbering; 0 if the stub does not number processes."""
        self.is_over = False
        """True if the target has ended."""
        self.is_running = False
        self._last: StopReply | None = None
        self.interrupts = 0
        """Number of interrupts that have not stopped the target yet."""

    def reason(self) -> StopReply:
        """
        Return the reason of the current stop.

        The request is sent only once, because QEMU's stub removes all breakpoints at this request.
        """
        if self._last is None:
            self._last = self.stub.reason()
        return self._last

    # Registers

    def registers(self, thread: ThreadId | None) -> Registers:
        """Return the registers of a thread."""
        data = self.stub.read_registers(thread)
        return Registers(
            self.description, data, self.byte_order, lambda number: self.stub.read_register(thread, number)
        )

    def write_back(self, thread: ThreadId | None, registers: Registers) -> None:
        """Write changed registers back to a thread."""
        changed = sorted(registers.changed)
        registers.changed.clear()
        if len(changed) > _SINGLE_MAX or not all(self._set_register(thread, registers, name) for name in changed):
            self.stub.set_registers(thread, registers.all_bytes())

    def _set_register(self, thread: ThreadId | None, registers: Registers, name: str) -> bool:
        number = self.description.registers[name].number
        return self.stub.set_register(thread, number, registers.bytes_of(name))

    # Memory

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of memory without the engine's breakpoints; fewer if some cannot be read."""
        data = bytearray()
        at = address
        while at < address + size:
            block = at & -BLOCK
            known = self._blocks.get(block)
            if known is None:
                known = self._blocks[block] = self._read_block(block)
            piece = known[at - block : min(BLOCK, address + size - block)]
            data += piece
            if len(piece) < min(BLOCK, address + size - block) - (at - block):
                break
            at = block + BLOCK
        return bytes(data)

    def _read_block(self, block: int) -> bytes:
        return self.read_anew(block, BLOCK)

    def read_anew(self, address: int, size: int) -> bytes:
        """Return bytes of memory without the engine's breakpoints, uncached; fewer if some cannot be read."""
        data = self.stub.read(address, size)
        for at, original in self._originals.items():
            if at < address + size and address < at + len(original) and data:
                clean = bytearray(data)
                for place, byte in enumerate(original, at - address):
                    if 0 <= place < len(clean):
                        clean[place] = byte
                data = bytes(clean)
        return data

    def word(self, address: int, size: int) -> int | None:
        """Return an unsigned number in memory, None if it cannot be read."""
        data = self.read(address, size)
        return int.from_bytes(data, self.byte_order) if len(data) == size else None

    def accesses_as_program(self, code: int) -> bool:
        """
        Return True if the stub refuses accesses that the target could not make. ``code`` is a read-only address.

        QEMU's user-mode emulation up to version 8.0 refuses them. Other stubs allow every access, so a fault would be
        missed.
        """
        if self._accesses_as_program is None:
            byte = self.stub.read(code, 1) if self.stub.can_be_asked_ahead else b""
            self._accesses_as_program = bool(byte) and not self.stub.write(code, byte)
        return self._accesses_as_program

    def write(self, address: int, data: bytes) -> bool:
        """Write memory; return whether all of it could be written."""
        self._blocks.clear()
        return self.stub.write(address, data)

    # Breakpoints

    def insert(self, address: int) -> bool:
        """
        Insert a breakpoint at an instruction; return whether that succeeded.

        If the stub does not support breakpoints, write the processor's breakpoint instruction into memory.
        """
        if address in self.inserted:
            return True
        instruction = self._breakpoint
        size = len(instruction)
        if self.stub.knows_breakpoints:
            self.tell(f"+ {address} {size}")
        answer = self.stub.insert(BreakpointKind.SOFTWARE, address, size)
        if answer is None:
            original = self.stub.read(address, len(instruction))
            if len(original) < len(instruction):
                return False
            self.tell(f"+ {address} {size} {original.hex()}")
            if not self.stub.write(address, instruction):
                return False
            self._originals[address] = original
        elif not answer:
            return False
        self.inserted.add(address)
        return True

    def remove(self, address: int) -> None:
        """Remove a breakpoint if there is one; raise ``EngineError``, at once or later, if that fails."""
        self._remove(address, len(self._breakpoint))

    def _remove(self, address: int, size: int) -> None:
        if address not in self.inserted:
            return
        self.inserted.discard(address)
        original = self._originals.pop(address, None)
        if original is None:
            self.stub.remove(BreakpointKind.SOFTWARE, address, size)
        elif self.stub.write(address, original):
            self.tell(f"- {address}")
        else:
            raise EngineError(f"the bytes at {address:#x} cannot be put back through the stub {self.stub.name}")

    def forget(self, address: int) -> None:
        """Remove a breakpoint if there is one, and ignore failures: the memory may have been unmapped."""
        if address in self.inserted:
            self.inserted.discard(address)
            if (original := self._originals.pop(address, None)) is not None:
                self.stub.write(address, original)
                self.tell(f"- {address}")
            else:
                self.stub.ask(f"z{BreakpointKind.SOFTWARE:d},{address:x},{len(self._breakpoint):x}")

    def insert_again(self, address: int) -> None:
        """Insert a breakpoint that ``remove`` has just removed; raise ``EngineError`` if memory cannot be written."""
        if self.stub.knows_breakpoints:
            self.stub.insert_again(BreakpointKind.SOFTWARE, address, len(self._breakpoint))
            self.inserted.add(address)
        elif not self.insert(address):
            raise EngineError(f"the breakpoint at {address:#x} cannot be put back through the stub {self.stub.name}")

    def watch(self, kind: BreakpointKind, address: int, length: int) -> bool | None:
        """Insert a watchpoint; return whether that succeeded, None if the stub does not support its kind."""
        if self._watched[address, length, kind]:
            self._watched[address, length, kind] += 1
            return True
        self.tell(f"watch {address} {length} {kind:d}")
        inserted = self.stub.insert(kind, address, length)
        if inserted:
            self._watched[address, length, kind] = 1
        else:
            self.tell(f"unwatch {address} {length} {kind:d}")
        return inserted

    def unwatch(self, address: int, length: int, kind: BreakpointKind) -> None:
        """Remove a watchpoint that no other probepoint needs; ignore failures, as the memory may be gone."""
        place = address, length, kind
        if self._watched[place] > 1:
            self._watched[place] -= 1
        elif self._watched.pop(place, 0):
            self.stub.ask(f"z{kind:d},{address:x},{length:x}")
            self.tell(f"unwatch {address} {length} {kind:d}")

    def _watch_nothing(self) -> None:
        for place in sorted(self._watched):
            self._watched[place] = 1
            self.unwatch(*place)

    def leave_fork(self, child: ThreadId, *, shares_memory: bool) -> None:
        """
        Remove the breakpoints from a forked child and detach from it; an unhandled one would kill it.

        If it ``shares_memory``, the parent has no breakpoints either until ``end_sharing``.
        """
        self.stub.leave_copy(child, sorted(self.inserted), len(self._breakpoint))
        if shares_memory:
            self._taken_out |= self.inserted
            self.inserted.clear()

    def end_sharing(self) -> None:
        """Insert the breakpoints that were removed for a child that shared the memory."""
        shared, self._taken_out = self._taken_out, set()
        for address in sorted(shared):
            self.insert(address)

    def begin_anew(self) -> None:
        """Forget the breakpoints and watchpoints of a program that execve has replaced: its memory is gone."""
        for address in self.inserted | self._taken_out:
            self.tell(f"- {address}")
        self._watch_nothing()
        for state in (self.inserted, self._taken_out, self._originals, self._blocks):
            state.clear()

    # Resuming

    def resume(self, signal: int = 0, thread: ThreadId | None = None) -> None:
        """Resume all threads; ``thread`` receives the signal ``signal``, 0 for none."""
        self._set_running()
        if signal and thread is not None:
            self.stub.resume([(f"C{signal:02x}", thread), ("c", None)])
        elif not self.stub.resume_asking_ahead(None):
            self.stub.resume([("c", None)])

    def resume_with(self, thread: ThreadId | None, registers: Registers, pc_name: str) -> None:
        """
        Write the changed registers of ``thread`` to the stub, and resume all threads.

        ``pc_name`` is the name of the program counter, which the packet that resumes the target can set.
        """
        if not self.stub.can_be_asked_ahead:
            self.write_back(thread, registers)
            self.resume()
            return
        pc = registers[pc_name]
        has_moved = pc_name in registers.changed
        registers.changed.discard(pc_name)
        self.write_back(thread, registers)
        self._set_running()
        if not self.stub.resume_asking_ahead(pc if has_moved else None):
            self.stub.resume_at(pc)

    def _set_running(self) -> None:
        self._blocks.clear()
        self.is_running = True
        self.tell("running 1")

    def step(self, thread: ThreadId | None, pc: int, pc_name: str, *, is_exact: bool) -> StopReply:
        """
        Execute the instruction at ``pc`` in a thread; return the stop.

        QEMU occasionally stops a machine before it has moved. Unless the step ``is_exact``, check for that and retry.
        """
        for _ in range(_STEP_ATTEMPTS):
            self._set_running()
            self.stub.resume([("s", thread)])
            reply = self.await_stop(_STEP_PATIENCE) or self.stop()
            is_done = is_exact or not isinstance(reply, Stopped) or reply.signal != SIGTRAP
            if is_done or self.registers(thread)[pc_name] != pc:
                break
        return reply

    def run_to(self, places: Iterable[int], thread: ThreadId | None) -> StopReply:
        """Run a thread to one of ``places``, by temporary breakpoints there; return the stop."""
        inserted = [place for place in sorted(places) if self.insert(place)]
        self._set_running()
        self.stub.resume([("c", thread)])
        reply = self.await_stop(_STEP_PATIENCE) or self.stop()
        if isinstance(reply, Stopped):
            for place in inserted:
                self.remove(place)
        return reply

    def await_stop(self, timeout: float) -> StopReply | None:
        """Wait up to ``timeout`` seconds for a stop, and return it; None if the target does not stop."""
        while True:
            reply = self.stub.wait(timeout)
            if not isinstance(reply, Console):
                if reply is not None:
                    self._last = reply
                    self.is_running = False
                    self.tell("running 0")
                    self._drop_interrupts(reply)
                self.is_over |= isinstance(reply, Exited | NoThreads)
                return reply

    def _drop_interrupts(self, reply: StopReply) -> None:
        """Discard interrupt requests that the stop ``reply`` preceded, unless the stub will report a stop for them."""
        if self.interrupts and not self.stub.raises_signals and not _is_for_interrupt(reply):
            self.stub.drain()
            self.interrupts = 0

    def interrupt(self) -> None:
        """Interrupt the target. It stops for the interrupt, or for another reason before that."""
        self.stub.interrupt()
        self.interrupts += 1

    def has_answered(self, reply: StopReply) -> bool:
        """Record a stop; return whether an interrupt of the engine caused it."""
        if not self.interrupts or not _is_for_interrupt(reply):
            return False
        self.interrupts -= 1
        return True

    def stop(self) -> StopReply:
        """Interrupt the target and return the stop; raise ``EngineError`` if it does not stop."""
        self.interrupt()
        reply = self.await_stop(_STOP_PATIENCE)
        if reply is None:
            raise EngineError(f"the target behind the stub {self.stub.name} does not stop")
        self.has_answered(reply)
        return reply

    def clear(self) -> None:
        """Remove all breakpoints and watchpoints, while the target is stopped."""
        for address in sorted(self.inserted):
            self._remove(address, 1)
        self._watch_nothing()

    def let_go(self) -> None:
        """Remove all breakpoints and detach; raise ``EngineError`` if that fails."""
        if self.is_running:
            self.stop()
        self.clear()
        if self.interrupts and self.stub.raises_signals:
            self.stub.absorb_interrupt()
        with contextlib.suppress(ConnectionLostError):  # some stubs close the connection before they answer
            self.stub.detach(self.process)
