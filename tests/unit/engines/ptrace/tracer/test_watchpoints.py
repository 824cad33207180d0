"""Where an emulation must not reach: memory that debug registers watch."""

from __future__ import annotations

import pytest

from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
from dprobes.engines.ptrace.tracer.breakpoints import Watchpoint
from dprobes.engines.ptrace.tracer.watchpoints import UnwatchedMemory
from dprobes.engines.x86.debugregs import Watch
from dprobes.rpn.program import Access
from dprobes.vm import Point
from ptrace_programs import inserted_program, probe_of


class Stack:
    """Remember what was written, and read it."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def read_word(self, address: int, size: int) -> int:
        assert size == 8
        return self.words.get(address, 0)

    def write_word(self, address: int, size: int, value: int) -> None:
        assert size == 8
        self.words[address] = value


def test_an_emulation_cannot_touch_what_is_watched() -> None:
    space = AddressSpace.closed(8)
    probe = probe_of(inserted_program())
    for watch in (Watch(0x1000, 8, Access.WRITE), Watch(0x2004, 4, Access.READ_WRITE)):
        space.watchpoints += (Watchpoint(watch, probe, Point(), (0, 0, "/x")),)
    stack = Stack()
    memory = UnwatchedMemory(stack, space)
    memory.write_word(0x1008, 8, 7)
    assert memory.read_word(0x1008, 8) == 7
    assert memory.read_word(0x1000, 8) == 0
    for address in (0xFF9, 0x1000, 0x1007, 0x2000):
        with pytest.raises(PermissionError):
            memory.write_word(address, 8, 1)
    with pytest.raises(PermissionError):
        memory.read_word(0x2000, 8)
    assert stack.words == {0x1008: 7}
