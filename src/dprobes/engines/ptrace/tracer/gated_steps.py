"""
Execution of one instruction without a single step, so that the thread survives if the tracer is killed.

The trap of a single step is a SIGTRAP, which ends the program if the tracer is killed before it has received the stop.
So the thread executes a copy of the instruction in a slot, and then writes to a protected page of its own, the *gate*.
There it waits as at any other protected page, without a signal. If the tracer is killed, the kernel ends the
protection. The thread passes the gate, and the jump after it leads to the next instruction::

    copy of the instruction | movb $0, gate | jmp rel32 to the instruction after the original one

Of a repeated string instruction, the copy executes one element. The count is decreased beforehand, and the jump leads
back to the instruction.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.tracer.call_injection import may_inject
from dprobes.engines.ptrace.tracer.placed_breakpoints import GRANULE, JUMP_SIZE, Slot, SlotArea
from dprobes.engines.ptrace.tracer.single_steps import REACH, map_code
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_relocation import copy_of, relocated
from dprobes.target.code.machine_code import prepare_decoder
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.protected_pages import ProtectedPages
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["GatedSlot", "GatedSlots"]

_RCX, _RIP = int(Register.RCX), int(Register.RIP)

_CODE_SIZE = 4 * PAGE_SIZE
_SLOT_SIZE = 2 * GRANULE
_GATE_SIZE = 7
"""Size of ``movb $0, gate`` in bytes."""


class GatedSlot(NamedTuple):
    """Slot whose copy is followed by a write to ``gate``. With ``is_element``, it executes one element of a string."""

    slot: Slot
    gate: int
    is_element: bool

    def enter(self, registers: RegisterWords) -> None:
        """Change the registers of a thread at the instruction to those with which it executes the copy."""
        registers[_RIP] = self.slot.address
        if self.is_element:
            registers[_RCX] -= 1

    def leave(self, registers: RegisterWords) -> bool:
        """
        Change the registers of a thread that has stopped to those outside the slot.

        Return whether the instruction was executed.
        """
        if registers[_RIP] == self.slot.address:
            registers[_RIP] = self.slot.site
            if self.is_element:
                registers[_RCX] += 1
            return False
        if registers[_RIP] == self.slot.end:
            registers[_RIP] = self.slot.site if self.is_element else self.slot.following
        return True


class GatedSlots:
    """Maker of slots with gates, for all address spaces."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def find(self, thread: Thread, pages: ProtectedPages, address: int, raw: bytes) -> GatedSlot | None:
        """
        Return the slot of the instruction at the beginning of ``raw``, at which a thread is at an event stop.

        All other threads must be stopped. Return None if the instruction cannot be executed elsewhere, or the process
        cannot map the memory. Raise ``ThreadGoneError`` if the thread is killed meanwhile.
        """
        known = pages.slots.get((address, raw))
        if known is None or (known and known[0].address not in thread.space.slots.by_address):
            made = self._make(thread, pages, address, raw)
            known = pages.slots[address, raw] = () if made is None else tuple(made)
        return GatedSlot(*known) if known else None

    def _make(self, thread: Thread, pages: ProtectedPages, address: int, raw: bytes) -> GatedSlot | None:
        space = thread.space
        code, is_element = _copied_code(raw, space.word_size)
        copy = copy_of(code, space.word_size)
        if copy is None or copy.pushes_return:
            return None
        area = next((a for a in pages.areas if abs(a - address) < REACH and pages.areas[a] < _CODE_SIZE), None)
        if area is None and (area := self._map(thread, pages, address)) is None:
            return None
        place, gate = area + pages.areas[area], area + _CODE_SIZE
        text = relocated(code, copy, address, place)
        if text is None:
            return None
        end = place + len(text)
        target = gate if space.word_size == 4 else gate - end - _GATE_SIZE
        text += b"\xc6\x05" + target.to_bytes(4, "little", signed=space.word_size == 8) + b"\x00"
        slot = Slot(place, address, end, Placement.PAGE, size=_SLOT_SIZE)
        onward = address if is_element else slot.following
        distance = onward - (end + _GATE_SIZE + JUMP_SIZE)
        text += b"\xe9" + (distance & 0xFFFFFFFF).to_bytes(4, "little")
        try:
            if os.pwrite(space.memory, text, place) < len(text):
                return None
        except OSError:
            return None
        pages.areas[area] += _SLOT_SIZE
        space.slots.by_address[place] = slot
        return GatedSlot(slot, gate, is_element)

    def _map(self, thread: Thread, pages: ProtectedPages, address: int) -> int | None:
        """Map pages near an address, and protect the last one; return their start, None if that fails."""
        space, size = thread.space, _CODE_SIZE + PAGE_SIZE
        if not may_inject(thread):
            return None
        start = map_code(self._connection, thread, address, size, PAGE_SIZE)
        if not start:
            return None
        space.slots.areas.append(SlotArea(start, start + size, used=size))
        try:
            os.pread(space.memory, 1, start + _CODE_SIZE)
            pages.add_gate(start + _CODE_SIZE)
        except OSError:
            return None
        pages.areas[start] = 0
        return start


def _copied_code(raw: bytes, word_size: int) -> tuple[bytes, bool]:
    """Return the bytes to copy for an instruction, and whether they are one element of a repeated string."""
    prepare_decoder()
    from iced_x86 import Decoder

    instruction = Decoder(8 * word_size, raw).decode()
    code = raw[: instruction.len]
    repeats = instruction.has_rep_prefix or instruction.has_repne_prefix
    if not instruction.is_string_instruction or not repeats:
        return code, False
    if 0x67 in code[:-1]:
        return b"", False  # the count has another size
    return code.replace(b"\xf3", b"", 1).replace(b"\xf2", b"", 1), True
