"""Threads that stop in code of ours: what makes them such as have run into the breakpoint."""

from __future__ import annotations

import os
import signal
import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.site_patches import NativeStop
from dprobes.engines.ptrace.tracer import held_signals
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.held_signals import is_in_native_stop, set_back, stop_of
from dprobes.native.x86 import x86_operations
from dprobes.native.x86.x86_assembler import Gpr
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

SITE, STACK = 0x4000, 0x100
FAULT = NativeStop(0x2000, SITE, is_trap=False, has_frame=True, has_flags=False)
TRAP = NativeStop(0x1FFF, SITE, is_trap=True, has_frame=True, has_flags=True)
EARLY = NativeStop(0x3000, SITE, is_trap=False, has_frame=False, has_flags=False)
RESUME, INTERRUPTS = 0x10000, 0x200
CARRY, PARITY, ZERO, SIGN, DIRECTION, OVERFLOW = 1, 4, 0x40, 0x80, 0x400, 0x800


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    space = AddressSpace(os.memfd_create("memory"), 8, has_shadow_stack=False)
    os.ftruncate(space.memory, 4096)
    space.patches.stops.update((stop.place, stop) for stop in (FAULT, TRAP, EARLY))
    yield space
    space.close()


def registers(pc: int, flags: int = 0, stack: int = STACK) -> ctypes.Array[ctypes.c_ulong]:
    made = ptrace_calls.Registers()
    made[Register.RIP], made[Register.EFLAGS], made[Register.RSP], made[Register.RAX] = pc, flags, stack, 99
    return made


def frame(space: AddressSpace, rax: int, flags: int) -> None:
    assert x86_operations.saved_at(Gpr.RAX).displacement == held_signals._RAX_AT
    os.pwrite(space.memory, struct.pack("=Q", rax), STACK + held_signals._RAX_AT)
    os.pwrite(space.memory, struct.pack("=Q", flags), STACK + held_signals._FLAGS_AT)


def shown(made: ctypes.Array[ctypes.c_ulong]) -> tuple[int, ...]:
    return tuple(made[each] for each in (Register.RIP, Register.RSP, Register.RAX, Register.EFLAGS))


def test_the_frame_is_that_of_trampolines() -> None:
    assert held_signals._FRAME_SIZE == x86_operations.FRAME_SIZE
    assert x86_operations.X86Operations.layout.flags == held_signals._FLAGS_AT


def test_a_fault_and_a_trap_are_told_apart(space: AddressSpace) -> None:
    assert stop_of(space, registers(0x2000), signal.SIGSEGV) is FAULT
    assert stop_of(space, registers(0x2000), signal.SIGTRAP) is TRAP
    assert stop_of(space, registers(0x1FFF), signal.SIGSEGV) is None
    assert stop_of(space, registers(0x3001), signal.SIGTRAP) is None
    space.patches.fixups[0x5000] = 0x5008
    pcs = (0x1FFF, 0x2000, 0x2001, 0x3000, 0x3001, 0x5000, 0x5001)
    assert [pc for pc in pcs if is_in_native_stop(space, pc)] == [0x1FFF, 0x2000, 0x3000, 0x5000]


def test_a_signal_that_no_instruction_raises_is_none_of_ours(space: AddressSpace) -> None:
    assert stop_of(space, registers(0x2000), signal.SIGALRM) is None
    assert stop_of(space, registers(0x3000), signal.SIGALRM) is None


@pytest.mark.parametrize(("saved", "overflow"), [(CARRY | ZERO, 0), (PARITY | SIGN, OVERFLOW), (0, 0)])
def test_flags_are_those_that_lahf_and_seto_have_saved(space: AddressSpace, saved: int, overflow: int) -> None:
    frame(space, 7, 0xABC_0000 | (saved | 2) << 8 | bool(overflow))
    made = registers(0x2000, RESUME | INTERRUPTS | DIRECTION | SIGN | CARRY | OVERFLOW)
    assert set_back(space, FAULT, made)
    assert shown(made) == (SITE, STACK + 304, 7, INTERRUPTS | DIRECTION | saved | overflow)


def test_flags_are_those_that_pushfq_has_saved(space: AddressSpace) -> None:
    frame(space, 1 << 63, INTERRUPTS | DIRECTION | OVERFLOW | CARRY | RESUME | 2)
    made = registers(0x2000, INTERRUPTS | ZERO)
    assert set_back(space, TRAP, made)
    assert shown(made) == (SITE, STACK + 304, 1 << 63, INTERRUPTS | DIRECTION | OVERFLOW | CARRY)


def test_before_anything_is_saved_only_the_stack_pointer_has_changed(space: AddressSpace) -> None:
    made = registers(0x3000, INTERRUPTS | ZERO, 0xFFFF_0000_0000_0000)
    assert set_back(space, EARLY, made)
    assert shown(made) == (SITE, 0xFFFF_0000_0000_0000 + 304, 99, INTERRUPTS | ZERO)


def test_a_stack_that_cannot_be_read_leaves_registers_alone(space: AddressSpace) -> None:
    made = registers(0x2000, ZERO, 1 << 63)
    before = shown(made)
    assert not set_back(space, FAULT, made)
    assert shown(made) == before
